"""A replica that was started again rejoins under the same plan."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from fakes.memory_transport import MemoryFabric, MemoryTransport
from fakes.publish import KEY, DictSource, EndpointThread, PlainEngine, committed, engine_layout

from slipstream.conf.schema import WeightSyncConfig
from slipstream.weight_sync.errors import PlanMismatch, ReplicaError
from slipstream.weight_sync.publish.publisher import Publisher
from slipstream.weight_sync.replica.messages import Bound, addresses_digest
from slipstream.weight_sync.replica.recovery import make_offer, pull
from slipstream.weight_sync.replica.version_state import Phase, VersionState
from slipstream.weight_sync.typed_msgpack import Sent


class World:
    """One trainer rank and some replicas that can be ended and started again."""

    def __init__(self, num_replicas: int) -> None:
        self.fabric = MemoryFabric()
        self.engines = [self.engine() for _ in range(num_replicas)]
        self.endpoints = [EndpointThread(engine) for engine in self.engines]
        self.transport = MemoryTransport(self.fabric)
        self.publisher = Publisher(
            DictSource(0, num_ranks=1), self.transport, rank=0, world_size=1, group=None,
            config=WeightSyncConfig(watermark_bytes=1 << 16, timeout_s=10.0), key=KEY,
        )  # fmt: skip
        try:
            self.publisher.connect([endpoint.address for endpoint in self.endpoints])
        except BaseException:
            self.close()
            raise

    def engine(self) -> PlainEngine:
        return PlainEngine([MemoryTransport(self.fabric) for _ in range(2)])

    def end(self, replica: int) -> None:
        self.endpoints[replica].close()
        for receiver in self.engines[replica].receivers:
            receiver.transport.close()

    def start(self, replica: int) -> str:
        self.engines[replica] = self.engine()
        self.endpoints[replica] = EndpointThread(self.engines[replica])
        return self.endpoints[replica].address

    def close(self) -> None:
        self.publisher.close()
        for endpoint in self.endpoints:
            endpoint.close()


@pytest.fixture
def worlds() -> Iterator[list[World]]:
    made: list[World] = []
    yield made
    for world in made:
        world.close()


def test_a_replica_started_again_rejoins_and_the_other_notices_nothing(worlds: list[World]) -> None:
    worlds.append(world := World(2))
    first = world.publisher.publish(0)
    world.end(0)
    assert committed(world.publisher.publish(1)) == [False, True]
    address = world.start(0)
    world.engines[1].calls.clear()
    world.publisher.reconnect(0, address)
    assert world.engines[1].calls == []
    report = world.publisher.publish(2)
    assert committed(report) == [True, True]
    assert [engine.wrong_params(2) for engine in world.engines] == [[], []]
    assert report.replicas[0].endpoint == address
    assert report.epoch == first.epoch + 2
    assert report.num_changed_params == 2 * 5, (
        "of the other one's two ranks: this one did not commit the version before"
    )


def test_a_replica_started_again_is_never_written_to_where_the_old_one_was(worlds: list[World]) -> None:
    """Its addresses are its own, also where it answers as if nothing had changed."""
    worlds.append(world := World(2))
    world.publisher.publish(0)
    old = world.engines[0].receivers[0].describe().binding
    world.end(0)
    world.publisher.publish(1)
    address = world.start(0)
    fresh = world.engines[0]
    world.publisher.reconnect(0, address)
    begin, known = fresh.begin, []

    async def answers_as_the_old_one(version: int, epoch: int, digest: str, said: Sequence[str]) -> list[Bound]:
        known.append(said)
        bounds = await begin(version, epoch, digest, said)
        return [Bound(bounds[0].session, addresses_digest(old.addresses), None), bounds[1]]

    fresh.begin = answers_as_the_old_one  # type: ignore[method-assign]
    report = world.publisher.publish(2)
    assert committed(report) == [False, True]
    assert "never said" in (report.replicas[0].error or "")
    own = [receiver.describe().binding.addresses for receiver in fresh.receivers]
    assert sorted(known[0]) == sorted(map(addresses_digest, own)), "its own are known, and not said again"


def test_a_recovered_replica_rejoins_at_the_epoch_that_it_adopted(worlds: list[World]) -> None:
    worlds.append(world := World(2))
    world.publisher.publish(0)
    world.end(0)
    address = world.start(0)
    for fresh, peer in zip(world.engines[0].receivers, world.engines[1].receivers, strict=True):
        offer = make_offer(peer)
        pull(fresh, offer, timeout_s=5)
        fresh.adopt(offer.version, offer.epoch)
    state = world.engines[1].receivers[0].state
    world.endpoints[0].endpoint.adopt(state)
    assert world.engines[0].wrong_params(0) == []
    world.publisher.reconnect(0, address)
    assert committed(world.publisher.publish(1)) == [True, True]
    assert world.engines[0].wrong_params(1) == []


def test_a_replica_that_comes_back_at_a_later_epoch_is_led_on_from_there(worlds: list[World]) -> None:
    worlds.append(world := World(2))
    world.publisher.publish(0)
    world.end(0)
    address = world.start(0)
    world.endpoints[0].endpoint.adopt(VersionState(Phase.clean, version=0, epoch=9, digest="another publisher's"))
    world.publisher.reconnect(0, address)
    report = world.publisher.publish(1)
    assert committed(report) == [True, True] and report.epoch == 10


def test_epochs_go_on_growing_where_every_replica_is_a_fresh_one(worlds: list[World]) -> None:
    worlds.append(world := World(1))
    first = world.publisher.publish(0)
    world.end(0)
    world.publisher.connect([world.start(0)])
    report = world.publisher.publish(1)
    assert committed(report) == [True] and report.epoch == first.epoch + 1


def test_a_replica_that_comes_back_as_another_one_is_refused_and_gets_nothing(worlds: list[World]) -> None:
    worlds.append(world := World(2))
    world.publisher.publish(0)
    world.end(0)
    address = world.start(0)
    described = world.engines[0].receivers[0].describe
    world.engines[0].receivers[0].describe = lambda: replace(  # type: ignore[method-assign]
        described(), sent=Sent(replace(engine_layout(0), fills=()))
    )
    with pytest.raises(PlanMismatch, match="another layout"):
        world.publisher.reconnect(0, address)
    report = world.publisher.publish(1)
    assert committed(report) == [False, True]
    assert "another layout" in (report.replicas[0].error or "")
    assert "begin" not in world.engines[0].calls


def test_a_successor_that_is_not_there_is_an_error_and_may_be_tried_again(worlds: list[World]) -> None:
    worlds.append(world := World(2))
    world.publisher.publish(0)
    world.end(0)
    with pytest.raises(ReplicaError, match="gone"):
        world.publisher.reconnect(0, "tcp://127.0.0.1:9")
    assert committed(world.publisher.publish(1)) == [False, True]
    world.publisher.reconnect(0, world.start(0))
    assert committed(world.publisher.publish(2)) == [True, True]


def test_further_replicas_join_under_the_same_plan_in_any_order(worlds: list[World]) -> None:
    """Replica 3 is met before replica 2, which keeps its place meanwhile."""
    worlds.append(world := World(2))
    first = world.publisher.publish(0)
    digest = world.engines[0].receivers[0].state.digest
    world.engines += [world.engine(), world.engine()]
    world.endpoints += [EndpointThread(engine) for engine in world.engines[2:]]
    world.engines[0].calls.clear()
    assert committed(world.publisher.publish(1, exclude=[2, 3])) == [True, True]
    world.publisher.reconnect(3, world.endpoints[3].address)
    report = world.publisher.publish(2, exclude=[2])
    assert committed(report) == [True, True, False, True]
    assert report.num_bytes == 3 * first.num_bytes // 2
    world.publisher.reconnect(2, world.endpoints[2].address)
    report = world.publisher.publish(3)
    assert committed(report) == [True] * 4
    assert [engine.wrong_params(3) for engine in world.engines] == [[]] * 4
    assert report.replicas[2].endpoint == world.endpoints[2].address
    assert {receiver.state.digest for engine in world.engines for receiver in engine.receivers} == {digest}
    assert "describe" not in world.engines[0].calls, "the others are not asked"


def test_a_further_replica_of_another_layout_is_refused_and_gets_nothing(worlds: list[World]) -> None:
    worlds.append(world := World(1))
    world.publisher.publish(0)
    other = world.engine()
    described = other.receivers[0].describe
    other.receivers[0].describe = lambda: replace(  # type: ignore[method-assign]
        described(), sent=Sent(replace(engine_layout(0), fills=()))
    )
    world.endpoints.append(EndpointThread(other))
    with pytest.raises(PlanMismatch, match="another layout"):
        world.publisher.reconnect(1, world.endpoints[1].address)
    assert committed(world.publisher.publish(1)) == [True, False]
    assert "begin" not in other.calls


def test_disconnect_closes_the_links_of_the_dead_at_once(worlds: list[World]) -> None:
    worlds.append(world := World(2))
    world.publisher.publish(0)
    sessions = sorted(receiver.describe().binding.session for receiver in world.engines[0].receivers)
    world.publisher.disconnect([0])
    assert sorted(world.transport.closed) == sessions
    world.publisher.disconnect([0])
    assert len(world.transport.closed) == len(sessions), "once"


def test_another_trainer_meets_the_replicas_that_are_there_and_publishes_anew(worlds: list[World]) -> None:
    """The first one died in a publish: its replicas are DIRTY. Of the others one is known to be out of service, and one
    is gone without a word; both join later.
    """
    worlds.append(world := World(4))
    world.publisher.publish(0)
    addresses = [endpoint.address for endpoint in world.endpoints]
    for replica in (0, 1):
        world.end(replica)
    for replica in (2, 3):
        world.endpoints[replica].endpoint._state = world.endpoints[replica].endpoint.state.begin(1, 7, "half")
    world.publisher.close()
    world.transport = MemoryTransport(world.fabric)
    world.publisher = Publisher(
        DictSource(0, num_ranks=1), world.transport, rank=0, world_size=1, group=None,
        config=WeightSyncConfig(watermark_bytes=1 << 16, timeout_s=10.0), key=KEY,
    )  # fmt: skip
    with pytest.raises(ReplicaError, match="gone"):
        world.publisher.connect(addresses[:2], absent=[])
    with pytest.raises(ReplicaError, match="gone"):
        world.publisher.connect(addresses)
    world.publisher.connect(addresses, absent=[0])
    report = world.publisher.publish(1, exclude=[0])
    assert committed(report) == [False, False, True, True] and report.epoch == 8
    assert "gone" in (report.replicas[1].error or "") or "out of service" in (report.replicas[1].error or "")
    for replica in (0, 1):
        world.publisher.reconnect(replica, world.start(replica))
    assert committed(world.publisher.publish(2)) == [True] * 4
    addresses = [endpoint.address for endpoint in world.endpoints]
    world.publisher.connect([addresses[0], "", addresses[2]], absent=[])
    assert committed(world.publisher.publish(3)) == [True, False, True], "a place that nobody has had yet"
    world.engines[0].calls.clear()
    world.publisher.connect(addresses, absent=[0])
    assert world.engines[0].calls == [], "it is out of service, and might keep everybody waiting"
    world.end(3)
    world.publisher.connect(addresses, absent=[])
    assert committed(world.publisher.publish(4)) == [True, True, True, False], "the last one is gone"
    world.publisher.reconnect(3, world.start(3))
