"""Compares the mismatch of each step with the thresholds of section `parity`.

Owns: when a warning is logged, and what a warning or the end of the run says. Does not own: the figures
(trainer/step/loss.py measures them, files/step_rows.py makes them a row), saving and ending (step_loop).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from conf.schema import ParityConfig
from orchestrator.files.metrics_catalogue import Value

logger = logging.getLogger(__name__)

REPEAT_STEPS = 20
"""Steps after which a warning that still holds is logged again."""
CAUSES = {
    "parity/k3": (
        "these tokens were sampled from the version that is trained, so the two compute it differently: weights that "
        "did not reach the engine whole, a rounded KV cache, or other experts at near-ties (model families that route)"
    ),
    "parity/k3_stale": (
        "these tokens were sampled from older versions: the policy moved far in a step (lower trainer.optim.lr, or "
        "algorithm.max_staleness_steps), or the two compute the same weights differently (see parity/k3)"
    ),
}
"""Figure -> what makes it large."""
UNCORRECTED = (
    "algorithm.correction=none trains on these tokens as if the trainer had sampled them; tis, or another one, weighs "
    "them. "
)
LOST_UPDATES = (
    "weight_sync.rounding=nearest gives engines little of an adapter's update (dithered gives them its mean). "
)
LOST_SHARE = 0.2
"""sync/update_error above which rounding is named as a cause. By thresholds it is noise about 0, mostly below."""
CURE = (
    "`slipstream parity` names the operation at which trainer and "
    "engine part, and docs/parity.md says what else to look at"
)
FLOOR_SHARE = 0.1
"""When the floor is more than this share of the mismatch, the cause is in the engine. The floor may be the mean of few
tokens, and so off by a factor; where the engine is not the cause it is orders of magnitude below.
"""


class ParityAlarm:
    """Remembers since when a figure is above parity.warn_k3.

    Args:
        is_corrected: whether the loss weighs or clips tokens by their ratio.
        loses_updates: whether merged weights are rounded to nearest.
    """

    def __init__(self, config: ParityConfig, *, is_corrected: bool, loses_updates: bool = False) -> None:
        self._config, self._loses_updates = config, loses_updates
        self._advice = ("" if is_corrected else UNCORRECTED) + CURE
        self._lost = LOST_UPDATES if loses_updates else ""
        """What is known of updates that engines did not get."""
        self._warned_at: int | None = None
        """Step of the last warning; None while no figure is above the threshold."""
        self._floor = ""
        """What the last measured floor says about the cause."""

    def reason_to_stop(self, step: int, row: Mapping[str, Value]) -> str:
        """Log a warning where one is due, and say why the run must end; "" when it may go on."""
        k3, floor = row.get("parity/k3"), row.get("parity/floor_k3")
        if k3 is not None and floor is not None:
            self._floor = _what_the_floor_says(step, k3, floor)
        lost = row.get("sync/update_error")
        if lost is not None:
            told = f"sync/update_error is {lost:.2g}: engines lack that share of the adapter's update. "
            self._lost = told + (LOST_UPDATES if self._loses_updates else "") if lost > LOST_SHARE else ""
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
            f"tokens that the engine sampled. Likely causes: {CAUSES[figure]}. {self._floor}{self._lost}{self._advice}"
        )


def _what_the_floor_says(step: int, k3: float, floor: float) -> str:
    figures = f"parity/floor_k3 of step {step} is {floor:.3g}, where parity/k3 is {k3:.3g}: "
    if floor > FLOOR_SHARE * k3:
        return (
            figures
            + "the engine's prefill is about as far from its decoding, so the cause is in how the engine samples. "
        )
    return figures + "the engine agrees with itself, so the cause is in its weights or between trainer and engine. "
