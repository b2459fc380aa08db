"""Promises of orchestrator/loop/alarms.py, and of the loop that asks it."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.loop import Loop, make_config

from slipstream.conf.schema import (
    Correction,
    MergeRounding,
    ParityConfig,
    RunConfig,
    TrainerConfig,
    TrainMode,
    WeightSyncConfig,
)
from slipstream.orchestrator.errors import TrainingStopped
from slipstream.orchestrator.loop.alarms import CAUSES, ParityAlarm


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


def test_warning_names_figure_threshold_causes_and_cure(caplog: pytest.LogCaptureFixture) -> None:
    ParityAlarm(ParityConfig(), is_corrected=False).reason_to_stop(7, {"parity/k3": 0.01, "parity/k3_stale": 0.25})
    (said,) = caplog.messages
    named = ("step 7", "parity/k3_stale is 0.25", "parity.warn_k3=0.05", "older versions", "docs/parity.md")
    assert all(part in said for part in (*named, "=none trains on"))


@pytest.mark.parametrize(
    ("rounding", "mode", "loses"),
    [
        (MergeRounding.dithered, TrainMode.lora, False),
        (MergeRounding.nearest, TrainMode.lora, True),
        (MergeRounding.nearest, TrainMode.full, False),
    ],
)
def test_updates_that_rounding_loses_are_a_cause(
    rounding: MergeRounding, mode: TrainMode, loses: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = RunConfig(trainer=TrainerConfig(mode=mode), weight_sync=WeightSyncConfig(rounding=rounding))
    assert config.loses_updates is loses
    ParityAlarm(ParityConfig(), is_corrected=True, loses_updates=loses).reason_to_stop(7, {"parity/k3": 0.25})
    assert ("weight_sync.rounding=nearest" in caplog.text) is loses


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
    assert alarm.reason_to_stop(1, dict.fromkeys(CAUSES, 0.45)) == ""
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


async def test_a_mismatch_at_the_threshold_does_not_end_the_run(tmp_path: Path) -> None:
    loop = a_run_that_stops_at(5.0, tmp_path)
    await loop.run()
    assert loop.rows[-1]["step"] == 4
