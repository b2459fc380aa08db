"""Says who judges responses, before a run starts. Does not own the try of a reward (preflight.py)."""

from collections.abc import Sequence

from slipstream.conf.schema import ANSWER, Objective, RunConfig

DEFAULT = "exact_match"


def who_judges(config: RunConfig) -> str:
    """The rewards with their weights; with an agent, what it returns, and the reward beside it that somebody chose."""
    reward, agent = config.reward, config.rollout.agent
    parts = ", ".join(f"{part.weight:g} x {name}" for name, part in reward.by_name.items()) if reward.parts else ""
    if agent is not None:
        return "what the agent returns" + (
            "" if _is_default(config) else f"; where that is None, {parts or reward.kind}"
        )
    return parts or (f"{DEFAULT}: {_MEANING}" if reward.kind == DEFAULT else reward.kind)


def unchosen_reward(config: RunConfig, overrides: Sequence[str]) -> str:
    """The line that says that a new run's reward is the default one; empty if a word chose it, or an agent judges."""
    is_chosen = any(word.lstrip("+~").startswith("reward") for word in overrides)
    trains = config.algorithm.objective is Objective.policy and config.run.num_steps > 0 and config.run.resume is None
    if is_chosen or not trains or config.rollout.agent is not None or not _is_default(config):
        return ""
    return (
        f"reward: {DEFAULT}, which no word of the command chose: {_MEANING}; another: reward=math, or "
        "reward.kind=FILE.py:function (docs/rewards.md)"
    )


def _is_default(config: RunConfig) -> bool:
    return config.reward.kind == DEFAULT and not config.reward.parts


_MEANING = f"1 if a response equals the row's column {ANSWER!r}, otherwise 0"
