"""Promises of trainer/delivery/adapter_source.py: what is read is bitwise what vLLM makes of the adapter's file, in
slots of a larger rank too, and ranks together hold all of it once.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases.packed_reads import Reads, assert_covered, read_shards
from cases.rank_helpers import LORA, MOE_CONFIG, fill_adapters, make_rank, spawn
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file

from slipstream.conf.architecture.families import read_config
from slipstream.conf.schema import DType, LoraConfig
from slipstream.trainer.adapter_io import ADAPTER_FILE
from slipstream.trainer.delivery.adapter_source import AdapterSource
from slipstream.trainer.errors import LayoutError
from slipstream.trainer.lora import Adapted
from slipstream.trainer.rank import TrainerRank
from slipstream.trainer.weights.adapter_names import PREFIX, adapter_tensors, target_modules
from slipstream.weight_sync.layout import Region

RANK, SLOT_RANK = LORA.rank, 8
EXPERTS = 4


def expected(folder: Path, scale: float, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """vLLM's arithmetic on the file: cast, multiply B in that dtype, copy into a zeroed slot. Experts one by one."""
    matrices: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / ADAPTER_FILE).items():
        module, factor = name.removesuffix(".weight").rsplit(".lora_", 1)
        if ".mlp.experts" not in module:
            matrices[name] = tensor
            continue
        is_gate_up = module.endswith(".base_layer")
        bank = module.removesuffix(".base_layer")
        if factor == "A":
            stack = tensor.view(EXPERTS, RANK, -1)
        else:
            stack = tensor.view(tensor.shape[0], RANK, EXPERTS).permute(2, 0, 1)
        for expert, matrix in enumerate(stack):
            if not is_gate_up:
                matrices[f"{bank}.{expert}.down_proj.lora_{factor}.weight"] = matrix
                continue
            halves = (matrix, matrix) if factor == "A" else matrix.chunk(2)
            for leaf, half in zip(("gate_proj", "up_proj"), halves, strict=True):
                matrices[f"{bank}.{expert}.{leaf}.lora_{factor}.weight"] = half
    slots = {}
    for name, matrix in matrices.items():
        is_a = ".lora_A." in name
        shape = (SLOT_RANK, matrix.shape[1]) if is_a else (matrix.shape[0], SLOT_RANK)
        slot = torch.zeros(shape, dtype=dtype)
        value = matrix.to(dtype)
        if not is_a:
            value *= scale
        slot[: matrix.shape[0], : matrix.shape[1]] = value
        slots[name] = slot
    return slots


def source_of(rank: TrainerRank, number: int = 0) -> AdapterSource:
    return AdapterSource(rank.decoder, number, LORA)


def work(rank: int, world_size: int, rendezvous: str, folder: Path, ep_size: int, dtype: DType) -> tuple:
    trainer = make_rank(rank, world_size, rendezvous, ep_size=ep_size, dtype=dtype)
    fill_adapters(trainer, world_size)
    trainer.states.save_adapter(folder / "adapter")
    source = source_of(trainer, rank)
    result = (source.layout(), read_shards(source, trainer.decoder.dtype))
    trainer.shutdown()
    return result


CASES = [(2, DType.bfloat16), (1, DType.float32)]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    parts = spawn(work, 2, folder, CASES)
    return {
        case: (expected(folder / str(index) / "adapter", 2.0, getattr(torch, case[1])), parts[index])
        for index, case in enumerate(CASES)
    }


@pytest.mark.parametrize("case", CASES, ids=["ep2-bf16", "fsdp2-fp32"])
def test_two_ranks_cover_the_adapter_without_overlap_and_bitwise(two_ranks, case):
    slots, parts = two_ranks[case]
    assert parts[0][0].tensors == parts[1][0].tensors
    assert {meta.name: meta.shape for meta in parts[0][0].tensors} == {n: tuple(t.shape) for n, t in slots.items()}
    assert_covered([read for _, read in parts], slots, {})


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory) -> tuple[AdapterSource, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("adapter")
    rank = make_rank(dtype=DType.bfloat16)
    fill_adapters(rank, 1)
    rank.states.save_adapter(folder)
    return source_of(rank), expected(folder, 2.0, torch.bfloat16)


@settings(max_examples=80)
@given(data=st.data())
def test_joined_reads_are_bitwise_slices_of_the_slots(one_rank, data):
    """Factors in any order, cut by rows, some permuted, with gaps: what joins and what does not."""
    source, slots = one_rank
    tensors = source.layout().tensors
    places = data.draw(st.lists(st.integers(0, len(tensors) - 1), min_size=1, max_size=12, unique=True))
    metas = [tensors[place] for place in places]
    if data.draw(st.booleans()):
        metas = [meta for meta in tensors if "gate_proj.lora_B" in meta.name]
    reads = Reads()
    for meta in metas:
        cut = data.draw(st.sampled_from([meta.shape[0], 1, RANK, meta.shape[0] // 2]))
        for start, stop in ((0, cut), (cut, meta.shape[0])):
            if start < stop:
                region = Region((start, 0), (stop - start, meta.shape[1]))
                axes = data.draw(st.sampled_from([(0, 1), (0, 1), (1, 0)]))
                reads.add(meta, region, axes, gap=data.draw(st.sampled_from([0, 0, 0, 64])))
    reads.check(source, slots)


def test_a_slot_is_filled_with_the_factors_of_today_wherever_they_lie():
    """What is compiled once must not hold on to values, nor to memory that a shard has left."""
    rank = make_rank(dtype=DType.bfloat16)
    fill_adapters(rank, 1)
    source = source_of(rank)
    reads = Reads()
    for meta in source.layout().tensors:
        reads.add(meta)
    slots = [torch.empty(reads.num_bytes, dtype=torch.uint8) for _ in range(2)]
    fills = [*map(source.compile_reads(reads), slots)]
    parameters = [p for name, p in rank.decoder.named_parameters() if "lora_" in name]
    for step in range(6):
        with torch.no_grad():
            for parameter in parameters:
                parameter.normal_()
                if step in (2, 3):
                    parameter.data = parameter.data.clone()
        slot = slots[step % 2]
        slot.fill_(255)
        fills[step % 2]()
        for read in reads:
            out = torch.empty(read.region.shape, dtype=torch.bfloat16)
            source.read(read.tensor, read.region, out)
            assert torch.equal(read.view(slot), out), (step, read.tensor)


@pytest.mark.parametrize("factor", ["gate_proj.lora_A", "up_proj.lora_B", "down_proj.lora_B"])
def test_one_factor_of_all_experts_of_a_layer_is_one_copy(one_rank, factor: str):
    source, _ = one_rank
    reads = Reads()
    for meta in source.layout().tensors:
        if ".layers.1.mlp.experts." in meta.name and factor in meta.name:
            reads.add(meta)
    assert len(reads) == EXPERTS
    assert len(source.joined(reads)) == 1
    some = [replace(reads[n], offset_bytes=place * reads[0].num_bytes) for place, n in enumerate((0, 1, 3))]
    assert len(source.joined(some)) == 2, "the third is farther off"


def test_a_scale_that_is_no_power_of_two_is_applied_as_vllm_does(tmp_path: Path):
    rank = make_rank(dtype=DType.bfloat16)
    fill_adapters(rank, 1)
    rank.states.save_adapter(tmp_path)
    for module in rank.decoder.modules():
        if isinstance(module, Adapted) and module.lora is not None:
            module.lora = LoraConfig(rank=RANK, alpha=10.0)
    read = read_shards(source_of(rank), torch.bfloat16)
    slots = expected(tmp_path, 2.5, torch.bfloat16)
    assert all(torch.equal(values, slots[name]) for (name, _), values in read.items())


def test_names_and_targets_follow_what_is_adapted():
    spec = read_config(make_config(num_layers=2, dense_layers=[0]))
    tensors = spec.checkpoint_tensors("bfloat16")
    everything = adapter_tensors(tensors, LoraConfig(rank=16))
    assert len(everything) == 2 * (2 * 4 + 3 + 3 * EXPERTS)
    assert all(meta.name.startswith(PREFIX) and 16 in meta.shape for meta in everything)
    assert target_modules(tensors, LoraConfig(targets=("attention",))) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert "experts" in target_modules(tensors, LoraConfig(targets=("experts",)))
    for own in (["q_proj", "k_proj", "v_proj"], ["down_proj", "o_proj"]):
        assert target_modules(tensors, LoraConfig(targets=tuple(own))) == sorted(own)
    assert target_modules(tensors, LoraConfig(targets=("mlp",))) == ["down_proj", "gate_proj", "up_proj"]


def test_kinds_of_another_rank_share_the_slots_of_the_largest():
    lora = LoraConfig(rank=16, attention_rank=33, expert_rank=4)
    assert lora.slot_rank == 64
    tensors = read_config(make_config(num_layers=1, dense_layers=[])).checkpoint_tensors("bfloat16")
    assert all(64 in meta.shape for meta in adapter_tensors(tensors, lora))


@pytest.mark.parametrize(("rank", "slot_rank"), [(1, 1), (2, 8), (8, 8), (33, 64), (257, 320), (512, 512), (513, 0)])
def test_a_slots_rank_is_one_that_engines_have(rank: int, slot_rank: int):
    assert LoraConfig(rank=rank).slot_rank == slot_rank


def test_reading_what_this_rank_does_not_hold_is_refused(one_rank):
    source, _ = one_rank
    with pytest.raises(LayoutError, match="cannot read"):
        source.read("no.such.tensor", Region((0, 0), (1, 1)), torch.empty(1, 1))


def make_config(*, num_layers: int, dense_layers: list[int]) -> dict:
    return {**MOE_CONFIG, "num_hidden_layers": num_layers, "mlp_only_layers": dense_layers}
