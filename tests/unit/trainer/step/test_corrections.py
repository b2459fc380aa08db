"""Importance weights, losses and gradients against the formulas of their sources, one sequence and token at a time."""

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from oracles.cases import loss_tokens

from slipstream.conf.schema import AlgorithmConfig, Correction, Normalization, RatioBaseline
from slipstream.trainer.step.corrections import LOG_RATIO_BOUND, importance_weights
from slipstream.trainer.step.loss import PolicyLoss, policy_loss
from slipstream.trainer.types import Denominators


class Sequence(NamedTuple):
    """One response: log-probabilities of trainer and engine, and its advantage."""

    trainer: list[float]
    engine: list[float]
    advantage: float


def expected_weights(
    sequence: Sequence, correction: Correction, low: float, high: float, mask: float
) -> list[tuple[float, bool, bool]]:
    """(weight, truncated, masked) of each token, as the sources have it: by token, product or geometric mean."""
    ratios = [math.exp(one - other) for one, other in zip(sequence.trainer, sequence.engine, strict=True)]
    found: list[tuple[float, bool, bool]] = []
    for ratio in ratios:
        judged = ratio
        if correction in (Correction.sequence_tis, Correction.sequence_mis):
            judged = math.prod(ratios)
        if correction is Correction.geometric_mis:
            judged = math.prod(ratios) ** (1 / len(ratios))
        assume(all(abs(judged - bound) > 1e-9 or judged == bound == 1.0 == ratio for bound in (low, high)))
        assume(abs(abs(math.log(ratio)) - mask) > 1e-9 or mask == 0)
        if correction is Correction.none:
            weight, cut = 1.0, False
        elif correction in (Correction.tis, Correction.sequence_tis):
            weight, cut = min(judged, high), judged > high
        else:
            weight, cut = judged if low <= judged <= high else 0.0, False
        if 0 < mask < abs(math.log(ratio)):
            weight, cut = 0.0, False
        found.append((weight, cut, weight == 0.0))
    return found


def loss_of(sequences: list[Sequence], algorithm: AlgorithmConfig, mask: float = 0.0) -> tuple[PolicyLoss, list[float]]:
    """policy_loss on all sequences as one microbatch, in float64, and its gradient by token."""

    def flat(values: list[list[float]]) -> torch.Tensor:
        return torch.tensor([value for part in values for value in part], dtype=torch.float64)

    logprobs, sizes = flat([one.trainer for one in sequences]).requires_grad_(), [len(one.trainer) for one in sequences]
    tokens = loss_tokens(
        sizes, logprobs, rollout_logprobs_N=flat([one.engine for one in sequences]),
        advantages_N=flat([[one.advantage] * len(one.trainer) for one in sequences]),
    )  # fmt: skip
    result = policy_loss(tokens, algorithm, Denominators(sum(sizes), len(sizes), policy_version=0), mask)
    result.loss.backward()
    assert logprobs.grad is not None
    return result, logprobs.grad.tolist()


def some_logprobs(data: st.DataObject, size: int) -> list[float]:
    return data.draw(st.lists(st.floats(-3.0, -0.01), min_size=size, max_size=size))


LN = math.log
TWO = [Sequence([LN(0.6), LN(0.9)], [LN(0.2), LN(0.6)], 1.0), Sequence([LN(0.1)], [LN(0.5)], -1.0)]
"""Ratios 3 and 1.5 (product 4.5, mean 4.5 ** 0.5 = 2.121), and 0.2."""


@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        (Correction.none, [1.0, 1.0, 1.0]),
        (Correction.tis, [2.0, 1.5, 0.2]),  # cut at 2
        (Correction.mis, [0.0, 1.5, 0.2]),  # from 0 to 2
        (Correction.icepop, [3.0, 1.5, 0.0]),  # from 0.5 to 5
        (Correction.sequence_tis, [2.0, 2.0, 0.2]),  # cut at 2
        (Correction.sequence_mis, [0.0, 0.0, 0.2]),  # from 0 to 2
        (Correction.geometric_mis, [0.0, 0.0, 0.0]),  # from 0.999 to 1.001
    ],
)
def test_bounds_that_nobody_set_are_those_of_the_methods_source(correction: Correction, weights: list[float]) -> None:
    """One gradient a token: -w A / 3."""
    _, grad = loss_of(TWO, AlgorithmConfig(correction=correction))
    assert grad == pytest.approx([-weights[0] / 3, -weights[1] / 3, weights[2] / 3], rel=1e-6)


def test_mask_threshold_leaves_tokens_out_of_a_clipped_ratio_too() -> None:
    """|d| = ln 3, ln 1.5 and ln 5. Above 1.05 are the first and the last; the clip at 1.28 stops the second one."""
    algorithm = AlgorithmConfig(ratio_baseline=RatioBaseline.rollout, correction=Correction.none)
    result, grad = loss_of([*TWO, Sequence([-1.0], [-1.0], 1.0)], algorithm, mask=1.05)
    assert grad == pytest.approx([0.0, 0.0, 0.0, -1 / 4])
    assert result.loss.item() == pytest.approx(-(1.28 + 1) / 4, rel=1e-6)
    assert result.sums["correction/num_masked"].item() == 2


def test_a_mask_threshold_leaves_out_more_than_the_bounds_of_the_correction() -> None:
    """A ratio of 3 is above 2, and |ln 3| within 1.5; of 1 / 5 it is the other way round."""
    log_ratio_N, one_N = torch.tensor([LN(3), 0.0, -LN(5)]), torch.ones(3, dtype=torch.int64)
    algorithm = AlgorithmConfig(correction=Correction.mis, correction_max=2.0)
    found = importance_weights(log_ratio_N, one_N, one_N.cumsum(0) - 1, algorithm, 1.5)
    assert found.is_masked_N.tolist() == [True, False, True] and found.weight_N.tolist() == [0.0, 1.0, 0.0]


def test_a_ratio_that_is_its_bound_is_within() -> None:
    """e^0 is 1 in every format."""
    one_N = torch.ones(1, dtype=torch.int64)
    for correction in (Correction.tis, Correction.mis):
        algorithm = AlgorithmConfig(correction=correction, correction_min=1.0, correction_max=1.0)
        found = importance_weights(torch.zeros(1), one_N, one_N * 0, algorithm)
        assert [found.weight_N.item(), found.is_truncated_N.item(), found.is_masked_N.item()] == [1.0, False, False]
    found = importance_weights(torch.tensor([0.5]), one_N, one_N * 0, AlgorithmConfig(correction=Correction.none), 0.5)
    assert found.weight_N.item() == 1.0


def test_a_product_that_overflows_is_bounded() -> None:
    """100 tokens of ratio e: the product is e^100, which float32 cannot hold; the loss stays finite."""
    wild = Sequence([-1.0] * 100, [-2.0] * 100, 1.0)
    result, grad = loss_of([wild], AlgorithmConfig(correction=Correction.sequence_tis, correction_max=1e30))
    assert grad == pytest.approx([-math.exp(LOG_RATIO_BOUND) / 100] * 100)
    assert math.isfinite(result.loss.item())
    _, grad = loss_of([wild], AlgorithmConfig(correction=Correction.geometric_mis, correction_max=3.0))
    assert grad == pytest.approx([-math.e / 100] * 100)


def test_log_ratios_of_a_long_sequence_are_added_up_in_float64() -> None:
    """In float32 none of the small ones would change a sum of 16."""
    log_ratio_N = torch.tensor([16.0, *[8e-7] * 100_000, -16.0])
    one_N = torch.ones(len(log_ratio_N), dtype=torch.int64)
    algorithm = AlgorithmConfig(correction=Correction.sequence_tis, correction_max=2.0)
    weights = importance_weights(log_ratio_N, one_N * len(one_N), one_N * 0, algorithm)
    assert weights.weight_N.dtype == torch.float32
    assert weights.weight_N[0].item() == pytest.approx(math.exp(0.08), abs=1e-3)


@settings(max_examples=150)
@given(st.data())
def test_weights_loss_and_gradient_are_those_of_the_formulas(data: st.DataObject) -> None:
    correction = data.draw(st.sampled_from(list(Correction)))
    normalization = data.draw(st.sampled_from([Normalization.token, Normalization.sequence]))
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    low, high = data.draw(st.floats(0.0, 1.0)), data.draw(st.floats(1.0, 3.0))
    masks_too = correction in (Correction.none, Correction.tis, Correction.sequence_tis)
    mask = data.draw(st.sampled_from([0.0, 0.5])) if masks_too else 0.0
    algorithm = AlgorithmConfig(
        correction=correction, correction_min=low, correction_max=high, normalization=normalization
    )
    sequences = [
        Sequence(some_logprobs(data, size), some_logprobs(data, size), data.draw(st.floats(-2, 2))) for size in sizes
    ]

    wanted_loss, wanted_grad, weights, cut_sequences, masked_sequences = 0.0, [], [], 0, 0
    for sequence in sequences:
        judged = expected_weights(sequence, correction, low, high, mask)
        share = 1 / sum(sizes)
        if normalization is Normalization.sequence:
            share = 1 / len(sequence.trainer) / len(sizes)
        for weight, _, _ in judged:
            wanted_loss -= weight * sequence.advantage * share
            wanted_grad.append(-weight * sequence.advantage * share)
        weights += judged
        cut_sequences += any(cut for _, cut, _ in judged)
        masked_sequences += any(masked for _, _, masked in judged)

    result, grad = loss_of(sequences, algorithm, mask)
    assert result.loss.item() == pytest.approx(wanted_loss, rel=1e-6, abs=1e-6)  # shares are float32
    assert grad == pytest.approx(wanted_grad, rel=1e-6, abs=1e-9)
    sums = {name: value.item() for name, value in result.sums.items()}
    assert sums["correction/weight_sum"] == pytest.approx(sum(weight for weight, _, _ in weights))
    assert sums["correction/weight_square_sum"] == pytest.approx(sum(weight**2 for weight, _, _ in weights))
    assert sums["correction/num_truncated"] == sum(cut for _, cut, _ in weights)
    assert sums["correction/num_masked"] == sum(masked for _, _, masked in weights)
    assert sums["correction/num_truncated_sequences"] == cut_sequences
    assert sums["correction/num_masked_sequences"] == masked_sequences
    assert sums["policy/num_sequences"] == pytest.approx(len(sizes))
