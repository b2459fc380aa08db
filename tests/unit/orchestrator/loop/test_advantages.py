"""Locks: group advantages by hand-computed numbers, what is left out, and what the shuffled control keeps."""

from dataclasses import replace

import numpy as np
import pytest
from cases.samples import build_samples

from slipstream.conf.schema import AlgorithmConfig
from slipstream.orchestrator.errors import TrainingStopped
from slipstream.orchestrator.loop.advantages import batch_advantages, group_advantages, teacher_term, whitened
from slipstream.orchestrator.loop.updates import denominators_of
from slipstream.rollout.types import Group, Prompt, Rollout, Routes


@pytest.mark.parametrize(
    ("kind", "rewards", "advantages"),
    [
        ("group", [1.0, 0.0, 0.0, 0.0], [0.75, -0.25, -0.25, -0.25]),
        ("group_std", [1.0, 0.0, 0.0, 0.0], [3**0.5, *[-(3**-0.5)] * 3]),  # mean 1/4, population std sqrt(3)/4
        ("group_std", [1.0, None, 0.0], [1.0, None, -1.0]),  # who failed counts in nothing: mean and std 1/2
        ("group_std", [1e-6, 0.0], [1 / 3, -1 / 3]),  # std 5e-7, and 1e-6 more: 5e-7 / 1.5e-6
        ("group_mean", [1.0, 0.0, None, 0.0, 0.0], [3.0, -1.0, None, -1.0, -1.0]),  # mean 1/4
        ("group_mean", [1.0, 1.0, 1.0, 0.0], [*[1 / 3] * 3, -1.0]),  # the rarer a success, the more it weighs
        ("group_mean", [-1.0, -1.0], [0.0, 0.0]),  # nothing is divided
        ("group_std", [0.1 + 0.2] * 3, [0.0] * 3),
        # 1 against (0 + 0 + 0.5) / 3; 0 against (1 + 0 + 0.5) / 3; 0.5 against 1 / 3
        ("leave_one_out", [1.0, None, 0.0, 0.0, 0.5], [5 / 6, None, -0.5, -0.5, 1 / 6]),
    ],
)
def test_advantages_by_hand(kind: str, rewards: list[float | None], advantages: list[float | None]) -> None:
    wanted = [None if value is None else pytest.approx(value, rel=1e-5) for value in advantages]
    assert group_advantages(rewards, kind) == wanted


def test_no_advantage_is_divided_by_a_mean_that_is_not_above_zero() -> None:
    for rewards, mean in (([1.0, -1.0], "0"), ([1.0, -2.0], "-0.5")):
        with pytest.raises(TrainingStopped, match=f"one has {mean}: it is for rewards that are never negative"):
            group_advantages(rewards, "group_mean")


def test_one_known_reward_of_a_group_and_one_token_of_a_batch_have_nothing_to_be_compared_with() -> None:
    for kind in ("group_std", "group", "leave_one_out", "group_mean"):
        assert group_advantages([None, 0.5], kind) == [None, 0.0]
    assert [value.tolist() for value in whitened([np.array([3.0]), np.zeros(0)])] == [[0.0], []]
    assert whitened([]) == []
    # of two: mean 0, variance 2, and 1e-8 more
    assert whitened([np.array([1.0, -1.0])])[0].tolist() == pytest.approx([(2 + 1e-8) ** -0.5, -((2 + 1e-8) ** -0.5)])
    # variance 2e-8, and as much as half of it more
    assert whitened([np.array([1e-4, -1e-4])])[0].tolist() == pytest.approx([1 / 3**0.5, -1 / 3**0.5], rel=1e-6)


def test_penalties_are_subtracted_once_from_what_comes_after_them() -> None:
    """Two responses of 2 and 1 tokens with rewards 1 and 0, whose penalties are 0.1 and 0.2, and 0.4. From token t on:
    1 - 0.3, 1 - 0.2; 0 - 0.4. Of whole responses: 0.7 and -0.4, whose mean is 0.15."""
    rewards, counts, penalties = [[1.0, None, 0.0]], [[2, 1, 1]], [[np.array([0.1, 0.2]), np.ones(1), np.array([0.4])]]
    ((first, failed, last),) = batch_advantages(rewards, counts, "group", penalties)
    assert failed is None
    assert first.tolist() == pytest.approx([0.55, 0.55]) and last.tolist() == pytest.approx([-0.55])
    ((first, failed, last),) = batch_advantages(rewards, counts, "batch_std", penalties)
    assert failed is None and first is not None and last is not None
    wanted = whitened([np.array([0.7, 0.8, -0.4])])[0].tolist()
    assert [*first, *last] == pytest.approx(wanted)
    ((first, failed, last),) = batch_advantages(rewards, counts, "group_batch_std", penalties)
    assert failed is None and first is not None and last is not None
    assert [*first, *last] == pytest.approx(whitened([np.array([0.55, 0.55, -0.55])])[0].tolist())
    ((first, failed, last),) = batch_advantages(rewards, counts, "none")
    assert (first.tolist(), failed, last.tolist()) == ([0, 0], None, [0])


def test_a_teachers_term_is_its_log_probability_minus_that_of_who_sampled() -> None:
    assert teacher_term([-1.0, -0.5], [-2.0, -0.25]).tolist() == [-1.0, 0.25]


def make_group(rewards: list[float | None], num_tokens: list[int]) -> Group:
    rollouts = [Rollout([9] * n, [-0.5 - i] * n, [4] + [3] * (n - 1), "t", "stop") for i, n in enumerate(num_tokens)]
    return Group(Prompt(0, (1, 2, 3), "abc"), rollouts, rewards)


def test_samples_mask_the_prompt_and_leave_out_failures() -> None:
    samples = build_samples([make_group([1.0, None, 0.0], [2, 2, 3])], AlgorithmConfig())
    assert [sample.num_tokens for sample in samples] == [5, 6]
    first = samples[0]
    assert first.token_ids.tolist() == [1, 2, 3, 9, 9]
    assert first.loss_mask.tolist() == [False, False, False, True, True]
    assert first.rollout_logprobs.tolist() == [0, 0, 0, -0.5, -0.5]
    assert first.advantages == pytest.approx([0, 0, 0, 1, 1], rel=1e-5)
    assert first.oldest_version == 3
    assert (first.token_ids.dtype, first.loss_mask.dtype) == (np.int32, bool)
    assert first.advantages.dtype == first.rollout_logprobs.dtype == np.float32
    denominators = denominators_of(samples, policy_version=5)
    assert (denominators.num_valid_tokens, denominators.num_sequences, denominators.policy_version) == (5, 2, 5)


def test_truncated_responses_count_in_the_baseline_alone() -> None:
    """Rewards 1, 0, 1, 1, the last two of responses that were cut: mean 3/4, so 1/4 and -3/4 are left; of the first two
    alone the mean would be 1/2."""
    group = make_group([1.0, 0.0, 1.0, 1.0], [2, 3, 4, 4])
    reasons = ("stop", "tool_calls", "length", "length")
    group.rollouts[:] = [replace(one, finish_reason=why) for one, why in zip(group.rollouts, reasons, strict=True)]
    config = AlgorithmConfig(mask_truncated=True, advantage="group")
    samples = build_samples([group], config)
    assert [sample.num_valid_tokens for sample in samples] == [2, 3]
    assert [sample.advantages[-1] for sample in samples] == pytest.approx([0.25, -0.75])
    denominators = denominators_of(samples, policy_version=5, max_response_tokens=4)
    assert (denominators.num_valid_tokens, denominators.num_sequences) == (5, 2)
    assert denominators.num_possible_tokens == 2 * 4
    assert len(build_samples([group], replace(config, mask_truncated=False))) == 4


def test_tokens_that_were_sampled_at_a_position_without_a_route_do_not_count() -> None:
    """Three prompt tokens and two or three of the response: positions 0 to 3, or 4; tokens 3, 4, 5 are sampled at 2, 3,
    4. The first response lacks the route at 3, the second all of them; what is missing at 0 is only context."""
    group = make_group([1.0, 0.0, 0.0], [2, 3, 1])
    missing = [[0, 3], [0, 1, 2, 3, 4], []]
    group.rollouts[:] = [
        replace(rollout, routes=Routes(np.arange(n * 4, dtype=np.uint8).reshape(n, 2, 2), ~np.isin(np.arange(n), gone)))
        for rollout, n, gone in zip(group.rollouts, (4, 5, 3), missing, strict=True)
    ]
    first, last = build_samples([group], AlgorithmConfig())
    assert first.loss_mask.tolist() == [False, False, False, True, False]
    assert first.advantages[4] == 0
    assert last.loss_mask.tolist() == [False, False, False, True]
    assert first.routed_experts is not None and first.has_route is not None
    assert first.routed_experts.shape == (5, 2, 2) and first.routed_experts.dtype == np.uint8
    assert first.routed_experts[:4].flatten().tolist() == list(range(16)), "each token has its own position's"
    assert first.has_route.tolist() == [False, True, True, False, False]  # the last token was never computed
    assert [rollout.num_tokens_without_route for rollout in group.rollouts] == [1, 3, 0]
