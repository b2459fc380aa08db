"""Rewards in processes of their own, as a run has them, for as long as a test needs them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from slipstream.conf.schema import RewardConfig
from slipstream.rollout.rewards.runner import RewardRunner
from slipstream.rollout.types import Prompt, Rollout


@asynccontextmanager
async def running(config: RewardConfig, **options: Any) -> AsyncIterator[RewardRunner]:
    runner = RewardRunner(config, **options)
    await runner.start()
    try:
        yield runner
    finally:
        await runner.close()


def rollouts(*texts: str) -> list[Rollout]:
    return [Rollout([5], [0.0], [0], text, "stop") for text in texts]


async def rewards_of(runner: RewardRunner, prompt: Prompt, *texts: str) -> list[float | None]:
    """One group's."""
    return [judgement.reward for judgement in await runner.score_group(prompt, rollouts(*texts))]
