"""Rewards in processes of their own, as a run has them, for as long as a test needs them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from slipstream.conf.schema import RewardConfig, RewardPart
from slipstream.orchestrator.inputs import given_code
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
    return [judgement.reward for judgement in await runner.score_group(prompt, rollouts(*texts))]


def try_each_reward_once(patch: pytest.MonkeyPatch) -> None:
    """Every preflight sets its rewards up in processes of their own: those that read no file and no variable, once."""
    try_it, have_worked = given_code.check_reward, list[tuple[RewardConfig, dict[str, Path]]]()

    def check(config: RewardConfig) -> dict[str, Path]:
        for known, files in have_worked:
            if known == config:
                return files
        files = try_it(config)
        if all(reads_nothing(part) for part in config.by_name.values()):
            have_worked.append((config, files))
        return files

    patch.setattr(given_code, "check_reward", check)


def reads_nothing(part: RewardPart) -> bool:
    is_ours = ":" not in part.kind or part.kind.startswith("slipstream.")
    return is_ours and part.kind != "judge" and not part.env
