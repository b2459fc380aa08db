"""What tests of publishes share."""

from collections.abc import Callable, Iterator

import pytest
from fakes.publish_world import World


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
