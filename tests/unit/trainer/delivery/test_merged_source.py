"""Promises of trainer/delivery/merged_source.py: what is read is bitwise the merged export, and ranks together hold all
of it.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from cases.packed_reads import Reads, assert_covered, drawn_reads, part_of, read_shards
from cases.rank_helpers import count, fill_adapters, make_rank, make_samples, save_state, spawn
from fakes.memory_transport import MemoryFabric, MemoryTransport
from fakes.ranked_engine import MirrorEngine
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import load_file
from torch.multiprocessing.reductions import StorageWeakRef

from slipstream.conf.schema import DType, OptimConfig, TrainMode
from slipstream.trainer.errors import LayoutError
from slipstream.trainer.rank import TrainerRank
from slipstream.trainer.weights.loading import CheckpointReader, load_weights
from slipstream.weight_sync.layout import Region
from slipstream.weight_sync.pipeline.pipeline import Pipeline
from slipstream.weight_sync.plan.plan import build_plan


def load_export(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def read_all(rank: TrainerRank) -> dict[tuple[str, tuple[int, ...]], torch.Tensor]:
    """Every shard of this rank, by (tensor, start)."""
    rank.delivery.source.begin(version=0)
    read = read_shards(rank.delivery.source, rank.decoder.dtype)
    rank.delivery.source.end()
    return read


def work(
    rank: int, world_size: int, rendezvous: str, folder: Path, ep_size: int, mode: TrainMode, dtype: DType
) -> tuple:
    trainer = make_rank(rank, world_size, rendezvous, ep_size=ep_size, mode=mode, dtype=dtype)
    fill_adapters(trainer, world_size)
    trainer.states.save_merged(folder / "merged")
    result = (trainer.delivery.source.layout(), read_all(trainer))
    trainer.shutdown()
    return result


CASES = [
    (2, TrainMode.lora, DType.bfloat16), (1, TrainMode.lora, DType.bfloat16), (1, TrainMode.lora, DType.float32),
    (1, TrainMode.full, DType.bfloat16),
]  # fmt: skip


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Case -> (its merged export, what each of two ranks returned)."""
    folder = tmp_path_factory.mktemp("ranks")
    parts = spawn(work, 2, folder, CASES)
    return {case: (load_export(folder / str(index) / "merged"), parts[index]) for index, case in enumerate(CASES)}


@pytest.mark.parametrize("case", CASES, ids=["lora-ep2-bf16", "lora-fsdp2-bf16", "lora-fsdp2-fp32", "full-fsdp2-bf16"])
def test_two_ranks_cover_the_export_without_overlap_and_bitwise(two_ranks, case):
    export, parts = two_ranks[case]
    assert parts[0][0].tensors == parts[1][0].tensors
    assert {meta.name: meta.shape for meta in parts[0][0].tensors} == {n: tuple(t.shape) for n, t in export.items()}
    # Vectors are frozen in LoRA mode, and then every rank has them whole.
    whole = {name for name, tensor in export.items() if tensor.dim() == 1 and TrainMode.lora in case}
    assert_covered([read for _, read in parts], export, dict.fromkeys(whole, len(parts)))


def test_the_bytes_are_those_of_one_rank_and_of_a_resumed_one(two_ranks, tmp_path):
    rank, resumed = (make_rank(dtype=DType.bfloat16) for _ in range(2))
    fill_adapters(rank, 1)
    save_state(rank, tmp_path)
    resumed.states.load_state(tmp_path)
    read = read_all(rank)
    for case in CASES[:2]:
        export = two_ranks[case][0]
        assert all(torch.equal(values, export[name]) for (name, _), values in read.items())
    again = read_all(resumed)
    assert all(torch.equal(values, again[place]) for place, values in read.items())


def test_full_training_computes_with_the_weights_that_engines_get(tmp_path):
    """After steps far below half a step of bfloat16: the float32 weights have moved, and what is lost in rounding them
    is lost on both sides."""
    rank, engine = (make_rank(dtype=DType.bfloat16, mode=TrainMode.full, optim=OptimConfig(lr=1e-5)) for _ in range(2))
    before = read_all(rank)
    for version in range(3):
        samples = make_samples(version=version)
        rank.forward_backward([samples], count(samples, version))
        assert rank.optimizer_step().is_finite
    rank.states.save_merged(tmp_path)
    after = read_all(rank)
    num_moved = sum(int((values != before[place]).sum()) for place, values in after.items())
    assert 0 < num_moved < 0.1 * sum(values.numel() for values in after.values())
    load_weights(engine.decoder, CheckpointReader(tmp_path, engine.decoder.spec), seed=0)
    mine, theirs = (one.score([make_samples(version=one.policy_version)], one.policy_version) for one in (rank, engine))
    assert all((a.logprobs == b.logprobs).all() for a, b in zip(mine[0], theirs[0], strict=True))


@pytest.fixture(scope="module", params=[DType.bfloat16, DType.float32])
def merged(request, tmp_path_factory) -> tuple[TrainerRank, dict[str, torch.Tensor]]:
    """One LoRA rank amid a publish, and its merged export. float32 shows a last bit that bfloat16 rounds away."""
    folder = tmp_path_factory.mktemp("merged")
    rank = make_rank(dtype=request.param)
    fill_adapters(rank, 1)
    rank.states.save_merged(folder)
    rank.delivery.source.begin(version=0)
    return rank, load_export(folder)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_region_is_bitwise_a_slice_of_the_export(merged, data):
    rank, export = merged
    name = data.draw(st.sampled_from(sorted(export)))
    start, shape = [], []
    for size in export[name].shape:
        first = data.draw(st.integers(0, size - 1))
        start.append(first)
        shape.append(data.draw(st.integers(1, size - first)))
    region = Region(tuple(start), tuple(shape))
    out = torch.empty(shape[::-1], dtype=export[name].dtype).permute(*reversed(range(len(shape))))
    rank.delivery.source.read(name, region, out)
    assert torch.equal(out, part_of(export[name], region))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_joined_reads_are_bitwise_slices_of_the_export(merged, data):
    rank, export = merged
    drawn_reads(data, rank.delivery.source.layout().tensors).check(rank.delivery.source, export)


@torch.no_grad()
def test_a_compiled_load_reads_what_the_parameters_hold_now_wherever_they_are():
    rank = make_rank()
    metas = {meta.name: meta for meta in rank.delivery.source.layout().tensors}
    reads = Reads()
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.experts.1.down_proj.weight"):
        reads.add(metas[name])
    slot = torch.zeros(reads.num_bytes, dtype=torch.uint8)
    fill = rank.delivery.source.compile_reads(reads)(slot)
    for version, does_move in enumerate((False, False, True)):
        for parameter in rank.decoder.parameters():
            if does_move:
                parameter.data = parameter.data.clone()
            parameter.normal_()
        rank.delivery.source.begin(version)
        fill()
        for read in reads:
            rank.delivery.source.read(read.tensor, read.region, wanted := torch.empty(read.region.shape))
            assert torch.equal(read.view(slot), wanted.to(getattr(torch, read.dtype)))
        rank.delivery.source.end()
    with pytest.raises(LayoutError, match=r"outside begin\(\) and end\(\)"):
        fill()


class RememberingTransport(MemoryTransport):
    """Knows the storages that were registered, and does not hold them."""

    def __init__(self, fabric: MemoryFabric) -> None:
        super().__init__(fabric)
        self.storages: list[StorageWeakRef] = []

    def register(self, tensors: Sequence[torch.Tensor]) -> None:
        super().register(tensors)
        self.storages += [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]


@pytest.mark.parametrize("end", [Pipeline.allocate, Pipeline.release, Pipeline.close])
def test_staging_ends_though_the_plan_is_kept(end):
    """What fills a slot names its addresses; torch must not find it in use when it is asked to give memory back."""
    rank, fabric = make_rank(), MemoryFabric()
    transport, engine = RememberingTransport(fabric), MemoryTransport(fabric)
    layout = MirrorEngine(rank.delivery.source.layout().tensors, engine).receivers[0].describe().layout
    pipeline = Pipeline(rank.delivery.source, transport, device="cpu", watermark_bytes=1 << 20)
    plan = build_plan([rank.delivery.source.layout()], [[layout]], max_task_bytes=pipeline.max_task_bytes)
    pipeline.load(plan.tasks[0])
    pipeline.prepare(0)
    assert pipeline.run(0, {}, {}).report.prepare_s > 0, "slots were filled"
    (staging,) = transport.storages
    assert not staging.expired()
    end(pipeline)
    assert staging.expired()


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_runs_are_as_many_as_layers_parameters_and_destinations_whatever_the_experts(merged, tp_size):
    """A TP rank's w13 takes bands of gate_up_proj, its w2 columns of down_proj; both are one run, and right."""
    rank, export = merged
    source = rank.delivery.source
    metas = {meta.name: meta for meta in source.layout().tensors}
    reads = Reads()
    for tp_rank in range(tp_size):
        for layer in range(2):
            for leaves, dim in ((("gate_proj", "up_proj"), 0), (("down_proj",), 1)):
                for name in (
                    f"model.layers.{layer}.mlp.experts.{e}.{leaf}.weight" for e in range(4) for leaf in leaves
                ):
                    shape = list(metas[name].shape)
                    shape[dim] //= tp_size
                    start = [0, 0]
                    start[dim] = tp_rank * shape[dim]
                    reads.add(metas[name], Region(tuple(start), tuple(shape)))
    assert len(source.joined(reads)) == tp_size * 2 * 2
    reads.check(source, export)


def test_adapters_really_merge(merged):
    rank, export = merged
    base = dict(rank.decoder.named_parameters())["model.layers.0.mlp.experts.down_proj"][1]
    assert not torch.equal(export["model.layers.0.mlp.experts.1.down_proj.weight"], base)


def test_reading_outside_a_publish_or_a_shard_is_refused():
    source = make_rank().delivery.source
    region = Region((0, 0), (1, 1))
    with pytest.raises(LayoutError, match=r"outside begin\(\) and end\(\)"):
        source.read("lm_head.weight", region, torch.empty(1, 1))
    held_bytes = source.begin(version=1)
    assert held_bytes <= source.temporary_bytes
    with pytest.raises(LayoutError, match="before the end of the publish"):
        source.begin(version=2)
    with pytest.raises(LayoutError, match="none of it"):
        source.read("no.such.tensor", region, torch.empty(1, 1))
    with pytest.raises(LayoutError, match="cannot read"):
        source.read("lm_head.weight", Region((39, 0), (2, 1)), torch.empty(2, 1))
    source.end()
    source.end()
