"""Section `algorithm`: the batch of a step, and the loss on it."""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from slipstream.conf.schema.rules import If, above, at_least, read_if, require
from slipstream.conf.schema.teacher import TeacherConfig


class Objective(StrEnum):
    """What the trainer minimizes: the policy-gradient loss of rollouts that were sampled and judged, the negative
    log-likelihood of given conversations, or the loss of given pairs of answers of which one is preferred."""

    policy = "policy"
    sft = "sft"
    dpo = "dpo"


class Normalization(StrEnum):
    """What one token's loss is divided by: the tokens of the batch; the tokens of its sequence, and then the sequences
    of the batch; or the most tokens that the batch's sequences may have."""

    token = "token"
    sequence = "sequence"
    constant = "constant"


class RatioBaseline(StrEnum):
    """The policy in the denominator of the importance ratio (see AlgorithmConfig.ratio_baseline)."""

    rollout = "rollout"
    trainer = "trainer"


class Correction(StrEnum):
    """How a token is weighed whose probability differs between trainer and engine (trainer/step/corrections.py has the
    formulas and their sources): not at all; by its ratio, cut above (tis), or left out beyond a bound (mis) or two
    (icepop); by the product of its response's ratios, cut or left out; by their geometric mean, left out."""

    none = "none"
    tis = "tis"
    mis = "mis"
    icepop = "icepop"
    sequence_tis = "sequence_tis"
    sequence_mis = "sequence_mis"
    geometric_mis = "geometric_mis"


CORRECTION_BOUNDS = {
    Correction.none: (0.0, math.inf),
    Correction.tis: (0.0, 2.0),
    Correction.mis: (0.0, 2.0),
    Correction.icepop: (0.5, 5.0),
    Correction.sequence_tis: (0.0, 2.0),
    Correction.sequence_mis: (0.0, 2.0),
    Correction.geometric_mis: (0.999, 1.001),
}
"""Lowest and highest ratio of each method, from its source: 2 is that of Liu, Li et al. and of verl, 0.5 and 5 are of
arXiv:2510.18855, 1.001 is verl's for means (verl-project/verl #3984), with its inverse."""


SHIPPED_LOSSES = ("clip", "gspo", "cispo", "sapo")
"""Values of algorithm.loss that are not functions of the user's own."""


class KlEstimator(StrEnum):
    """How KL(policy || reference) is estimated from a sampled token; trainer/step/mismatch.py has the formulas."""

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class KlPlace(StrEnum):
    """Where the estimate of KL(policy || reference) is subtracted."""

    loss = "loss"
    reward = "reward"


SHIPPED_ADVANTAGES = ("group_std", "group", "leave_one_out", "group_mean", "batch_std", "group_batch_std", "none")
"""Values of algorithm.advantage that are not functions of the user's own."""


GIVEN = If("algorithm.objective!=policy", cure="choose algorithm=sft or algorithm=dpo")
RATIO_DIFFERS = If(
    "algorithm.ratio_is_one=false or algorithm.loss=*:*",
    "algorithm.ratio_baseline=trainer, whose ratio is 1 in the one update of a step",
    "set algorithm.ratio_baseline=rollout algorithm.correction=none, or algorithm.minibatches_per_step",
)
"""A function of the user's own may read every option."""
BOUNDED = If("algorithm.loss!=sapo", ", which has a gate and no bounds", "choose another loss")
CORRECTED = If("algorithm.correction!=none", cure="set algorithm.correction")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """GRPO (Shao et al. 2024, arXiv:2402.03300) and its family; or learning from given answers."""

    objective: Objective = Objective.policy
    """policy: reinforcement learning. sft: learn the assistant's tokens of the conversations in data.path; no engine
    is started, and of this section only `sequences_per_step` and `normalization` are read. dpo: learn from the pairs in
    data.path which of two answers is preferred (Rafailov et al. 2023, arXiv:2305.18290, eq. 7); as sft, with
    `sequences_per_step` and `dpo_beta`."""
    sequences_per_step: int = field(default=64, metadata=read_if(GIVEN))
    """Conversations, with objective=dpo pairs of answers, that make one optimizer step."""
    dpo_beta: float = field(default=0.1, metadata=read_if(If("algorithm.objective=dpo", cure="choose algorithm=dpo")))
    """objective=dpo: how much a pair's loss counts a log-ratio of the policy to the one before training. The larger,
    the nearer the policy stays to that one."""
    group_size: int = 16
    """Rollouts per prompt; the advantage compares them with each other."""
    groups_per_step: int = 16
    """Groups that make one batch, hence one optimizer step."""
    max_staleness_steps: int = 1
    """How many optimizer steps old a sample may be when the trainer uses it: the trainer's policy version minus the
    oldest version in the sample. 0 is strictly on-policy."""
    minibatches_per_step: int = 1
    """Parts of a batch, each of whole groups and with an update of its own (PPO's minibatches). With several updates,
    the trainer first computes the batch's log-probabilities once more, for the ratio; the step's one policy version is
    what the last update leaves."""
    epochs_per_step: int = 1
    """Times that a batch is used, its groups in another order each time (PPO's epochs)."""
    advantage: str = "group_std"
    """How a reward r becomes an advantage (docs/algorithms.md has the formulas). group_std: (r - mean) / (std + 1e-6)
    of its group (GRPO). group: r - mean (Dr. GRPO). leave_one_out: r - the mean of the group's others (RLOO).
    group_mean: (r - mean) / mean (MaxRL), for rewards that are never negative. batch_std: r, standardized over the
    tokens of the batch (REINFORCE++). group_batch_std: r - the group's mean, standardized in the same way
    (REINFORCE++ with baseline). none: 0, so that the teacher's term alone counts (distill_coef). Or a function of your
    own, FILE.py:function or package.module:function."""
    distill_coef: float = 0.0
    """Weight of log teacher - log mu, mu the policy that sampled, which is added to the advantage of each token:
    on-policy distillation (docs/algorithms.md). 0 asks no teacher."""
    teacher: TeacherConfig = field(
        default_factory=TeacherConfig,
        metadata=read_if(If("algorithm.distill_coef!=0", ", which asks no teacher", "choose algorithm=distill")),
    )
    normalization: Normalization = field(
        default=Normalization.token,
        metadata=read_if(
            If("algorithm.objective!=dpo", "algorithm=dpo, whose loss is the mean over pairs", "choose algorithm=sft")
        ),
    )
    """token: every response token of the batch has the same weight (DAPO, arXiv:2503.14476). sequence: every response
    has the same weight. constant: as token, but divided by responses * rollout.sampling.max_tokens, so that short
    responses do not make the step larger (Dr. GRPO; algorithm=grpo sets it); not with objective=sft."""
    mask_truncated: bool = False
    """Do not train on responses that end by length (DAPO's overlong filtering): the loss is not divided by their tokens
    either. Their rewards still count in the group's mean and deviation. Needs rollout.sampling.stop_at_eos."""
    loss: str = field(default="clip", metadata=read_if(RATIO_DIFFERS))
    """What a token's ratio and advantage make of its loss (docs/algorithms.md has the formulas). clip: PPO's clipped
    ratio. gspo: the same with the response's geometric mean of ratios. cispo: log-probability times clipped ratio, so
    that every token keeps a gradient. sapo: a smooth gate in place of the clip. With ratio_baseline=trainer and one
    update of a batch the ratio is 1, and all four have the same gradient. Or a function of your own, FILE.py:function
    or package.module:function."""
    clip_low: float = field(default=0.2, metadata=read_if(RATIO_DIFFERS, BOUNDED))
    """Lower clip of the importance ratio: 1 - clip_low; 1: none. Ignored where the ratio is 1."""
    clip_high: float = field(default=0.28, metadata=read_if(RATIO_DIFFERS, BOUNDED))
    """Upper clip of the importance ratio: 1 + clip_high (clip-higher, DAPO). Ignored where the
    ratio is 1."""
    dual_clip: float | None = field(default=None, metadata=read_if(RATIO_DIFFERS, If("algorithm.loss=clip|*:*")))
    """loss=clip: a token of negative advantage A costs at most -dual_clip * A, however large its ratio (Ye et al. 2020,
    arXiv:1912.09729; they use 3). null: no bound."""
    sapo_tau_positive: ClassVar[float] = 1.0
    """loss=sapo: sharpness of the gate for tokens of positive advantage."""
    sapo_tau_negative: ClassVar[float] = 1.05
    """loss=sapo: the same for the others; larger, so that less of them gets through (arXiv:2511.20347)."""
    ratio_baseline: RatioBaseline = RatioBaseline.trainer
    """trainer: the ratio is 1 at the start of each step, and `correction` corrects for the engine's mismatch. rollout:
    the ratio is taken to the engine's log-probabilities and clipped; `correction` must be none."""
    correction: Correction = Correction.tis
    """Weight of a token by its ratio r, the trainer's probability over the engine's. tis: min(r, max), the mildest.
    mis: r up to max, else 0. icepop: r from min to max, else 0; for models that route. sequence_tis, sequence_mis: as
    tis and mis, with the product of the response's ratios; for runs that collapse. geometric_mis: with their geometric
    mean; for long responses. none: 1. docs/parity.md says when to use which."""
    correction_min: float | None = field(
        default=None,
        metadata=read_if(
            CORRECTED,
            If(
                "algorithm.correction!=tis|sequence_tis",
                ", which cuts weights above alone",
                "set algorithm.correction=icepop",
            ),
        ),
    )
    """Lowest ratio, below which a token is left out. null: 0.5 for icepop, 0.999 for geometric_mis, else 0."""
    correction_max: float | None = field(default=None, metadata=read_if(CORRECTED))
    """Highest ratio; above, a weight is cut, or a token left out. null: icepop 5, geometric_mis 1.001, else 2."""
    kl_coef: float = 0.0
    """Weight of the estimate of KL(policy || reference), the policy before training. 0 skips its forward pass."""
    kl_estimator: KlEstimator = field(default=KlEstimator.k3, metadata=read_if(If("algorithm.kl_coef!=0")))
    """k1: the log-ratio; in the loss its expected gradient is 0. k2: half its square. k3: >= 0 and unbiased (GRPO)."""
    kl_in: KlPlace = field(default=KlPlace.loss, metadata=read_if(If("algorithm.kl_coef!=0")))
    """loss: the estimate is added to each token's loss. reward: it is subtracted from the reward, so that it counts in
    the advantage; the trainer first computes the batch's log-probabilities once more."""
    entropy_coef: float = 0.0
    """Weight of the policy's entropy at a token, which is subtracted from the token's loss: that is lower, the less
    certain the policy is. As the loss, it is divided by what `normalization` says. Negative: the opposite."""
    drop_zero_variance_groups: bool = False
    """Drop groups whose rewards are all equal and sample others in their place (dynamic sampling, DAPO). What lengths
    take from rewards (reward.overlong_tokens, reward.length_penalty) makes none differ here."""
    max_uninformative_batches: ClassVar[int] = 10
    """Save the state and end the run after this many times groups_per_step groups in a row were dropped for equal
    rewards: the prompts are solved, or too hard."""

    def __post_init__(self) -> None:
        require(
            self.group_size >= 2 or self.advantage == "none",
            f"algorithm.group_size must be >= 2, got {self.group_size}: a group of one has no advantage",
        )
        at_least(1, "algorithm", self, "group_size", "groups_per_step", "sequences_per_step")
        at_least(1, "algorithm", self, "minibatches_per_step", "epochs_per_step")
        require(
            self.minibatches_per_step <= self.groups_per_step,
            f"algorithm.minibatches_per_step must be <= algorithm.groups_per_step={self.groups_per_step}, because "
            f"groups are not divided; got {self.minibatches_per_step}",
        )
        require(
            self.advantage in SHIPPED_ADVANTAGES or _is_a_function(self.advantage),
            f"algorithm.advantage must be one of {', '.join(SHIPPED_ADVANTAGES)}, FILE.py:function or "
            f"package.module:function, got {self.advantage!r}",
        )
        at_least(0, "algorithm", self, "max_staleness_steps", "kl_coef", "distill_coef")
        require(
            not (self.objective is Objective.sft and self.normalization is Normalization.constant),
            "algorithm.normalization=constant divides by rollout.sampling.max_tokens, and fine-tuning samples nothing; "
            "set algorithm.normalization=token or sequence",
        )
        require(0 < self.clip_low <= 1, f"algorithm.clip_low must lie in (0, 1], got {self.clip_low}")
        above(0, "algorithm", self, "dpo_beta", "clip_high")
        require(
            self.loss in SHIPPED_LOSSES or _is_a_function(self.loss),
            f"algorithm.loss must be one of {', '.join(SHIPPED_LOSSES)}, FILE.py:function or package.module:function, "
            f"got {self.loss!r}",
        )
        require(
            self.dual_clip is None or 1 < self.dual_clip < math.inf,
            f"algorithm.dual_clip must be > 1 or null, got {self.dual_clip}: below 1 it would bound losses that are "
            "not clipped",
        )
        require(math.isfinite(self.entropy_coef), f"algorithm.entropy_coef must be finite, got {self.entropy_coef}")
        low, high = self.correction_bounds
        require(0 <= low <= 1, f"algorithm.correction_min must lie in [0, 1], got {low}: a ratio of 1 is no mismatch")
        require(high >= 1, f"algorithm.correction_max must be >= 1, got {high}: a ratio of 1 is no mismatch")
        require(
            self.ratio_baseline is RatioBaseline.trainer or self.correction is Correction.none,
            "algorithm.ratio_baseline=rollout already corrects for the engine's log-probabilities: set "
            "algorithm.correction=none with it",
        )

        self._check_distillation()

    def _check_distillation(self) -> None:
        teacher, is_rewarded = self.teacher, self.advantage != "none"
        require(
            self.distill_coef == 0 or bool(teacher.base_url and teacher.model),
            f"algorithm.distill_coef={self.distill_coef:g} needs a teacher: give algorithm.teacher.base_url and "
            f"algorithm.teacher.model, got {teacher.base_url!r} and {teacher.model!r}",
        )
        require(
            is_rewarded or self.distill_coef > 0,
            "algorithm.advantage=none leaves nothing to learn from: choose algorithm=distill, or set "
            "algorithm.distill_coef, or another algorithm.advantage",
        )
        require(
            is_rewarded or not self.drop_zero_variance_groups,
            "algorithm.advantage=none contradicts algorithm.drop_zero_variance_groups=true: groups of equal rewards "
            "teach as much as others; set one of the two otherwise",
        )
        require(
            is_rewarded or not self.penalizes_rewards,
            "algorithm.advantage=none contradicts algorithm.kl_in=reward: rewards count in nothing; set "
            "algorithm.kl_in=loss",
        )

    @property
    def is_corrected(self) -> bool:
        """Whether a token counts by the ratio of trainer and engine, as a weight or clipped."""
        return self.correction is not Correction.none or self.ratio_baseline is RatioBaseline.rollout

    @property
    def ratio_is_one(self) -> bool:
        """Whether every ratio is 1, so that nothing is clipped and all losses have one gradient."""
        return self.ratio_baseline is RatioBaseline.trainer and self.updates_per_step == 1

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates that one batch is used for."""
        return self.minibatches_per_step * self.epochs_per_step if self.objective is Objective.policy else 1

    @property
    def penalizes_rewards(self) -> bool:
        return self.kl_coef > 0 and self.kl_in is KlPlace.reward

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with the policy before training."""
        return self.kl_coef > 0 or self.objective is Objective.dpo

    @property
    def scores_first(self) -> bool:
        """Whether the trainer computes a batch's log-probabilities before its first update."""
        return self.updates_per_step > 1 or self.penalizes_rewards

    @property
    def correction_bounds(self) -> tuple[float, float]:
        """Lowest and highest ratio of `correction`: what is set, else the method's own."""
        low, high = CORRECTION_BOUNDS[self.correction]
        return (
            low if self.correction_min is None else self.correction_min,
            high if self.correction_max is None else self.correction_max,
        )


def _is_a_function(value: str) -> bool:
    place, _, name = value.rpartition(":")
    return bool(place) and name.isidentifier()
