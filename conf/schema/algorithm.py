"""Section `algorithm`: the batch of a step, and the loss on it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from conf.schema.rules import above, at_least, require


class Objective(StrEnum):
    """What the trainer minimizes: the policy-gradient loss of sampled and judged rollouts, or the negative
    log-likelihood of given conversations.
    """

    policy = "policy"
    sft = "sft"


class Normalization(StrEnum):
    """What one token's loss is divided by: the tokens of the whole batch; first its own sequence's, then the
    sequences'; or what the batch's sequences may hold at most.
    """

    token = "token"
    sequence = "sequence"
    constant = "constant"


class RatioBaseline(StrEnum):
    """The policy in the denominator of the importance ratio (see AlgorithmConfig.ratio_baseline)."""

    rollout = "rollout"
    trainer = "trainer"


class AdvantageScale(StrEnum):
    """How group advantages are scaled: by the group's standard deviation (GRPO), not at all (Dr. GRPO), or as rewards
    against the mean of the others (RLOO).
    """

    std = "std"
    none = "none"
    leave_one_out = "leave_one_out"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """GRPO (Shao et al. 2024, arXiv:2402.03300) and its family; or supervised fine-tuning."""

    objective: Objective = Objective.policy
    """policy: reinforcement learning. sft: learn the assistant's tokens of the conversations in data.path; no engine
    is started, and of this section only `sequences_per_step` and `normalization` are read.
    """
    sequences_per_step: int = 64
    """Conversations that make one optimizer step. Ignored when objective=policy."""
    group_size: int = 16
    """Rollouts sampled for one prompt; the advantage compares them with each other."""
    groups_per_step: int = 16
    """Groups that make one batch, hence one optimizer step."""
    max_staleness_steps: int = 1
    """Oldest policy version that a sample may contain, counted back from the trainer's at consumption. 0 is strictly
    on-policy.
    """
    advantage_scale: AdvantageScale = AdvantageScale.std
    """std: (r - mean) / (std + 1e-6). none: r - mean (Dr. GRPO, arXiv:2503.20783). leave_one_out: r - mean of the
    siblings' rewards without its own (RLOO, arXiv:2402.14740), which is n / (n - 1) * (r - mean).
    """
    shuffle_advantages: bool = False
    """Permute advantages within each group: a control that must not learn."""
    normalization: Normalization = Normalization.token
    """token: every response token of the batch weighs the same (DAPO, arXiv:2503.14476). sequence: every response
    weighs the same. constant: as token, divided by responses * rollout.sampling.max_tokens, so that a batch of short
    responses makes no larger a step (Dr. GRPO); not with objective=sft.
    """
    mask_truncated: bool = False
    """Responses that end by length keep their reward in the group's mean and deviation, and are not trained on (DAPO's
    overlong filtering): no loss divides by them. Needs rollout.sampling.stop_at_eos.
    """
    clip_low: float = 0.2
    """Lower clip of the importance ratio: 1 - clip_low. Ignored when ratio_baseline=trainer, whose ratio is 1."""
    clip_high: float = 0.28
    """Upper clip of the importance ratio: 1 + clip_high (clip-higher, DAPO). Ignored when ratio_baseline=trainer."""
    ratio_baseline: RatioBaseline = RatioBaseline.trainer
    """trainer: the ratio starts at 1 each step and the engine's mismatch is corrected by `tis_max`. rollout: the ratio
    is taken against the engine's log-probabilities and clipped.
    """
    tis_max: float = 2.0
    """Truncated importance sampling: a token's weight is min(exp(trainer - rollout), tis_max). 0 turns it off; must be
    0 when ratio_baseline=rollout.
    """
    kl_coef: float = 0.0
    """Weight of the k3 estimate of KL(policy || reference); the reference is the policy before training. 0 skips its
    forward pass.
    """
    drop_zero_variance_groups: bool = False
    """Drop groups whose rewards are all equal and sample others in their place (dynamic sampling, DAPO)."""
    max_uninformative_batches: int = 10
    """End the run, its state saved, once this many times groups_per_step groups in a row were dropped for equal
    rewards: the prompts are solved, or out of reach. 0: go on for ever. Ignored when drop_zero_variance_groups=false.
    """

    def __post_init__(self) -> None:
        require(
            self.group_size >= 2,
            f"algorithm.group_size must be >= 2, got {self.group_size}: a group of one has no advantage",
        )
        at_least(1, "algorithm", groups_per_step=self.groups_per_step, sequences_per_step=self.sequences_per_step)
        at_least(
            0,
            "algorithm",
            max_staleness_steps=self.max_staleness_steps,
            kl_coef=self.kl_coef,
            max_uninformative_batches=self.max_uninformative_batches,
        )
        require(
            not (self.objective is Objective.sft and self.normalization is Normalization.constant),
            "algorithm.normalization=constant divides by rollout.sampling.max_tokens, and fine-tuning samples nothing; "
            "set algorithm.normalization=token or sequence",
        )
        require(0 < self.clip_low < 1, f"algorithm.clip_low must lie in (0, 1), got {self.clip_low}")
        above(0, "algorithm", clip_high=self.clip_high)
        require(self.tis_max == 0 or self.tis_max >= 1, f"algorithm.tis_max must be 0 or >= 1, got {self.tis_max}")
        require(
            not (self.ratio_baseline is RatioBaseline.rollout and self.tis_max > 0),
            "algorithm.ratio_baseline=rollout already corrects for the engine's log-probabilities: set "
            "algorithm.tis_max=0 with it",
        )
