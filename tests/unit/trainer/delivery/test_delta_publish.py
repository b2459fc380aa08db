"""Promises of a publish that sends only changes (weight_sync.delta_bytes), from a trainer rank to an engine's memory:
engines hold the same bytes as after a whole publish, less is sent, and nothing is assumed of what an engine holds.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cases.rank_helpers import SYNC_KEY, count, make_rank, make_samples
from fakes.memory_transport import Fault, MemoryFabric, MemoryTransport
from fakes.publish import EndpointThread
from fakes.ranked_engine import REPACKED, MirrorEngine

from slipstream.conf.schema import DType, OptimConfig, TrainMode, WeightSyncConfig
from slipstream.trainer.rank import TrainerRank
from slipstream.weight_sync.changes import Landed, max_records
from slipstream.weight_sync.publish.landings import Landing
from slipstream.weight_sync.publish.staging_slots import Slots
from slipstream.weight_sync.replica import landing

ZONE_BYTES = 1 << 16


class World:
    """A trainer rank, and engines to which it publishes."""

    def __init__(
        self,
        tmp_path: Path,
        num_engines: int = 1,
        lr: float = 1e-4,
        zone: int = ZONE_BYTES,
        mode: TrainMode = TrainMode.lora,
        **options: int,
    ) -> None:
        self.folder = tmp_path
        self.rank: TrainerRank = make_rank(
            dtype=DType.bfloat16,
            mode=mode,
            optim=OptimConfig(lr=lr),
            weight_sync=WeightSyncConfig(**{"delta_bytes": ZONE_BYTES, "timeout_s": 5.0, **options}),
        )
        self.fabric = MemoryFabric()
        self.links = [MemoryTransport(self.fabric) for _ in range(num_engines)]
        metas = self.rank.delivery.source.layout().tensors
        self.engines = [MirrorEngine(metas, link, zone) for link in self.links]
        self.endpoints = [EndpointThread(engine, key=SYNC_KEY) for engine in self.engines]
        addresses = [endpoint.address for endpoint in self.endpoints]
        self.zone = zone
        self.whole_bytes = self.rank.delivery.connect(addresses, MemoryTransport(self.fabric))["num_bytes"]

    def add_engines(self, num_engines: int) -> None:
        """The last one comes first, so that there is room for all of them at once."""
        metas = self.rank.delivery.source.layout().tensors
        for _ in range(num_engines):
            self.engines.append(MirrorEngine(metas, MemoryTransport(self.fabric), self.zone))
            self.endpoints.append(EndpointThread(self.engines[-1], key=SYNC_KEY))
        for number in range(len(self.engines))[: -num_engines - 1 : -1]:
            self.rank.delivery.reconnect(number, self.endpoints[number].address)

    def step(self) -> None:
        version = self.rank.policy_version
        samples = make_samples(version=version)
        self.rank.forward_backward([samples], count(samples, version))
        assert self.rank.optimizer_step().is_finite

    def publish(self, **options: object):
        return self.rank.delivery.publish(self.rank.policy_version, **options)

    def all_hold_it(self) -> bool:
        folder = self.folder / str(self.rank.policy_version)
        self.rank.states.save_merged(folder)
        return all(engine.holds(folder) for engine in self.engines)

    def close(self) -> None:
        self.rank.shutdown()
        for endpoint in self.endpoints:
            endpoint.close()


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(*args: int, **options: int) -> World:
        worlds.append(World(tmp_path, *args, **options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


@pytest.mark.parametrize("watermark_bytes", [1 << 30, 300_000])
def test_engines_hold_every_byte_of_each_version_and_get_fewer(make_world, watermark_bytes):
    """In one load, and in as many as a small watermark asks for, which is used up."""
    world = make_world(watermark_bytes=watermark_bytes)
    sent = []
    for _ in range(5):
        report = world.publish()
        assert report.num_committed == 1, report
        assert world.all_hold_it()
        assert report.peak_bytes <= watermark_bytes
        assert report.peak_bytes > 0.99 * watermark_bytes or watermark_bytes == 1 << 30
        sent.append(report.num_bytes)
        world.step()
    assert sent[0] == world.whole_bytes, "nothing is known of an engine that was just met"
    assert max(sent[1:]) < 0.5 * world.whole_bytes, sent


def test_in_full_training_what_was_published_is_kept_and_compared(make_world):
    world = make_world(lr=1e-6, mode=TrainMode.full)
    sent = []
    for _ in range(4):
        report = world.publish()
        assert report.num_committed == 1 and world.all_hold_it(), report
        sent.append(report.num_bytes)
        world.step()
    assert sent[0] == world.whole_bytes
    assert max(sent[1:]) < 0.5 * world.whole_bytes, sent


def test_what_changed_much_goes_whole(make_world):
    world = make_world(lr=0.05)
    for number in range(3):
        report = world.publish()
        assert report.num_committed == 1 and world.all_hold_it()
        assert report.num_bytes == world.whole_bytes or (number and report.num_bytes > 0.5 * world.whole_bytes)
        world.step()


@pytest.mark.parametrize("zone", [64, 1 << 11])
def test_what_finds_no_room_in_the_zone_goes_whole(make_world, zone):
    world = make_world(delta_bytes=zone, zone=zone)
    sent = []
    for _ in range(3):
        report = world.publish()
        assert report.num_committed == 1
        assert world.all_hold_it()
        sent.append(report.num_bytes)
        world.step()
    assert 0.4 * world.whole_bytes < sent[-1] < world.whole_bytes


def test_an_engine_without_a_zone_or_with_another_one_gets_every_byte(make_world):
    for zone in (0, ZONE_BYTES // 2):
        world = make_world(zone=zone)
        for _ in range(2):
            assert world.publish().num_bytes == world.whole_bytes
            assert world.all_hold_it()
            world.step()


def test_an_engine_that_missed_two_versions_gets_every_byte_and_the_others_what_changed(make_world):
    world = make_world(2)
    world.publish()
    world.step()
    both = world.publish().num_bytes
    world.step()
    one = world.publish(exclude=[1]).num_bytes
    assert one < both < world.whole_bytes // 2
    world.step()
    world.publish(exclude=[1])
    world.step()
    report = world.publish()
    assert report.num_committed == 2 and world.all_hold_it() and report.num_takers == 1
    assert world.whole_bytes / 2 <= report.num_bytes < world.whole_bytes / 2 + 2 * one
    world.add_engines(2)
    sent = []
    for _ in range(2):
        world.step()
        sent.append(world.publish().num_bytes)
        assert world.all_hold_it()
    assert sent[0] == 2 * world.whole_bytes > 2 * sent[1], "once, where further ones have joined"


def before_writes(world: World, monkeypatch: pytest.MonkeyPatch, note: Callable[[int, Sequence[int]], None]) -> None:
    """Call this with the engine and the addresses before each write."""
    real, sessions = MemoryTransport.write, [link.session for link in world.links]

    def write(self, session, sources, places, sizes, **more):
        note(sessions.index(session), places)
        real(self, session, sources, places, sizes, **more)

    monkeypatch.setattr(MemoryTransport, "write", write)


def test_changes_land_while_engines_serve_and_what_goes_whole_is_written_once_they_have_paused(make_world, monkeypatch):
    """The second engine turns out to hold something else, and gets every byte."""
    world = make_world(2, delta_bytes=1 << 11, zone=1 << 11)
    world.publish()
    world.step()
    world.engines[1].receivers[0]._holds = "another version's digest"
    zones = [engine.receivers[0]._landing.address for engine in world.engines]
    seen = set()

    def note(number, places):
        is_serving = world.engines[number].receivers[0].state.is_serving
        seen.update((number, is_serving, 0 <= place - zones[number] < 1 << 11) for place in places)

    before_writes(world, monkeypatch, note)
    report = world.publish()
    assert (report.num_committed, report.num_takers) == (2, 1) and world.all_hold_it(), report
    assert seen == {(number, is_ahead, is_ahead) for number in (0, 1) for is_ahead in (True, False)}
    assert world.whole_bytes / 2 < report.num_bytes < world.whole_bytes


def test_only_loads_of_which_something_goes_whole_are_packed_again(make_world, monkeypatch):
    world = make_world(lr=1e-6, watermark_bytes=300_000)
    world.publish()
    world.step()
    real, packed = Slots.pack, []

    def noting(self, slot, load, *more, **options):
        packed.append(load.number)
        return real(self, slot, load, *more, **options)

    monkeypatch.setattr(Slots, "pack", noting)
    assert world.publish().num_committed == 1 and world.all_hold_it()
    loads = world.rank.delivery._publisher._pipeline.loads
    again = [
        number
        for number, packets in enumerate(loads)
        if any(task.param == REPACKED or max_records(task.num_bytes) <= 0 for one in packets for task in one.tasks)
    ]
    assert packed == [*range(len(loads)), *again] and 0 < len(again) < len(loads) - 1


def test_nothing_is_sent_ahead_to_where_an_engine_was_before_it_was_started_again(make_world):
    world = make_world(2)
    world.publish()
    world.step()
    world.links[1].close()
    world.links[1] = MemoryTransport(world.fabric)
    world.engines[1] = MirrorEngine(world.rank.delivery.source.layout().tensors, world.links[1], world.zone)
    world.endpoints.append(EndpointThread(world.engines[1], key=SYNC_KEY))
    world.rank.delivery.reconnect(1, world.endpoints[-1].address)
    report = world.publish()
    assert (report.num_committed, report.num_takers) == (2, 1) and world.all_hold_it(), report


@pytest.mark.parametrize("is_ahead", [True, False])
def test_a_link_that_breaks_lets_nobody_take_changes_and_the_next_publish_is_whole(make_world, monkeypatch, is_ahead):
    """With changes, which an engine need not know of, or with what goes whole afterwards, which leaves it dirty."""
    world = make_world(delta_bytes=1 << 11, zone=1 << 11)
    world.publish()
    world.step()
    session, receiver = world.links[0].session, world.engines[0].receivers[0]

    def break_it(*_):
        if receiver.state.is_serving == is_ahead:
            world.fabric.inject(session, Fault(refuse=True))

    with monkeypatch.context() as patch:
        before_writes(world, patch, break_it)
        report = world.publish()
    assert report.num_committed == 0 and "refused" in report.replicas[0].error
    assert (receiver.state.is_serving, receiver.state.version) == (is_ahead, not is_ahead)
    world.fabric.take_back(session)
    report = world.publish()
    assert report.num_committed == 1 and world.all_hold_it()
    assert report.num_bytes == world.whole_bytes


IN_STREAM: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "a lost position": lambda _, records: records[0].copy_(records[1]),
    "a swapped pair": lambda _, records: records[:2].bitwise_xor_((records[0] ^ records[1]) & 0xFFFF),
    "a value that is rounded otherwise": lambda _, records: records[0].bitwise_xor_(1),
    "a position out of bounds": lambda _, records: records[0].fill_(4095 << 16),
    "a record that is not there": lambda table, _: table[1].add_(1),
}


def plant(world: World, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Change what a publish says of what landed, or what landed, or what it was computed against."""
    if fault == "a stale base":  # the engine's memory is not what it says
        held = world.engines[0].params[0]["model.layers.1.self_attn.k_proj.weight"]
        held[3, 5] += 1
        return
    if fault == "another base":
        receiver = world.engines[0].receivers[0]
        receiver._holds = "another version's digest"
        bases = world.rank.delivery._publisher._bases
        bases._committed = dict.fromkeys(bases._committed, receiver._holds)
        begin = receiver.begin

        def begin_and_forget(*args):
            binding = begin(*args)
            receiver._base = "what it really held"
            return binding

        monkeypatch.setattr(receiver, "begin", begin_and_forget)
        return
    zone = world.engines[0].receivers[0]._landing
    apply = zone.apply

    def applied(changes: bytes) -> None:
        rows = np.frombuffer(changes, "<i8").reshape(-1, 5).copy()
        row = max(rows.tolist(), key=lambda one: one[4])
        tiles = -(-row[2] // 8192)
        table = zone._zone[row[3] // 4 :][: 2 * tiles]
        records = zone._zone[row[3] // 4 + 2 * tiles :][: row[4]]
        if fault in IN_STREAM:
            IN_STREAM[fault](table, records)
        elif fault == "a row past its parameter":
            rows[-1, 1] += rows[-1, 2]
        elif fault == "a row past the zone":
            rows[-1, 3] = ZONE_BYTES
        elif fault == "a row that is lost":
            rows = rows[:-1]
        apply(rows.tobytes())

    monkeypatch.setattr(zone, "apply", applied)


BEFORE_A_WRITE = {
    "another base": "ProtocolError", "a position out of bounds": "ProtocolError",
    "a record that is not there": "ProtocolError", "a row past its parameter": "ProtocolError",
    "a row past the zone": "ProtocolError",
}  # fmt: skip
BY_HASH = {
    "a stale base": "IntegrityError", "a lost position": "IntegrityError", "a swapped pair": "IntegrityError",
    "a value that is rounded otherwise": "IntegrityError", "a row that is lost": "IntegrityError",
}  # fmt: skip


@pytest.mark.parametrize("fault", [*BEFORE_A_WRITE, *BY_HASH])
def test_each_fault_is_found_before_the_version_is_served_and_mended_by_a_whole_publish(make_world, monkeypatch, fault):
    world = make_world()
    world.publish()
    world.step()
    before = {name: tensor.clone() for name, tensor in world.engines[0].params[0].items()}
    with monkeypatch.context() as planted:
        plant(world, planted, fault)
        report = world.publish()
    assert report.num_committed == 0
    assert (BEFORE_A_WRITE | BY_HASH)[fault] in report.replicas[0].error
    assert not world.engines[0].receivers[0].state.is_serving
    if fault in BEFORE_A_WRITE:
        changes = {n: int((t != before[n]).sum()) for n, t in world.engines[0].params[0].items() if n != REPACKED}
        assert "model.layers.1.mlp.experts.0.down_proj.weight" in changes
        assert changes["model.layers.1.mlp.experts.0.down_proj.weight"] == 0, "nothing of the changes was written"
    report = world.publish()
    assert report.num_committed == 1 and report.num_bytes == world.whole_bytes
    assert world.all_hold_it()


def test_a_part_of_a_zone_is_never_left():
    part = Landing(address=1000, first=16, stop=64)
    assert [part.take(size) for size in (1, 16, 20, 16)] == [16, 32, None, 48]
    assert part.take(1) is None
    assert replace(part, rows=[(1, 2, 3, 4, 5)]).to_bytes() == np.array([1, 2, 3, 4, 5], "<i8").tobytes()


PUBLISH = "slipstream.weight_sync.publish."


@pytest.mark.parametrize(
    "last",
    ["lanes.Replay.replay", "transaction.Transaction.begin", "transaction.Transaction.finish", "bases.Bases.end"],
)
def test_after_a_publisher_died_at_any_stage_engines_get_every_byte_of_the_next_one(make_world, last):
    """Before a stream was written, before it asked them to begin, before it asked them to commit, and once all had."""
    world = make_world()
    for _ in range(2):
        world.publish()
        world.step()
    with pytest.MonkeyPatch.context() as patch:

        def dies(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(PUBLISH + last, dies)
        with pytest.raises(KeyboardInterrupt):
            world.publish()
    assert world.engines[0].receivers[0].state.is_serving == (last != "transaction.Transaction.finish")
    report = world.publish()
    assert report.num_committed == 1 and world.all_hold_it()
    assert report.num_bytes == world.whole_bytes


@pytest.mark.parametrize("stage", ["begin", "verify", "half of the changes", "commit"])
def test_after_an_engine_failed_at_any_stage_it_gets_every_byte_and_the_other_what_changed(
    make_world, monkeypatch, stage
):
    world = make_world(2)
    for _ in range(2):
        world.publish()
        world.step()
    first = world.engines[0]
    with monkeypatch.context() as patch:
        if stage == "half of the changes":
            real = landing.apply

            def apply_half(landed: Sequence[Landed]) -> None:
                real(landed[: len(landed) // 2])
                raise RuntimeError("the engine died")

            patch.setattr(landing, "apply", lambda landed: apply_half(landed) if owns(first, landed) else real(landed))
        else:
            first.fail_on[stage] = RuntimeError("the engine died")
        report = world.publish()
    assert [replica.committed for replica in report.replicas] == [False, True]
    assert not first.receivers[0].state.is_serving or stage == "begin"
    world.step()
    report = world.publish()
    assert report.num_committed == 2 and world.all_hold_it()
    assert report.num_takers == 1
    assert world.whole_bytes / 2 < report.num_bytes < world.whole_bytes


def owns(engine: MirrorEngine, landed: Sequence[Landed]) -> bool:
    """Whether streams are for this engine's parameters."""
    places = {tensor.untyped_storage().data_ptr() for tensor in engine.params[0].values()}
    return landed[0].values.untyped_storage().data_ptr() in places


def test_loads_that_changed_too_much_are_not_marked_for_a_while(make_world, monkeypatch):
    monkeypatch.setattr("slipstream.weight_sync.publish.landings.SKIPPED", 3)
    world = make_world(lr=0.05)
    world.publish()
    changes = world.rank.delivery._publisher._pipeline._slots.changes
    marked: list[int] = []
    fill = changes.fill
    monkeypatch.setattr(changes, "fill", lambda slot, load: (marked.append(load), fill(slot, load)))
    monkeypatch.setattr(
        "slipstream.weight_sync.publish.landings.max_records", lambda _: -1
    )  # as if everything had changed
    counts = []
    for _ in range(6):
        world.step()
        marked.clear()
        assert world.publish().num_bytes == world.whole_bytes
        assert world.all_hold_it()
        counts.append(len(marked))
    num_loads = len(world.rank.delivery._publisher._pipeline.loads)
    assert counts == [num_loads, 0, 0, num_loads, 0, 0]
