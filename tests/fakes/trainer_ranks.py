"""Trainer ranks that count their updates, and what starts, calls and keeps them, for tests of their rebirth."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from slipstream.fleet.errors import WaitTimeout
from slipstream.orchestrator.cluster.ray_handles import RayTrainerGroup
from slipstream.orchestrator.cluster.rebirth import Ranks, Rebirth
from slipstream.orchestrator.errors import TrainingStopped
from slipstream.trainer.checkpoint.keeper import Readiness
from slipstream.trainer.types import OptimStats

ADDRESS = ("127.0.0.1", 1)


class Actor:
    """A rank whose version is the number of its updates."""

    def __init__(self, cast: Cast, name: str) -> None:
        self.cast, self.name = cast, name
        self.calls: list[tuple[Any, ...]] = []
        self.version = 0
        self.is_dead = False
        self.dies_in: set[str] = set()

    @property
    def call(self) -> SimpleNamespace:
        return SimpleNamespace(remote=self.answer)

    def answer(self, name: str, *arguments: Any) -> Any:
        if name in self.dies_in:
            self.is_dead = True
        if self.is_dead:
            return RuntimeError(f"{self.name} died of SIGKILL")
        self.calls.append((name, *arguments))
        if name == "optimizer_step":
            self.version += 1
            step = arguments[1]
            readiness = self.cast.readiness if step is not None else Readiness.later
            if step is not None and readiness is Readiness.now:
                self.cast.kept = {step - 1, step} - {0}
                self.cast.versions[step] = self.version
            return OptimStats(self.version, 1.0, 1e-3, is_finite=True), readiness
        if name == "load_kept":
            self.version = self.cast.versions[arguments[1]]
        if name == "keep":
            self.cast.kept |= {arguments[0]}
            self.cast.versions[arguments[0]] = self.version
            return self.cast.readiness
        if name == "settle":
            return self.version
        return self.cast.is_written if name == "has_written" else (name, *arguments)


class Cast:
    """A cluster, ranks and keepers; `kept` are the numbers of states that all ranks have."""

    def __init__(self, *, max_restarts: int = 3, lack: str = "", backoff_s: float = 0.0) -> None:
        self.dead: dict[str, str] = {}
        self.kept: set[int] = set()
        self.is_written = True
        self.readiness = Readiness.now
        self.versions: dict[int, int] = {}
        """The version of each state, by its number."""
        self.ended: list[Actor] = []
        self.lives: list[list[Actor]] = []
        self.told: list[list[tuple[tuple[str, int], int]]] = []
        """The states that ranks were told of, per life."""
        self.start_fails = 0
        self.no_keeper: Exception | None = None
        self.lack = lack
        self.rebirth = Rebirth(
            self,  # type: ignore[arg-type]
            self.start,
            self,  # type: ignore[arg-type]
            self.call_all,
            max_restarts=max_restarts,
            start_timeout_s=5.0,
            backoff_s=backoff_s,
        )

    async def group(self) -> RayTrainerGroup:
        group = RayTrainerGroup(self, await self.start(0), self.rebirth, is_lora=True)  # type: ignore[arg-type]
        await group.connect(["tcp://a", "tcp://b"], 5.0)
        await group.outlive_ranks()
        return group

    async def start(self, life: int, kept: Sequence[tuple[tuple[str, int], int]] = ()) -> Ranks:
        if life and self.start_fails:
            self.start_fails -= 1
            raise WaitTimeout("gave up waiting for trainer ranks to start")
        actors = [Actor(self, f"trainer-{rank}{f'.{life}' * bool(life)}") for rank in range(2)]
        self.lives.append(actors)
        self.told.append(list(kept))
        return Ranks(actors, [actor.name for actor in actors], [{"state_bytes": 5, "node": "n"}] * 2)  # type: ignore[arg-type]

    async def result_of(self, answer: Any, who: str, _: type) -> Any:
        await asyncio.sleep(0)
        if isinstance(answer, RuntimeError):
            self.dead[who] = "died of SIGKILL"
            raise TrainingStopped(str(answer))
        return answer

    async def call_all(self, ranks: Ranks, what: str, arguments: Any, timeout_s: float) -> list[Any]:
        played: list[Any] = list(ranks.actors)
        answers = [(actor.answer(what, *arguments(rank)), actor.name) for rank, actor in enumerate(played)]
        return [await self.result_of(answer, name, TrainingStopped) for answer, name in answers]

    async def in_thread(self, call: Any) -> None:
        call()

    async def lacks_room(self, nodes: Sequence[str], state_bytes: Sequence[int]) -> str:
        assert (list(nodes), list(state_bytes)) == (["n", "n"], [5, 5])
        return self.lack

    async def of(self, nodes: Sequence[str]) -> list[list[tuple[str, int]]]:
        return [[ADDRESS] for _ in nodes]

    async def again(self) -> None:
        if self.no_keeper is not None:
            raise self.no_keeper

    async def newest(self, num_ranks: int, most: int, life: int) -> tuple[int, list[tuple[str, int]]]:
        number = max((one for one in self.kept if one <= most), default=0)
        return number, [ADDRESS] * num_ranks if number else []

    def names(self, life: int) -> list[str]:
        """What rank 1 was called for."""
        return [call[0] for call in self.lives[life][1].calls]
