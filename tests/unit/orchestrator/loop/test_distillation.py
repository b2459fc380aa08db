"""Locks: what a teacher adds to the advantage of a token, what its failures cost, and that waiting groups keep it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from cases.samples import build_samples
from fakes.loop import FakeTeacher, Loop, make_config

from slipstream.conf.schema import AlgorithmConfig, RunConfig, TeacherConfig
from slipstream.orchestrator.errors import CheckpointError, TrainingStopped
from slipstream.orchestrator.files.row_files import read_rows
from slipstream.rollout.types import Group, Judgement, Prompt, Rollout, Turn

TEACHER = TeacherConfig(base_url="http://127.0.0.1:1/v1", model="big")


def algorithm(advantage: str = "none", coef: float = 1.0, **more: object) -> AlgorithmConfig:
    return AlgorithmConfig(advantage=advantage, distill_coef=coef, teacher=TEACHER, **more)


def a_group(rewards: list[float | None], seed: int = 0) -> Group:
    """Responses of 1, 2, ... tokens with made-up log-probabilities of policy and teacher."""
    rng = np.random.default_rng(seed)

    def numbers(n: int) -> list[float]:
        return (-rng.exponential(2.0, n)).tolist()

    rollouts = [
        Rollout([9] * n, numbers(n), [3] * n, "t", "stop", teacher_logprobs=numbers(n))
        for n in range(1, len(rewards) + 1)
    ]
    return Group(Prompt(0, (1, 2), "ab"), rollouts, rewards)


@pytest.mark.parametrize("coef", [1.0, 0.25])
def test_advantages_are_the_formula_of_each_token(coef: float) -> None:
    """-(log mu - log teacher) of each token; a reward of whatever size counts in nothing."""
    group = a_group([0.0, 100.0, -3.0])
    samples = build_samples([group], algorithm(coef=coef))
    for sample, rollout in zip(samples, group.rollouts, strict=True):
        mu, teacher = np.array(rollout.logprobs), np.array(rollout.teacher_logprobs)
        np.testing.assert_array_equal(sample.advantages[2:], (-coef * (mu - teacher)).astype(np.float32))
        assert not sample.advantages[:2].any()


def test_rewards_and_the_teacher_add_up() -> None:
    """Rewards 1, failed, 0: group_std gives 1 and -1 (mean and deviation 1/2)."""
    group = a_group([1.0, None, 0.0])
    first, last = build_samples([group], algorithm("group_std", 0.5))
    for sample, rollout, own in ((first, group.rollouts[0], 1.0), (last, group.rollouts[2], -1.0)):
        term = np.array(rollout.teacher_logprobs) - np.array(rollout.logprobs)
        assert sample.advantages[2:] == pytest.approx(own + 0.5 * term, rel=1e-5)


def test_each_token_of_an_episode_has_its_own_term_in_its_own_branch() -> None:
    """Turns 0 and 1 are one sequence, turn 2 is another one."""
    turns = (Turn(None, [1, 7], 2, "start"), Turn(0, [8], 1, ""), Turn(None, [1, 9], 1, "edited"))
    rollout = Rollout([5, 2, 6, 3], [-1.0] * 4, [0] * 4, "t", "stop", turns=turns, teacher_logprobs=[-1, -2, -3, -4])
    talk, edited = build_samples([Group(Prompt(0, (1, 7), "p"), [rollout], [0.0])], algorithm(group_size=1))
    assert talk.token_ids.tolist() == [1, 7, 5, 2, 8, 6]
    assert talk.advantages.tolist() == [0, 0, 0, -1, 0, -2]
    assert edited.advantages.tolist() == [0, 0, -3]


def a_config(num_steps: int = 3, **more: object) -> RunConfig:
    return make_config(num_steps=num_steps, advantage="none", distill_coef=1.0, teacher=TEACHER, **more)


async def test_a_run_learns_from_the_teacher_and_says_how_far_it_is(tmp_path: Path) -> None:
    """Engines sample [5, 2] at -1 and -0.5; the teacher gives -2 and -0.25."""
    loop = Loop(tmp_path, a_config())
    loop.teacher = FakeTeacher()
    await loop.run()
    assert loop.teacher.num_asked == 3 * 3 * 2
    for _, samples in loop.trainer.trained:
        assert {tuple(sample.advantages.tolist()) for sample in samples} == {(0, 0, -1.0, 0.25)}
    for row in loop.rows[1:]:
        assert row["distill/kl_mean"] == pytest.approx((1.0 - 0.25) / 2)
        assert [row[f"distill/{name}"] for name in ("failures", "retries", "response_s")] == [1, 2, 0.5]
    spans = [what for row in read_rows(loop.folder.timeline) for _, what, *_ in row["spans"]]
    assert spans.count("teacher") == 3 * 3
    rows = [json.loads(line) for line in loop.folder.samples.read_text().splitlines()]
    shown = [(row["teacher_logprobs"], row["advantages"]) for row in rows if row["kind"] == "training"]
    assert shown == [([-2.0, -0.25], [-1.0, 0.25])] * 18
    assert not any("teacher_logprobs" in row for row in rows if row["kind"] == "held-out")


async def test_a_response_that_the_teacher_failed_on_is_left_out(tmp_path: Path) -> None:
    loop = Loop(tmp_path, a_config())
    loop.teacher = FakeTeacher(fails=lambda text: text == "right")
    await loop.run()
    assert [len(samples) for _, samples in loop.trainer.trained] == [3, 3, 3], "one of two in each of three groups"
    assert [row["reward/failures"] for row in loop.rows[1:]] == [3, 3, 3]
    assert [row["reward/mean"] for row in loop.rows[1:]] == [0, 0, 0]


@pytest.mark.parametrize("is_judged", [True, False])
async def test_responses_without_a_reward_and_groups_that_are_dropped_are_not_asked_about(
    tmp_path: Path, is_judged: bool
) -> None:
    config = make_config(num_steps=2, distill_coef=1.0, teacher=TEACHER, drop_zero_variance_groups=is_judged)
    loop = Loop(tmp_path, config)
    loop.rewards.is_flat = lambda prompt: is_judged and prompt.prompt_id % 2 == 0
    judge, loop.teacher = loop.rewards.score_group, FakeTeacher()

    async def first_may_fail(prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Judgement]:
        judged = await judge(prompt, rollouts)
        return judged if is_judged else [Judgement(None), *judged[1:]]

    loop.rewards.score_group = first_may_fail
    await loop.run()
    per_group = 2 if is_judged else 1
    assert loop.teacher.num_asked == 2 * 3 * per_group
    assert [len(samples) for _, samples in loop.trainer.trained] == [3 * per_group] * 2
    assert loop.controller.sampler.num_generated > (2 * 3 + 4 if is_judged else 2 * 3 - 1)


async def test_a_teacher_that_fails_on_every_third_group_is_asked_on(tmp_path: Path) -> None:
    """On nine of 27, of which eight in a row would end the run."""
    loop, asked = Loop(tmp_path, a_config(num_steps=9)), count()
    loop.teacher = FakeTeacher(fails=lambda text: next(asked) // 2 % 3 == 0)
    await loop.run()
    assert [row["reward/failures"] for row in loop.rows[1:]] == [2] * 9


async def test_a_teacher_that_fails_on_everything_ends_the_run_with_its_state_saved(tmp_path: Path) -> None:
    loop = Loop(tmp_path, a_config(num_steps=9))
    loop.teacher = FakeTeacher(fails=lambda text: loop.world.version >= 2)
    with pytest.raises(TrainingStopped, match=r"algorithm\.teacher\.base_url=.*:1/v1, failed on every"):
        await loop.run()
    assert loop.saved.step >= 2


async def test_groups_that_wait_keep_the_teachers_word_over_a_resume(tmp_path: Path) -> None:
    loop = Loop(tmp_path, a_config(num_steps=2, staleness=1))
    loop.teacher = FakeTeacher()
    controller = await loop.run()
    folder = loop.checkpoints.begin(7)
    (folder / "rank0.json").write_text("2")
    state = controller._state()
    group = replace(a_group([0.0, 1.0]), parts=[], answers=[])
    saved = loop.checkpoints.finish(folder, replace(state, step=7, buffer=replace(state.buffer, groups={14: group})))
    assert loop.checkpoints.read(saved).buffer.groups[14].rollouts == group.rollouts
    plain = Loop(tmp_path, make_config(num_steps=9, staleness=1))
    with pytest.raises(CheckpointError, match="distill_coef"):
        plain.checkpoints.read(saved)
