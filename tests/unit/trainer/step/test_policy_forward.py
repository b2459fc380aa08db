"""What a loss is given of a microbatch, and what is kept of it before a step's first update. The decoder is played."""

from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases.rank_helpers import make_rank
from torch import Tensor

from slipstream.conf.schema import AlgorithmConfig, KlEstimator, KlPlace, ParityConfig
from slipstream.trainer.parallel import ParallelLayout
from slipstream.trainer.step.loss import PolicyLoss
from slipstream.trainer.step.microbatches import collate
from slipstream.trainer.step.policy_forward import PolicyForward
from slipstream.trainer.types import Denominators, Sample


def sample_of(token_ids: list[int], num_prompt: int, **more: Any) -> Sample:
    mask = np.arange(len(token_ids)) >= num_prompt
    values = np.where(mask, np.array(token_ids) / 10, 0).astype(np.float32)
    return Sample(np.array(token_ids, np.int32), mask, -values, values, 3, **more)


SAMPLES = [sample_of([7, 8, 9], 1), sample_of([4, 5], 1)]


class Played:
    """Decoder and reference: a token's log-probability is minus the token before it, the reference's ten less."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.layout = ParallelLayout.single("cpu")

    def __call__(
        self, token_ids: Tensor, positions: Tensor, cu_seqlens: Tensor, routes: Any, *, by: Any, most_tokens: int | None
    ) -> Tensor:
        self.order.append(("policy" if by is None else "reference") + (", routed" if routes is not None else ""))
        assert positions.tolist() == [0, 1, 2, 0, 1] and cu_seqlens.tolist() == [0, 3, 5]
        if routes is not None:
            routes.flipped.extend([torch.tensor(1), torch.tensor(2)])
        return -(token_ids + (0 if by is None else 10)).float()[:, None]

    def logprobs(self, hidden_NH: Tensor, *given: Any, **more: Any) -> tuple[Tensor, Tensor]:
        self.differentiates_entropy = more["differentiate_entropy"]
        return hidden_NH[:, 0].requires_grad_(), hidden_NH[:, 0] * 0.5

    @contextmanager
    def active(self):
        yield "by the reference"


def forward_of(played: Played, seen: list[Any], *, has_reference: bool, **algorithm: Any) -> PolicyForward:
    def loss_of(*given: Any) -> PolicyLoss:
        seen.append(given)
        return PolicyLoss(given[0].logprobs_N.sum(), {})

    parity = ParityConfig(mask_log_ratio=2.5)
    options = make_rank(algorithm=AlgorithmConfig(**algorithm), parity=parity, is_loaded=False)._options
    decoder: Any = played
    return PolicyForward(decoder, decoder if has_reference else None, loss_of, options)


DENOMINATORS = Denominators(num_valid_tokens=3, num_sequences=2, policy_version=5)


@pytest.mark.parametrize("coef", [-0.1, 0.0, 0.1])
def test_the_entropy_has_a_gradient_where_it_is_in_the_loss(coef: float) -> None:
    played, seen = Played(), []
    forward_of(played, seen, has_reference=False, entropy_coef=coef).loss(collate(SAMPLES, 5), DENOMINATORS)
    assert played.differentiates_entropy == (coef != 0) and seen[0][0].ref_logprobs_N is None


def test_a_loss_is_given_each_counted_token_and_the_reference_runs_first() -> None:
    played, seen = Played(), []
    forward = forward_of(played, seen, has_reference=True)
    part, before = forward.loss(collate(SAMPLES, policy_version=5), DENOMINATORS)
    assert played.order == ["reference", "policy"]
    ((tokens, algorithm, denominators, mask_log_ratio),) = seen
    assert tokens.logprobs_N.tolist() == before.tolist() == [-7, -8, -4] and not before.requires_grad
    assert tokens.entropy_N.tolist() == [-3.5, -4, -2] and tokens.old_logprobs_N is before
    assert (algorithm, denominators, mask_log_ratio) == (forward.options.algorithm, DENOMINATORS, 2.5)
    assert tokens.ref_logprobs_N.tolist() == [-17, -18, -14]
    assert tokens.rollout_logprobs_N.tolist() == pytest.approx([-0.8, -0.9, -0.5])
    assert tokens.advantages_N.tolist() == pytest.approx([0.8, 0.9, 0.5])
    assert (tokens.sequence_lengths_N.tolist(), tokens.sequence_index_N.tolist()) == ([2, 2, 1], [0, 0, 1])
    assert (tokens.positions_N.tolist(), tokens.staleness_N.tolist()) == ([0, 1, 0], [2, 2, 2])
    assert part.sums == {}


def test_what_was_scored_before_is_not_computed_again() -> None:
    def scored(sample: Sample, old: float, ref: float) -> Sample:
        values = np.where(sample.loss_mask, 1, 0).astype(np.float32)
        return replace(sample, old_logprobs=old * values, ref_logprobs=ref * values)

    played, seen = Played(), []
    samples = [scored(SAMPLES[0], -1, -2), scored(SAMPLES[1], -3, -4)]
    _, before = forward_of(played, seen, has_reference=True).loss(collate(samples, 3), DENOMINATORS)
    assert played.order == ["policy"] and before.tolist() == [-1, -1, -3]
    tokens = seen[0][0]
    assert (tokens.old_logprobs_N.tolist(), tokens.ref_logprobs_N.tolist()) == ([-1, -1, -3], [-2, -2, -4])


def test_routes_that_were_recorded_are_replayed_and_counted() -> None:
    def routed(sample: Sample) -> Sample:
        size = sample.num_tokens
        return replace(
            sample, routed_experts=np.zeros((size, 2, 1), np.uint8), has_route=np.arange(size) < size - 1
        )  # fmt: skip

    played, seen = Played(), []
    micro = collate([routed(one) for one in SAMPLES], 3)
    part, _ = forward_of(played, seen, has_reference=True).loss(micro, DENOMINATORS)
    assert played.order == ["reference, routed", "policy, routed"]
    assert float(part.sums["parity/num_flipped"]) == 3
    assert float(part.sums["parity/num_routings"]) == 3 * 2, "of three tokens, at two layers"


@pytest.mark.parametrize(
    ("has_reference", "place", "has_kl"),
    [(False, KlPlace.loss, False), (True, KlPlace.loss, False), (True, KlPlace.reward, True)],
)
def test_scores_are_cut_by_sample_and_have_what_rewards_lose(has_reference: bool, place: KlPlace, has_kl: bool) -> None:
    forward = forward_of(
        Played(), [], has_reference=has_reference, kl_coef=0.1, kl_in=place, kl_estimator=KlEstimator.k1
    )
    first, second = forward.scores(SAMPLES, 3)
    assert (first.logprobs.tolist(), second.logprobs.tolist()) == ([-7, -8], [-4])
    if not has_reference:
        assert first.ref_logprobs is None and second.kl_estimates is None
        return
    assert first.ref_logprobs is not None and first.ref_logprobs.tolist() == [-17, -18]
    assert second.ref_logprobs is not None and second.ref_logprobs.tolist() == [-14]
    assert (first.kl_estimates is not None) == has_kl
    if first.kl_estimates is not None and second.kl_estimates is not None:  # log pi - log of the reference
        assert (first.kl_estimates.tolist(), second.kl_estimates.tolist()) == ([10, 10], [10])
