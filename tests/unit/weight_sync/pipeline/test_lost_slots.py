"""Slots that a failed write may still read: none is packed, freed or given back before that write is closed."""

from unittest.mock import Mock

import pytest
from cases.pipeline_world import HASH_BYTES, UnclosableTransport, World, destinations
from fakes.memory_transport import Fault

from slipstream.weight_sync.errors import TransferTimeout, TransportError
from slipstream.weight_sync.plan.budget import NUM_SLOTS


def test_staging_that_a_failed_write_may_still_read_is_not_given_back() -> None:
    world = World(transport=UnclosableTransport)
    world.fabric.inject(world.sessions[0][0].session, Fault(refuse=True))
    assert set(world.run(1).report.errors) == {0}
    (staging,) = world.transport.registered
    for gives_back in (world.pipeline.release, lambda: world.pipeline.compile(world.plan.tasks[0])):
        with pytest.raises(TransportError, match="still draining"):
            gives_back()
    assert world.transport.registered == [staging]
    world.transport.is_stuck = False
    world.pipeline.release()
    assert not world.transport.registered


def test_slots_whose_failed_writes_were_closed_at_last_are_packed_again() -> None:
    world = World(3, HASH_BYTES + 1024, transport=UnclosableTransport)
    loads = world.pipeline.loads
    assert len(loads) > NUM_SLOTS
    for replica, last in ((1, -2), (2, -1)):  # fails in the last load but one, in the last
        before = sum((replica, 0) in destinations(packets) for packets in loads[:last])
        world.fabric.inject(world.sessions[replica][0].session, *[Fault()] * before, Fault(refuse=True))
    assert set(world.run(1).report.errors) == {1, 2}, "one that has every byte is not blamed for slots nobody needs"
    assert world.transport.num_refused == NUM_SLOTS, "each is lost"
    assert world.arrived(0, 1)
    world.transport.is_stuck = False
    assert world.run(2).report.errors == {}
    assert all(world.arrived(replica, 2) for replica in range(3))


def test_a_slot_is_packed_again_only_once_each_of_its_failed_writes_is_closed() -> None:
    """Two replicas' writes of the first load fail, and one of them can be closed before the other."""
    world = World(3, transport=UnclosableTransport)
    failed = [world.sessions[replica][0].session for replica in (1, 2)]
    for session in failed:
        world.fabric.inject(session, Fault(refuse=True))
    assert set(world.run(1).report.errors) == {1, 2}
    world.transport.is_stuck = False
    reset, fails = world.transport.reset, Mock(side_effect=TransferTimeout("still draining"))
    for stuck in failed:
        world.transport.reset = lambda session, stuck=stuck: fails() if session == stuck else reset(session)
        assert "still draining" in world.run(2).report.errors[0]
    world.transport.reset, world.transport.closed = reset, []
    assert world.run(3).report.errors == {} and sorted(world.transport.closed) == sorted(failed)
    assert all(world.arrived(replica, 3) for replica in range(3))


def test_a_survey_sums_what_is_held_and_packs_no_slot_that_a_failed_write_may_read() -> None:
    world = World(transport=UnclosableTransport)
    whole = world.run(0).sums.table
    world.pipeline.prepare(2)
    world.pipeline.cancel()
    num_ends = world.source.num_ends
    assert (world.pipeline.survey().table == whole).all(), "what was packed before does not count"
    assert world.source.num_ends == num_ends + 1
    world.fabric.inject(world.sessions[0][0].session, Fault(refuse=True))
    assert set(world.run(1).report.errors) == {0}
    num_reads = world.source.num_reads
    with pytest.raises(TransportError, match="still draining"):
        world.pipeline.survey()
    assert world.source.num_reads == num_reads
