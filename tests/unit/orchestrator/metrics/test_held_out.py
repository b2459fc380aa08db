"""Figures of an evaluation by hand, and which may choose the best checkpoint; pass@k and majority vote against counting
every draw, standard errors against their definition.
"""

import itertools
import math
import statistics
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from slipstream.conf.schema import AlgorithmConfig, DataConfig, Objective, RunConfig, RunSection
from slipstream.orchestrator.metrics.held_out import (
    EvalNames,
    choosing_metrics,
    estimate,
    eval_names,
    evaluate_groups,
    in_words,
    is_better,
    majority_vote,
    pass_at_k,
)
from slipstream.rollout.types import Group, Prompt, Rollout

PROMPT = Prompt(0, (1,), "p")


def a_group(rewards: list[float | None], answers: list[str | None] | None = None, version: int = 3) -> Group:
    rollouts = [Rollout([5, 2], [-1.0, -0.5], [version, version], "", "stop") for _ in rewards]
    return Group(PROMPT, rollouts, rewards, [], answers or [])


def test_figures_by_hand() -> None:
    easy = [a_group([1.0, 1.0, 0.0], ["7", "7", "3"]), a_group([0.0, 1.0, None], ["4", "9", None])]
    hard = [a_group([0.5, 0.0, 0.0], ["1", "2", "2"], version=4)]
    found = evaluate_groups({"easy": easy, "hard": hard}, 3, EvalNames(("easy", "hard"), (1, 3)), 1.0)
    assert found["eval/easy/reward"] == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert found["eval/reward"] == pytest.approx((2 / 3 + 1 / 2 + 1 / 6) / 3)
    assert found["eval/easy/reward_se"] == pytest.approx((2 / 3 - 1 / 2) / 2)  # of two values: half of their distance
    assert found["eval/easy/pass_at_1"] == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert found["eval/easy/pass_at_3"] == 1.0  # of the prompt whose three responses were judged
    assert (found["eval/hard/pass_at_1"], found["eval/hard/reward_se"]) == (0.0, None)  # 0.5 is not right
    assert (found["eval/easy/majority"], found["eval/hard/majority"]) == (0.75, 0.0)  # 1, and one of two
    assert in_words(found, "reward") == "0.444 (easy 0.583, hard 0.167)"
    assert (found["eval/failures"], found["eval/rollouts"]) == (1, 9)
    assert evaluate_groups({"hard": hard}, 3, EvalNames(("hard",), (1,)), 0.5)["eval/hard/pass_at_1"] == pytest.approx(
        1 / 3
    )
    assert (found["eval/version_spread"], found["eval/other_version_fraction"]) == (1, pytest.approx(6 / 18))


def test_a_reward_that_tells_no_answers_has_no_majority_and_one_that_failed_no_mean() -> None:
    names = EvalNames((), (1,))
    found = evaluate_groups({"": [a_group([1.0, 0.0]), a_group([0.0, 0.0])]}, 3, names, 1.0)
    assert (found["eval/majority"], found["eval/reward"], found["eval/pass_at_1"]) == (None, 0.25, 0.25)
    failed = evaluate_groups({"": [a_group([None, None])]}, 3, names, 1.0)
    assert (failed["eval/reward"], failed["eval/pass_at_1"], failed["eval/failures"]) == (None, None, 2)


def test_what_a_length_takes_and_the_rounding_of_a_sum_make_no_response_wrong() -> None:
    lengths, weights = [{"length_penalty": -0.0375}, {"length_penalty": -0.1}], 0.6 + 0.3 + 0.1
    assert weights < 1
    group = replace(a_group([weights - 0.0375, 0.9 - 0.1], ["7", "3"]), parts=lengths)
    found = evaluate_groups({"": [group]}, 3, EvalNames((), (1,)), 1.0)
    assert (found["eval/pass_at_1"], found["eval/majority"], found["eval/reward"]) == (0.5, 0.5, pytest.approx(0.88125))


@given(
    weights=st.lists(st.integers(1, 999), min_size=1, max_size=8),
    scale=st.sampled_from([0.01, 1.0, 100.0]),
    kind=st.sampled_from([np.float32, np.float64]),
    num_tokens=st.integers(0, 300),
)
@example([9, 1], 1.0, np.float32, 0).via("weights of 0.9 and 0.1")
def test_a_perfect_response_is_right_and_one_that_lacks_a_little_is_not(
    weights: list[int], scale: float, kind: type[np.floating[Any]], num_tokens: int
) -> None:
    """Rewards are summed part by part, some by functions that return float32."""
    total = sum(weights)
    parts = [kind(scale * weight / total) for weight in weights]
    penalty = 0.3 * scale * -num_tokens / 300
    perfect = float(sum(parts, kind(0.0))) + penalty
    group = replace(a_group([perfect, perfect - 1e-4 * scale]), parts=[{"length_penalty": penalty}] * 2)
    nothing = replace(a_group([0.1 + 0.2 - 0.3 - 0.4, -0.5]), parts=[{"length_penalty": -0.4}] * 2)
    assert evaluate_groups({"": [nothing]}, 3, EvalNames((), (1,)), 0.0)["eval/pass_at_1"] == 0.5
    assert evaluate_groups({"": [group]}, 3, EvalNames((), (1,)), scale)["eval/pass_at_1"] == 0.5


def test_figures_have_the_names_of_the_runs_sets() -> None:
    run = RunSection(eval_samples_per_prompt=4)
    config = RunConfig(run=run, data=DataConfig(eval_sets={"aime": "a.jsonl"}))
    names = eval_names(config)
    assert (names.sets, names.ks) == (("aime",), (1, 2, 4))
    assert "eval/aime/pass_at_4_se" in names.metrics and "eval/aime/nll" in names.metrics
    assert choosing_metrics(config)[:4] == ["eval/reward", "eval/majority", "eval/pass_at_1", "eval/pass_at_2"]
    sft = replace(config, algorithm=AlgorithmConfig(objective=Objective.sft))
    assert choosing_metrics(sft) == ["eval/nll", "eval/aime/nll"]
    dpo = replace(config, algorithm=AlgorithmConfig(objective=Objective.dpo))
    figures = ("dpo_loss", "dpo_accuracy")
    assert choosing_metrics(dpo) == [*(f"eval/{name}" for name in figures), *(f"eval/aime/{name}" for name in figures)]
    found = evaluate_groups({"aime": [a_group([1.0] * 4)]}, 3, names, 1.0)
    assert {name for name in found if name.startswith("eval/aime") or "pass" in name} <= names.metrics.keys()


def test_better_is_larger_but_for_losses() -> None:
    assert is_better("eval/dpo_loss", 0.5, 0.6) and is_better("eval/dpo_accuracy", 0.6, 0.5)
    assert is_better("eval/reward", 0.6, 0.5) and not is_better("eval/reward", 0.5, 0.5)
    assert is_better("eval/aime/nll", 0.5, 0.6) and not is_better("eval/nll", math.inf, 0.6)


@pytest.mark.parametrize("num_samples", range(1, 9))
def test_pass_at_k_is_the_share_of_draws_with_a_right_sample(num_samples: int) -> None:
    """Every set of k samples is counted; nothing but the definition of pass@k is used."""
    for num_right, k in itertools.product(range(num_samples + 1), range(1, num_samples + 1)):
        draws = list(itertools.combinations([True] * num_right + [False] * (num_samples - num_right), k))
        counted = Fraction(sum(any(draw) for draw in draws), len(draws))
        assert pass_at_k(num_samples, num_right, k) == pytest.approx(float(counted), rel=1e-12, abs=1e-15)


@given(st.integers(1, 40), st.data())
def test_pass_at_k_rises_with_k_and_with_what_is_right(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    value = pass_at_k(n, c, k)
    assert 0 <= value <= 1 and pass_at_k(n, c, 1) == pytest.approx(c / n)
    assert k == n or pass_at_k(n, c, k + 1) >= value
    assert c == n or pass_at_k(n, c + 1, k) >= value


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)])
def test_pass_at_k_of_too_few_samples_is_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} of {n} samples"):
        pass_at_k(n, c, k)


ANSWERS = st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.booleans()), min_size=1, max_size=7)


@given(ANSWERS)
def test_a_majority_vote_is_the_count_of_its_winners(samples: list[tuple[str | None, bool]]) -> None:
    """Who wins is found by comparing every answer with every other one; a winner is then asked for by each voter."""
    answers = [answer for answer, _ in samples]
    given_answers = [answer for answer in dict.fromkeys(answers) if answer is not None]
    winners = [
        one for one in given_answers if all(answers.count(one) >= answers.count(other) for other in given_answers)
    ]
    shares = []
    for winner in winners:
        of_winner = [right for answer, right in samples if answer == winner]
        shares.append(Fraction(sum(of_winner), len(of_winner)))
    counted = float(sum(shares) / len(shares)) if shares else 0.0
    assert majority_vote(answers, [right for _, right in samples]) == pytest.approx(counted, abs=1e-12)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=30))
def test_the_error_of_a_mean_is_its_samples_deviation_over_the_root_of_their_number(values: list[float]) -> None:
    found = estimate(values)
    assert found is not None and found.error is not None
    assert found.mean == pytest.approx(statistics.fmean(values))
    assert found.error == pytest.approx(statistics.stdev(values) / math.sqrt(len(values)), abs=1e-9)


def test_one_prompt_has_no_error_and_none_no_mean() -> None:
    one = estimate([0.5])
    assert one is not None and (one.mean, one.error) == (0.5, None)
    assert estimate([]) is None
