"""pass@k and majority vote against counting every draw; standard errors against their definition."""

import itertools
import math
import statistics
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from slipstream.orchestrator.files.held_out import estimate, majority_vote, pass_at_k


@pytest.mark.parametrize("num_samples", range(1, 9))
def test_pass_at_k_is_the_share_of_draws_with_a_right_sample(num_samples: int) -> None:
    """Every set of k samples is counted; nothing but the definition of pass@k is used."""
    for num_right, k in itertools.product(range(num_samples + 1), range(1, num_samples + 1)):
        draws = list(itertools.combinations([True] * num_right + [False] * (num_samples - num_right), k))
        counted = Fraction(sum(any(draw) for draw in draws), len(draws))
        assert pass_at_k(num_samples, num_right, k) == pytest.approx(float(counted), rel=1e-12, abs=1e-15)


@given(st.integers(1, 10), st.integers(1, 4), st.integers(0, 6))
def test_pass_at_k_is_unbiased(num_right_of_ten: int, k: int, more: int) -> None:
    """Over all outcomes of n independent samples, each right with chance p, its mean is 1 - (1 - p)^k."""
    p, n = num_right_of_ten / 10, k + more
    mean = math.fsum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
    assert mean == pytest.approx(1 - (1 - p) ** k, rel=1e-9)


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


def test_a_majority_vote_by_hand() -> None:
    assert majority_vote(["7", "7", "3"], [True, True, False]) == 1.0
    assert majority_vote(["7", "3", "3"], [True, False, False]) == 0.0
    assert majority_vote(["7", "3"], [True, False]) == 0.5  # drawn
    assert majority_vote(["7", None, None], [True, False, False]) == 1.0  # who has no answer does not vote
    assert majority_vote([None, None], [False, False]) == 0.0


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
