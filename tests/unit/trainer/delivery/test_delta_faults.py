"""Promises of a publish of changes in which something fails: no version is served with the fault, and the next publish
sends every byte to whom it concerns.
"""

from collections.abc import Sequence
from unittest.mock import Mock

import numpy as np
import pytest
from cases.delta_world import STAGES, World, before_writes, die_at, fill_from_peer
from fakes.memory_transport import Fault, MemoryTransport
from fakes.ranked_engine import REPACKED, MirrorEngine

from slipstream.conf.schema import TrainMode
from slipstream.weight_sync.changes import Landed
from slipstream.weight_sync.errors import TransferTimeout
from slipstream.weight_sync.pipeline.staging_slots import Slots
from slipstream.weight_sync.replica import landing
from slipstream.weight_sync.replica.recovery import make_offer, pull


@pytest.mark.parametrize("is_ahead", [True, False])
def test_a_link_that_breaks_lets_nobody_take_changes_and_the_next_publish_is_whole(make_world, monkeypatch, is_ahead):
    """With changes, which an engine need not know of, or with what goes whole afterwards, which leaves it dirty."""
    world = make_world(delta_bytes=1 << 11, zone=1 << 11).stepped()
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


def test_a_slot_that_a_failed_write_may_still_read_is_packed_no_more(make_world, monkeypatch):
    """Not even by the same publish, which goes on with what is sent whole."""
    world = make_world(2, delta_bytes=1 << 11, zone=1 << 11, watermark_bytes=300_000).stepped()
    world.fabric.inject(world.links[0].session, Fault(refuse=True))
    real, packed_anyway = Slots.pack, []

    def noting(self, slot, *more, **options):
        packed_anyway.extend({slot} & self.quarantined.keys())
        return real(self, slot, *more, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Slots, "pack", noting)
        patch.setattr(MemoryTransport, "reset", Mock(side_effect=TransferTimeout("still draining")))
        report = world.publish()
        assert [one.committed for one in report.replicas] == [False, True] and not packed_anyway
    world.fabric.take_back(world.links[0].session)
    assert world.publish().num_committed == 2 and world.all_hold_it()


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
        records = zone._zone[row[3] // 4 + 2 * tiles :][: row[4]]
        if fault == "a row that is lost":
            rows = rows[:-1]
        elif fault == "a position out of bounds":
            records[0].fill_(4095 << 16)
        else:
            records[0].copy_(records[1])
        apply(rows.tobytes())

    monkeypatch.setattr(zone, "apply", applied)


BEFORE_A_WRITE = ("another base", "a position out of bounds")


@pytest.mark.parametrize("fault", [*BEFORE_A_WRITE, "a stale base", "a lost position", "a row that is lost"])
def test_each_fault_is_found_before_the_version_is_served_and_mended_by_a_whole_publish(make_world, monkeypatch, fault):
    world = make_world().stepped()
    before = {name: tensor.clone() for name, tensor in world.engines[0].params[0].items()}
    with monkeypatch.context() as planted:
        plant(world, planted, fault)
        report = world.publish()
    assert report.num_committed == 0
    assert ("ProtocolError" if fault in BEFORE_A_WRITE else "IntegrityError") in report.replicas[0].error
    assert not world.engines[0].receivers[0].state.is_serving
    if fault in BEFORE_A_WRITE:
        changes = {n: int((t != before[n]).sum()) for n, t in world.engines[0].params[0].items() if n != REPACKED}
        assert "model.layers.1.mlp.experts.0.down_proj.weight" in changes
        assert changes["model.layers.1.mlp.experts.0.down_proj.weight"] == 0, "nothing of the changes was written"
    report = world.publish()
    assert report.num_committed == 1 and report.num_bytes == world.whole_bytes
    assert world.all_hold_it()


@pytest.mark.parametrize("stage", STAGES)
def test_after_a_publisher_died_at_any_stage_engines_get_every_byte_of_the_next_one(make_world, stage):
    world = make_world()
    for _ in range(2):
        world.publish()
        world.step()
    die_at(stage, world.publish)
    assert world.engines[0].receivers[0].state.is_serving == (stage != "publish.transaction.Transaction.finish")
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
    nothing = Mock(side_effect=AssertionError("it is not known to hold the last version"))
    monkeypatch.setattr(world.rank.delivery._publisher._pipeline, "send_ahead", nothing)
    report = world.publish()
    assert report.num_committed == 2 and world.all_hold_it()
    assert report.num_takers == 1
    assert world.whole_bytes / 2 < report.num_bytes < world.whole_bytes


@pytest.mark.parametrize("mode", [TrainMode.lora, TrainMode.full])
def test_a_later_wave_of_a_publish_gets_every_byte_and_who_reads_from_it_takes_changes_of_the_next_one(
    make_world, mode
):
    """The first wave's engine fails, another one of its node takes its place, and the third reads from that one."""
    world = make_world(3, lr=1e-6, mode=mode).stepped()
    world.fabric.inject(world.links[0].session, Fault(refuse=True))
    assert world.publish(exclude=[1, 2]).num_committed == 0
    world.fabric.take_back(world.links[0].session)
    report = world.publish(exclude=[0, 2])
    assert (report.num_committed, report.num_takers) == (1, 0), report
    first, second, third = (engine.receivers for engine in world.engines)
    fill_from_peer(third, second)
    assert (first[0].state.version, third[0].state.version) == (0, 1)
    world.step()
    report = world.publish()
    assert (report.num_committed, report.num_takers) == (3, 2) and world.all_hold_it(), report


def test_an_engine_reads_a_peer_while_changes_land_there_and_does_not_adopt_what_the_publish_passed_by(
    make_world, monkeypatch
):
    world = make_world(2).stepped()
    reader, peer = world.engines[1].receivers[0], world.engines[0].receivers[0]
    world.publish(exclude=[1])
    world.step()
    offer, read = make_offer(peer), []

    def read_once(*_):
        if not read:
            assert peer.state.is_serving
            read.append(pull(reader, offer, timeout_s=60.0))

    with monkeypatch.context() as patch:
        before_writes(world, patch, read_once)
        assert world.publish(exclude=[1]).num_takers == 1
    assert read and make_offer(peer) != offer and not reader.state.is_serving
    world.step()
    report = world.publish()
    assert (report.num_committed, report.num_takers) == (2, 1) and world.all_hold_it(), report


def owns(engine: MirrorEngine, landed: Sequence[Landed]) -> bool:
    """Whether streams are for this engine's parameters."""
    places = {tensor.untyped_storage().data_ptr() for tensor in engine.params[0].values()}
    return landed[0].values.untyped_storage().data_ptr() in places
