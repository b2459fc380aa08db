"""A fleet whose failed workers are started again."""

from collections.abc import Callable

from fakes.fleet import FakeFleet, until
from fakes.workers import FakeWorker
from slipstream.fleet.fleet_log import FleetEvent
from slipstream.fleet.replicas import ReplicaState
from slipstream.fleet.router import Router
from slipstream.rollout.types import Prompt

PROMPT = Prompt(0, (1,), "p")


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
