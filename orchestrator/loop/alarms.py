"""What a run warns of or ends for, by the rows of its steps and the groups that were sampled: trainer and engine
disagree (section `parity`), steps teach nothing, no response has a reward.

Owns: when, and what is said: causes, cures, and whether the run's reward or its agent is to blame. Does not own: the
figures (metrics/step_rows.py), saving and ending, losses that are not finite (step_loop), groups that are dropped
(sampler), what a failed episode or reward costs, nor their first reports in run.log (episode_runner.py,
rewards/runner.py).
"""

import logging
from collections import Counter
from collections.abc import Mapping

from slipstream.conf.schema import AlgorithmConfig, ParityConfig, RunConfig
from slipstream.orchestrator.errors import TrainingStopped
from slipstream.orchestrator.metrics.catalogue import Value
from slipstream.rollout.agents.episode_runner import EpisodeRunner
from slipstream.rollout.types import Group

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
    """Remembers since when a figure is above parity.warn_k3. `is_corrected`: whether the loss weighs or clips tokens by
    their ratio."""

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


WARN_STEPS = 5
"""Steps in a row that taught nothing after which a warning is logged."""
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


MAX_UNJUDGED_GROUPS = 8
"""Groups in a row (and at least a batch of them) without one reward after which the run stops: the reward or the agent
is broken. The same of a teacher."""
MAX_REPORT_LINES = 12
"""Lines of the first episode's failure; its end is kept."""


def most_in_a_row(config: RunConfig) -> int:
    """Groups without one reward, or without one answer of the teacher, after which the run stops."""
    return max(MAX_UNJUDGED_GROUPS, config.algorithm.groups_per_step)


class Unjudged:
    """See the module's docstring. `episodes`: Runs the agent's; None without one."""

    def __init__(self, config: RunConfig, episodes: EpisodeRunner | None) -> None:
        self._config = config
        self._episodes = episodes
        self._has_judged = False
        self._num_groups = 0
        """Groups in a row without one reward."""
        self._failures: Counter[str] = Counter()
        """How episodes of their responses failed; "" where the reward did."""

    def note(self, group: Group) -> None:
        if any(reward is not None for reward in group.rewards):
            self._has_judged, self._num_groups = True, 0
            self._failures.clear()
            return
        self._num_groups += 1
        self._failures.update(rollout.failure for rollout in group.rollouts)

    def stop_if_too_many(self) -> None:
        """A reward or an agent that fails now and then costs samples. One that always does is broken. Raises
        TrainingStopped: the last groups, a whole batch of them, have no reward."""
        if self._num_groups >= most_in_a_row(self._config):
            raise TrainingStopped(f"{self._blame()}. Repair it and go on with slipstream resume")

    def stop_if_all(self) -> None:
        """Raise TrainingStopped if no group of a run that has made its steps has a reward: it taught nothing."""
        if self._num_groups and not self._has_judged:
            raise TrainingStopped(f"{self._blame()}. Repair it and start again")

    def _blame(self) -> str:
        config, num_groups = self._config, self._num_groups
        rewards = ", ".join(config.reward.names)
        by_agent = {kind: count for kind, count in self._failures.items() if kind}
        if not by_agent:
            return (
                f"reward {rewards} failed on every response of {num_groups} groups in a row, so there is nothing to "
                "learn from; run.log has the first failure of each kind, and rewards.log what the reward printed"
            )
        kinds = ", ".join(f"{kind} {count}" for kind, count in by_agent.items())
        num_failed, num_left = sum(by_agent.values()), self._failures[""]
        who = f"rollout.agent={config.rollout.agent} failed in every episode of {num_groups} groups in a row ({kinds})"
        if num_left:
            who = (
                f"rollout.agent={config.rollout.agent} failed in {num_failed} episodes of {num_groups} groups in a row "
                f"({kinds}), and reward {rewards} on the other {num_left}"
            )
        report = "" if self._episodes is None else self._episodes.first_report.rstrip()
        lines = "".join(f"\n    {line}" for line in report.splitlines()[-MAX_REPORT_LINES:])
        return (
            f"{who}, so there is nothing to learn from. The first failure:{lines}\nrun.log has the first of each kind, "
            "and agents.log what the agent printed"
        )
