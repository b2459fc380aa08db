"""Locks: episodes are judged, compared, buffered, counted and resumed as single responses are; a branch is a sample."""

from dataclasses import replace
from pathlib import Path

import pytest
from fakes.loop import FakeEpisodes, Loop, make_config

from slipstream.orchestrator.errors import TrainingStopped


def a_loop(folder: Path, num_steps: int = 3, **more: int) -> Loop:
    loop = Loop(folder, make_config(num_steps=num_steps, groups_per_step=2, group_size=4), **more)
    loop.episodes = FakeEpisodes(loop.world)
    return loop


async def test_a_branch_is_a_sample_with_the_advantage_of_its_episode_and_a_row_counts_it(tmp_path: Path) -> None:
    loop = a_loop(tmp_path)
    await loop.run()
    rewards = [1.0, 0.0, 1.0]  # the third is the run's reward, of the last response; the fourth failed
    mean, std = sum(rewards) / 3, (2 / 9) ** 0.5
    for version, samples in loop.trainer.trained:
        assert len(samples) == 2 * 3 * 2, "groups, episodes without a failure, branches"
        assert {sample.oldest_version for sample in samples} == {version}
        found = sorted(
            (
                sample.token_ids.tolist(),
                sample.loss_mask.tolist(),
                round(float(sample.advantages[sample.loss_mask][0]), 2),
            )
            for sample in samples
        )
        talk = ([1, 7, 5, 2, 8, 6], [False, False, True, True, False, True])
        edited = ([1, 9, 3], [False, False, True])
        advantages = [round((reward - mean) / std, 2) for reward in rewards]
        assert found == sorted((*branch, advantage) for branch in (talk, edited) for advantage in 2 * advantages)
        for sample in samples:
            assert len(set(sample.advantages[sample.loss_mask].tolist())) == 1
            assert not sample.advantages[~sample.loss_mask].any()
    for row in loop.rows[1:]:
        assert row["rollout/turns_mean"] == 3
        assert row["rollout/branches_mean"] == 2
        assert row["rollout/branches_edited"] == 8
        assert row["rollout/branches_fork"] == 0
        assert row["rollout/failed_raised"] == row["reward/failures"] == 2
        assert row["rollout/response_tokens_mean"] == 4
        assert row["rollout/episode_s_max"] == 0.5
        assert row["reward/mean"] == pytest.approx(2 / 3)


async def test_the_length_of_an_episode_counts_in_what_its_agent_returned(tmp_path: Path) -> None:
    loop = a_loop(tmp_path, num_steps=1)
    penalty = 0.5 * loop.config.max_response_tokens / 4  # an episode has four tokens
    loop.config = replace(loop.config, reward=replace(loop.config.reward, length_penalty=penalty))
    await loop.run()
    assert loop.rows[-1]["reward/mean"] == pytest.approx((1 - 0.5 + 0 - 0.5 + 1) / 3), "the third is judged elsewhere"


async def test_an_agent_that_always_fails_is_blamed_with_its_first_traceback(tmp_path: Path) -> None:
    """8 groups in a row; until then steps without a sample pass."""
    loop = a_loop(tmp_path, num_steps=9)
    loop.config = replace(loop.config, rollout=replace(loop.config.rollout, agent="agent.py:play"))
    loop.episodes.all_fail = True
    with pytest.raises(TrainingStopped) as stopped:
        await loop.run()
    said = str(stopped.value)
    assert said.startswith("rollout.agent=agent.py:play failed in every episode of ")
    assert "groups in a row (raised " in said and "agent.py, line 7, in play\n    KeyError: 'hints'\n" in said
    assert "agents.log" in said and "exact_match" not in said and "resume" in said
