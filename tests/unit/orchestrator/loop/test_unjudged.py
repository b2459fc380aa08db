"""When a run ends because nothing has a reward, and whom it blames."""

from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.conf.load import load_run_config
from slipstream.conf.schema import RunConfig
from slipstream.orchestrator.errors import TrainingStopped
from slipstream.orchestrator.loop.alarms import Unjudged, most_in_a_row
from slipstream.rollout.types import Group, Prompt, Rollout


def config_of(*words: str) -> RunConfig:
    return load_run_config(["experiment=quickstart", "reward=exact_match", *words])


def group_of(*rewards: float | None, failures: tuple[str, ...] = ("", "")) -> Group:
    rollouts = [Rollout([5], [-0.5], [0], "", "stop", failure=failure) for failure in failures]
    return Group(Prompt(0, (1,), "p"), rollouts, list(rewards or (None, None)))


AGENT = ("rollout.agent=a.py:play",)


@pytest.mark.parametrize(("groups_per_step", "most"), [(1, 8), (8, 8), (9, 9)])
def test_a_batch_and_at_least_eight_groups_in_a_row_are_too_many(groups_per_step: int, most: int) -> None:
    config = config_of(f"algorithm.groups_per_step={groups_per_step}")
    assert most_in_a_row(config) == most
    unjudged = Unjudged(config, None)
    for _ in range(most - 1):
        unjudged.note(group_of())
    unjudged.stop_if_too_many()
    unjudged.note(group_of(None, 0.0))
    for _ in range(most - 1):
        unjudged.note(group_of())
    unjudged.stop_if_too_many()
    unjudged.note(group_of())
    said = rf"^reward exact_match failed on every response of {most} groups in a row, .*Repair it and go on with"
    with pytest.raises(TrainingStopped, match=said):
        unjudged.stop_if_too_many()


def test_a_run_that_has_made_its_steps_ends_where_no_group_had_a_reward() -> None:
    unjudged = Unjudged(config_of(), None)
    unjudged.stop_if_all()
    unjudged.note(group_of())
    with pytest.raises(TrainingStopped, match=r"of 1 groups in a row.*Repair it and start again$"):
        unjudged.stop_if_all()
    unjudged.note(group_of(1.0, None))
    unjudged.note(group_of())
    unjudged.stop_if_all()


def blamed(config: RunConfig, groups: list[Group], report: str) -> str:
    episodes: Any = SimpleNamespace(first_report=report)
    unjudged = Unjudged(config, episodes)
    for group in groups:
        unjudged.note(group)
    with pytest.raises(TrainingStopped) as caught:
        unjudged.stop_if_all()
    return str(caught.value)


def test_an_agent_whose_episodes_fail_is_blamed_with_the_end_of_its_first_report() -> None:
    report = "".join(f"line {number}\n" for number in range(20))
    groups = [group_of(failures=("raised", "raised")), group_of(failures=("raised", "died"))]
    said = blamed(config_of(*AGENT), groups, report)
    assert said.startswith(
        "rollout.agent=a.py:play failed in every episode of 2 groups in a row (raised 3, died 1), so there is nothing"
    )
    assert "\n    line 7\n" not in said and "The first failure:\n    line 8\n" in said and "\n    line 19\n" in said
    groups += [group_of(failures=("", "timeout"))]
    said = blamed(config_of(*AGENT), groups, report)
    assert said.startswith(
        "rollout.agent=a.py:play failed in 5 episodes of 3 groups in a row (raised 3, died 1, timeout 1), and reward "
        "exact_match on the other 1, so there is nothing"
    )
    assert blamed(config_of(), [group_of()], "").startswith("reward exact_match failed on every response")


def test_failures_before_a_reward_are_forgotten() -> None:
    episodes: Any = SimpleNamespace(first_report="")
    unjudged = Unjudged(config_of(*AGENT), episodes)
    for group in (group_of(failures=("died", "died")), group_of(1.0, None)):
        unjudged.note(group)
    for _ in range(16):
        unjudged.note(group_of(failures=("raised", "raised")))
    with pytest.raises(TrainingStopped, match=r"of 16 groups in a row \(raised 32\), so"):
        unjudged.stop_if_too_many()
