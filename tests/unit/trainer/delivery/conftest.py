"""What tests of publishes of changes share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cases.delta_world import World


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(*args: int, **options: int) -> World:
        worlds.append(World(tmp_path, *args, **options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()
