"""A supervisor over the fakes of loop.py, one whose failed workers are started again, and what tests wait for."""

import asyncio
from collections.abc import Callable
from typing import Any, Self

from fakes.trainer import outcome
from fakes.workers import FakeWorker
from fakes.world import World
from slipstream.fleet.fleet_log import FleetEvent, FleetRow
from slipstream.fleet.replicas import Replica, ReplicaState
from slipstream.fleet.router import Router
from slipstream.fleet.supervisor import Supervisor
from slipstream.rollout.types import Prompt

PROMPT = Prompt(0, (1,), "p")


class FakeFleet:
    """Workers that are started again, or are further ones, come up once `gate` is open.

    Args:
        options: More of Supervisor's.
    """

    def __init__(self, num_workers: int, **options: Any) -> None:
        self.world = World(committed=[-1] * num_workers)
        self.gate = asyncio.Event()
        self.gate.set()
        self.rows: list[FleetRow] = []
        workers = [self.made(index) for index in range(num_workers)]
        options = {"backoff_s": 0.0, "max_restarts": 1, "restart": self.restart, "note": self.rows.append} | options
        self.supervisor = Supervisor(workers, **options)
        self.roster, self.scaling = self.supervisor.roster, self.supervisor.scaling

    def made(self, index: int) -> FakeWorker:
        """A worker as it starts."""
        return FakeWorker(self.world, index)

    @property
    def states(self) -> list[ReplicaState]:
        return [replica.state for replica in self.roster.replicas.values()]

    def replica(self, index: int) -> Replica:
        return self.roster.replicas[f"rollout-{index}"]

    def worker(self, index: int) -> FakeWorker:
        worker = self.replica(index).worker
        assert isinstance(worker, FakeWorker)
        return worker

    def events(self, worker: int) -> list[FleetEvent]:
        """In the order in which they were noted."""
        return [row.event for row in self.rows if row.worker == worker]

    async def restart(self, name: str) -> FakeWorker:
        await self.gate.wait()
        index = int(name[-1])
        self.world.committed += [-1] * (index + 1 - len(self.world.committed))
        self.world.committed[index] = -1
        return self.made(index)

    async def published(self, version: int = 1) -> Self:
        """Once all have committed a version."""
        await self.publish(version)
        return self

    async def fail(self, index: int, reason: str = "it died") -> None:
        await self.supervisor.fail(self.replica(index), reason)

    async def publish(self, version: int = 1) -> list[int]:
        """Returns who was left out."""
        held = await self.supervisor.hold()
        for replica in held.joining:
            replica.is_known = True
        places = range(len(self.world.committed))
        for index in set(places) - set(held.exclude):
            self.world.committed[index] = version
        await self.supervisor.settle([outcome(index not in held.exclude, "excluded") for index in places])
        return held.exclude

    async def until(self, *states: ReplicaState) -> None:
        await until(lambda: self.states == list(states), every_s=0.001)


async def never(name: str) -> FakeWorker:
    """The restart of workers that are not restarted."""
    raise AssertionError(f"{name} is restarted")


def supervised(num_workers: int = 2) -> tuple[Supervisor, list[FakeWorker]]:
    """A supervisor and its workers, which hold version 0."""
    world = World(committed=[0] * num_workers)
    workers = [FakeWorker(world, i) for i in range(num_workers)]
    return Supervisor(workers, restart=never), workers


async def serve(supervisor: Supervisor) -> None:
    """A publish to all."""
    await supervisor.hold()
    await supervisor.settle([outcome(True) for _ in supervisor.roster.replicas.values()])


async def until(condition: Callable[[], bool], every_s: float = 0.0) -> None:
    for turn in range(20_000):
        if condition():
            return
        await asyncio.sleep(every_s or 0.001 * (turn > 1000))  # a thread may have to end first
    raise AssertionError("it did not come to that")


class Cast(FakeFleet):
    """Restarts succeed unless they are told to fail."""

    def __init__(self, num_workers: int = 2, max_restarts: int = 2, **options: float) -> None:
        super().__init__(num_workers, max_restarts=max_restarts, **options)
        self.failures: list[Exception] = []
        self.prepare: Callable[[FakeWorker], None] = lambda worker: None
        """Called with every worker that was started again."""
        self.num_started = 0
        self.router = Router(self.supervisor, request_timeout_s=60)

    async def restart(self, name: str) -> FakeWorker:
        self.num_started += 1
        number = self.num_started
        await self.gate.wait()
        if self.failures:
            raise self.failures.pop(0)
        worker = await super().restart(name)
        worker.name, worker.endpoint = f"{name}.{number}", f"tcp://{number}"
        self.prepare(worker)
        return worker

    def told(self, worker: int) -> list[tuple[str, FleetEvent]]:
        """Process and event, in the order in which they were noted."""
        return [(row.name, row.event) for row in self.rows if row.worker == worker]

    async def serves(self, index: int) -> None:
        await until(lambda: self.states[index] is ReplicaState.serving)


async def serving(*args: int, **options: float) -> Cast:
    """One whose workers hold version 0."""
    return await Cast(*args, **options).published(0)  # type: ignore[arg-type]


async def broken_link() -> None:
    raise ConnectionError("the link broke")
