"""Whole publishes in one process, and whom a publisher connects to: real ZMQ endpoints, bytes over the memory link."""

from __future__ import annotations

import gc
import itertools
import json
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.memory_transport import Fault
from fakes.publish import DictSource, PlainEngine, committed
from fakes.publish_world import World

from slipstream.weight_sync.errors import LinkMismatch, PlanError, ProtocolError
from slipstream.weight_sync.plan.plan import build_plan
from slipstream.weight_sync.replica.clients import ReplicaClients
from slipstream.weight_sync.replica.messages import Bound, EngineRank
from slipstream.weight_sync.replica.version_state import Phase


def test_replicas_need_not_have_equally_many_ranks(make_world: Callable[..., World]) -> None:
    world = make_world(2, num_ranks_of_last=1)
    world.connect()
    for version in (0, 1):
        assert committed(world.publisher.publish(version)) == [True, True]
        assert [engine.wrong_params(version) for engine in world.engines] == [[], []]
    world.publisher.reconnect(1, world.addresses[1])
    assert committed(world.publisher.publish(2)) == [True, True], "each has a layout of its own"
    world.publisher.reconnect(2, world.start(2))
    assert committed(world.publisher.publish(3)) == [True] * 3, "a further one has that of the first"


def test_a_publish_of_the_same_weights_says_that_nothing_changed(world: World) -> None:
    assert world.publisher.publish(0).num_changed_params is None
    assert world.publisher.publish(0).num_changed_params == 0
    world.publisher.publish(1, exclude=[0])
    assert world.publisher.publish(1).num_changed_params == 2 * 5, "in the one that missed it"


@pytest.mark.parametrize("fault", [Fault(corrupt=True), Fault(drop=True)])
def test_damage_in_flight_is_named_and_costs_one_replica(world: World, fault: Fault) -> None:
    world.publisher.publish(0)
    world.fabric.inject(world.sessions(1)[0], fault)
    report = world.publisher.publish(1)
    assert committed(report) == [True, False]
    error = report.replicas[1].error
    assert error is not None
    assert error.startswith("IntegrityError: ") and "version 1" in error and "rank 0" in error
    assert any(f"{param} (from " in error for param in ("qk", "norm", "embed"))
    assert not world.endpoints[1].endpoint.state.is_serving
    assert world.engines[0].wrong_params(1) == []

    healed = world.publisher.publish(2)
    assert committed(healed) == [True, True]
    assert healed.epoch > report.epoch
    assert world.engines[1].wrong_params(2) == []


@pytest.mark.parametrize(
    ("verb", "asked"), [("pause", "begin"), ("begin", "begin"), ("verify", "commit"), ("commit", "commit")]
)
def test_a_replica_that_raises_is_named_with_its_error(world: World, verb: str, asked: str) -> None:
    world.engines[0].fail_on[verb] = RuntimeError(f"no {verb} today")
    report = world.publisher.publish(0)
    assert committed(report) == [False, True]
    said = f"{world.endpoints[0].address}: {asked} failed with RuntimeError: no {verb} today"
    assert report.replicas[0].error == f"ReplicaError: {said}"
    assert world.engines[0].calls[-2:] == [verb, "abort"]
    assert world.endpoints[0].endpoint.state.phase is Phase.dirty
    assert committed(world.publisher.publish(1)) == [True, True]


def test_a_traced_publish_writes_one_process_a_rank_and_replica(world: World, tmp_path: Path) -> None:
    world.endpoints[1].run(world.endpoints[1].endpoint.close())
    report = world.publisher.publish(0, trace=tmp_path / "traces" / "publish.json")
    events = json.loads((tmp_path / "traces" / "publish.json").read_text())["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(processes.values()) == [f"replica {world.endpoints[0].address}", "trainer rank 0"]
    spans: dict[str, list[dict]] = {name: [] for name in processes.values()}
    for event in events:
        if event["ph"] == "X":
            spans[processes[event["pid"]]].append(event)
    phases = spans[f"replica {world.endpoints[0].address}"]
    assert [event["name"] for event in phases] == ["pause", "mark dirty", "writes arrive", "verify", "commit"]
    for earlier, later in itertools.pairwise(phases):
        assert earlier["ts"] + earlier["dur"] == pytest.approx(later["ts"], abs=1)
    writes = [event for event in spans["trainer rank 0"] if event["cat"].startswith("write ")]
    assert sum(event["args"]["bytes"] for event in writes) == report.num_bytes
    arriving = phases[2]
    for event in writes:
        assert arriving["ts"] <= event["ts"] <= event["ts"] + event["dur"] <= arriving["ts"] + arriving["dur"]


def test_a_timeline_that_cannot_be_written_costs_no_publish(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "traces").write_text("a file where the folder should be")
    assert committed(world.publisher.publish(0, trace=tmp_path / "traces" / "publish.json")) == [True, True]
    assert "timeline cannot be written" in caplog.text
    world.publisher.disconnect([0, 1])
    assert len(world.links[0].closed) == 4, "its links are known"


def test_a_callers_garbage_is_still_collected() -> None:
    """A heap frozen in the caller's process would keep whatever was alive then and is reached by a cycle."""

    class Cycle:
        def __init__(self) -> None:
            self.own = self

    world, mine = World(1), Cycle()
    frozen, ref = gc.get_freeze_count(), weakref.ref(mine)
    world.connect()
    assert committed(world.publisher.publish(0)) == [True]
    world.close()
    del mine
    gc.collect()
    assert ref() is None
    assert gc.get_freeze_count() <= frozen  # fewer: what other tests froze may have ended meanwhile


def test_without_hashes_bytes_still_cross_and_are_counted(make_world: Callable[..., World]) -> None:
    world = make_world(1, verify_hashes=False)
    world.connect()
    report = world.publisher.publish(5)
    assert committed(report) == [True]
    assert world.engines[0].wrong_params(5) == []
    assert [report.num_changed_params, world.publisher.publish(6).num_changed_params] == [None, None], "nobody knows"


def test_a_publish_is_written_into_the_slot_that_the_replica_names(world: World) -> None:
    """As of adapters: another receiver of the same layout takes this publish, the first one the next."""
    engine = world.engines[0]
    slots = [engine, PlainEngine([receiver.transport for receiver in engine.receivers])]
    held = [(slot.params, slot.receivers) for slot in slots]
    begin, describe = engine.begin, engine.describe

    async def describes_both() -> list[EngineRank]:
        others = await slots[1].describe()
        return [replace(rank, others=(other.binding.addresses,))
                for rank, other in zip(await describe(), others, strict=True)]  # fmt: skip

    async def begins_in_one(version: int, epoch: int, digest: str) -> list[Bound]:
        return [replace(bound, slot=version % 2) for bound in await begin(version, epoch, digest)]

    engine.describe, engine.begin = describes_both, begins_in_one  # type: ignore[method-assign]
    world.connect()
    for version in range(4):
        engine.params, engine.receivers = held[version % 2]
        assert committed(world.publisher.publish(version)) == [True, True]
        assert engine.wrong_params(version) == []
        engine.params, engine.receivers = held[1 - version % 2]
        assert version == 0 or engine.wrong_params(version - 1) == []


def test_a_description_without_the_address_of_a_parameter_is_refused(world: World) -> None:
    engine = world.engines[0]
    describe = engine.describe

    async def lacks_one() -> list[EngineRank]:
        first, *rest = await describe()
        return [replace(first, others=({"qk": 16},)), *rest]

    engine.describe = lacks_one  # type: ignore[method-assign]
    with pytest.raises(ProtocolError, match="rank 0, says no address of 4 parameters of slot 1, the first is norm"):
        world.connect()


def test_publish_needs_connect(make_world: Callable[..., World]) -> None:
    world = make_world(1)
    for asks in (lambda: world.publisher.publish(0), lambda: world.publisher.reconnect(0, world.endpoints[0].address)):
        with pytest.raises(ProtocolError, match="before connect"):
            asks()


@pytest.mark.parametrize("is_right", [True, False])
def test_a_plan_made_for_expected_layouts_serves_those_engines_and_no_others(
    is_right: bool, make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(2)
    plans: list[int] = []

    def counted(*args: Any, **options: Any) -> Any:
        plans.append(1)
        return build_plan(*args, **options)

    monkeypatch.setattr("slipstream.weight_sync.publish.rank0.build_plan", counted)
    expected = tuple(one.layout for one in (receiver.describe() for receiver in world.engines[0].receivers))
    world.publisher.plan_for([expected] * (2 if is_right else 1))
    with pytest.raises(ProtocolError, match="before connect"):
        world.publisher.publish(0)
    assert world.links[0].registered == [], "engines that start meanwhile count on all memory that is free"
    world.connect()
    assert len(plans) == (1 if is_right else 2)
    assert committed(world.publisher.publish(0)) == [True, True]
    assert [engine.wrong_params(0) for engine in world.engines] == [[], []]
    names = [thread.name for thread in threading.enumerate()]
    world.connect()  # again, to the same engines
    assert len(plans) == (1 if is_right else 2)
    still = [thread.name for thread in threading.enumerate()]
    assert still.count("weight-sync-control") == names.count("weight-sync-control"), "the first ones are closed"
    report = world.publisher.publish(1)
    assert committed(report) == [True, True] and report.num_changed_params is None


def test_a_plan_made_anew_has_the_digests_of_the_base_for_its_own_engine_ranks(
    make_world: Callable[..., World],
) -> None:
    world, base = make_world(2), DictSource(0, num_ranks=1)
    world.publisher._base, bases = base, world.publisher._rank0._bases
    world.connect()
    world.connect()  # again, to the same engines
    assert base.num_ends == 1 and bases.frozen.keys() == {(0, 0), (0, 1), (1, 0), (1, 1)}
    world.engines.pop()
    world.endpoints.pop().close()
    world.connect()
    assert base.num_ends == 2 and bases.frozen.keys() == {(0, 0), (0, 1)}


def test_replicas_have_a_publish_s_deadline_to_say_what_they_are(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, call = make_world(2, timeout_s=7.0), ReplicaClients.call
    asked: list[dict[int, float]] = []

    def noted(clients: ReplicaClients, verb: Any, arguments: Any, timeouts_s: Any) -> Any:
        asked.append(dict(timeouts_s))
        return call(clients, verb, arguments, timeouts_s)

    monkeypatch.setattr(ReplicaClients, "call", noted)
    world.connect()
    world.publisher.reconnect(1, world.addresses[1])
    assert asked == [{0: 7.0, 1: 7.0}, {1: 7.0}]


def test_connect_and_reconnect_refuse_links_that_differ(make_world: Callable[..., World]) -> None:
    world = make_world(1)
    world.connect()
    described = world.engines[0].receivers[0].describe
    world.engines[0].receivers[0].describe = lambda: replace(described(), link="tcp")  # type: ignore[method-assign]
    for meets in (lambda: world.publisher.reconnect(0, world.addresses[0]), world.connect):
        with pytest.raises(LinkMismatch, match=r"receives over tcp.*send over memory"):
            meets()


@pytest.mark.parametrize("order", [slice(None, None, -1), slice(1, None)])
def test_connect_refuses_ranks_that_are_not_described_in_their_order(
    make_world: Callable[..., World], order: slice
) -> None:
    """Answers of begin and verify have no ranks' numbers: their place says whose they are."""
    world = make_world(1)
    engine = world.engines[0]
    engine.receivers = engine.receivers[order]
    with pytest.raises(ProtocolError, match=r"described ranks \[1"):
        world.connect()


def test_connect_refuses_what_cannot_be_planned(make_world: Callable[..., World]) -> None:
    world = make_world(1)
    layout = world.sources[0].layout()
    world.sources[0].layout = lambda: type(layout)(0, layout.tensors, layout.shards[1:])  # type: ignore[method-assign]
    for _ in range(2):  # there is no plan for these layouts, though they are those of the last try
        with pytest.raises(PlanError):
            world.connect()
