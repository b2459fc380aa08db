"""What a trainer rank is built from, and what goes into and comes out of it. Plain data with numpy arrays: importable
without torch."""

from dataclasses import dataclass, field

import numpy as np

from slipstream.conf.json_files import JsonObject
from slipstream.conf.schema import (
    AlgorithmConfig,
    ModelConfig,
    Objective,
    ParityConfig,
    TrainerConfig,
    WeightSyncConfig,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions:
    """Sections of the run's options, and facts that all ranks share."""

    model: ModelConfig
    trainer: TrainerConfig
    algorithm: AlgorithmConfig
    sampling_temperature: float
    weight_sync: WeightSyncConfig
    seed: int
    num_steps: int
    """Steps of the run; the learning rate's schedule ends with the updates of the last one."""
    device: str
    """"cpu" or "cuda"; rank r takes the visible GPU r modulo their number."""
    hf_config: JsonObject
    sync_key: bytes
    """Signs the control messages of a publish."""
    rendezvous: str = ""
    """"tcp://host:port" of rank 0. Unused with one rank."""
    parity: ParityConfig = field(default_factory=ParityConfig)
    engine_ranks: int = 1
    """Tensor-parallel ranks of an engine; trainer.numerics.match=bitwise adds as they do."""

    @property
    def temperature(self) -> float:
        """The temperature of the softmax whose log-probabilities are trained on. Fine-tuning has none, and uses 1."""
        return self.sampling_temperature if self.algorithm.objective is Objective.policy else 1.0


Origin = tuple[int, int, int]
"""Numbers of a sequence's group in the batch, of its rollout in the group, and of its branch in the rollout."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A trainable token sequence: prompt then response. All arrays have length T = prompt + response."""

    token_ids: np.ndarray
    """[T] int32."""
    loss_mask: np.ndarray
    """[T] bool; True on response tokens. Entry t says whether the prediction *of* token t counts."""
    rollout_logprobs: np.ndarray
    """[T] float32; the engine's log-probability of token t; 0 where loss_mask is False."""
    advantages: np.ndarray
    """[T] float32; 0 where loss_mask is False."""
    oldest_version: int
    """Oldest policy version among the response tokens."""
    routed_experts: np.ndarray | None = None
    """[T, layers with experts, experts per token] uint8 or int16; the experts that the engine chose for token t. None:
    the trainer chooses."""
    has_route: np.ndarray | None = None
    """[T] bool, given with routed_experts; False: the trainer chooses for token t. Always False for the last token,
    which the engine never computed."""
    origin: Origin | None = None
    """Which sequence of its batch this is; None: of no rollout (fine-tuning)."""
    is_shown: bool = False
    """Whether the trainer returns its log-probabilities of this sample (LossStats.logprobs)."""
    old_logprobs: np.ndarray | None = None
    """[T] float32; log-probability of token t by the trainer before the step's first update; 0 where loss_mask is
    False. None: it was not computed (AlgorithmConfig.scores_first)."""
    ref_logprobs: np.ndarray | None = None
    """[T] float32; the reference's. None: each update computes it, if it needs it."""
    kl_estimates: np.ndarray | None = None
    """[T] float32; estimate of KL(policy || reference), where it is part of the reward."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_valid_tokens(self) -> int:
        """Tokens that count in the loss."""
        return int(self.loss_mask.sum())


@dataclass(frozen=True, slots=True)
class Scores:
    """What the trainer computes of a sample before a step's first update: one entry per token that counts."""

    logprobs: np.ndarray
    """float32."""
    ref_logprobs: np.ndarray | None
    """float32; None without a reference."""
    kl_estimates: np.ndarray | None
    """float32; None where rewards are not penalized."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How large a rank's microbatch is. Ranks tell each other at the beginning of a call."""

    num_tokens: int
    num_sequences: int
    longest: int
    """Tokens of a sequence, at most."""
    has_routes: bool


@dataclass(frozen=True, slots=True)
class Denominators:
    """Divisors of the loss: counts over all samples of an update, the same on every rank and for every microbatch."""

    num_valid_tokens: int
    num_sequences: int
    policy_version: int
    """Version that is about to be trained; sample staleness = policy_version - sample.oldest_version."""
    num_possible_tokens: int = 0
    """Sequences times the longest response that may be sampled. Read only with algorithm.normalization=constant."""


@dataclass(frozen=True, slots=True)
class LossStats:
    """Sums over the tokens of one rank, to be added over ranks and divided once. Keys are metric names, e.g.
    "parity/k3_sum"."""

    sums: dict[str, float]
    maxima: dict[str, float]
    vectors: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Sums by bin, for example of the tokens by their k3; they add up bin by bin."""
    logprobs: dict[Origin, np.ndarray] = field(default_factory=dict[Origin, np.ndarray])
    """[N] float32; trainer_logprobs of the tokens that count in the loss, of each sample with `is_shown`."""


@dataclass(frozen=True, slots=True)
class OptimStats:
    policy_version: int
    grad_norm: float
    lr: float
    is_finite: bool
    """False: the loss or the norm was not finite, nothing was updated and nothing may be published."""
