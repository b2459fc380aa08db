"""What the fakes of one loop share: the trainer's version, what each worker has committed, a diary of what was called.
Nothing here sleeps; a test that wants an order holds an `asyncio.Event`."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class World:
    """What the fakes agree on."""

    version: int = 0
    committed: list[int] = field(default_factory=list)
    diary: list[tuple[Any, ...]] = field(default_factory=list)
    scored: list[tuple[int, list[int]]] = field(default_factory=list)
    """Version and tokens of every sequence that a worker was asked to score."""


class Watched:
    """What a test awaits before a call: it may wait, change the world, or raise."""

    def __init__(self) -> None:
        self.before: dict[str, Callable[[], Awaitable[None]]] = {}
        """By the call's name."""

    async def _reached(self, call: str) -> None:
        if call in self.before:
            await self.before[call]()
