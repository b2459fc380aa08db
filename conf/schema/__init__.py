"""Every option of a run, once: its type, its meaning, its unit and its default. One file per section.

Each section is a frozen dataclass. YAML files under `conf/<group>/` choose values and never types; `conf/load.py`
composes them and is the only place that sees a DictConfig. A rule about one section is checked in that section's
`__post_init__`; a rule across sections is a `check_<rule>` in `conf/checks.py` or `conf/model_checks.py`; options that
have no effect because of others are a row in `conf/ignored.py`. Derived values are properties that carry their formula.

All other code imports from here: `from conf.schema import RunConfig`.
"""

from slipstream.conf.schema.algorithm import (
    SHIPPED_ADVANTAGES,
    SHIPPED_LOSSES,
    AlgorithmConfig,
    Correction,
    KlEstimator,
    KlPlace,
    Normalization,
    Objective,
    RatioBaseline,
)
from slipstream.conf.schema.cluster import ClusterConfig, Device
from slipstream.conf.schema.data import DataConfig, Order
from slipstream.conf.schema.model import DType, EngineFormat, Init, ModelConfig
from slipstream.conf.schema.numerics import (
    AttentionValues,
    CombineMode,
    Match,
    MlaNormEps,
    NumericsByPlace,
    NumericsConfig,
    Rounding,
    Roundings,
    RoutedScale,
    RouterFormat,
    RouterLogits,
)
from slipstream.conf.schema.parity import ParityConfig
from slipstream.conf.schema.reward import (
    ANSWER,
    READ_AN_ANSWER,
    SHIPPED_REWARDS,
    CodeConfig,
    JudgeConfig,
    RewardConfig,
    RewardPart,
    reward_part,
)
from slipstream.conf.schema.rollout import (
    EpisodesConfig,
    EvalSampling,
    EvalSamplingConfig,
    RolloutConfig,
    SamplingConfig,
)
from slipstream.conf.schema.run import RunConfig, RunSection
from slipstream.conf.schema.teacher import TeacherConfig
from slipstream.conf.schema.trainer import (
    ENGINE_LORA_RANKS,
    LORA_TARGETS,
    MAX_EXPERT_RANK,
    Activations,
    LoraConfig,
    OptimConfig,
    OptimState,
    TrainerConfig,
    TrainMode,
)
from slipstream.conf.schema.weight_sync import (
    MergeRounding,
    PauseMode,
    Relay,
    RemoteMerge,
    SyncMode,
    TransportKind,
    WeightSyncConfig,
)

__all__ = [
    "ANSWER",
    "ENGINE_LORA_RANKS",
    "LORA_TARGETS",
    "MAX_EXPERT_RANK",
    "READ_AN_ANSWER",
    "SHIPPED_ADVANTAGES",
    "SHIPPED_LOSSES",
    "SHIPPED_REWARDS",
    "Activations",
    "AlgorithmConfig",
    "AttentionValues",
    "ClusterConfig",
    "CodeConfig",
    "CombineMode",
    "Correction",
    "DType",
    "DataConfig",
    "Device",
    "EngineFormat",
    "EpisodesConfig",
    "EvalSampling",
    "EvalSamplingConfig",
    "Init",
    "JudgeConfig",
    "KlEstimator",
    "KlPlace",
    "LoraConfig",
    "Match",
    "MergeRounding",
    "MlaNormEps",
    "ModelConfig",
    "Normalization",
    "NumericsByPlace",
    "NumericsConfig",
    "Objective",
    "OptimConfig",
    "OptimState",
    "Order",
    "ParityConfig",
    "PauseMode",
    "RatioBaseline",
    "Relay",
    "RemoteMerge",
    "RewardConfig",
    "RewardPart",
    "RolloutConfig",
    "Rounding",
    "Roundings",
    "RoutedScale",
    "RouterFormat",
    "RouterLogits",
    "RunConfig",
    "RunSection",
    "SamplingConfig",
    "SyncMode",
    "TeacherConfig",
    "TrainMode",
    "TrainerConfig",
    "TransportKind",
    "WeightSyncConfig",
    "reward_part",
]
