"""Says that steps teach nothing, which no figure of a single step shows.

Owns: when a step taught nothing, and the words. Does not own: the figures (files/step_rows.py), or refusing to go on
(step_loop: losses that are not finite; sampler: groups that are dropped).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from conf.schema import AlgorithmConfig
from orchestrator.files.metrics_catalogue import Value

logger = logging.getLogger(__name__)

WARN_STEPS = 5
"""Steps in a row that taught nothing after which a warning is logged."""
REPEAT_STEPS = 20
"""Steps after which it is logged again."""
_WITHIN_GROUPS = ("group_std", "group", "leave_one_out", "group_mean", "group_batch_std")
"""Values of algorithm.advantage by which equal rewards of a group are advantages of 0."""


class LearningAlarm:
    """Remembers for how many steps nothing was learned. A run that is resumed begins to count anew."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self._compares_in_groups = algorithm.advantage in _WITHIN_GROUPS and algorithm.distill_coef == 0
        self._num_steps = 0
        self._num_in_a_row = 0
        self._why = ""

    def look(self, step: int, row: Mapping[str, Value]) -> None:
        """Take a step's row, and log a warning where one is due."""
        if row.get("optim/skipped") is None:  # row 0, the state before training
            return
        self._num_steps += 1
        self._why = self._why_nothing(row)
        self._num_in_a_row = self._num_in_a_row + 1 if self._why else 0
        if self._why and (self._num_in_a_row - WARN_STEPS) % REPEAT_STEPS == 0:
            logger.warning("step %d: the last %d steps taught nothing: %s", step, self._num_in_a_row, self._why)

    def say_at_the_end(self) -> None:
        """Log it if the steps up to the last one taught nothing: all, or so many that a warning was due."""
        if self._why and self._num_in_a_row >= min(WARN_STEPS, self._num_steps):
            which = "" if self._num_in_a_row == self._num_steps else "last "
            steps = f"{self._num_in_a_row} {which}step{'s' if self._num_in_a_row > 1 else ''}"
            logger.warning("nothing was learned in the %s of this start: %s", steps, self._why)

    def _why_nothing(self, row: Mapping[str, Value]) -> str:
        """Why the step taught nothing; "" where it did."""
        if row["optim/skipped"]:
            return "they changed no weight (optim/skipped), because no response counted or a loss was not finite"
        if self._compares_in_groups and row.get("reward/no_spread_fraction") == 1:
            return (
                f"the rewards of each group are all equal (reward/mean {row['reward/mean']}), so that every advantage "
                "is 0. The prompts are out of reach or solved, or the reward gives every response the same; "
                "`slipstream view` shows responses with their rewards"
            )
        if row.get("optim/grad_norm") == 0:
            return "the gradient is 0 (optim/grad_norm)"
        return ""
