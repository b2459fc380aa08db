"""Evaluations of a reinforcement run: one at a time, awaited where they are due, or beside training.

    begin(step, version) --> Sampler.evaluate --> figures --> finish() --> the row of the step in which it ends

Owns: the evaluation under way, and which version it is of. Does not own: when one is due and which row it goes into
(controller), sampling (sampler), the figures (metrics/held_out.py).
Which versions sample an evaluation:
    awaited                        one: nothing is published before it has ended
    beside, mode=adapter           one: every engine keeps it in a slot. A worker that is restarted meanwhile samples
                                   from the newest, and so do the requests of an agent's episodes
    beside, mode=merged            a publish changes the weights under it
eval/version_spread and eval/other_version_fraction tell in every case what happened, from the stamps of the tokens.
"""

import asyncio
import logging
import time

from slipstream.conf.schema import RunConfig, SyncMode
from slipstream.orchestrator.loop.ports import LoopServices
from slipstream.orchestrator.loop.sampler import Sampler
from slipstream.orchestrator.metrics.held_out import Evaluation, eval_names, evaluate_groups

logger = logging.getLogger(__name__)


class Evaluations:
    def __init__(self, config: RunConfig, services: LoopServices, sampler: Sampler) -> None:
        self._config = config
        self._services = services
        self._sampler = sampler
        self._task: asyncio.Task[Evaluation] | None = None

    @property
    def is_running(self) -> bool:
        """Whether one has begun whose result was not taken."""
        return self._task is not None

    @property
    def has_ended(self) -> bool:
        """Whether finish() would return at once, or raise."""
        return self._task is not None and self._task.done()

    async def begin(self, step: int, version: int) -> None:
        """Start to evaluate the policy that engines serve."""
        assert self._task is None
        is_kept = self._config.evaluates_beside and self._config.weight_sync.mode is SyncMode.adapter
        if is_kept:
            kept = await self._services.router.keep_version(version)
            logger.debug("evaluation of step %d: %d replicas keep version %d", step, kept, version)
        self._task = asyncio.create_task(self._run(step, version, is_kept=is_kept))

    async def finish(self) -> Evaluation:
        """Wait for the evaluation under way. Raises what ended it."""
        assert self._task is not None
        try:
            return await self._task
        finally:
            self.cancel()

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self, step: int, version: int, *, is_kept: bool) -> Evaluation:
        config, began = self._config, time.monotonic()
        groups = await self._sampler.evaluate(version if is_kept else None)
        seconds = time.monotonic() - began
        if is_kept:
            await self._services.router.keep_version(None)
        figures = evaluate_groups(groups, version, eval_names(config), config.run.eval_right_from)
        return Evaluation(step, version, groups, {"eval/step": step, **figures, "eval/total_s": seconds})
