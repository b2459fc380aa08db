"""Promises of trainer/step/preference_loss.py: TRL's values, and a pair's own numbers by hand."""

import json
import math
from pathlib import Path

import pytest
import torch
from oracles.cases import DPO_CASES, our_dpo

from slipstream.conf.schema import AlgorithmConfig, Objective
from slipstream.trainer.step.loss import CountedTokens
from slipstream.trainer.step.preference_loss import dpo_loss
from slipstream.trainer.types import Denominators

RECORDED = json.loads((Path(__file__).parents[3] / "oracles" / "recorded.json").read_text())["cases"]
DPO = AlgorithmConfig(objective=Objective.dpo, dpo_beta=0.5)


@pytest.mark.parametrize("name", DPO_CASES)
def test_the_loss_and_its_gradient_equal_trls(name):
    """Recorded from TRL's own function (`make oracles` computes it again)."""
    for mine, theirs in zip(our_dpo(DPO_CASES[name]), RECORDED[name], strict=True):
        torch.testing.assert_close(mine, torch.tensor(theirs, dtype=torch.float64), rtol=1e-6, atol=1e-9)


def _loss(logprobs, ref, lengths, num_sequences):
    sizes = torch.tensor(lengths, dtype=torch.int64)
    index = torch.repeat_interleave(torch.arange(len(lengths)), sizes)
    zeros = torch.zeros(len(index))
    tokens = CountedTokens(
        zeros, zeros, torch.repeat_interleave(sizes, sizes), index, index, index,
        ref_logprobs_N=None if ref is None else torch.tensor(ref),
    )  # fmt: skip
    return dpo_loss(logprobs, zeros, tokens, DPO, Denominators(len(index), num_sequences, 0))


def test_rewards_margins_and_preferences_are_those_of_the_pairs():
    """beta 0.5. Pair 0: chosen -1 -1 against -2 -2 is 0.5 * 2 = 1, rejected -3 against -1 is -1: margin 2. Pair 1: 0
    and 0.5 * 1: margin -0.5. Four pairs are in the batch."""
    logprobs = torch.tensor([-1.0, -1.0, -3.0, -1.0, -1.0], requires_grad=True)
    found = _loss(logprobs, [-2.0, -2.0, -1.0, -1.0, -2.0], (2, 1, 1, 1), num_sequences=8)
    losses = [math.log1p(math.exp(-2)), math.log1p(math.exp(0.5))]
    assert found.loss.item() == pytest.approx(sum(losses) / 4)
    sums = {name: value.item() for name, value in found.sums.items() if name.startswith("dpo/")}
    assert sums == pytest.approx(
        {
            "dpo/num_pairs": 2, "dpo/loss_sum": sum(losses), "dpo/num_preferred": 1, "dpo/margin_sum": 1.5,
            "dpo/chosen_reward_sum": 1.0, "dpo/rejected_reward_sum": -0.5,
        }
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(found.loss, logprobs)
    first, second = (0.5 / 4 / (1 + math.exp(margin)) for margin in (2, -0.5))  # beta sigmoid(-margin) / pairs
    assert gradient.tolist() == pytest.approx([-first, -first, first, -second, second])


def test_a_microbatch_without_a_pair_is_a_zero_with_a_graph():
    logprobs = torch.zeros(0, requires_grad=True)
    found = _loss(logprobs, [], (), num_sequences=2)
    found.loss.backward()
    assert found.loss.item() == 0 and found.sums["dpo/num_pairs"].item() == 0


def test_pairs_that_are_far_apart_stay_finite():
    logprobs = torch.tensor([-5e4, -0.1], requires_grad=True)
    found = _loss(logprobs, [-0.1, -5e4], (1, 1), num_sequences=2)
    (gradient,) = torch.autograd.grad(found.loss, logprobs)
    assert found.loss.item() == pytest.approx(0.5 * 1e5, rel=1e-4)
    assert gradient.tolist() == pytest.approx([-0.5, 0.5])


def test_without_a_reference_it_is_refused():
    with pytest.raises(ValueError, match=r"algorithm.objective=dpo needs the reference"):
        _loss(torch.zeros(2), None, (1, 1), num_sequences=2)
