"""What tests of publishes share."""

import logging
from collections.abc import Callable, Iterator

import pytest
from fakes.one_rank_publish import World

from slipstream.weight_sync.publish import slot_turns


@pytest.fixture
def make_world() -> Iterator[Callable[..., World]]:
    """Worlds whose publisher has not met anybody yet."""
    made: list[World] = []

    def make(*args: int, **options: float) -> World:
        made.append(World(*args, **options))
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    """A trainer rank that has met two replicas of two ranks."""
    world = make_world(2)
    world.connect()
    return world


@pytest.fixture
def impatience(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Filter]:
    """Packing that waits for a slot for ten seconds waits for ever: here that is an error."""

    class Impatience(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            assert not record.msg.startswith("packing waits"), "nobody gives a slot back"
            return True

    monkeypatch.setattr(slot_turns, "WAIT_LOG_S", 10.0)
    slot_turns.logger.addFilter(found := Impatience())
    yield found
    slot_turns.logger.removeFilter(found)
