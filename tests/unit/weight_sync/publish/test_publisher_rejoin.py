"""A replica that was started again rejoins under the same plan."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from fakes.meeting import ThreadMeeting
from fakes.memory_transport import MemoryTransport
from fakes.publish import committed, engine_layout
from fakes.publish_world import World

from slipstream.weight_sync.errors import PlanMismatch, ReplicaError, TransferFailed
from slipstream.weight_sync.publish import publisher as module
from slipstream.weight_sync.publish.report import EXCLUDED, NOT_MET
from slipstream.weight_sync.replica.version_state import Phase, VersionState
from slipstream.weight_sync.typed_msgpack import Sent


def test_a_replica_that_comes_back_at_a_later_epoch_is_led_on_from_there(world: World) -> None:
    world.publisher.publish(0)
    old = world.sessions(0)
    world.end(0)
    address = world.start(0)
    world.endpoints[0].endpoint.adopt(VersionState(Phase.clean, version=0, epoch=9, digest="another publisher's"))
    world.publisher.reconnect(0, address)
    assert sorted(world.links[0].closed) == sorted(old), "links to the one before it are not left open"
    report = world.publisher.publish(1)
    assert committed(report) == [True, True] and report.epoch == 10


def test_epochs_go_on_growing_where_every_replica_is_a_fresh_one(make_world: Callable[..., World]) -> None:
    world = make_world(1)
    world.connect()
    first = world.publisher.publish(0)
    world.end(0)
    world.publisher.connect([world.start(0)])
    report = world.publisher.publish(1)
    assert committed(report) == [True] and report.epoch == first.epoch + 1


@pytest.mark.parametrize("number", [0, 2])
def test_a_replica_of_another_layout_is_refused_and_gets_nothing(world: World, number: int) -> None:
    """One that comes back, and a further one."""
    world.publisher.publish(0)
    address = world.start(number)
    other = world.engines[number]
    described = other.receivers[0].describe
    other.receivers[0].describe = lambda: replace(  # type: ignore[method-assign]
        described(), sent=Sent(replace(engine_layout(0), fills=()))
    )
    with pytest.raises(PlanMismatch, match="another layout"):
        world.publisher.reconnect(number, address)
    report = world.publisher.publish(1)
    assert committed(report) == [one != number for one in range(len(world.engines))]
    assert "another layout" in (report.replicas[number].error or "")
    assert "begin" not in other.calls


def test_further_replicas_join_under_the_same_plan_in_any_order(world: World) -> None:
    """Replica 3 is met before replica 2, which keeps its place meanwhile."""
    first = world.publisher.publish(0)
    digest = world.engines[0].receivers[0].state.digest
    for number in (2, 3):
        world.start(number)
    world.engines[0].calls.clear()
    assert committed(world.publisher.publish(1, exclude=[2, 3])) == [True, True]
    world.publisher.reconnect(3, world.addresses[3])
    report = world.publisher.publish(2, exclude=[2])
    assert committed(report) == [True, True, False, True]
    assert report.num_bytes == 3 * first.num_bytes // 2
    world.publisher.reconnect(2, world.addresses[2])
    report = world.publisher.publish(3)
    assert committed(report) == [True] * 4
    assert [engine.wrong_params(3) for engine in world.engines] == [[]] * 4
    assert report.replicas[2].endpoint == world.addresses[2]
    assert {receiver.state.digest for engine in world.engines for receiver in engine.receivers} == {digest}
    assert "describe" not in world.engines[0].calls, "the others are not asked"


def test_another_trainer_meets_the_replicas_that_are_there_and_publishes_anew(make_world: Callable[..., World]) -> None:
    """The first one died in a publish: its replicas are DIRTY. Of the others one is known to be out of service, and one
    is gone without a word; both join later.
    """
    world = make_world(4)
    world.connect()
    world.publisher.publish(0)
    addresses = world.addresses
    for replica in (0, 1):
        world.end(replica)
    for replica in (2, 3):
        endpoint = world.endpoints[replica].endpoint
        endpoint._state = endpoint.state.begin(1, 5 + replica, "half")
    world.publisher.close()
    world.new_publishers()
    with pytest.raises(ReplicaError, match="gone"):
        world.publisher.connect(addresses)
    world.publisher.connect(addresses, absent=[0])
    report = world.publisher.publish(1, exclude=[0])
    assert committed(report) == [False, False, True, True] and report.epoch == 9
    assert "gone" in (report.replicas[1].error or "") or "out of service" in (report.replicas[1].error or "")
    for replica in (0, 1):
        world.publisher.reconnect(replica, world.start(replica))
    assert committed(world.publisher.publish(2)) == [True] * 4
    addresses = world.addresses
    world.publisher.connect([addresses[0], "", addresses[2]], absent=[])
    assert committed(world.publisher.publish(3)) == [True, False, True], "a place that nobody has had yet"
    world.engines[0].calls.clear()
    world.publisher.connect(addresses, absent=[0])
    assert world.engines[0].calls == [], "it is out of service, and might keep everybody waiting"
    world.end(3)
    world.publisher.connect(addresses, absent=[])
    assert committed(world.publisher.publish(4)) == [True, True, True, False], "the last one is gone"
    world.publisher.reconnect(3, world.start(3))


@pytest.mark.parametrize("is_known", [True, False])
def test_another_trainer_that_meets_nobody_plans_for_the_first_replica_that_comes_back(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """The first trainer died while no engine served, or at the same moment as all of them."""
    monkeypatch.setattr(module, "Meeting", ThreadMeeting)
    world = make_world(2, num_ranks=2)
    world.connect()
    world.publish(0)
    for replica in range(2):
        world.end(replica)
    for publisher in world.publishers:
        publisher.close()
    world.new_publishers()

    def comes_back(replica: int) -> None:
        address = world.start(replica)
        world.all(lambda publisher: publisher.reconnect(replica, address))

    gone, absent = world.addresses, [0, 1] if is_known else []
    world.all(lambda publisher: publisher.connect(gone, absent=absent))
    report = world.publish(1, exclude=absent)
    assert committed(report) == [False, False] and [one.endpoint for one in report.replicas] == gone
    assert {one.error for one in report.replicas} == {EXCLUDED if is_known else NOT_MET}
    world.raises(ReplicaError, "gone", lambda publisher: publisher.reconnect(1, gone[1]))
    comes_back(1)
    assert committed(world.publish(2, exclude=[0])) == [False, True]
    comes_back(0)
    comes_back(2)
    assert committed(world.publish(3)) == [True] * 3
    assert [engine.wrong_params(3) for engine in world.engines] == [[]] * 3


def test_a_first_replica_for_which_there_was_no_memory_is_planned_for_again_when_it_comes_back(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(1)
    world.connect()
    world.end(0)
    world.publisher.close()
    world.new_publishers()
    world.publisher.connect(world.addresses, absent=[0])
    register, (link,) = MemoryTransport.register, world.links

    def refused(self: MemoryTransport, tensors: Sequence[torch.Tensor]) -> None:
        if self is link:
            raise TransferFailed("no memory")
        register(self, tensors)

    with monkeypatch.context() as broken:
        broken.setattr(MemoryTransport, "register", refused)
        with pytest.raises(TransferFailed, match="no memory"):
            world.publisher.reconnect(0, world.start(0))
        assert committed(world.publisher.publish(1)) == [False]
    world.publisher.reconnect(0, world.addresses[0])
    assert committed(world.publisher.publish(2)) == [True]
    assert world.engines[0].wrong_params(2) == []
