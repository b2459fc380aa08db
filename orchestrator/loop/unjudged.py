"""Says who is to blame when no response has a reward: the run's reward, or the agent, whose episodes failed.

Owns: when that ends a run, and the message. Does not own: what a failed episode or reward costs (the sampler and the
advantages leave it out), nor their first reports in run.log (episode_runner.py, rewards/runner.py).
"""

from collections import Counter

from slipstream.conf.schema import RunConfig
from slipstream.orchestrator.errors import TrainingStopped
from slipstream.rollout.agents.episode_runner import EpisodeRunner
from slipstream.rollout.types import Group

MAX_UNJUDGED_GROUPS = 8
"""Groups in a row (and at least a batch of them) without one reward after which the run stops: the reward or the agent
is broken. The same of a teacher."""
MAX_REPORT_LINES = 12
"""Lines of the first episode's failure; its end is kept."""


def most_in_a_row(config: RunConfig) -> int:
    """Groups without one reward, or without one answer of the teacher, after which the run stops."""
    return max(MAX_UNJUDGED_GROUPS, config.algorithm.groups_per_step)


class Unjudged:
    """See the module's docstring.

    Args:
        episodes: Runs the agent's; None without one.
    """

    def __init__(self, config: RunConfig, episodes: EpisodeRunner | None) -> None:
        self._config = config
        self._episodes = episodes
        self._has_judged = False
        self._num_groups = 0
        """Groups in a row without one reward."""
        self._failures: Counter[str] = Counter()
        """How episodes of their responses failed; "" where the reward did."""

    def note(self, group: Group) -> None:
        """Take the next group that was sampled."""
        if any(reward is not None for reward in group.rewards):
            self._has_judged, self._num_groups = True, 0
            self._failures.clear()
            return
        self._num_groups += 1
        self._failures.update(rollout.failure for rollout in group.rollouts)

    def stop_if_too_many(self) -> None:
        """A reward or an agent that fails now and then costs samples. One that always does is broken.

        Raises:
            TrainingStopped: The last groups, a whole batch of them, have no reward.
        """
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
