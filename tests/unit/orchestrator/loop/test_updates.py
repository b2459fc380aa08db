"""Locks: what each of a step's updates learns from, what a version is then, and advantages over a batch."""

import json
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cases.samples import build_samples
from fakes.loop import Loop, make_config
from hypothesis import given, strategies as st
from oracles.advantages import ADVANTAGE_CASES, our_advantages

from slipstream.conf.schema import AlgorithmConfig, KlEstimator, KlPlace
from slipstream.orchestrator.files.timeline import Activities
from slipstream.orchestrator.loop.advantages import batch_advantages
from slipstream.orchestrator.loop.ports import Stopwatch
from slipstream.orchestrator.loop.updates import (
    advantage_function,
    combined,
    draft_samples,
    filled,
    minibatches,
    score,
    scored,
    update,
)
from slipstream.rollout.types import Group, Prompt, Rollout, Turn
from slipstream.trainer.types import LossStats, OptimStats, Sample, Scores

RECORDED = json.loads((Path(__file__).parents[3] / "oracles" / "recorded.json").read_text())["cases"]


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 4), st.integers(0, 99))
def test_every_group_is_in_one_update_of_every_epoch(groups: int, parts: int, epochs: int, seed: int) -> None:
    parts = min(parts, groups)
    found = minibatches(groups, parts, epochs, np.random.default_rng(seed))
    assert len(found) == parts * epochs
    for epoch in range(epochs):
        of_epoch = found[epoch * parts : (epoch + 1) * parts]
        assert sorted(number for part in of_epoch for number in part) == list(range(groups))
        assert max(map(len, of_epoch)) - min(map(len, of_epoch)) <= 1
    assert [number for part in found[:parts] for number in part] == list(range(groups))


def test_each_later_epoch_has_an_order_of_its_own_that_the_seed_decides() -> None:
    def orders(seed: int) -> list[list[int]]:
        found = minibatches(40, 4, 3, np.random.default_rng(seed))
        return [[number for part in found[first : first + 4] for number in part] for first in (0, 4, 8)]

    first, second, third = orders(7)
    assert first != second != third != first and orders(7) == [first, second, third]
    assert orders(8)[0] == first and orders(8)[1] != second


def test_a_part_that_comes_several_times_has_all_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each time has a span of its own. It is 100 s since 1970."""
    ticks = iter([0.0, 1.0, 1.5, 3.5])
    monkeypatch.setattr(
        "slipstream.orchestrator.loop.ports.time", SimpleNamespace(monotonic=lambda: next(ticks), time=lambda: 100.0)
    )
    clock = Stopwatch(activities := Activities())
    for name in ("trainer/forward_backward_s", "trainer/optimizer_s", "trainer/forward_backward_s"):
        clock.lap(name)
    assert clock.laps == {"trainer/forward_backward_s": 3.0, "trainer/optimizer_s": 0.5}
    spans = [(one.what, one.from_s) for one in activities.take()]
    assert spans == [("forward and backward", 99.0), ("optimizer", 99.5), ("forward and backward", 98.0)]


async def test_one_version_and_one_publish_for_all_updates_of_a_batch(tmp_path: Path) -> None:
    config = make_config(num_steps=3, groups_per_step=4, minibatches_per_step=2, epochs_per_step=2)
    loop = Loop(tmp_path, config)
    controller = await loop.run()
    assert (controller.step, controller.policy_version) == (3, 3)
    kinds = [entry[:2] for entry in loop.world.diary if entry[0] != "sample"]
    assert kinds == [
        ("publish", 0),
        *[one for v in range(3) for one in [("score", v), *[("train", v)] * 4, ("publish", v + 1)]],
    ]
    assert [len(samples) for _, samples in loop.trainer.trained] == [4] * 12  # two groups of two siblings
    for sample in (one for _, samples in loop.trainer.trained for one in samples):
        assert sample.old_logprobs is not None
        assert sample.old_logprobs.tolist() == [-2.0 * counts for counts in sample.loss_mask]
    assert [row["optim/updates"] for row in loop.rows] == [None, 4, 4, 4]
    assert [row["trainer/score_s"] is None for row in loop.rows] == [True, False, False, False]
    assert [row["staleness/max"] for row in loop.rows] == [None, 0, 0, 0]


async def test_tokens_count_once_an_epoch_and_those_of_responses_that_are_left_out_nowhere(tmp_path: Path) -> None:
    loop, fails = Loop(tmp_path, make_config(num_steps=2, epochs_per_step=2)), cycle([True, False, False])
    loop.rewards.fails = lambda: next(fails)
    await loop.run()
    assert sum(row["reward/failures"] for row in loop.rows[1:]) >= 2
    for row in loop.rows[1:]:
        trained = [one for version, samples in loop.trainer.trained if version == row["step"] - 1 for one in samples]
        assert row["trainer/num_tokens"] == sum(sample.num_tokens for sample in trained)


async def test_an_update_that_is_refused_costs_itself_alone(tmp_path: Path) -> None:
    """Updates 0 and 1 make step 1, 2 and 3 step 2, 4 and 5 step 3. One of step 1 is refused, both of step 2."""
    loop = Loop(tmp_path, make_config(num_steps=3, minibatches_per_step=2))
    loop.trainer.not_finite = {1, 2, 3}
    controller = await loop.run()
    assert controller.policy_version == 2
    assert [entry[1] for entry in loop.world.diary if entry[0] == "publish"] == [0, 1, 2]
    assert [row["optim/updates"] for row in loop.rows[1:]] == [1, 0, 2]
    assert [row["optim/skipped"] for row in loop.rows[1:]] == [0, 1, 0]
    assert [row["optim/grad_norm"] for row in loop.rows[1:]] == [1.0, None, 1.0]


async def test_rewards_are_penalized_by_what_the_trainer_estimates(tmp_path: Path) -> None:
    """The fake estimates 1 for each of two tokens: 0.1 * 2 comes off both rewards, and off their difference nothing."""
    config = make_config(num_steps=1, kl_coef=0.1, kl_in=KlPlace.reward, advantage="batch_std")
    loop = Loop(tmp_path, config)
    await loop.run()
    # R_t of the right response: 0.8, 0.9; of the wrong one: -0.2, -0.1; mean 0.35
    _, samples = loop.trainer.trained[0]
    values = np.array([0.8, 0.9, -0.2, -0.1] * 3)
    wanted = (values - 0.35) / values.std(ddof=1)
    found = sorted(value for sample in samples for value in sample.advantages[sample.loss_mask])
    assert found == pytest.approx(sorted(wanted), rel=1e-5)
    for sample in samples:
        assert sample.ref_logprobs is not None
        assert sample.ref_logprobs.tolist() == [-3.0 * counts for counts in sample.loss_mask]


def test_combined_speaks_for_the_updates_that_were_applied() -> None:
    good, bad = OptimStats(4, 2.0, 0.1, is_finite=True), OptimStats(4, float("nan"), 0.1, is_finite=False)
    last = OptimStats(5, 4.0, 0.05, is_finite=True)
    assert combined([good, bad, last]) == OptimStats(5, 3.0, 0.05, is_finite=True)
    assert combined([good, OptimStats(5, float("nan"), 0.05, is_finite=False)]) == OptimStats(5, 2.0, 0.05, True)
    assert combined([bad]) is bad


class Ranks:
    """Two that note what they are given. A response's log-probabilities are minus its length."""

    num_ranks = 2

    def __init__(self) -> None:
        self.batches: list[list[list[list[Sample]]]] = []
        self.told: list[object] = []

    async def score(self, batches: list[list[list[Sample]]], policy_version: int) -> list[list[list[Scores]]]:
        self.batches.append(batches)
        self.told.append(policy_version)
        sizes = [[[one.num_valid_tokens for one in micro] for micro in of_rank] for of_rank in batches]
        return [[[Scores(np.full(size, -size), None, None) for size in micro] for micro in one] for one in sizes]

    async def forward_backward(self, batches: list[list[list[Sample]]], _: object) -> list[LossStats]:
        self.batches.append(batches)
        return [LossStats({"loss/total_sum": 1.0, "loss/policy_sum": 3.0}, {})]

    async def optimizer_step(self, *, ends_version: bool) -> OptimStats:
        self.told.append(ends_version)
        return OptimStats(1, 2.0, 0.1, is_finite=True)


async def test_every_draft_has_the_scores_of_its_own_sample_and_microbatches_have_room_for_prompts() -> None:
    """Wherever it was packed: eight sequences of 3 + 1 to 3 + 3 tokens, at most 12 tokens in a microbatch."""
    sizes, ranks = (3, 2, 1, 1, 3, 2, 1, 1), Ranks()
    rollouts = [Rollout([5] * size, [-1.0] * size, [0] * size, "t", "stop") for size in sizes]
    groups = [Group(Prompt(0, (1, 2, 3), "abc"), rollouts, [1.0, 0.0] * 4)]
    config = make_config(trainer={"max_microbatch_tokens": 12})
    drafts = await score(ranks, draft_samples(groups, AlgorithmConfig()), config, 3)  # type: ignore[arg-type]
    assert [draft.sample.old_logprobs[-1] for draft in drafts] == [-size for size in sizes]
    samples, clock = build_samples(groups, AlgorithmConfig()), Stopwatch(Activities())
    done = await update(ranks, [samples], config, 0, np.random.default_rng(0), clock)  # type: ignore[arg-type]
    for batches in ranks.batches:
        assert [len(of_rank) for of_rank in batches] == [2, 2]
        assert all(sum(one.num_tokens for one in micro) <= 12 for of_rank in batches for micro in of_rank)
    assert (done.num_microbatches, done.num_tokens, ranks.told) == (2, 8 * 3 + sum(sizes), [3, True])


async def test_a_minibatch_without_samples_is_no_update() -> None:
    """Two of three groups have samples. Two ranks share each microbatch."""
    config, ranks = make_config(minibatches_per_step=3, trainer={"num_ranks": 2, "cp_size": 2}), Ranks()
    groups = [Group(Prompt(0, (1,), "a"), [Rollout([5], [-1.0], [0], "t", "stop")] * 2, [1.0, 0.0])] * 2
    samples = build_samples(groups, AlgorithmConfig())
    parts, clock = [samples[:2], samples[2:], []], Stopwatch(Activities())
    done = await update(ranks, parts, config, 0, np.random.default_rng(0), clock)  # type: ignore[arg-type]
    assert (ranks.batches, ranks.told) == ([[[samples[:2]]] * 2, [[samples[2:]]] * 2], [False, True])
    assert (done.num_microbatches, done.num_applied) == (2, 2)
    assert [stats.sums for stats in done.loss] == [{"loss/total_sum": 0.5, "loss/policy_sum": 1.5}] * 2


@pytest.mark.parametrize("name", ADVANTAGE_CASES)
def test_advantages_equal_those_of_verl(name: str) -> None:
    assert our_advantages(ADVANTAGE_CASES[name]).tolist() == pytest.approx(RECORDED[name][0], rel=1e-6, abs=1e-7)


@given(st.lists(st.lists(st.one_of(st.none(), st.integers(0, 3).map(float)), min_size=2, max_size=4), max_size=4))
def test_a_batch_is_standardized_over_its_tokens(rewards: list[list[float | None]]) -> None:
    counts = [[1 + (i + j) % 3 for j in range(len(group))] for i, group in enumerate(rewards)]
    for kind in ("batch_std", "group_batch_std"):
        found = batch_advantages(rewards, counts, kind)
        known = [value for group in found for value in group if value is not None]
        assert [[a is None for a in group] for group in found] == [[r is None for r in group] for group in rewards]
        flat = np.concatenate([np.zeros(0), *known])
        if len(flat) > 1:
            assert flat.mean() == pytest.approx(0, abs=1e-6)
            assert flat.std(ddof=1) == pytest.approx(1, abs=1e-3) or not flat.any()


def test_branches_of_an_episode_get_the_penalties_of_their_own_tokens() -> None:
    """Turns 0 and 1 make one sequence, turn 2 goes on from turn 0 and makes another; tokens 5 6, 7, 8 are numbers 0 to
    3. Each is penalized by its own estimate; what the rollout gets is the sum."""
    turns = (Turn(None, [1], 2, "start"), Turn(0, [2], 1, ""), Turn(0, [3], 1, "edited"))
    episode = Rollout([5, 6, 7, 8], [-1.0] * 4, [0] * 4, "t", "stop", turns=turns)
    plain = Rollout([9], [-1.0], [0], "t", "stop")
    groups = [Group(Prompt(0, (1,), "a"), [episode, plain], [1.0, 0.0])]
    config = AlgorithmConfig(
        advantage="group", kl_coef=0.5, kl_in=KlPlace.reward, kl_estimator=KlEstimator.k1, minibatches_per_step=1
    )
    drafts = draft_samples(groups, config)
    assert [draft.numbers.tolist() for draft in drafts] == [[-1, 0, 1, -1, 2], [-1, -1, -1, -1, 3], [-1, 0]]
    estimates = [[0.1, 0.2, 0.3], [0.4], [0.0]]
    drafts = [
        scored(draft, Scores(np.array(kl), None, np.array(kl))) for draft, kl in zip(drafts, estimates, strict=True)
    ]
    (samples,) = filled(drafts, groups, config, advantage_function(config))
    # 1 - 0.5 * (0.1 + 0.2 + 0.3 + 0.4) = 0.5 against 0: +-0.25
    assert [set(sample.advantages[sample.loss_mask].tolist()) for sample in samples] == [{0.25}, {0.25}, {-0.25}]
