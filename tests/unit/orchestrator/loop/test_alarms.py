"""Locks: when a run warns that trainer and engine disagree or that steps teach nothing, and when it ends because
nothing has a reward; and what it says then.
"""

import logging
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.loop import Loop, make_config

from slipstream.conf.load import load_run_config
from slipstream.conf.schema import (
    AlgorithmConfig,
    Correction,
    MergeRounding,
    ParityConfig,
    RunConfig,
    TeacherConfig,
    WeightSyncConfig,
)
from slipstream.orchestrator.errors import TrainingStopped
from slipstream.orchestrator.loop.alarms import CAUSES, LearningAlarm, ParityAlarm, Unjudged, most_in_a_row
from slipstream.orchestrator.metrics.catalogue import Value
from slipstream.rollout.types import Group, Prompt, Rollout


def warned_steps(alarm: ParityAlarm, figures: list[float | None], caplog: pytest.LogCaptureFixture) -> list[int]:
    """Steps whose k3 raised a warning, when step i has the i-th figure."""
    warned = []
    for step, figure in enumerate(figures):
        caplog.clear()
        assert alarm.reason_to_stop(step, {"parity/k3": figure, "parity/k3_stale": None}) == ""
        warned += [step] * len(caplog.records)
    return warned


def test_a_warning_comes_once_and_again_after_a_while_or_a_recovery(caplog: pytest.LogCaptureFixture) -> None:
    alarm = ParityAlarm(ParityConfig(warn_k3=0.1), is_corrected=True)
    figures: list[float | None] = [0.1, 0.2, 0.3, None, 0.2, *[0.2] * 20]
    with caplog.at_level(logging.WARNING):
        assert warned_steps(alarm, figures, caplog) == [1, 4, 24]


@pytest.mark.parametrize(("share", "is_named"), [(0.71, True), (0.06, False)])
def test_the_share_of_the_update_that_engines_lack_says_whether_rounding_is_the_cause(
    share: float, is_named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also when a later row, without a publish, has no share."""
    for loses_updates in (True, False):
        caplog.clear()
        alarm = ParityAlarm(ParityConfig(), is_corrected=True, loses_updates=loses_updates)
        alarm.reason_to_stop(6, {"parity/k3": 0.0, "sync/update_error": share})
        alarm.reason_to_stop(7, {"parity/k3": 0.25, "sync/update_error": None})
        assert ("sync/update_error is 0.71" in caplog.text) is is_named
        assert ("weight_sync.rounding=nearest" in caplog.text) is (is_named and loses_updates)


@pytest.mark.parametrize(
    ("floor", "where"), [(0.2, "in how the engine samples"), (0.02, "in its weights or between trainer and engine")]
)
def test_the_floor_says_on_which_side_the_cause_is(floor: float, where: str) -> None:
    """The floor of step 3, at 2/3 and at 1/15 of that step's mismatch, tells of the alarm at step 5."""
    alarm = ParityAlarm(ParityConfig(warn_k3=0, stop_k3=0.5), is_corrected=True)
    assert alarm.reason_to_stop(3, {"parity/k3": 0.3, "parity/floor_k3": floor}) == ""
    reason = alarm.reason_to_stop(5, {"parity/k3": 0.6, "parity/floor_k3": None})
    assert f"parity/floor_k3 of step 3 is {floor:.3g}, where parity/k3 is 0.3" in reason and where in reason
    assert "algorithm.correction" not in reason


@pytest.mark.parametrize("figure", CAUSES)
def test_either_figure_ends_a_run_and_is_the_one_that_is_named(figure: str) -> None:
    alarm = ParityAlarm(ParityConfig(stop_k3=0.5), is_corrected=True)
    row = dict.fromkeys(CAUSES, 0.45) | {figure: 0.6}
    assert alarm.reason_to_stop(1, dict.fromkeys(CAUSES, 0.5)) == ""
    assert alarm.reason_to_stop(2, row).startswith(f"{figure} is 0.6, above parity.stop_k3=0.5: ")


def test_thresholds_of_zero_are_off(caplog: pytest.LogCaptureFixture) -> None:
    alarm = ParityAlarm(ParityConfig(warn_k3=0, stop_k3=0), is_corrected=True)
    assert alarm.reason_to_stop(1, {"parity/k3": 1e9}) == "" and not caplog.records


def a_run_that_stops_at(k3_sum: float, tmp_path: Path) -> Loop:
    loop = Loop(tmp_path, replace(make_config(), parity=ParityConfig(stop_k3=0.5)))
    loop.trainer.extra_sums = {"parity/k3_sum": k3_sum, "parity/num_tokens": 10.0}
    return loop


async def test_a_mismatch_above_stop_k3_ends_the_run_with_its_state_saved(tmp_path: Path) -> None:
    """k3 = 6 / 10 in every step: the first one ends the run, after it was published and its row written."""
    loop = a_run_that_stops_at(6.0, tmp_path)
    with pytest.raises(TrainingStopped, match=r"step 1: parity/k3 is 0\.6, above parity\.stop_k3=0\.5.*is saved in"):
        await loop.run()
    assert [row["step"] for row in loop.rows] == [0, 1]
    assert loop.saved.policy_version == 1


@pytest.mark.parametrize(
    ("correction", "rounding"), [(Correction.none, MergeRounding.dithered), (Correction.tis, MergeRounding.nearest)]
)
async def test_a_runs_warning_names_those_of_its_options_that_make_a_mismatch_worse(
    correction: Correction, rounding: MergeRounding, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sync = WeightSyncConfig(rounding=rounding)
    loop = Loop(tmp_path, make_config(num_steps=1, correction=correction, sync=sync))
    loop.trainer.extra_sums = {"parity/k3_sum": 6.0, "parity/num_tokens": 10.0}
    await loop.run()
    (said,) = [text for text in caplog.messages if "parity/k3 is 0.6, above parity.warn_k3" in text]
    assert ("algorithm.correction=none trains on" in said) == (correction is Correction.none)
    assert ("weight_sync.rounding=nearest gives" in said) == (rounding is MergeRounding.nearest)


TAUGHT: dict[str, Value] = {
    "optim/skipped": 0,
    "optim/grad_norm": 0.5,
    "reward/no_spread_fraction": 0.5,
    "reward/mean": 0.25,
}
EQUAL = TAUGHT | {"reward/no_spread_fraction": 1.0}


def warned(alarm: LearningAlarm, rows: list[dict[str, Value]], caplog: pytest.LogCaptureFixture) -> list[int]:
    """Steps, from 0, after which a warning was logged."""
    found = []
    for step, row in enumerate(rows):
        caplog.clear()
        alarm.look(step, row)
        found += [step] * len(caplog.records)
    return found


def test_a_warning_comes_after_a_few_steps_and_again_after_a_while(caplog: pytest.LogCaptureFixture) -> None:
    start: dict[str, Value] = {"optim/skipped": None}
    rows = [start, *[EQUAL] * 4, TAUGHT, *[EQUAL] * 25]
    assert warned(LearningAlarm(AlgorithmConfig()), rows, caplog) == [10, 30], "after five, and after twenty more"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"reward/no_spread_fraction": 1.0}, r"rewards of each group are all equal \(reward/mean 0.25\)"),
        ({"optim/grad_norm": 0.0}, "the gradient is 0"),
        ({"optim/skipped": 1, "optim/grad_norm": None}, "changed no weight"),
    ],
)
def test_the_end_of_a_short_run_says_why_nothing_was_learned(
    change: dict[str, Value], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    alarm = LearningAlarm(AlgorithmConfig())
    warned(alarm, [{"optim/skipped": None}, *[TAUGHT | change] * 3], caplog)
    alarm.say_at_the_end()
    assert re.match(f"nothing was learned in the 3 steps of this start: .*{why}", caplog.messages[-1])
    one = LearningAlarm(AlgorithmConfig())
    warned(one, [TAUGHT | change], caplog)
    one.say_at_the_end()
    assert caplog.messages[-1].startswith("nothing was learned in the 1 step of this start: ")
    for num_taught, num_lost in ((4, 0), (3, 2), (1, 4)):
        alarm = LearningAlarm(AlgorithmConfig())
        warned(alarm, [TAUGHT] * num_taught + [TAUGHT | change] * num_lost, caplog)
        caplog.clear()
        alarm.say_at_the_end()
        assert not caplog.messages, "fewer than five at the end of a longer run"
    alarm.look(5, TAUGHT | change)
    alarm.say_at_the_end()
    assert caplog.messages[-1].startswith("nothing was learned in the 5 last steps of this start: ")


def test_equal_rewards_teach_where_advantages_compare_the_batch_or_a_teacher_speaks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    teacher = TeacherConfig(base_url="http://127.0.0.1:1/v1", model="big")
    for algorithm in (
        AlgorithmConfig(advantage="batch_std"),
        AlgorithmConfig(advantage="own.py:f"),
        AlgorithmConfig(distill_coef=0.5, teacher=teacher),
    ):
        assert not warned(LearningAlarm(algorithm), [EQUAL] * 5, caplog)


async def test_a_run_that_learned_nothing_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(tmp_path, make_config())
    loop.trainer.grad_norm = 0.0
    with caplog.at_level(logging.WARNING):
        await loop.run()
    assert "nothing was learned in the 4 steps of this start: the gradient is 0 (optim/grad_norm)" in caplog.messages


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
