"""Block-FP8 of a publish: against an arithmetic of its own in float64, against vLLM's helpers, and over ranks whose
rows end inside a block.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.packed_reads import Reads, assert_covered, drawn_reads
from cases.rank_helpers import LORA, MOE_CONFIG, fill_adapters, make_rank, spawn
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file

from slipstream.conf.errors import ConfigError
from slipstream.conf.schema import Device, DType, MergeRounding, TrainerConfig, TrainMode, WeightSyncConfig
from slipstream.trainer.delivery.merged_source import TrainerWeightSource
from slipstream.trainer.delivery.planned_layouts import PlannedTrainer
from slipstream.trainer.errors import LayoutError
from slipstream.trainer.rank import TrainerRank
from slipstream.trainer.weights.block_scales import ScaleRun
from slipstream.trainer.weights.quantization import (
    BLOCK,
    SCALE_SUFFIX,
    BlockFp8,
    engine_tensors,
    owned_blocks,
    shared_blocks,
    touched_blocks,
)
from slipstream.trainer.weights.shards import local_shards
from slipstream.weight_sync.layout import Region, TensorMeta

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
CONFIG: dict[str, Any] = {
    **MOE_CONFIG, "hidden_size": 200, "num_attention_heads": 10, "intermediate_size": 300,
    "moe_intermediate_size": 140, "decoder_sparse_step": 2,
}  # fmt: skip
"""No size is a multiple of 128; two ranks cut q at row 80, a dense feed-forward at row 150, an o projection at 100."""
QUANTIZED: dict[str, Any] = {
    **CONFIG, "quantization_config": {**FP8, "modules_to_not_convert": ["lm_head", "model.layers.0.self_attn.k_proj"]},
}  # fmt: skip


def e4m3(values: np.ndarray) -> np.ndarray:
    """The bytes of float8_e4m3fn next to float32 values of at most 448; to the even one in the middle."""
    codes = np.arange(0x7F)  # 0x7f is NaN
    exponent, fraction = codes >> 3, codes & 7
    table = np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent - 10.0))
    sizes = np.abs(values.astype(np.float64))
    high = np.minimum(np.searchsorted(table, sizes), len(table) - 1)
    low = np.maximum(high - 1, 0)
    gap_low, gap_high = sizes - table[low], table[high] - sizes
    is_low = (gap_low < gap_high) | ((gap_low == gap_high) & (low % 2 == 0))
    return (np.where(is_low, low, high) | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def quantized_by_hand(weight: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(bytes, scales): each block by itself, in float64 and rounded once."""
    values = weight.numpy().astype(np.float64)
    rows, columns = values.shape
    scales = np.ones((-(-rows // BLOCK), -(-columns // BLOCK)), dtype=np.float32)
    codes = np.empty(values.shape, dtype=np.uint8)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            window = np.s_[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
            amax = np.abs(values[window]).max()
            if amax > 0:
                scales[i, j] = np.float32(amax / 448)
            codes[window] = e4m3((values[window] / np.float64(scales[i, j])).astype(np.float32))
    return codes, scales


def merged_in_float32(rank: TrainerRank) -> dict[str, torch.Tensor]:
    """Every weight before it is quantized."""
    values: dict[str, torch.Tensor] = {}
    for held in local_shards(rank.decoder):
        values[held.tensor] = torch.empty(held.region.shape, dtype=torch.float32)
        held.run(held.region).write(values[held.tensor], {})
    return values


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy()


@pytest.fixture(scope="module", params=[DType.bfloat16, DType.float32])
def exported(request, tmp_path_factory) -> tuple[TrainerRank, dict[str, torch.Tensor]]:
    """One LoRA rank that rounds to nearest, and its export."""
    return _export(request.param, MergeRounding.nearest, tmp_path_factory.mktemp("fp8"))


def _export(dtype: DType, rounding: MergeRounding, folder: Path) -> tuple[TrainerRank, dict[str, torch.Tensor]]:
    rank = make_rank(dtype=dtype, hf_config=QUANTIZED, weight_sync=WeightSyncConfig(rounding=rounding))
    fill_adapters(rank, 1)
    with torch.no_grad():
        rank.decoder.get_parameter("model.layers.0.mlp.up_proj.weight")[128:256, 128:].zero_()
        rank.decoder.get_parameter("model.layers.0.mlp.up_proj.lora_B")[128:256].zero_()
    rank.states.save_merged(folder)
    return rank, load_file(folder / "model.safetensors")


def test_weights_and_scales_are_those_of_float64(exported):
    rank, export = exported
    merged = merged_in_float32(rank)
    metas = rank.decoder.spec.checkpoint_tensors(str(rank.decoder.dtype).removeprefix("torch."))
    kept = {meta.name for meta in metas if not BlockFp8.from_hf_config(QUANTIZED).quantizes(meta.name, meta.shape)}
    assert {"lm_head.weight", "model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.gate.weight"} < kept
    for name in kept:
        assert export[name].dtype == rank.decoder.dtype
        assert torch.equal(export[name], merged[name].to(rank.decoder.dtype)), name
    checked = 0
    for meta in metas:
        if meta.name in kept:
            continue
        codes, scales = quantized_by_hand(merged[meta.name])
        assert np.array_equal(export[meta.name + SCALE_SUFFIX].numpy(), scales), meta.name
        assert np.array_equal(as_bytes(export[meta.name]), codes), meta.name
        checked += 1
    assert checked == 2 * 3 + 1 + 3 + 4 * 3
    assert export["model.layers.0.mlp.up_proj.weight_scale_inv"][1, 1] == 1.0  # a block of zeros
    base = rank.decoder.get_parameter("model.layers.1.mlp.experts.down_proj")[1].float()
    assert not torch.equal(merged["model.layers.1.mlp.experts.1.down_proj.weight"], base)


def test_thresholds_round_what_adapters_add_to_the_codes_of_the_base(tmp_path):
    """Each element between its code without an adapter and the one next to it on the other side of the exact sum; the
    mean over elements is the sum's; what has no adapter keeps the bits of nearest."""
    rank, export = _export(DType.bfloat16, MergeRounding.dithered, tmp_path)
    merged = merged_in_float32(rank)
    checked = 0
    for held in local_shards(rank.decoder):
        name = held.tensor
        if name + SCALE_SUFFIX not in export:
            continue
        scales = export[name + SCALE_SUFFIX].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        scales = scales[: merged[name].shape[0], : merged[name].shape[1]]
        got = export[name].float()
        codes = (held.base.detach().float() / scales).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        if held.delta is None:
            assert torch.equal(got, codes), name
            continue
        exact = (codes + (merged[name] - held.base.float()) / scales).clamp(-448, 448)
        table = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        above = torch.searchsorted(table, exact.abs())
        low, high = table[(above - 1).clamp(min=0)], table[above]
        assert ((got.abs() == low) | (got.abs() == high)).all(), name
        step = (high - low).clamp(min=2.0**-9)
        error = ((got - exact) / step).double()
        assert abs(float(error.mean())) < 5 * 0.5 / error.numel() ** 0.5, name
        checked += 1
    assert checked > 10


@settings(max_examples=60)
@given(data=st.data())
def test_any_rectangle_and_any_join_is_bitwise_a_slice_of_the_export(exported, data):
    rank, export = exported
    reads = drawn_reads(data, rank.delivery.source.layout().tensors)
    rank.delivery.source.begin(0)
    reads.check(rank.delivery.source, export)
    rank.delivery.source.end()


@pytest.mark.parametrize("tp_size", [1, 2])
def test_values_and_scales_of_a_stack_of_experts_are_one_run_each(exported, tp_size):
    rank, export = exported
    for suffix in ("_proj.weight", "_proj.weight_scale_inv"):
        reads = Reads()
        for meta in rank.delivery.source.layout().tensors:
            if ".mlp.experts." in meta.name and "down" not in meta.name and meta.name.endswith(suffix):
                reads.add(meta, Region((0, 0), (meta.shape[0] // tp_size, meta.shape[1])))
        assert len(reads) == 8
        assert len(rank.delivery.source.joined(reads)) == 1
        rank.delivery.source.begin(0)
        reads.check(rank.delivery.source, export)
        rank.delivery.source.end()


def test_scales_of_other_columns_or_of_another_parameter_are_a_run_of_their_own(exported):
    rank, _ = exported
    scales = rank.delivery.source._scales

    def run(tensor: str, column: int) -> ScaleRun:
        return scales.scale_run(
            f"model.layers.1.mlp.experts.{tensor}_proj.weight{SCALE_SUFFIX}", Region((0, column), (2, 1))
        )

    first = run("0.gate", 0)
    both = first.joined(run("0.up", 0))
    assert both is not None and both.shape == (4, 1)
    assert first.joined(run("0.up", 1)) is None
    assert first.joined(dataclasses.replace(run("0.up", 0), columns=slice(0, 2))) is None
    assert first.joined(run("0.down", 0)) is None
    assert first.joined(dataclasses.replace(run("0.up", 0), stack=run("0.down", 0).stack)) is None


def test_what_an_engine_keeps_in_another_format_is_refused(exported):
    rank, _ = exported
    name = "model.layers.0.mlp.up_proj.weight"
    rank.delivery.source.begin(0)
    with pytest.raises(LayoutError, match="does not hold it in FP8"):
        rank.delivery.source.read(name, Region((0, 0), (1, 1)), torch.empty(1, 1))
    rank.delivery.source.end()
    with pytest.raises(LayoutError, match=r"outside begin\(\) and end\(\)"):
        rank.delivery.source.read(name + SCALE_SUFFIX, Region((0, 0), (1, 1)), torch.empty(1, 1))


# -- several ranks -----------------------------------------------------------------------------------------------------


def work(rank: int, world_size: int, rendezvous: str, folder: Path, ep_size: int, mode: TrainMode) -> tuple:
    config = TrainerConfig(num_ranks=world_size, ep_size=ep_size, mode=mode, lora=LORA)
    made = make_rank(
        rank, world_size, rendezvous, ep_size=ep_size, mode=mode, dtype=DType.bfloat16, hf_config=QUANTIZED
    )
    fill_adapters(made, world_size)
    made.states.save_merged(folder / "merged")
    source = made.delivery.source
    assert isinstance(source, TrainerWeightSource)
    held = source.begin(0)
    read = {}
    for shard in source.layout().shards:
        dtype = next(meta.dtype for meta in source.layout().tensors if meta.name == shard.tensor)
        read[shard.tensor, shard.region.start] = torch.empty(shard.region.shape, dtype=getattr(torch, dtype))
        source.read(shard.tensor, shard.region, read[shard.tensor, shard.region.start])
    source.end()
    facts = (source.layout(), read, held, source.temporary_bytes, config)
    made.shutdown()
    return facts


CASES = [(1, TrainMode.lora), (1, TrainMode.full)]


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, tmp_path_factory) -> list[tuple[dict[str, torch.Tensor], list]]:
    folder = tmp_path_factory.mktemp(f"ranks{request.param}")
    cases = [*CASES, (2, TrainMode.lora)] if request.param == 2 else CASES[:1]
    parts = spawn(work, request.param, folder, cases)
    exports = [load_file(folder / str(index) / "merged" / "model.safetensors") for index in range(len(cases))]
    return list(zip(exports, parts, strict=True))


def test_ranks_cover_the_export_bitwise_and_blocks_that_they_share_have_one_scale(ranks):
    for export, parts in ranks:
        assert {meta.name: meta.shape for meta in parts[0][0].tensors} == {n: tuple(t.shape) for n, t in export.items()}
        for index, (_, read, held, declared, _) in enumerate(parts):
            is_cut_inside_a_block = any(start[0] % BLOCK for name, start in read if name + SCALE_SUFFIX in export)
            assert is_cut_inside_a_block == (index > 0)
            assert held <= declared
        # Vectors are frozen in LoRA mode, and then every rank has them whole.
        is_lora = parts[0][4].mode is TrainMode.lora
        whole = {name for name, tensor in export.items() if tensor.dim() == 1 and is_lora}
        assert_covered([read for _, read, *_ in parts], export, dict.fromkeys(whole, len(parts)))


def test_the_bytes_do_not_depend_on_the_number_of_ranks(ranks, tmp_path):
    """fill_adapters draws by name and place, so one rank has the same policy as two or three."""
    rank = make_rank(dtype=DType.bfloat16, hf_config=QUANTIZED)
    fill_adapters(rank, 1)
    rank.states.save_merged(tmp_path)
    alone = load_file(tmp_path / "model.safetensors")
    export, parts = ranks[0]
    assert parts[0][4].mode is TrainMode.lora
    for name, tensor in alone.items():
        assert np.array_equal(as_bytes(tensor), as_bytes(export[name])), name


def test_layouts_and_temporary_bytes_are_foretold(ranks):
    quantization = BlockFp8.from_hf_config(QUANTIZED)
    from slipstream.conf.architecture.families import read_config

    spec = read_config(QUANTIZED)
    for _, parts in ranks:
        trainer = parts[0][4]
        planned = PlannedTrainer(spec, "bfloat16", trainer)
        foretold = planned.layouts(quantization)
        for part, layout in zip(parts, foretold, strict=True):

            def ordered(one):
                return dataclasses.replace(one, shards=tuple(sorted(one.shards, key=lambda s: (s.tensor, s.region))))

            assert ordered(part[0]) == ordered(layout)
        assert max(part[3] for part in parts) == planned.temporary_bytes(Device.cpu, quantization)


# -- which tensors -----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 400), min_size=1, max_size=6))
def test_blocks_have_one_owner_whoever_holds_their_rows(sizes):
    stops = np.cumsum(sizes).tolist()
    ranges = list(zip([0, *stops[:-1]], stops))
    owned = [block for start, stop in ranges for block in owned_blocks(start, stop)]
    assert owned == list(range(-(-stops[-1] // BLOCK)))
    for start, stop in ranges:
        if start < stop:
            assert set(owned_blocks(start, stop)) <= set(touched_blocks(start, stop))
    inner = [start for start, stop in ranges if start < stop and start > 0 and start % BLOCK]
    assert shared_blocks([one for one in ranges if one[0] < one[1]]) == sorted({start // BLOCK for start in inner})


def test_only_the_format_that_can_be_made_is_accepted():
    assert BlockFp8.from_hf_config({}) is None
    for change, named in (
        ({"quant_method": "gptq"}, "quant_method='gptq'"),
        ({"weight_block_size": None}, "weight_block_size=None"),
        ({"weight_block_size": [64, 128]}, r"weight_block_size=\[64, 128\]"),
        ({"activation_scheme": "static"}, "activation_scheme='static'"),
        *(({"modules_to_not_convert": one}, "modules_to_not_convert must be a list") for one in (3, "lm_head", [[1]])),
    ):
        with pytest.raises(ConfigError, match=named):
            BlockFp8.from_hf_config({"quantization_config": {**FP8, **change}})


def test_an_entry_for_a_model_that_has_none_keeps_head_and_routers():
    tensors = [
        TensorMeta(name, (256, 128), "bfloat16")
        for name in ("lm_head.weight", "model.layers.3.mlp.gate.weight", "model.layers.3.mlp.gate_proj.weight")
    ]
    entry = BlockFp8.hf_entry(tensors)
    assert entry["modules_to_not_convert"] == ["lm_head", "model.layers.3.mlp.gate"]
    wanted = engine_tensors(tensors, BlockFp8.from_hf_config({"quantization_config": entry}))
    assert wanted[2:] == [
        TensorMeta("model.layers.3.mlp.gate_proj.weight", (256, 128), "float8_e4m3fn"),
        TensorMeta("model.layers.3.mlp.gate_proj.weight_scale_inv", (2, 1), "float32"),
    ]
