"""Promises of trainer/step/loss.py, against numbers derived by hand in the comments; of DPO, against TRL's values."""

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from fakes.trainer import MAXIMA, SUMS, VECTORS
from hypothesis import given, strategies as st
from oracles.cases import DPO_CASES, loss_tokens, our_dpo

from slipstream.conf.schema import (
    AlgorithmConfig,
    Correction,
    KlEstimator,
    KlPlace,
    Normalization,
    Objective,
    RatioBaseline,
)
from slipstream.trainer.step.corrections import LOG_RATIO_BOUND
from slipstream.trainer.step.loss import LossAccumulator, PolicyLoss, dpo_loss, policy_loss, sft_loss
from slipstream.trainer.step.surrogates import LossTokens, clipped_loss
from slipstream.trainer.types import Denominators

TRAINER = AlgorithmConfig(ratio_baseline=RatioBaseline.trainer, correction=Correction.tis, correction_max=2.0)
ROLLOUT = AlgorithmConfig(
    ratio_baseline=RatioBaseline.rollout, correction=Correction.none, clip_low=0.2, clip_high=0.28
)
LN = math.log
DPO = AlgorithmConfig(objective=Objective.dpo, dpo_beta=0.5)
RECORDED = json.loads((Path(__file__).parents[3] / "oracles" / "recorded.json").read_text())["cases"]


def run(
    algorithm,
    logprobs,
    rollout,
    advantages,
    *,
    sizes=None,
    staleness=None,
    ref=None,
    entropy=None,
    counts=None,
    mask=0.0,
):
    """policy_loss on lists; float64 so that literal numbers compare to 1e-12. Returns (result, gradient)."""
    wide = lambda values: torch.tensor(values, dtype=torch.float64)  # noqa: E731
    logprobs, n = wide(logprobs).requires_grad_(), len(logprobs)
    more = {"ref_logprobs_N": wide(ref)} if ref else {}
    more |= {"entropy_N": wide(entropy)} if entropy else {}
    more |= {"staleness_N": torch.tensor(staleness)} if staleness else {}
    tokens = loss_tokens(
        sizes or [n] * (n > 0), logprobs, rollout_logprobs_N=wide(rollout), advantages_N=wide(advantages), **more
    )
    counts = counts or Denominators(num_valid_tokens=max(n, 1), num_sequences=1, policy_version=5)
    result = policy_loss(tokens, algorithm, counts, mask)
    result.loss.backward()
    return result, logprobs.grad.tolist()


def test_kl_in_the_reward_is_measured_and_has_no_gradient():
    """It was subtracted from the rewards; here it would count twice. The metric is k3 by whatever is estimated."""
    for estimator in KlEstimator:
        shared = {"kl_coef": 0.5, "correction": Correction.none, "kl_estimator": estimator}
        inside = AlgorithmConfig(kl_in=KlPlace.reward, **shared)
        result, grad = run(inside, [-2.0, -1.0], [-2.0, -1.0], [1.0, 0.0], ref=[-2.0 + LN(2), -1.0])
        assert result.loss.item() == pytest.approx(-0.5) and grad == pytest.approx([-0.5, 0.0])
        assert result.sums["kl/ref_k3_sum"].item() == pytest.approx(1 - LN(2))
        result, grad = run(AlgorithmConfig(**shared), [-2.0], [-2.0], [0.0], ref=[-2.0 + LN(2)])
        assert result.sums["kl/ref_k3_sum"].item() == pytest.approx(1 - LN(2))
        assert grad != [0.0], "in the loss it has"
        # x = log pi - log ref = -ln 2
        value = {KlEstimator.k1: -LN(2), KlEstimator.k2: LN(2) ** 2 / 2, KlEstimator.k3: 1 - LN(2)}[estimator]
        assert result.loss.item() == pytest.approx(0.5 * value)
    plain, _ = run(AlgorithmConfig(kl_coef=0.0), [-2.0], [-2.0], [1.0], ref=[-1.0])
    assert plain.sums["kl/ref_k3_sum"].item() == 0.0


def test_entropy_is_added_and_weighed_like_a_token():
    """Two tokens of entropy 1 and 3: the loss is lower by 0.1 * 4 / 2; each entropy has the gradient -0.1 / 2."""
    entropy = torch.tensor([1.0, 3.0], dtype=torch.float64, requires_grad=True)
    tokens = loss_tokens([2], torch.tensor([-1.0, -1.0], dtype=torch.float64), entropy_N=entropy)
    for coef in (0.1, -0.1):
        result = policy_loss(tokens, AlgorithmConfig(entropy_coef=coef), Denominators(2, 1, 0))
        assert result.loss.item() == result.sums["loss/total_sum"].item() == pytest.approx(-coef * 2)
        (grad,) = torch.autograd.grad(result.loss, entropy)
        assert grad.tolist() == pytest.approx([-coef / 2] * 2)
        assert (result.sums["loss/policy_sum"].item(), result.sums["policy/entropy_sum"].item()) == (0.0, 4.0)


def test_after_the_first_update_weights_and_mismatch_are_those_of_before_it():
    """pi before: 2 mu, now 3 mu. Ratio baseline trainer: L = -w pi / old A, w = min(2, 2) = 2, pi / old = 1.5 clipped
    to 1.28. Ratio baseline rollout: w = 1, pi / mu = 3 clipped to 1.28. The mismatch is log 2 in both."""
    old, now, one = (torch.tensor([value]).double() for value in (LN(2) - 1, LN(3) - 1, 1.0))
    tokens = loss_tokens([1], now, old_logprobs_N=old, rollout_logprobs_N=-one, advantages_N=one)
    for algorithm, wanted in ((TRAINER, -2 * 1.28), (ROLLOUT, -1.28)):
        algorithm = replace(algorithm, clip_low=0.2, clip_high=0.28)
        result = policy_loss(tokens, algorithm, Denominators(1, 1, 0))
        assert result.loss.item() == pytest.approx(wanted, rel=1e-6)
        assert result.maxima["parity/log_ratio_max"].item() == pytest.approx(LN(2))
        assert result.sums["parity/prob_diff_sum"].item() == pytest.approx((2 - 1) * math.exp(-1))
        clipped = [result.sums[f"policy/num_clipped_{side}"].item() for side in ("low", "high")]
        assert clipped == [0, 1]
        assert result.sums["policy/ratio_sum"].item() == pytest.approx(2)


def test_a_token_beyond_the_mask_has_no_policy_term_and_keeps_the_others():
    """|log ratio| of ln 3 is beyond ln 2; of ln 1.5 it is not. The penalty of KL stays: k3's gradient at 2 is -1."""
    algorithm = AlgorithmConfig(correction=Correction.none, kl_coef=0.5)
    logprobs = [-1 + LN(3), -1 + LN(1.5)]
    for mask, weights in ((LN(2), [0.0, 1.0]), (0.0, [1.0, 1.0])):
        ref = [value + LN(2) for value in logprobs]
        result, grad = run(algorithm, logprobs, [-1.0, -1.0], [1.0, 1.0], ref=ref, mask=mask)
        assert grad == pytest.approx([-weight / 2 - 0.25 for weight in weights])
        assert result.sums["correction/num_masked"].item() == weights.count(0.0)


def test_a_loss_sees_every_field_of_its_tokens(monkeypatch):
    """Each of them is another tensor, and none stands in another's place."""
    seen = {}
    floats = ("logprobs_N", "old_logprobs_N", "rollout_logprobs_N", "advantages_N", "entropy_N", "ref_logprobs_N")
    given = {name: torch.tensor([-1.0 - place / 16, -2.0]) for place, name in enumerate(floats)}
    given["entropy_N"].requires_grad_()
    others = ("sequence_lengths_N", "positions_N", "staleness_N")
    given |= {name: torch.tensor([2 + place, 3]) for place, name in enumerate(others)}
    given["sequence_index_N"] = torch.tensor([0, 1])

    def loss(tokens, algorithm):
        seen.update({field.name: getattr(tokens, field.name) for field in fields(LossTokens)})
        return clipped_loss(tokens, algorithm)

    monkeypatch.setattr("slipstream.trainer.step.loss.loss_function", lambda name: loss)
    for algorithm, old in ((TRAINER, "old_logprobs_N"), (ROLLOUT, "rollout_logprobs_N")):
        tokens = LossTokens(weights_N=torch.full((2,), 9.0), **given)
        policy_loss(tokens, algorithm, Denominators(2, 2, 9))
        weights = seen.pop("weights_N")
        assert seen["entropy_N"].requires_grad
        wanted = {**given, "old_logprobs_N": given[old]}
        assert {name: value.tolist() for name, value in seen.items()} == {
            name: value.tolist() for name, value in wanted.items()
        }
        ratio = (given["old_logprobs_N"] - given["rollout_logprobs_N"]).exp()
        assert weights.tolist() == pytest.approx((ratio if algorithm is TRAINER else torch.ones(2)).tolist())


@pytest.mark.parametrize("algorithm", [TRAINER, ROLLOUT])
def test_wild_log_ratios_give_finite_losses_and_gradients(algorithm):
    result, grad = run(algorithm, [-0.1, -500.0, -0.1], [-500.0, -0.1, -500.0], [1.0, -1.0, 0.0])
    assert math.isfinite(result.loss.item()) and all(map(math.isfinite, grad))
    assert result.maxima["parity/log_ratio_max"].item() == LOG_RATIO_BOUND


@pytest.mark.parametrize(
    "algorithm",
    [
        TRAINER,
        ROLLOUT,
        AlgorithmConfig(kl_coef=0.3, normalization=Normalization.sequence),
        AlgorithmConfig(kl_coef=0.3, normalization=Normalization.constant),
    ],
)
def test_gradient_is_that_of_a_plain_float64_formula(algorithm):
    """The formulas of the module docstring once more, in the most literal form, differentiated by autograd."""
    generator = torch.Generator().manual_seed(0)
    n, draw = 40, lambda: torch.randn(40, generator=generator, dtype=torch.float64)
    logp = (-1 + 0.4 * draw()).requires_grad_()
    rollout, ref, advantages = -1 + 0.4 * draw(), -1 + 0.4 * draw(), draw()
    lengths = torch.tensor([8] * 8 + [32] * 32)
    counts = Denominators(num_valid_tokens=40, num_sequences=2, policy_version=0, num_possible_tokens=100)
    if algorithm.ratio_baseline is RatioBaseline.rollout:
        ratio = torch.exp(logp - rollout)
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    else:
        surrogate = torch.exp(logp.detach() - rollout).clamp(max=2.0) * advantages * torch.exp(logp - logp.detach())
    kl = torch.exp(ref - logp) - (ref - logp) - 1
    per_token = -surrogate + algorithm.kl_coef * kl
    if algorithm.normalization is Normalization.sequence:
        want = sum(per_token[lengths == size].mean() for size in (8, 32)) / 2
    elif algorithm.normalization is Normalization.constant:
        want = sum(per_token[lengths == size].sum() / 50 for size in (8, 32)) / 2  # 50 tokens at most
    else:
        want = per_token.sum() / n
    assert isinstance(want, torch.Tensor)
    (want_grad,) = torch.autograd.grad(want, logp)
    tokens = loss_tokens([8, 32], logp, rollout_logprobs_N=rollout, advantages_N=advantages, ref_logprobs_N=ref)
    result = policy_loss(tokens, algorithm, counts)
    (got_grad,) = torch.autograd.grad(result.loss, logp)
    torch.testing.assert_close(result.loss, want, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(got_grad, want_grad, rtol=1e-6, atol=1e-9)


@given(st.data())
def test_sums_do_not_depend_on_the_split_into_microbatches_or_ranks(data):
    """Losses, gradients and stats of any partition of the sequences add up to those of the whole."""
    others = [AlgorithmConfig(normalization=one) for one in (Normalization.sequence, Normalization.constant)]
    algorithm = data.draw(st.sampled_from([TRAINER, ROLLOUT, *others]))
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    owners = [data.draw(st.integers(0, 2)) for _ in sizes]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    logprobs, rollout, advantages = (torch.randn(sum(sizes), generator=generator).tolist() for _ in range(3))
    owner_of_token = [owner for size, owner in zip(sizes, owners, strict=True) for _ in range(size)]
    staleness = [index % 2 for index in range(sum(sizes))]
    counts = Denominators(sum(sizes), len(sizes), policy_version=9, num_possible_tokens=5 * len(sizes))

    def part(rows, sizes):
        pick = lambda values: [values[row] for row in rows]  # noqa: E731
        given = map(pick, (logprobs, rollout, advantages))
        return run(algorithm, *given, sizes=sizes, staleness=pick(staleness), counts=counts)

    whole = LossAccumulator()
    result, whole_grad = part(range(sum(sizes)), sizes)
    whole.add(result)
    parts, parts_grad = LossAccumulator(), [0.0] * sum(sizes)
    for owner in range(3):  # an owner without sequences is an empty microbatch
        rows = [row for row, other in enumerate(owner_of_token) if other == owner]
        result, grad = part(rows, [size for size, other in zip(sizes, owners, strict=True) if other == owner])
        parts.add(result)
        for row, value in zip(rows, grad, strict=True):
            parts_grad[row] = value
    assert parts_grad == pytest.approx(whole_grad, rel=1e-9, abs=1e-12)
    assert parts.result().sums == pytest.approx(whole.result().sums, rel=1e-5, abs=1e-7)
    assert parts.result().maxima == pytest.approx(whole.result().maxima)
    for name, vector in whole.result().vectors.items():
        assert parts.result().vectors[name] == pytest.approx(vector), name


def test_sums_are_those_that_a_row_is_made_of():
    """The list that tests of the rows start from, too."""
    result, _ = run(TRAINER, [-1.0], [-1.0], [1.0])
    assert result.sums.keys() == set(SUMS)
    assert {value.dtype for value in result.sums.values()} == {torch.float64}, "also counts: one copy to the host"
    assert result.maxima.keys() == set(MAXIMA)
    assert {name: len(vector) for name, vector in result.vectors.items()} == VECTORS


@pytest.mark.parametrize("normalization", [Normalization.token, Normalization.sequence])
def test_sft_loss_is_cross_entropy_over_the_counted_tokens(normalization):
    """Two sequences of 3 and 1 counted tokens: token weighs each by 1/4, sequence by 1/6, 1/6, 1/6 and 1/2."""
    logits = torch.randn(4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    targets = torch.tensor([1, 6, 0, 3])
    shares = {Normalization.token: [1 / 4] * 4, Normalization.sequence: [1 / 6] * 3 + [1 / 2]}[normalization]
    wanted = torch.nn.functional.cross_entropy(logits, targets, reduction="none") @ torch.tensor(shares).double()
    (wanted_grad,) = torch.autograd.grad(wanted, logits)
    logprobs = logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    tokens = loss_tokens([3, 1], logprobs, entropy_N=torch.tensor([0.5, 1.0, 2.0, 4.0]))
    result = sft_loss(tokens, AlgorithmConfig(normalization=normalization), Denominators(4, 2, 0))
    (grad,) = torch.autograd.grad(result.loss, logits)
    assert result.loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert torch.allclose(grad, wanted_grad, rtol=1e-6)
    assert {name: value.item() for name, value in result.sums.items()} == pytest.approx(
        {
            "loss/total_sum": wanted.item(),
            "policy/num_tokens": 4,
            "policy/entropy_sum": 7.5,
            "sft/nll_sum": -logprobs.sum().item(),
        }
    )


@pytest.mark.parametrize("name", DPO_CASES)
def test_the_loss_and_its_gradient_equal_trls(name):
    """Recorded from TRL's own function (`make oracles` computes it again)."""
    for mine, theirs in zip(our_dpo(DPO_CASES[name]), RECORDED[name], strict=True):
        torch.testing.assert_close(mine, torch.tensor(theirs, dtype=torch.float64), rtol=1e-6, atol=1e-9)


def dpo_of(logprobs, ref, lengths, num_sequences):
    tokens = loss_tokens(lengths, logprobs, ref_logprobs_N=torch.tensor(ref))
    return dpo_loss(tokens, DPO, Denominators(len(logprobs), num_sequences, 0))


def test_rewards_margins_and_preferences_are_those_of_the_pairs():
    """beta 0.5. Pair 0: chosen -1 -1 against -2 -2 is 0.5 * 2 = 1, rejected -3 against -1 is -1: margin 2. Pair 1: 0
    and 0.5 * 1: margin -0.5. Four pairs are in the batch."""
    logprobs = torch.tensor([-1.0, -1.0, -3.0, -1.0, -1.0], requires_grad=True)
    found = dpo_of(logprobs, [-2.0, -2.0, -1.0, -1.0, -2.0], (2, 1, 1, 1), num_sequences=8)
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
    found = dpo_of(logprobs, [], (), num_sequences=2)
    found.loss.backward()
    assert found.loss.item() == 0 and found.sums["dpo/num_pairs"].item() == 0


def test_pairs_that_are_far_apart_stay_finite():
    logprobs = torch.tensor([-5e4, -0.1], requires_grad=True)
    found = dpo_of(logprobs, [-0.1, -5e4], (1, 1), num_sequences=2)
    (gradient,) = torch.autograd.grad(found.loss, logprobs)
    assert found.loss.item() == pytest.approx(0.5 * 1e5, rel=1e-4)
    assert gradient.tolist() == pytest.approx([-0.5, 0.5])


def test_sums_and_vectors_add_up_and_maxima_do_not():
    """In float64: no float32 is the sum of `other`."""
    accumulated = LossAccumulator()
    for a, b in ((1.0, 5.0), (2.0, 3.0)):
        sums = {"s": torch.tensor(a), "other": torch.tensor(2.0**24 + 1, dtype=torch.float64)}
        vectors = {"v": torch.tensor([a, b]), "w": torch.tensor([b])}
        part = PolicyLoss(torch.zeros(()), sums, {"m": torch.tensor(b)}, vectors)
        accumulated.add(part)
        accumulated.add(part.uncounted())
    stats = accumulated.result()
    assert (stats.sums, stats.maxima) == ({"s": 3.0, "other": 2.0**25 + 2}, {"m": 5.0})
    assert stats.vectors == {"v": [3.0, 8.0], "w": [8.0]}
    other_rank = LossAccumulator()
    other_rank.add(part.uncounted())
    stats = other_rank.result()
    assert (stats.sums, stats.maxima) == ({"s": 0.0, "other": 0.0}, {"m": 3.0})
    assert stats.vectors == {"v": [0.0, 0.0], "w": [0.0]}, "as many as the rank that counts them has"
