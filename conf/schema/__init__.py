"""Every option of a run, once: its type, its meaning, its unit and its default. One file per section.

Each section is a frozen dataclass. YAML files under `conf/<group>/` choose values and never types; `conf/load.py`
composes them and is the only place that sees a DictConfig. A rule about one section is checked in that section's
`__post_init__`; a rule across sections stands in `conf/checks/`; in which runs an option is read is
metadata of its field (rules.py). Derived values are properties that carry their formula.

All other code imports from here: `from slipstream.conf.schema import RunConfig`.
"""

from slipstream.conf.schema.algorithm import (
    SHIPPED_ADVANTAGES as SHIPPED_ADVANTAGES,
    SHIPPED_LOSSES as SHIPPED_LOSSES,
    AlgorithmConfig as AlgorithmConfig,
    Correction as Correction,
    KlEstimator as KlEstimator,
    KlPlace as KlPlace,
    Normalization as Normalization,
    Objective as Objective,
    RatioBaseline as RatioBaseline,
)
from slipstream.conf.schema.cluster import ClusterConfig as ClusterConfig, Device as Device
from slipstream.conf.schema.data import DataConfig as DataConfig, Order as Order
from slipstream.conf.schema.model import (
    DType as DType,
    EngineFormat as EngineFormat,
    Init as Init,
    ModelConfig as ModelConfig,
)
from slipstream.conf.schema.numerics import (
    AttentionValues as AttentionValues,
    CombineMode as CombineMode,
    Match as Match,
    MlaNormEps as MlaNormEps,
    NumericsByPlace as NumericsByPlace,
    NumericsConfig as NumericsConfig,
    Rounding as Rounding,
    Roundings as Roundings,
    RoutedScale as RoutedScale,
    RouterFormat as RouterFormat,
    RouterLogits as RouterLogits,
)
from slipstream.conf.schema.parity import ParityConfig as ParityConfig
from slipstream.conf.schema.reward import (
    ANSWER as ANSWER,
    READ_AN_ANSWER as READ_AN_ANSWER,
    CodeConfig as CodeConfig,
    JudgeConfig as JudgeConfig,
    RewardConfig as RewardConfig,
    RewardPart as RewardPart,
    reward_part as reward_part,
)
from slipstream.conf.schema.rollout import (
    EpisodesConfig as EpisodesConfig,
    EvalSampling as EvalSampling,
    EvalSamplingConfig as EvalSamplingConfig,
    RolloutConfig as RolloutConfig,
    SamplingConfig as SamplingConfig,
)
from slipstream.conf.schema.run import RunConfig as RunConfig, RunSection as RunSection
from slipstream.conf.schema.teacher import TeacherConfig as TeacherConfig
from slipstream.conf.schema.trainer import (
    ATTENTION_MODULES as ATTENTION_MODULES,
    ENGINE_LORA_RANKS as ENGINE_LORA_RANKS,
    LORA_TARGETS as LORA_TARGETS,
    MAX_EXPERT_RANK as MAX_EXPERT_RANK,
    MLP_MODULES as MLP_MODULES,
    Activations as Activations,
    LoraConfig as LoraConfig,
    OptimConfig as OptimConfig,
    OptimState as OptimState,
    TrainerConfig as TrainerConfig,
    TrainMode as TrainMode,
)
from slipstream.conf.schema.weight_sync import (
    MergeRounding as MergeRounding,
    PauseMode as PauseMode,
    Relay as Relay,
    RemoteMerge as RemoteMerge,
    SyncMode as SyncMode,
    TransportKind as TransportKind,
    WeightSyncConfig as WeightSyncConfig,
)
