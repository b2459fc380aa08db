"""Promises of trainer/step/surrogates.py, and of estimates of KL: TRL's and verl's values, and formulas where nobody
has them."""

import json
import math
from pathlib import Path

import pytest
import torch
from oracles.cases import CASES, inputs, loss_tokens, ours

from slipstream.conf.schema import SHIPPED_LOSSES, AlgorithmConfig, KlEstimator
from slipstream.trainer.step.mismatch import kl_estimates
from slipstream.trainer.step.surrogates import LOSSES

RECORDED = json.loads((Path(__file__).parents[3] / "oracles" / "recorded.json").read_text())["cases"]


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_equal_those_of_other_trainers(name):
    """Recorded from TRL's and verl's own functions (`make oracles` computes them again)."""
    for mine, theirs in zip(ours(CASES[name]), RECORDED[name], strict=True):
        theirs = torch.tensor(theirs, dtype=torch.float64)
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6 * float(theirs.abs().max()))


def tokens_of(logprobs, old, advantages, lengths):
    return loss_tokens(lengths, logprobs, old_logprobs_N=old, advantages_N=advantages)


def test_the_cases_reach_both_sides_of_every_bound():
    given = inputs()
    tokens = tokens_of(given["logprobs"], given["old"], given["advantages"], (5, 2, 7, 1))
    for loss, bounds in (("clip", {"dual_clip": 1.15}), ("gspo", {"clip_high": 0.1, "clip_low": 0.05}), ("cispo", {})):
        clipped = LOSSES[loss](tokens, AlgorithmConfig(loss=loss, **bounds))
        assert clipped.is_clipped_high_N.any() and not clipped.is_clipped_high_N.all(), loss
        assert clipped.is_clipped_low_N.any() or loss == "gspo", loss
    dual = LOSSES["clip"](tokens, AlgorithmConfig(dual_clip=1.15))
    plain = LOSSES["clip"](tokens, AlgorithmConfig())
    assert (dual.loss_N < plain.loss_N).any() and (dual.loss_N <= plain.loss_N).all()


def test_gspo_bounds_the_mean_of_a_sequence_and_not_its_sum():
    zeros = torch.zeros(8, dtype=torch.float64)
    tokens = tokens_of(zeros + 5, zeros, zeros - 1, (8,))
    torch.testing.assert_close(LOSSES["gspo"](tokens, AlgorithmConfig(loss="gspo")).loss_N, zeros + math.exp(5))
    one = torch.zeros(8, dtype=torch.float64)
    one[3] = 24.0  # beyond the bound, and within it as a mean
    tokens = tokens_of(one, zeros, zeros - 1, (8,))
    torch.testing.assert_close(LOSSES["gspo"](tokens, AlgorithmConfig(loss="gspo")).loss_N, zeros + math.exp(3))


@pytest.mark.parametrize("loss", SHIPPED_LOSSES)
def test_where_the_ratio_is_one_every_loss_has_the_gradient_of_the_log_probability(loss):
    given = inputs()
    logprobs = given["logprobs"].requires_grad_()
    tokens = tokens_of(logprobs, logprobs.detach(), given["advantages"], (5, 2, 7, 1))
    (gradient,) = torch.autograd.grad(LOSSES[loss](tokens, AlgorithmConfig(loss=loss)).loss_N.sum(), logprobs)
    torch.testing.assert_close(gradient, -given["advantages"])


def test_gspo_clips_whole_responses():
    """Ratios 1.2 and 1.25 of one response have the mean sqrt(1.5) = 1.2247; 1.0 of another is inside. A = 1."""
    logprobs = torch.tensor([1.2, 1.25, 1.0], dtype=torch.float64).log().requires_grad_()
    zeros = torch.zeros(3, dtype=torch.float64)
    tokens = tokens_of(logprobs, zeros, zeros + 1, (2, 1))
    found = LOSSES["gspo"](tokens, AlgorithmConfig(loss="gspo", clip_high=0.22))
    (gradient,) = torch.autograd.grad(found.loss_N.sum(), logprobs)
    assert found.is_clipped_high_N.tolist() == [True, True, False]
    assert found.loss_N.tolist() == pytest.approx([-1.22, -1.22, -1.0])
    assert gradient.tolist() == [0.0, 0.0, -1.0]
    options = AlgorithmConfig(loss="gspo")
    object.__setattr__(options, "dual_clip", 1.1)  # options refuse it; only clip reads it
    worse = LOSSES["gspo"](tokens_of(logprobs, zeros, zeros - 1, (2, 1)), options)
    assert worse.loss_N.tolist() == pytest.approx([1.5**0.5, 1.5**0.5, 1.0])
    assert not worse.is_clipped_high_N.any()


@pytest.mark.parametrize("loss", SHIPPED_LOSSES)
def test_wild_ratios_stay_finite(loss):
    """In float32, as in a run: float64 has room for the exponential of 500."""
    logprobs = torch.tensor([-0.1, -500.0, -0.1], dtype=torch.float32, requires_grad=True)
    old = torch.tensor([-500.0, -0.1, -500.0], dtype=torch.float32)
    tokens = tokens_of(logprobs, old, torch.tensor([1.0, -1.0, 0.0], dtype=torch.float32), (1, 1, 1))
    found = LOSSES[loss](tokens, AlgorithmConfig(loss=loss)).loss_N
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    assert torch.isfinite(found).all() and torch.isfinite(gradient).all()


def test_estimates_of_kl_by_hand():
    """pi = 2 ref: x = ln 2. k1 = ln 2, k2 = (ln 2)^2 / 2, k3 = 1/2 - 1 + ln 2. Gradients by log pi: 1, ln 2, 1/2."""
    ln2 = torch.tensor([2.0], dtype=torch.float64).log()
    values = {"k1": (ln2, 1.0), "k2": (ln2**2 / 2, ln2.item()), "k3": (ln2 - 0.5, 0.5)}
    for name, (value, slope) in values.items():
        logprobs = (ln2 - 3.0).requires_grad_()
        found = kl_estimates(logprobs, torch.tensor([-3.0], dtype=torch.float64), KlEstimator(name))
        torch.testing.assert_close(found, value)
        assert torch.autograd.grad(found.sum(), logprobs)[0].item() == pytest.approx(slope)


def one_by_one(ratios, advantages, old=None):
    """Tokens of responses of one token each, with these ratios."""
    ratio, a = (torch.tensor(values, dtype=torch.float64) for values in (ratios, advantages))
    before = torch.zeros_like(ratio) if old is None else torch.tensor(old, dtype=torch.float64)
    return tokens_of(ratio.log() + before, before, a, (1,) * len(ratios))


def test_clips_by_hand():
    """Bounds 0.75 and 1.25, which themselves are inside; the dual clip is at 1.2 for negative advantages alone."""
    tokens = one_by_one([0.5, 0.5, 1.5, 1.5, 0.75, 1.25, 1.0, 1.5, 0.5], [1, -1, 1, -1, -2, 2, 0.5, 0, 0])
    bounds = {"clip_low": 0.25, "clip_high": 0.25}
    plain = LOSSES["clip"](tokens, AlgorithmConfig(**bounds))
    assert plain.loss_N.tolist() == pytest.approx([-0.5, 0.75, -1.25, 1.5, 1.5, -2.5, -0.5, 0, 0])
    low, high = [1], [2]
    assert plain.is_clipped_low_N.nonzero().flatten().tolist() == low
    assert plain.is_clipped_high_N.nonzero().flatten().tolist() == high
    dual = LOSSES["clip"](tokens, AlgorithmConfig(dual_clip=1.2, **bounds))
    assert dual.loss_N.tolist() == pytest.approx([-0.5, 0.75, -1.25, 1.2, 1.5, -2.5, -0.5, 0, 0])
    assert dual.is_clipped_low_N.nonzero().flatten().tolist() == low
    assert dual.is_clipped_high_N.nonzero().flatten().tolist() == [2, 3]


def test_cispo_by_hand():
    """The clipped ratio weighs the log-probability, whatever the sign of the advantage; bounds are inside."""
    tokens = one_by_one([0.5, 0.5, 1.5, 1.0], [1, -1, 2, 1], old=[-1.0, -2.0, -3.0, -4.0])
    logprobs = tokens.logprobs_N.requires_grad_()
    algorithm = AlgorithmConfig(loss="cispo", clip_low=0.25, clip_high=0.25)
    found, at_bounds = (LOSSES["cispo"](some, algorithm) for some in (tokens, one_by_one([0.75, 1.25], [1, 1])))
    assert not at_bounds.is_clipped_low_N.any() and not at_bounds.is_clipped_high_N.any()
    weights = torch.tensor([0.75, -0.75, 2.5, 1.0], dtype=torch.float64)
    assert found.loss_N.tolist() == pytest.approx((-weights * logprobs.detach()).tolist())
    assert torch.autograd.grad(found.loss_N.sum(), logprobs)[0].tolist() == pytest.approx((-weights).tolist())
    assert found.is_clipped_low_N.tolist() == [True, True, False, False]
    assert found.is_clipped_high_N.tolist() == [False, False, True, False]


def test_sapo_by_hand():
    """4 / tau * sigmoid(tau * (r - 1)), tau = 2 for advantages above 0 and 3 for others; nothing is clipped."""
    tokens = one_by_one([1.5, 1.5, 0.5, 1.0], [1, -2, 1, 1])
    sharp = type("Sharp", (AlgorithmConfig,), {"sapo_tau_positive": 2.0, "sapo_tau_negative": 3.0})
    found = LOSSES["sapo"](tokens, sharp(loss="sapo"))

    def gate(tau, ratio):
        return 4 / tau / (1 + math.exp(-tau * (ratio - 1)))

    assert found.loss_N.tolist() == pytest.approx([-gate(2, 1.5), 2 * gate(3, 1.5), -gate(2, 0.5), -gate(2, 1.0)])
    assert not found.is_clipped_low_N.any() and not found.is_clipped_high_N.any()
    assert found.is_clipped_low_N.dtype is torch.bool


def test_log_ratios_are_bounded_on_both_sides():
    values = ([0.0, -99.0, -1.0], [-99.0, 0.0, -2.0], [1.0] * 3)
    logprobs, old, advantages = (torch.tensor(value, dtype=torch.float64) for value in values)
    tokens = tokens_of(logprobs, old, advantages, (1, 1, 1))
    assert tokens.log_ratio_N.tolist() == [20.0, -20.0, 1.0]
