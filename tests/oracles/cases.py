"""Losses and penalties that TRL or verl compute too: what goes in, what ours gives, and how the peers are asked.

Owns: the cases, and our side. `peers.py` is the other side, which needs TRL and verl; what it gave is recorded in
recorded.json, so that unit tests need neither.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slipstream.conf.schema import AlgorithmConfig, Correction, KlEstimator, Normalization, Objective, RatioBaseline
from slipstream.trainer.step.loss import dpo_loss, policy_loss
from slipstream.trainer.step.surrogates import LossTokens
from slipstream.trainer.types import Denominators

LENGTHS = (5, 2, 7, 1)
LONGEST = 7


@dataclass(frozen=True)
class Case:
    """One comparison: which peer, which of its functions, and the options of ours."""

    peer: str
    function: str
    options: dict[str, Any] = field(default_factory=dict[str, Any])


CASES = {
    "verl clip": Case("verl", "vanilla", {"normalization": Normalization.token}),
    "verl clip by sequence": Case("verl", "vanilla", {"normalization": Normalization.sequence}),
    "verl clip by longest": Case("verl", "vanilla", {"normalization": Normalization.constant}),
    "verl dual clip": Case("verl", "vanilla", {"dual_clip": 1.15}),
    "verl clip, later update, rollout weights": Case(
        "verl",
        "vanilla",
        {"ratio_baseline": RatioBaseline.trainer, "correction": Correction.tis, "correction_max": 1.3},
    ),
    "verl gspo": Case("verl", "gspo", {"loss": "gspo", "normalization": Normalization.sequence, "clip_high": 0.1}),
    "verl gspo by token": Case("verl", "gspo", {"loss": "gspo", "clip_low": 0.05}),
    "verl cispo": Case("verl", "cispo", {"loss": "cispo"}),
    "verl sapo": Case("verl", "sapo", {"loss": "sapo", "normalization": Normalization.sequence}),
    "verl entropy bonus": Case("verl", "vanilla", {"entropy_coef": 0.3, "normalization": Normalization.sequence}),
    **{
        f"verl {one} in the loss": Case("verl", "vanilla", {"kl_coef": 0.2, "kl_estimator": one}) for one in KlEstimator
    },
    "trl dapo": Case("trl", "dapo"),
    "trl grpo": Case("trl", "grpo", {"normalization": Normalization.sequence, "kl_coef": 0.2}),
    "trl dr_grpo": Case("trl", "dr_grpo", {"normalization": Normalization.constant}),
    "trl gspo": Case("trl", "grpo", {"loss": "gspo", "normalization": Normalization.sequence, "clip_high": 0.1}),
    "trl cispo": Case("trl", "cispo", {"loss": "cispo", "clip_low": 1.0}),
    "trl sapo": Case("trl", "sapo", {"loss": "sapo", "normalization": Normalization.sequence}),
    "trl entropy bonus": Case("trl", "dapo", {"entropy_coef": 0.3}),
}


def inputs() -> dict[str, Tensor]:
    """float64 values of the counted tokens, sequence after sequence. Advantages are those of whole responses, one of
    them 0; ratios lie on both sides of every bound."""
    generator = torch.Generator().manual_seed(20)
    lengths = torch.tensor(LENGTHS)
    n = int(lengths.sum())

    def draw(scale: float) -> Tensor:
        return scale * torch.randn(n, generator=generator, dtype=torch.float64)

    old = -1.5 + draw(0.5)
    return {
        "logprobs": old + draw(0.4),
        "old": old,
        "rollout": old + draw(0.3),
        "ref": old + draw(0.3),
        "entropy": 1.0 + draw(0.2),
        "advantages": torch.repeat_interleave(torch.tensor([1.3, -0.7, -1.1, 0.0], dtype=torch.float64), lengths),
    }


def loss_tokens(lengths: Sequence[int], logprobs: Tensor, **more: Tensor | None) -> LossTokens:
    """Counted tokens of sequences of these lengths, one after the other; `more` are fields. Without them nothing is
    known of the engine and the policy before but that they are this one, and advantages and entropies are 0."""
    sizes, old = torch.tensor(lengths, dtype=torch.int64), more.get("old_logprobs_N")
    old = logprobs.detach() if old is None else old
    fields: dict[str, Any] = {
        "old_logprobs_N": old,
        "rollout_logprobs_N": old,
        "advantages_N": torch.zeros_like(old),
        "weights_N": torch.ones_like(old),
        "entropy_N": torch.zeros_like(old),
        "ref_logprobs_N": None,
        "sequence_index_N": torch.repeat_interleave(torch.arange(len(lengths)), sizes),
        "sequence_lengths_N": torch.repeat_interleave(sizes, sizes),
        "positions_N": torch.cat([torch.arange(0), *(torch.arange(size) for size in lengths)]),
        "staleness_N": torch.zeros(int(sizes.sum()), dtype=torch.int64),
    }
    return LossTokens(logprobs_N=logprobs, **fields | more)


def _tokens(given: dict[str, Tensor], rollout: str = "rollout") -> LossTokens:
    return loss_tokens(
        LENGTHS, given["logprobs"].requires_grad_(), old_logprobs_N=given["old"], rollout_logprobs_N=given[rollout],
        advantages_N=given["advantages"], ref_logprobs_N=given["ref"], entropy_N=given["entropy"].requires_grad_(),
    )  # fmt: skip


def padded(values: Tensor) -> Tensor:
    """[sequences, longest], zeros behind each."""
    return torch.nn.utils.rnn.pad_sequence(list(values.split(LENGTHS)), batch_first=True)


def ours(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Our loss, and its gradient with respect to log-probabilities and entropies. `old` is the ratio's denominator: the
    engine's, or with ratio_baseline=trainer the trainer's before the step's first update."""
    given = inputs()
    options = {"ratio_baseline": RatioBaseline.rollout, "correction": Correction.none} | case.options
    is_from_rollout = options["ratio_baseline"] is RatioBaseline.rollout
    lengths = torch.tensor(LENGTHS)
    tokens = _tokens(given, rollout="old" if is_from_rollout else "rollout")
    algorithm = AlgorithmConfig(**options)
    counts = Denominators(int(lengths.sum()), len(LENGTHS), 0, num_possible_tokens=LONGEST * len(LENGTHS))
    loss = policy_loss(tokens, algorithm, counts).loss
    by_logprobs, by_entropy = torch.autograd.grad(loss, (tokens.logprobs_N, tokens.entropy_N), allow_unused=True)
    return loss.detach(), by_logprobs, torch.zeros_like(by_logprobs) if by_entropy is None else by_entropy


DPO_CASES = {"trl dpo, beta 0.1": 0.1, "trl dpo, beta 0.7": 0.7}
"""Name -> algorithm.dpo_beta. The sequences of `inputs` are two pairs: chosen, rejected, chosen, rejected."""


def our_dpo(beta: float) -> tuple[Tensor, Tensor]:
    """Our loss of the pairs, and its gradient with respect to log-probabilities."""
    tokens, algorithm = _tokens(inputs()), AlgorithmConfig(objective=Objective.dpo, dpo_beta=beta)
    loss = dpo_loss(tokens, algorithm, Denominators(sum(LENGTHS), len(LENGTHS), 0)).loss
    (gradient,) = torch.autograd.grad(loss, tokens.logprobs_N)
    return loss.detach(), gradient
