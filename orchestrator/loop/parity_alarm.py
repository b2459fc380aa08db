"""Compares the mismatch of each step with the thresholds of section `parity`.

Owns: when a warning is logged, and what a warning or the end of the run says. Does not own: the figures
(trainer/step/loss.py measures them, files/telemetry.py makes them a row), saving and ending (step_loop).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from conf.schema import ParityConfig
from orchestrator.files.telemetry import Value

logger = logging.getLogger(__name__)

REPEAT_STEPS = 20
"""Steps after which a warning that still holds is logged again."""
CAUSES = {
    "parity/k3": (
        "these tokens were sampled from the version that is trained, so the two compute it differently: weights that "
        "did not reach the engine whole, log-probabilities of another distribution (rollout.sampling.top_p below 1), "
        "a rounded KV cache, or other experts at near-ties (model families that route)"
    ),
    "parity/k3_stale": (
        "these tokens were sampled from older versions: the policy moved far in a step (lower trainer.optim.lr, or "
        "algorithm.max_staleness_steps), or the two compute the same weights differently (see parity/k3)"
    ),
}
"""Figure -> what makes it large."""
CURE = "algorithm.correction bounds what such tokens do; docs/parity.md says how to find the cause"


class ParityAlarm:
    """Remembers since when a figure is above parity.warn_k3."""

    def __init__(self, config: ParityConfig) -> None:
        self._config = config
        self._warned_at: int | None = None
        """Step of the last warning; None while no figure is above the threshold."""

    def reason_to_stop(self, step: int, row: Mapping[str, Value]) -> str:
        """Log a warning where one is due, and say why the run must end; "" when it may go on."""
        figure, value = max(((name, row.get(name) or 0.0) for name in CAUSES), key=lambda pair: pair[1])
        if self._config.stop_k3 and value > self._config.stop_k3:
            return self._describe(figure, value, "stop_k3", self._config.stop_k3)
        if not self._config.warn_k3 or value <= self._config.warn_k3:
            self._warned_at = None
        elif self._warned_at is None or step >= self._warned_at + REPEAT_STEPS:
            self._warned_at = step
            logger.warning("step %d: %s", step, self._describe(figure, value, "warn_k3", self._config.warn_k3))
        return ""

    def _describe(self, figure: str, value: float, option: str, threshold: float) -> str:
        return (
            f"{figure} is {value:.3g}, above parity.{option}={threshold:g}: trainer and engine disagree about the "
            f"tokens that the engine sampled. Likely causes: {CAUSES[figure]}. {CURE}"
        )
