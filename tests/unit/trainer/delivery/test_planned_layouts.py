"""trainer/delivery/planned_layouts.py against real ranks: the layouts and temporary bytes that they report, and
their parameters."""

import dataclasses
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import tiny_configs as tiny
from cases.rank_helpers import spawn
from cases.tiny_models import make_decoder, trainer_config
from torch.distributed.tensor import DTensor

from slipstream.conf.architecture.families import read_config
from slipstream.conf.schema import Device, DType, LoraConfig, OptimConfig, OptimState, TrainerConfig, TrainMode
from slipstream.trainer.delivery.adapter_source import AdapterSource
from slipstream.trainer.delivery.merged_source import TrainerWeightSource
from slipstream.trainer.delivery.planned_layouts import PlannedTrainer
from slipstream.trainer.errors import LayoutError
from slipstream.trainer.model.build_decoder import build_decoder, dense_trainable
from slipstream.trainer.model.decoder import Decoder
from slipstream.trainer.moe.experts import Experts
from slipstream.trainer.parallel import ParallelLayout, local_part
from slipstream.trainer.step.learner import Learner
from slipstream.trainer.weights.factors import factor_shards
from slipstream.trainer.weights.shards import HeldTensor, local_shards
from slipstream.weight_sync.layout import SourceLayout
from slipstream.weight_sync.merging.factors import factor_tensors

ODD = {**tiny.MIXED, "vocab_size": 97, "num_experts": 6, "tie_word_embeddings": True}
"""Rows and experts that do not divide evenly."""
SEVEN = {**tiny.MOE, "num_experts": 7}
"""Experts that two ep_ranks cannot share evenly."""
MODELS = {
    "dense": tiny.DENSE,
    "moe": tiny.MOE,
    "mixed": tiny.MIXED,
    "odd": ODD,
    "seven": SEVEN,
    "deepseek": tiny.DEEPSEEK,
    "qwen3_5_moe": tiny.QWEN3_5_MOE,
    "qwen3_next": tiny.QWEN3_NEXT,
    "gpt_oss": tiny.GPT_OSS,
    "gemma4_moe": tiny.GEMMA4_MOE,
    "mixtral": tiny.MIXTRAL,
    "qwen2_moe": tiny.QWEN2_MOE,
}


def sorted_shards(layout: SourceLayout) -> SourceLayout:
    return dataclasses.replace(layout, shards=tuple(sorted(layout.shards, key=lambda one: (one.tensor, one.region))))


def held_bytes(decoder: torch.nn.Module, *, trained: bool) -> int:
    """Bytes of this rank's own parameters."""
    params = [p for p in decoder.parameters() if p.requires_grad == trained]
    local = [p.to_local() if isinstance(p, DTensor) else p for p in params]
    return sum(p.numel() * p.element_size() for p in local)


def whole_bytes(decoder: Decoder) -> int:
    """Bytes of other ranks' rows of dense parameters, and of gradients as large as those of what is trained."""
    held = [] if decoder.whole is None else decoder.whole._held
    more = [(one.whole.untyped_storage().nbytes() - local_part(one.rows)[0].nbytes, one.whole) for one in held]
    return sum(size * (2 if whole.requires_grad else 1) for size, whole in more)


def report(rank: int, layout: ParallelLayout, model: str, trainer: TrainerConfig) -> tuple:
    decoder = make_decoder(
        MODELS[model], trainer, dtype=torch.bfloat16, layout=layout, nonzero_b=False, may_be_whole=True
    )
    source = TrainerWeightSource(decoder, rank)
    sizes = (held_bytes(decoder, trained=False), held_bytes(decoder, trained=True), whole_bytes(decoder))
    has_names = trainer.mode is TrainMode.lora and model in ("dense", "moe", "mixed", "odd", "seven", "qwen2_moe")
    adapter = AdapterSource(decoder, rank, trainer.lora).layout() if has_names else None
    return source.layout(), source.temporary_bytes, *sizes, adapter, own_merges(decoder)


def own_merges(decoder: Decoder) -> tuple[list, list]:
    """Rectangles of factors that a rank holds, and where it merges: the row under its A, and the row whose threshold is
    taken, of the first row of every adapted rectangle."""
    shards = [one for one in local_shards(decoder) if one.delta is not None]
    adapted = [one for one in shards if isinstance(one, HeldTensor)]
    if len(adapted) < len(shards):
        return [], []
    places = []
    for held in adapted:
        assert held.delta is not None
        row, delta = held.delta.first_row + held.first_row, held.delta
        places.append(
            (held.tensor, held.region.start[0], row % delta.rows_a_factor, delta.stack_row + row, delta.scale)
        )
    return [(one.tensor, one.region) for one in factor_shards(decoder)], places


def work(rank: int, world_size: int, rendezvous: str, folder: Path, model: str, trainer: TrainerConfig) -> tuple:
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=rendezvous)
    try:
        return report(rank, ParallelLayout.create(world_size, trainer.ep_size, rank, "cpu"), model, trainer)
    finally:
        dist.destroy_process_group()


CASES = [
    ("dense", trainer_config(num_ranks=2)),
    ("moe", trainer_config(num_ranks=2, ep_size=2)),
    ("mixed", trainer_config(num_ranks=2)),
    ("mixed", trainer_config(num_ranks=2, lora=LoraConfig(rank=4, alpha=8.0, dtype=DType.bfloat16))),
    ("odd", trainer_config(TrainMode.full, num_ranks=2, ep_size=2)),
    ("odd", trainer_config(num_ranks=2)),
    ("seven", trainer_config(num_ranks=2, ep_size=2)),
    ("deepseek", trainer_config(num_ranks=2, ep_size=2)),
    ("mixtral", trainer_config(num_ranks=2, ep_size=2)),
    ("qwen2_moe", trainer_config(TrainMode.full, num_ranks=2)),
    ("qwen3_next", trainer_config(num_ranks=2, ep_size=2)),
    ("qwen3_next", trainer_config(TrainMode.full, num_ranks=2)),
    ("qwen3_5_moe", trainer_config(num_ranks=2, ep_size=2)),
    ("gpt_oss", trainer_config(num_ranks=2, ep_size=2)),
    ("gemma4_moe", trainer_config(num_ranks=2, ep_size=2)),
    ("gemma4_moe", trainer_config(TrainMode.full, num_ranks=2)),
]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> list[list]:
    return spawn(work, 2, tmp_path_factory.mktemp("offline"), CASES)


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda i: f"{CASES[i][0]}-ep{CASES[i][1].ep_size}")
def test_two_ranks_hold_what_was_foretold(two_ranks, case):
    model, trainer = CASES[case]
    planned = PlannedTrainer(read_config(MODELS[model]), "bfloat16", trainer)
    foretold = planned.layouts()
    for rank, (layout, held, frozen, trained, whole, adapter, _) in enumerate(two_ranks[case]):
        assert whole == pytest.approx(planned.memory().whole, rel=0.02)
        if adapter is not None:
            assert sorted_shards(adapter) == sorted_shards(planned.adapter_layouts()[rank])
        assert sorted_shards(layout) == sorted_shards(foretold[rank])
        assert held == planned.temporary_bytes(Device.cpu)
        memory = planned.memory()
        total = memory.weights + memory.adapters
        # Rows that do not divide make one rank fuller: the estimate is the fullest one's.
        assert (frozen + trained) <= total * 1.01
        assert total <= (frozen + trained) * 1.1


@pytest.mark.parametrize("case", [n for n, (_, one) in enumerate(CASES) if one.mode is TrainMode.lora])
def test_engines_are_told_how_two_ranks_merge_and_get_every_factor_once(two_ranks, case):
    model, trainer = CASES[case]
    if model in ("gpt_oss", "gemma4_moe"):
        with pytest.raises(LayoutError, match="which engines cannot merge"):
            PlannedTrainer(read_config(MODELS[model]), "bfloat16", trainer).merges()
        return
    merges = {one.tensor: one for one in PlannedTrainer(read_config(MODELS[model]), "bfloat16", trainer).merges()}
    shards, places = ([one for rank in two_ranks[case] for one in rank[-1][which]] for which in (0, 1))
    assert len(set(shards)) == len(shards), "nothing twice"
    held = Counter()
    for tensor, region in shards:
        held[tensor] += region.num_elements
    assert held == {meta.name: math.prod(meta.shape) for meta in factor_tensors(merges.values())}
    assert {tensor for tensor, *_ in places} == set(merges)
    for tensor, first, under_a, threshold, scale in places:
        merge = merges[tensor]
        assert (merge.first_row + first, merge.stack_row + merge.first_row + first) == (under_a, threshold)
        assert merge.scale == scale


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mode", TrainMode)
def test_one_rank_holds_what_was_foretold(model, mode):
    trainer = trainer_config(mode)
    planned = PlannedTrainer(read_config(MODELS[model]), "bfloat16", trainer)
    layout, held, frozen, trained, whole, *_ = report(0, ParallelLayout.single("cpu"), model, trainer)
    (foretold,) = planned.layouts()
    assert sorted_shards(layout) == sorted_shards(foretold)
    assert held == planned.temporary_bytes(Device.cpu)
    memory = planned.memory()
    assert (memory.weights + memory.adapters, memory.gradients, memory.optimizer, memory.whole, whole) == (
        frozen + trained,
        trained,
        2 * trained,
        0,
        0,
    )


def test_a_table_on_the_host_takes_no_memory_of_the_device():
    spec, held = read_config(tiny.DENSE), []
    for is_on_host in (False, True):
        held.append(PlannedTrainer(spec, "bfloat16", trainer_config(embedding_on_host=is_on_host)).memory().weights)
    assert held[0] - held[1] == 2 * spec.vocab_size * spec.hidden_size


@pytest.mark.parametrize(
    ("state", "dtype"),
    [(state, dtype) for state in OptimState for dtype in (None, DType.float32)]
    + [(state, DType.bfloat16) for state in OptimState if state is not OptimState.host],
)
def test_gradients_and_moments_take_what_was_foretold(state, dtype):
    """For adapters of either dtype, and in full training. Matrices are large enough for torchao's 8 bits, which have a
    scale for 256 values; norms, in full training, are not."""
    lora = LoraConfig(rank=64, dtype=dtype or DType.float32)
    mode, optim = TrainMode.full if dtype is None else TrainMode.lora, OptimConfig(state=state)
    trainer = dataclasses.replace(trainer_config(mode, lora=lora), optim=optim)
    hf_config = {**tiny.DENSE, "hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
    decoder, layout = make_decoder(hf_config, trainer, dtype=torch.bfloat16), ParallelLayout.single("cpu")
    learner = Learner(dense_trainable(decoder), optim, 1, 1, layout)
    state_bytes = {name: one.nbytes for name, one in learner.state_tensors().items() if not name.startswith("rng")}
    memory = PlannedTrainer(read_config(hf_config), "bfloat16", trainer).memory(needs_reference=True)
    moments = sum(size for name, size in state_bytes.items() if ".exp_avg" in name)
    assert (memory.optimizer, memory.host_moments)[state is OptimState.host] == pytest.approx(moments, rel=0.03)
    assert (memory.optimizer, memory.host_moments)[state is not OptimState.host] == 0
    assert memory.gradients == learner.num_bytes
    assert memory.state == pytest.approx(sum(state_bytes.values()), rel=0.03)
    assert memory.reference == (learner.num_bytes if mode is TrainMode.full else 0), "adapters start from the base"
    assert memory.total == memory.weights + memory.adapters + memory.gradients + memory.optimizer + memory.reference


@pytest.mark.parametrize("hf_config", [tiny.KIMI_INT4, tiny.GPT_OSS_MXFP4], ids=["int4", "mxfp4"])
@pytest.mark.parametrize("ep_size", [1, 2])
def test_packed_experts_are_counted_as_stored_with_two_layers_unpacked(hf_config, ep_size):
    trainer = trainer_config(num_ranks=2, ep_size=ep_size)
    spec = read_config(hf_config)
    layout = ParallelLayout(2, ep_size, 0, torch.device("cpu"), None, None, None)
    decoder = build_decoder(spec, dtype=torch.bfloat16, device="cpu", trainer=trainer, layout=layout)
    packed = sum(b.numel() * b.element_size() for b in decoder.buffers())
    banks = [module.packed for module in decoder.modules() if isinstance(module, Experts) and module.packed is not None]
    unpacked = 2 * 2 * sum(math.prod(shape) for shape in banks[0].shapes.values())
    dense = [p for name, p in decoder.named_parameters() if not p.requires_grad and ".experts." not in name]
    biases = [p for name, p in decoder.named_parameters() if not p.requires_grad and ".experts." in name]
    held = packed + unpacked + sum(p.numel() * p.element_size() for p in dense) // 2
    held += sum(p.numel() * p.element_size() for p in biases) * ep_size // 2
    assert PlannedTrainer(spec, "bfloat16", trainer).memory().weights == pytest.approx(held, rel=0.01)


def test_every_element_has_one_holder_in_any_layout():
    spec = read_config(ODD)
    for num_ranks, ep_size in ((1, 1), (4, 2), (6, 3), (8, 1), (5, 1), (12, 6)):
        layouts = PlannedTrainer(spec, "bfloat16", TrainerConfig(num_ranks=num_ranks, ep_size=ep_size)).layouts()
        vectors = {meta.name for meta in layouts[0].tensors if len(meta.shape) == 1}
        shards = [shard for layout in layouts for shard in layout.shards if shard.tensor not in vectors]
        total = sum(shard.region.num_elements for shard in shards)
        assert total == sum(torch.Size(meta.shape).numel() for meta in layouts[0].tensors if meta.name not in vectors)
        assert len({(shard.tensor, shard.region.start) for shard in shards}) == len(shards)
        for layout in layouts:  # frozen vectors are whole on every rank
            held = {shard.tensor: shard.region.shape for shard in layout.shards if shard.tensor in vectors}
            assert held == {meta.name: meta.shape for meta in layout.tensors if meta.name in vectors}
