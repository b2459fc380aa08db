"""Locks: whom a publisher connects to, whom it refuses, and which plan it makes of what they say."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fakes.publish import DictSource, committed
from fakes.publish_world import World

from slipstream.weight_sync.errors import LinkMismatch, PlanError, ProtocolError
from slipstream.weight_sync.plan.plan import build_plan
from slipstream.weight_sync.replica.clients import ReplicaClients


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
