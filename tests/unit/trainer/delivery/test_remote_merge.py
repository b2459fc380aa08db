"""Promises of weight_sync.remote_merge, from a trainer rank to an engine's memory: only factors cross the link, an
engine merges them to the trainer's bytes whatever part of a matrix it holds, and nothing is assumed of its base.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import compress
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from cases.delta_world import STAGES, die_at, fill_from_peer
from cases.rank_helpers import SYNC_KEY, draw, make_rank
from fakes.memory_transport import Fault, MemoryFabric, MemoryTransport
from fakes.publish import EndpointThread
from fakes.ranked_engine import RankedEngine
from fakes.vllm_layout import engine_layouts
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import load_file

from slipstream.conf.architecture.model_spec import ModelSpec
from slipstream.conf.schema import DType, RemoteMerge, WeightSyncConfig
from slipstream.trainer.weights.factors import factor_shards, merges_of
from slipstream.weight_sync.disk.regions import RegionReader
from slipstream.weight_sync.errors import IntegrityError, PlanError
from slipstream.weight_sync.integrity import hash_bytes
from slipstream.weight_sync.layout import DestLayout, Load, Param, PostLoad, Region
from slipstream.weight_sync.merging.factors import Merge, factor_tensors, is_factor, runs_of
from slipstream.weight_sync.replica.own_merge import OwnMerge

REPACKED = "model.embed_tokens.weight"
"""Its rows differ, so that one that was repacked twice shows."""
Q = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(2)]
QKV = Q[0].replace("q_proj", "qkv_proj")
OTHER = dict(zip(Q, reversed(Q), strict=True))
NUM_RANKS = 2
PLANTED: dict[str, Callable[[Merge, dict[str, Merge]], Merge]] = {
    "a scale that differs": lambda merge, _: replace(merge, scale=merge.scale * 1.01),
    "thresholds by local row": lambda merge, _: replace(merge, stack_row=merge.stack_row + 8),
    "thresholds of another seed": lambda merge, _: replace(merge, key=(merge.key or 0) ^ 1),
    "factors of another layer": lambda merge, of: replace(
        merge, a=of[OTHER.get(merge.tensor, merge.tensor)].a, b=of[OTHER.get(merge.tensor, merge.tensor)].b
    ),
}


def layouts(spec: ModelSpec) -> list[DestLayout]:
    """Two ranks, of which one parameter is repacked."""
    kinds = {REPACKED: PostLoad.repack}
    return [
        replace(one, params=tuple(replace(p, post_load=kinds.get(p.name, p.post_load)) for p in one.params))
        for one in engine_layouts(spec, NUM_RANKS)
    ]


class CountingLink(MemoryTransport):
    """Memory that is freed while it is registered may be registered again at the same address."""

    num_held = 0

    def register(self, tensors):
        super().register(tensors)
        self.num_held += len(tensors)

    def unregister(self, tensors):
        super().unregister(tensors)
        self.num_held -= len(tensors)


class World:
    """A trainer rank and one engine."""

    def __init__(self, folder: Path, flipped: str = "", fault: str = "") -> None:
        sync = WeightSyncConfig(remote_merge=RemoteMerge.host)
        self.folder, self.rank = folder, make_rank(dtype=DType.bfloat16, weight_sync=sync)
        self.rank.states.save_merged(folder / "base")
        self.metas = self.rank.decoder.spec.checkpoint_tensors("bfloat16")
        of = {merge.tensor: merge for merge in merges_of(self.rank.decoder)}
        self.whole = [PLANTED[fault](merge, of) if fault else merge for merge in of.values()]
        self.fabric = MemoryFabric()
        self.engines: list[RankedEngine] = []
        self.endpoints: list[EndpointThread] = []
        self.start_engine(flipped)
        self.link = CountingLink(self.fabric)
        summary = self.rank.delivery.connect([self.endpoints[0].address], self.link)
        self.whole_bytes = summary["num_bytes"]
        own = [one.layout for one in self.engines[0].merges]
        self.factor_bytes = sum(p.num_bytes for layout in own for p in layout.params if is_factor(p.name))

    def start_engine(self, flipped: str = "") -> None:
        self.links = [MemoryTransport(self.fabric) for _ in range(NUM_RANKS)]
        reader = RegionReader(self.folder / "base", [meta.name for meta in self.metas])

        def read(tensor: str, region: Region, out: torch.Tensor) -> None:
            reader.read(tensor, region, out)
            if tensor == flipped:
                out.view(torch.int16)[3, 5] ^= 1

        spec = self.rank.decoder.spec
        self.engines.append(RankedEngine(layouts(spec), self.links, merges=self.whole, read_base=read))
        self.endpoints.append(EndpointThread(self.engines[-1], key=SYNC_KEY))

    def restart_engine(self) -> None:
        self.start_engine()
        self.rank.delivery.reconnect(0, self.endpoints[-1].address)

    def publish(self, version: int):
        draw(self.rank, version, 0.05)
        report = self.rank.delivery.publish(version)
        if report.num_committed:
            folder = self.folder / str(version)
            self.rank.states.save_merged(folder)
            wanted: dict[str, torch.Tensor] = {}
            for file in folder.glob("*.safetensors"):
                wanted |= load_file(file)
            assert not self.engines[-1].wrong(wanted), "committed, and holds other bytes"
        return report

    def close(self) -> None:
        self.rank.shutdown()
        for endpoint in self.endpoints:
            endpoint.close()


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    with ExitStack() as ends:
        yield lambda **options: ends.enter_context(closing(World(tmp_path, **options)))


def test_factors_alone_are_sent_from_the_first_publish_on_also_to_an_engine_that_was_started_again(make_world, caplog):
    world = make_world()
    assert world.factor_bytes < world.whole_bytes / 2
    for version in range(3):
        report = world.publish(version)
        assert (report.num_committed, report.num_takers) == (1, NUM_RANKS), report
        assert report.num_bytes == world.factor_bytes
    world.restart_engine()
    assert world.publish(3).num_bytes == world.factor_bytes
    assert "get every byte" not in caplog.text
    world.rank.delivery._publisher.release()
    assert world.link.num_held == 0, "staging of the base's survey is unregistered as well"


def test_the_bases_of_a_further_plan_are_learned_too(make_world):
    world = make_world()
    world.publish(0)
    world.start_engine()
    world.rank.delivery._publisher.connect([one.address for one in world.endpoints])
    report = world.publish(1)
    assert (report.num_committed, report.num_takers) == (2, 2 * NUM_RANKS), report


def test_a_base_that_differs_by_a_bit_is_known_by_its_digest_and_every_byte_is_sent(make_world, caplog):
    world = make_world(flipped=Q[0])
    report = world.publish(0)
    assert f"{NUM_RANKS} of {NUM_RANKS} engine ranks get every byte" in caplog.text
    assert (report.num_committed, report.num_takers) == (1, 0), report
    assert report.num_bytes == world.whole_bytes


def test_an_engine_that_is_told_another_base_than_its_own_writes_nothing(make_world):
    world = make_world(flipped=Q[0])
    before = [{name: tensor.clone() for name, tensor in params.items()} for params in world.engines[0].params]
    frozen = world.rank.delivery._publisher._bases.frozen
    for receiver, begin in [(one, one.begin) for one in world.engines[0].receivers]:
        wanted = frozen[0, receiver.layout.rank]
        receiver.begin = lambda *args, begin=begin, wanted=wanted: replace(begin(*args), holds=wanted)
    report = world.publish(0)
    assert "changes against" in report.replicas[0].error
    for params, kept in zip(world.engines[0].params, before, strict=True):
        assert all(torch.equal(params[name], kept[name]) for name in kept)


@pytest.mark.parametrize("fault", ["refuse", "corrupt"])
def test_factors_that_do_not_arrive_change_nothing_and_the_next_publish_sends_factors(make_world, fault):
    world = make_world()
    world.publish(0)
    before = [{name: tensor.clone() for name, tensor in params.items()} for params in world.engines[0].params]
    world.fabric.inject(world.links[0].session, Fault(**{fault: True}))
    report = world.publish(1)
    assert report.num_committed == 0 and not world.engines[0].receivers[0].state.is_serving
    assert torch.equal(world.engines[0].params[0][QKV], before[0][QKV])
    report = world.publish(2)
    assert report.num_committed == 1 and report.num_bytes == world.factor_bytes


@pytest.mark.parametrize("fault", [*PLANTED, "one rounding that differs"])
def test_a_merge_that_differs_is_found_by_hash_and_later_publishes_are_whole(make_world, fault):
    world = make_world(fault=fault if fault in PLANTED else "")
    for own in world.engines[0].merges if fault not in PLANTED else ():
        own._steps = [own._step(run) for run in own._runs]
        own._steps.append(lambda own=own: own._params[QKV].view(torch.int16)[7].add_(1))
    for version in range(NUM_RANKS):  # this engine asks its ranks one after the other, up to the first that fails
        report = world.publish(version)
        assert report.num_committed == 0 and "IntegrityError" in report.replicas[0].error
    for version in (NUM_RANKS, NUM_RANKS + 1):
        report = world.publish(version)
        assert (report.num_committed, report.num_bytes) == (1, world.whole_bytes)


@pytest.mark.parametrize("stage", STAGES)
def test_after_a_publisher_died_at_any_stage_the_next_publish_is_of_factors(make_world, stage):
    world = make_world()
    world.publish(0)
    die_at(stage, lambda: world.publish(1))
    report = world.publish(2)
    assert (report.num_committed, report.num_bytes) == (1, world.factor_bytes), report


@pytest.mark.parametrize(
    ("stage", "num_takers"), [("begin", 2), ("verify", 2), ("half of the merge", 1), ("commit", 2)]
)
def test_after_an_engine_failed_at_any_stage_the_rank_whose_merge_was_cut_off_alone_gets_every_byte(
    make_world, stage, num_takers
):
    world = make_world()
    world.publish(0)
    engine, dies = world.engines[0], Mock(side_effect=RuntimeError("the engine died"))
    steps = engine.merges[0]._steps
    if stage == "half of the merge":
        steps.insert(len(steps) // 2, dies)
    else:
        engine.fail_on[stage] = RuntimeError("the engine died")
    report = world.publish(1)
    assert report.num_committed == 0 and "the engine died" in report.replicas[0].error
    assert not engine.receivers[0].state.is_serving or stage == "begin"
    engine.merges[0]._steps = [step for step in steps if step is not dies]
    for version in (2, 3):
        report = world.publish(version)
        assert (report.num_committed, report.num_takers) == (1, num_takers), report


def test_an_engine_that_read_a_peers_weights_merges_the_next_factors(make_world):
    world = make_world()
    world.publish(0)
    world.start_engine()
    peer, engine = world.engines
    fill_from_peer(engine.receivers, peer.receivers)
    assert all(
        torch.equal(params[name], held[name])
        for params, held in zip(engine.params, peer.params, strict=True)
        for name in params
    )
    world.rank.delivery._publisher.connect([one.address for one in world.endpoints])
    report = world.publish(1)
    assert (report.num_committed, report.num_bytes) == (2, 2 * world.factor_bytes), report


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_rectangle_that_an_engine_holds_is_merged_to_the_trainers_bytes(ranks, data):
    rank, merges = ranks[data.draw(st.sampled_from(sorted(ranks)))]
    merge = data.draw(st.sampled_from(merges))
    (rows, _), (_, columns) = merge.b.shape, merge.a.shape
    first, left = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    stop, right = data.draw(st.integers(first + 1, rows)), data.draw(st.integers(left + 1, columns))
    region, width = Region((first, left), (stop - first, right - left)), right - left + data.draw(st.integers(0, 5))
    load = Load(merge.tensor, region, (0, 1), "w", data.draw(st.integers(0, 5)), (width, 1))
    dtype = str(rank.decoder.dtype).removeprefix("torch.")
    param = Param("w", (load.offset + region.shape[0] * width,), dtype)
    before = data.draw(st.integers(0, 3))  # a parameter may be a view into a larger memory
    params = {"w": torch.zeros(before + param.shape[0], dtype=rank.decoder.dtype)[before:]}
    own = OwnMerge(DestLayout(0, (param,), (load,)), params, merges, on_device=data.draw(st.booleans()))
    merge_once(rank, own)
    assert_merged(rank, [load], params)


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([1, 2, 4]), st.booleans(), st.booleans(), st.integers(0, 3), st.sampled_from([1, 1, 2]))
def test_the_experts_of_a_layer_are_merged_at_once_to_the_trainers_bytes(
    ranks, tp_size: int, has_split_experts: bool, is_up_first: bool, number: int, every: int
):
    """In whatever parts an engine's ranks hold them, all or every other, in any order of gate and up. As vLLM holds
    them, w13 and w2 are a launch each."""
    rank, merges = ranks["bfloat16"]
    spec = rank.decoder.spec
    layout = engine_layouts(spec, tp_size, has_split_experts=has_split_experts)[number % tp_size]
    if is_up_first:
        layout = replace(layout, loads=tuple(map(with_up_first, layout.loads)))
    is_held = [int(re.findall(r"experts\.(\d+)\.|$", load.tensor)[0] or 0) % every == 0 for load in layout.loads]
    layout = replace(layout, loads=tuple(compress(layout.loads, is_held)))
    own_runs = [
        run for run in runs_of(layout, {merge.tensor: merge for merge in merges}) if "experts" in run.factors[0]
    ]
    if not is_up_first and every == 1:
        assert len(own_runs) == 2 * spec.num_layers
    assert sum(len(run.bands) for run in own_runs) == sum(".experts." in load.tensor for load in layout.loads)
    params = {p.name: torch.zeros(p.shape, dtype=torch.bfloat16) for p in layout.params}
    own = OwnMerge(layout, params, merges, on_device=False)
    merge_once(rank, own)
    assert_merged(rank, layout.loads, params)


def with_up_first(load: Load) -> Load:
    """In w13 as some kernels want it."""
    num_elements = load.region.num_elements
    moved = {"gate_proj": num_elements, "up_proj": -num_elements}
    by = next((by for leaf, by in moved.items() if ".experts." in load.tensor and leaf in load.tensor), 0)
    return replace(load, offset=load.offset + by)


def merge_once(rank, own: OwnMerge) -> None:
    """A publish without a link."""
    source, base = rank.delivery.source, rank.delivery._merged_from
    base.begin(0)
    own.read_base(base.read)
    base.end()
    source.begin(0)
    for load in own.layout.loads:
        if is_factor(load.tensor):
            source.read(
                load.tensor,
                load.region,
                own.factors[load.param].view(-1).as_strided(load.region.shape, load.stride, load.offset),
            )
    own.apply()
    source.end()


def assert_merged(rank, loads: Sequence[Load], params: dict[str, torch.Tensor]) -> None:
    source = rank.delivery.source
    source.begin(0)
    for load in loads:
        wanted = torch.empty(load.region.shape, dtype=rank.decoder.dtype)
        source.read(load.tensor, load.region, wanted)
        held = params[load.param].view(-1)[load.offset :].as_strided(load.region.shape, load.stride)
        assert torch.equal(held, wanted), load.tensor
    source.end()


@pytest.fixture(scope="module")
def ranks() -> Iterator[dict[str, tuple]]:
    """A trainer in bfloat16 by thresholds, and one in float32."""
    sync, made = WeightSyncConfig(remote_merge=RemoteMerge.host), {}
    for dtype in (DType.bfloat16, DType.float32):
        rank = make_rank(dtype=dtype, weight_sync=sync)
        draw(rank, 7, 0.05)
        made[str(dtype)] = rank, merges_of(rank.decoder)
    yield made
    for rank, _ in made.values():
        rank.shutdown()


def test_factors_of_a_rank_are_those_that_are_planned(ranks):
    """Gate and up of an expert share one A, which is sent once."""
    rank, merges = ranks["bfloat16"]
    held = {one.tensor: one.region.shape for one in factor_shards(rank.decoder)}
    assert held == {meta.name: meta.shape for meta in factor_tensors(merges)}
    assert len({merge.a.name for merge in merges}) < len({merge.b.name for merge in merges}) == len(merges)


@pytest.mark.parametrize("change", [1, -1])
def test_any_factor_that_is_another_one_is_named(ranks, change):
    rank, merges = ranks["bfloat16"]
    layout = engine_layouts(rank.decoder.spec, 1)[0]
    own = OwnMerge(
        layout, {p.name: torch.zeros(p.shape, dtype=torch.bfloat16) for p in layout.params}, merges, on_device=False
    )
    for factor in own.factors.values():
        factor.normal_()
    held = {name: hash_bytes(factor) for name, factor in own.factors.items()}
    own.check_factors(held)
    for name in (min(held), max(held)):
        with pytest.raises(IntegrityError, match=rf"1 of {len(held)} factors .* \({re.escape(name)}, "):
            own.check_factors(held | {name: held[name] + change})


def test_a_matrix_that_lies_in_another_order_is_refused(ranks):
    merge = ranks["bfloat16"][1][0]
    shape = (merge.b.shape[0], merge.a.shape[1])
    load = Load(merge.tensor, Region((0, 0), shape), (1, 0), "w", 0, (shape[0], 1))
    layout = DestLayout(0, (Param("w", shape, "bfloat16"),), (load,))
    with pytest.raises(PlanError, match="does not lie row by row"):
        OwnMerge(layout, {"w": torch.zeros(shape, dtype=torch.bfloat16)}, [merge], on_device=False)
