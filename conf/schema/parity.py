"""Section `parity`: how far trainer and engine may disagree about the tokens that the engine sampled."""

from dataclasses import dataclass

from slipstream.conf.schema.rules import at_least, require


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityConfig:
    """Agreement of trainer and engine. Figures are in nats, per sampled token (docs/parity.md)."""

    warn_k3: float = 0.05
    """Log a warning when the mismatch KL of a step (parity/k3, or parity/k3_stale) is above it. 0: never."""
    stop_k3: float = 0.0
    """End the run, its state saved, when a step's mismatch KL (parity/k3, parity/k3_stale) is above it. 0: never."""

    mask_log_ratio: float = 0.0
    """Tokens whose log-probabilities differ by more than this are left out of the policy's loss, whatever
    algorithm.correction does with the others: they still count in what it is divided by. 0: none."""
    replay_routing: bool = False
    """Replay routing: the engine records which experts it chose for each token, and the trainer uses these instead of
    its own choice. Needs a mixture of experts, and engines on GPUs."""

    def __post_init__(self) -> None:
        at_least(0, "parity", self, "warn_k3", "stop_k3", "mask_log_ratio")
        require(
            self.stop_k3 == 0 or self.stop_k3 >= self.warn_k3,
            f"parity.stop_k3={self.stop_k3} is below parity.warn_k3={self.warn_k3}, so that the run would end before "
            "it warns; raise parity.stop_k3, or lower parity.warn_k3 (0: no warning)",
        )
