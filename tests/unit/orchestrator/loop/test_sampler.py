"""Locks: how many groups are in flight, what an evaluation samples with, and that pointless sampling ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fakes.loop import FakeWorker, Loop, make_config

from conf.schema import SamplingConfig
from orchestrator.errors import TrainingStopped
from rollout.types import Prompt, Rollout


class Noting(FakeWorker):
    """Notes how many groups it samples at once, and with what."""

    def __init__(self, worker: FakeWorker) -> None:
        super().__init__(worker.world, worker.index)
        self.num_now = self.num_most = 0
        self.temperatures: dict[bool, set[float | None]] = {True: set(), False: set()}
        """Temperatures asked for, by whether the prompt is held out; None: as rollout.sampling."""

    async def generate_group(self, prompt: Prompt, n: int, sampling: SamplingConfig | None = None) -> list[Rollout]:
        self.temperatures[prompt.prompt_id >= 1000].add(None if sampling is None else sampling.temperature)
        self.num_now += 1
        self.num_most = max(self.num_most, self.num_now)
        try:
            return await super().generate_group(prompt, n, sampling)
        finally:
            self.num_now -= 1


@pytest.mark.parametrize("num_places", [1, 3])
async def test_training_and_evaluation_share_the_places(tmp_path: Path, num_places: int) -> None:
    config = make_config(num_steps=6, staleness=2, groups_per_step=8)
    config = replace(
        config,
        run=replace(config.run, eval_every_steps=1),
        rollout=replace(config.rollout, max_concurrent_groups=num_places),
    )
    loop = Loop(tmp_path, config, num_workers=1)
    worker = Noting(loop.workers[0])
    loop.workers[0] = worker
    await loop.run()
    assert worker.num_most == num_places


@pytest.mark.parametrize("temperature", [None, 0.0, 0.6])
async def test_evaluations_have_a_temperature_of_their_own(tmp_path: Path, temperature: float | None) -> None:
    config = make_config()
    loop = Loop(tmp_path, replace(config, rollout=replace(config.rollout, eval_temperature=temperature)), num_workers=1)
    worker = Noting(loop.workers[0])
    loop.workers[0] = worker
    await loop.run()
    assert worker.temperatures == {True: {temperature}, False: {None}}


async def test_prompts_that_tell_nothing_end_the_run_with_its_state_saved(tmp_path: Path) -> None:
    loop = Loop(tmp_path, make_config(num_steps=9, drop_zero_variance_groups=True, max_uninformative_batches=5))
    loop.rewards.is_flat = lambda prompt: loop.world.version >= 2
    with pytest.raises(TrainingStopped, match=r"15 groups in a row had equal rewards \(1 in the last one\)"):
        await loop.run()
    assert loop.checkpoints.read(loop.checkpoints.newest()).step == 2
