"""What tests of publishes share."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest
from fakes.publish_world import World


@pytest.fixture
def make_world() -> Iterator[Callable[..., World]]:
    """Worlds whose publisher has not met anybody yet."""
    with ExitStack() as ends:
        yield lambda *args, **options: ends.enter_context(closing(World(*args, **options)))


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    """A trainer rank that has met two replicas of two ranks."""
    world = make_world(2)
    world.connect()
    return world
