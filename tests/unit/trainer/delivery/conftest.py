"""What tests of publishes of changes share."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from cases.delta_world import World


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    with ExitStack() as ends:
        yield lambda *args, **options: ends.enter_context(closing(World(tmp_path, *args, **options)))
