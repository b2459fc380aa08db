"""Promises of trainer/step/loss.py, against numbers derived by hand in the comments."""

import math
from dataclasses import fields, replace

import pytest
import torch
from fakes.trainer import MAXIMA, SUMS, VECTORS
from hypothesis import given, strategies as st

from slipstream.conf.schema import AlgorithmConfig, Correction, KlEstimator, KlPlace, Normalization, RatioBaseline
from slipstream.trainer.step.corrections import LOG_RATIO_BOUND
from slipstream.trainer.step.loss import CountedTokens, LossAccumulator, policy_loss, sft_loss
from slipstream.trainer.step.surrogates import LossTokens, clipped_loss
from slipstream.trainer.types import Denominators

TRAINER = AlgorithmConfig(ratio_baseline=RatioBaseline.trainer, correction=Correction.tis, correction_max=2.0)
ROLLOUT = AlgorithmConfig(
    ratio_baseline=RatioBaseline.rollout, correction=Correction.none, clip_low=0.2, clip_high=0.28
)
LN = math.log


def numbered(lengths):
    """(sequence_index, positions) of tokens whose sequences have these lengths, one entry a token."""
    index, positions = [], []
    while len(index) < len(lengths):
        size = lengths[len(index)]
        positions += range(size)
        index += [index[-1] + 1 if index else 0] * size
    return torch.tensor(index[: len(lengths)], dtype=torch.int64), torch.tensor(
        positions[: len(lengths)], dtype=torch.int64
    )


def run(algorithm, logprobs, rollout, advantages, *, lengths=None, staleness=None, ref=None, entropy=None, counts=None):
    """policy_loss on lists; float64 so that literal numbers compare to 1e-12. Returns (result, gradient)."""
    n = len(logprobs)
    logprobs = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    tokens = CountedTokens(
        rollout_logprobs_N=torch.tensor(rollout, dtype=torch.float64),
        advantages_N=torch.tensor(advantages, dtype=torch.float64),
        sequence_lengths_N=torch.tensor(lengths or [n] * n),
        sequence_index_N=numbered(lengths or [n] * n)[0],
        positions_N=numbered(lengths or [n] * n)[1],
        staleness_N=torch.tensor(staleness or [0] * n),
        ref_logprobs_N=None if ref is None else torch.tensor(ref, dtype=torch.float64),
    )
    counts = counts or Denominators(num_valid_tokens=max(n, 1), num_sequences=1, policy_version=5)
    entropy = torch.zeros(n) if entropy is None else torch.tensor(entropy)
    result = policy_loss(logprobs, entropy, tokens, algorithm, counts)
    result.loss.backward()
    return result, logprobs.grad.tolist()


def test_trainer_baseline_weighs_by_the_truncated_ratio():
    """exp(d) = 1.5, 3, 0.5 with correction_max 2: weights 1.5, 2, 0.5. Loss = -(1.5*1 + 2*1 + 0.5*-2) / 3 = -2.5/3; d
    loss / d logp = -w A / 3.
    """
    rollout = [-1.0, -2.0, -1.0]
    logprobs = [-1.0 + LN(1.5), -2.0 + LN(3), -1.0 + LN(0.5)]
    result, grad = run(TRAINER, logprobs, rollout, [1.0, 1.0, -2.0])
    assert result.loss.item() == pytest.approx(-2.5 / 3, rel=1e-6)
    assert grad == pytest.approx([-0.5, -2 / 3, 1 / 3], rel=1e-6)
    assert result.sums["correction/weight_sum"].item() == pytest.approx(4.0)
    assert result.sums["correction/num_truncated"].item() == 1
    assert result.sums["policy/ratio_sum"].item() == pytest.approx(5.0)


def test_rollout_baseline_clips_higher_and_lower_on_the_right_side():
    """Ratios and advantages, bounds 0.8 and 1.28; term = min(r A, clip(r) A):
    1.5, +1 -> 1.28 clipped high, no gradient      1.5, -1 -> -1.5 kept, gradient
    0.5, -1 -> -0.8 clipped low, no gradient       0.5, +1 ->  0.5 kept, gradient
    1.2, +1 ->  1.2 inside                         2.0, +1 ->  1.28 clipped high, no gradient
    Loss = -(1.28 - 1.5 - 0.8 + 0.5 + 1.2 + 1.28) / 6. d(-r A)/d logp = -r A / 6 where kept: .25, -.5 / 6, -.2."""
    ratios = [1.5, 1.5, 0.5, 0.5, 1.2, 2.0]
    result, grad = run(ROLLOUT, [LN(r) - 1 for r in ratios], [-1.0] * 6, [1.0, -1.0, -1.0, 1.0, 1.0, 1.0])
    assert result.loss.item() == pytest.approx(-1.96 / 6, rel=1e-6)
    assert grad == pytest.approx([0.0, 0.25, 0.0, -0.5 / 6, -0.2, 0.0], rel=1e-6)
    assert result.sums["policy/num_clipped_high"].item() == 2
    assert result.sums["policy/num_clipped_low"].item() == 1


def test_reference_kl_is_k3_of_reference_over_policy():
    """x = log ref - log pi = ln 2: k3 = 2 - ln 2 - 1 = 0.306853; its derivative by log pi is 1 - exp(x) = -1.
    kl_coef 0.1, one token.
    """
    algorithm = AlgorithmConfig(ratio_baseline=RatioBaseline.trainer, correction=Correction.none, kl_coef=0.1)
    result, grad = run(algorithm, [-2.0], [-2.0], [0.0], ref=[-2.0 + LN(2)])
    assert result.loss.item() == pytest.approx(0.1 * (1 - LN(2)), rel=1e-6)
    assert grad == pytest.approx([-0.1], rel=1e-6)
    assert result.sums["kl/ref_k3_sum"].item() == pytest.approx(1 - LN(2))
    with pytest.raises(ValueError, match="kl_coef"):
        run(algorithm, [-2.0], [-2.0], [0.0])


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
    logprobs = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    entropy = torch.tensor([1.0, 3.0], dtype=torch.float64, requires_grad=True)
    zeros = torch.zeros(2, dtype=torch.float64)
    tokens = CountedTokens(logprobs, zeros, torch.tensor([2, 2]), *numbered([2, 2]), torch.zeros(2, dtype=torch.int64))
    for coef in (0.1, -0.1):
        result = policy_loss(logprobs, entropy, tokens, AlgorithmConfig(entropy_coef=coef), Denominators(2, 1, 0))
        assert result.loss.item() == result.sums["loss/total_sum"].item() == pytest.approx(-coef * 2)
        (grad,) = torch.autograd.grad(result.loss, entropy)
        assert grad.tolist() == pytest.approx([-coef / 2] * 2)
        assert result.sums["loss/policy_sum"].item() == 0.0


def test_after_the_first_update_weights_and_mismatch_are_those_of_before_it():
    """pi before: 2 mu, now 3 mu. Ratio baseline trainer: L = -w pi / old A, w = min(2, 2) = 2, pi / old = 1.5 clipped
    to 1.28. Ratio baseline rollout: w = 1, pi / mu = 3 clipped to 1.28. The mismatch is log 2 in both."""
    old, now = torch.tensor([LN(2) - 1]).double(), torch.tensor([LN(3) - 1]).double()
    counts = Denominators(1, 1, 0)
    one = torch.ones(1, dtype=torch.int64)
    zero = torch.zeros(1, dtype=torch.int64)
    tokens = CountedTokens(-torch.ones(1).double(), torch.ones(1).double(), one, zero, zero, zero, None, old)
    for algorithm, wanted in ((TRAINER, -2 * 1.28), (ROLLOUT, -1.28)):
        algorithm = replace(algorithm, clip_low=0.2, clip_high=0.28)
        result = policy_loss(now, torch.zeros(1), tokens, algorithm, counts)
        assert result.loss.item() == pytest.approx(wanted, rel=1e-6)
        assert result.maxima["parity/log_ratio_max"].item() == pytest.approx(LN(2))
        assert result.sums["parity/prob_diff_sum"].item() == pytest.approx((2 - 1) * math.exp(-1))
        assert result.sums["policy/num_clipped_high"].item() == 1
        assert result.sums["policy/ratio_sum"].item() == pytest.approx(2)


def test_a_token_beyond_the_mask_has_no_policy_term_and_keeps_the_others():
    """|log ratio| of ln 3 is beyond ln 2; of ln 1.5 it is not. The penalty of KL stays: k3's gradient at 2 is -1."""
    logprobs = torch.tensor([-1 + LN(3), -1 + LN(1.5)], dtype=torch.float64, requires_grad=True)
    mu, zeros = -torch.ones(2).double(), torch.zeros(2, dtype=torch.int64)
    tokens = CountedTokens(
        mu, torch.ones(2).double(), torch.tensor([2, 2]), *numbered([2, 2]), zeros, logprobs.detach() + LN(2)
    )
    for mask, weights in ((LN(2), [0.0, 1.0]), (0.0, [1.0, 1.0])):
        algorithm = AlgorithmConfig(correction=Correction.none, kl_coef=0.5)
        result = policy_loss(logprobs, torch.zeros(2), tokens, algorithm, Denominators(2, 1, 0), mask)
        (grad,) = torch.autograd.grad(result.loss, logprobs)
        assert grad.tolist() == pytest.approx([-weight / 2 - 0.25 for weight in weights])
        assert result.sums["correction/num_masked"].item() == weights.count(0.0)


def test_a_loss_sees_every_field_of_its_tokens(monkeypatch):
    """Each of them is another tensor, and none stands in another's place."""
    seen = {}
    names = ("rollout_logprobs_N", "advantages_N", "sequence_lengths_N", "sequence_index_N", "positions_N",
             "staleness_N", "ref_logprobs_N", "old_logprobs_N")  # fmt: skip
    floats = {"rollout_logprobs_N", "advantages_N", "ref_logprobs_N", "old_logprobs_N"}
    given = {
        name: torch.tensor([-1.0 - place / 16, -2.0]) if name in floats else torch.tensor([2 + place, 3])
        for place, name in enumerate(names)
    }
    given["sequence_index_N"] = torch.tensor([0, 1])

    def loss(tokens, algorithm):
        seen.update({field.name: getattr(tokens, field.name) for field in fields(LossTokens)})
        return clipped_loss(tokens, algorithm)

    monkeypatch.setattr("slipstream.trainer.step.loss.loss_function", lambda name: loss)
    logprobs, entropy = torch.tensor([-0.5, -0.75]), torch.tensor([4.0, 5.0], requires_grad=True)
    for algorithm, old in ((TRAINER, "old_logprobs_N"), (ROLLOUT, "rollout_logprobs_N")):
        policy_loss(logprobs, entropy, CountedTokens(**given), algorithm, Denominators(2, 2, 9))
        weights = seen.pop("weights_N")
        assert seen["entropy_N"].requires_grad
        wanted = {**given, "old_logprobs_N": given[old], "logprobs_N": logprobs, "entropy_N": entropy}
        assert {name: value.tolist() for name, value in seen.items()} == {
            name: value.tolist() for name, value in wanted.items()
        }
        ratio = (given["old_logprobs_N"] - given["rollout_logprobs_N"]).exp()
        assert weights.tolist() == pytest.approx((ratio if algorithm is TRAINER else torch.ones(2)).tolist())


def test_token_and_sequence_normalization():
    """Sequences of 1 and 3 tokens, A = 1 and 2, on-policy. Token: -(1 + 6)/4. Sequence: -(1/1 + 6/3)/2 = -1.5."""
    counts = Denominators(num_valid_tokens=4, num_sequences=2, policy_version=0)
    arguments = ([-1.0] * 4, [-1.0] * 4, [1.0, 2.0, 2.0, 2.0])
    by_token, _ = run(TRAINER, *arguments, lengths=[1, 3, 3, 3], counts=counts)
    algorithm = AlgorithmConfig(normalization=Normalization.sequence)
    by_sequence, grad = run(algorithm, *arguments, lengths=[1, 3, 3, 3], counts=counts)
    assert by_token.loss.item() == pytest.approx(-1.75, rel=1e-6)
    assert by_sequence.loss.item() == pytest.approx(-1.5, rel=1e-6)
    assert grad == pytest.approx([-0.5, -1 / 3, -1 / 3, -1 / 3], rel=1e-6)


def test_constant_normalization_knows_nothing_of_lengths():
    """Sequences of 1 and 3 tokens of 5 that are possible, A = 1 and 2, on-policy: -(1 + 3 * 2) / (2 * 5) = -0.7. A
    longer batch of the same tokens has a larger loss, in the same unit: two more of A = 2 make -(7 + 4) / 10."""
    algorithm = AlgorithmConfig(normalization=Normalization.constant)
    for lengths, advantages, wanted in (([1, 3, 3, 3], [1.0, 2, 2, 2], -0.7), ([1] + [5] * 5, [1.0] + [2] * 5, -1.1)):
        n = len(lengths)
        counts = Denominators(num_valid_tokens=n, num_sequences=2, policy_version=0, num_possible_tokens=10)
        result, grad = run(algorithm, [-1.0] * n, [-1.0] * n, advantages, lengths=lengths, counts=counts)
        assert result.loss.item() == pytest.approx(wanted, rel=1e-6)
        assert grad == pytest.approx([-advantage / 10 for advantage in advantages], rel=1e-6)


def test_parity_is_reported_apart_for_fresh_and_stale_tokens():
    """d = ln 2 fresh: k3 = 1 - ln 2. d = -ln 2 stale: 0.5 + ln 2 - 1."""
    result, _ = run(
        TRAINER, [-1 + LN(2), -1.0, -1 - LN(2)], [-1.0] * 3, [0.0] * 3, staleness=[0, 0, 2], entropy=[1.0, 2.0, 4.0]
    )
    sums, maxima = result.sums, result.maxima
    assert sums["parity/k3_sum"].item() == pytest.approx(1 - LN(2))
    assert sums["parity/k3_sum_stale"].item() == pytest.approx(LN(2) - 0.5)
    assert (sums["parity/num_tokens"].item(), sums["parity/num_tokens_stale"].item()) == (2, 1)
    assert maxima["parity/log_ratio_max"].item() == pytest.approx(LN(2))
    assert maxima["parity/log_ratio_max_stale"].item() == pytest.approx(LN(2))
    assert sums["policy/entropy_sum"].item() == 7.0


def test_k3_of_tiny_log_ratios_keeps_its_digits():
    """k3(d) = d^2/2 + d^3/6 + ...; at d = 1e-5 that is 5.0000167e-11, far below float32's rounding of exp(d) - 1."""
    result, _ = run(TRAINER, [-1.0 + 1e-5], [-1.0], [0.0])
    assert result.sums["parity/k3_sum"].item() == pytest.approx(5.0000167e-11, rel=1e-5)


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
    tokens = CountedTokens(
        rollout, advantages, lengths, *numbered(lengths.tolist()), torch.zeros(n, dtype=torch.int64), ref
    )
    result = policy_loss(logp, torch.zeros(n), tokens, algorithm, counts)
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
    lengths = [size for size in sizes for _ in range(size)]
    owner_of_token = [owner for size, owner in zip(sizes, owners, strict=True) for _ in range(size)]
    staleness = [index % 2 for index in range(sum(sizes))]
    counts = Denominators(sum(sizes), len(sizes), policy_version=9, num_possible_tokens=5 * len(sizes))

    def part(rows):
        pick = lambda values: [values[row] for row in rows]  # noqa: E731
        given = map(pick, (logprobs, rollout, advantages))
        return run(algorithm, *given, lengths=pick(lengths), staleness=pick(staleness), counts=counts)

    whole = LossAccumulator()
    result, whole_grad = part(range(sum(sizes)))
    whole.add(result)
    parts, parts_grad = LossAccumulator(), [0.0] * sum(sizes)
    for owner in range(3):  # an owner without sequences is an empty microbatch
        rows = [row for row, other in enumerate(owner_of_token) if other == owner]
        result, grad = part(rows)
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


def test_no_counted_token_gives_a_zero_loss_with_a_graph():
    result, grad = run(TRAINER, [], [], [])
    assert result.loss.item() == 0.0 and grad == []
    assert all(value.item() == 0 for value in [*result.sums.values(), *result.maxima.values()])


@pytest.mark.parametrize("normalization", [Normalization.token, Normalization.sequence])
def test_sft_loss_is_cross_entropy_over_the_counted_tokens(normalization):
    """Two sequences of 3 and 1 counted tokens: token weighs each by 1/4, sequence by 1/6, 1/6, 1/6 and 1/2."""
    logits = torch.randn(4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    targets, lengths = torch.tensor([1, 6, 0, 3]), torch.tensor([3, 3, 3, 1])
    shares = {Normalization.token: [1 / 4] * 4, Normalization.sequence: [1 / 6] * 3 + [1 / 2]}[normalization]
    wanted = torch.nn.functional.cross_entropy(logits, targets, reduction="none") @ torch.tensor(shares).double()
    (wanted_grad,) = torch.autograd.grad(wanted, logits)
    zeros = torch.zeros(4)
    tokens = CountedTokens(zeros, zeros, lengths, *numbered(lengths.tolist()), torch.zeros(4, dtype=torch.int64))
    logprobs = logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    algorithm = AlgorithmConfig(normalization=normalization)
    entropy = torch.tensor([0.5, 1.0, 2.0, 4.0])
    result = sft_loss(logprobs, entropy, tokens, algorithm, Denominators(4, 2, 0))
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
