"""A `verifiers` environment as Slipstream's agent: rollout.agent=examples/verifiers/agent.py:play.

VERIFIERS_PYTHON is the interpreter of the virtual environment with verifiers, VERIFIERS_TASKSET the taskset's id;
name both in rollout.episodes.env. worker.py runs there, one process for each agent process, for all of its episodes.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
NEEDED = ("VERIFIERS_PYTHON", "VERIFIERS_TASKSET")
if missing := [name for name in NEEDED if not os.environ.get(name)]:
    raise RuntimeError(f"{' and '.join(missing)} not set; export them, and 'rollout.episodes.env=[{','.join(NEEDED)}]'")
if shutil.which(os.environ["VERIFIERS_PYTHON"]) is None:
    raise RuntimeError(f"VERIFIERS_PYTHON={os.environ['VERIFIERS_PYTHON']} is no program")
MAX_EPISODES = 2000
"""verifiers keeps an HTTP client for each key, half a megabyte; then another process takes its place."""


class Worker:
    """One process of worker.py."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.num_episodes = 0
        self._process = process
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls) -> Worker:
        """Start it."""
        python, taskset = os.environ["VERIFIERS_PYTHON"], os.environ["VERIFIERS_TASKSET"]
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it is Slipstream's
        process = await asyncio.create_subprocess_exec(
            *(python, str(HERE / "worker.py"), taskset),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=variables,
        )
        return cls(process)

    @property
    def takes_more(self) -> bool:
        """Whether it is there and has not had its episodes."""
        return not self._reading.done() and self.num_episodes < MAX_EPISODES

    async def run(self, order: dict[str, Any]) -> dict[str, Any]:
        """Run an episode."""
        assert self._process.stdin is not None
        self.num_episodes += 1
        number = self.num_episodes
        answered = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._process.stdin.write(json.dumps({"episode": number, **order}).encode() + b"\n")
        if self.num_episodes == MAX_EPISODES:
            self._process.stdin.close()  # it ends when the last of them has
        try:
            return await answered
        finally:
            del self._waiting[number]

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            answer = json.loads(line)
            if (answered := self._waiting.get(answer["episode"])) is not None and not answered.done():
                answered.set_result(answer)
        for answered in self._waiting.values():
            if not answered.done():
                answered.set_exception(RuntimeError("the process of verifiers ended; agents.log has the reason"))


class Workers:
    """The process that gets the next episode."""

    def __init__(self) -> None:
        self._newest: Worker | None = None
        self._starting = asyncio.Lock()

    async def run(self, order: dict[str, Any]) -> dict[str, Any]:
        """Run an episode."""
        async with self._starting:
            if self._newest is None or not self._newest.takes_more:
                self._newest = await Worker.start()
            running = asyncio.ensure_future(self._newest.run(order))
            await asyncio.sleep(0)  # it has its number
        return await running


WORKERS = Workers()


async def play(task: dict[str, Any], session: Any) -> float:
    """One episode of the environment. Returns the sum of its rewards."""
    answer = await WORKERS.run(
        {"idx": task["idx"], "base_url": session.base_url, "api_key": session.api_key, "model": session.model}
    )
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["reward"]
