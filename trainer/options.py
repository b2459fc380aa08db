"""What every trainer rank of a run is built from. Plain data, no torch: a controller makes it."""

from dataclasses import dataclass, field

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
