"""Locks: rows are complete, means do not depend on the layout, resumes keep one row a step, sinks agree; a row of the
timeline has its form, and leaves out what would make it too long.
"""

import errno
import json
import math
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from fakes.trainer import outcome, publish_report, stats
from rich.console import Console

from slipstream.conf.json_files import JsonObject
from slipstream.orchestrator.files.row_files import read_rows
from slipstream.orchestrator.files.run_folder import RunFolder
from slipstream.orchestrator.files.run_log import ProgressLine, RunLog, format_s
from slipstream.orchestrator.files.timeline import (
    MOST_SPANS,
    REWARDS,
    TRAINER,
    Activities,
    Activity,
    StepTimeline,
    row_of_step,
    write_row,
)
from slipstream.orchestrator.metrics.catalogue import (
    JUDGE_METRICS,
    METRICS,
    NO_EVALS,
    NO_REWARDS,
    REWARD_METRICS,
    RewardNames,
)
from slipstream.orchestrator.metrics.curves import draw_curves
from slipstream.orchestrator.metrics.held_out import EvalNames, Evaluation, evaluate_groups
from slipstream.orchestrator.metrics.loggers import TensorBoardEvents
from slipstream.orchestrator.metrics.step_rows import StepRecord, row_of
from slipstream.orchestrator.metrics.telemetry import Telemetry
from slipstream.orchestrator.training import RunResult
from slipstream.rollout.types import Group, Prompt, Rollout, Routes
from slipstream.trainer.types import OptimStats


def record(step: int, **changes: object) -> StepRecord:
    rollouts = [
        Rollout([1, 2], [-1.0, -1.0], [0, 0], "a", "stop"),
        Rollout([1] * 4, [-1.0] * 4, [0] * 4, "b", "length", num_evictions=3),
    ]
    parts: dict = {
        "groups": [Group(Prompt(0, (1, 2, 3), "p"), rollouts, [1.0, None])],
        "staleness_steps": [1],
        "loss": [stats(4, 0.5), stats(2, 0.2)],
        "optim": OptimStats(step, 0.7, 1e-3, True),
        "sync": publish_report(step, [outcome(True), outcome(False, "x")]),
        "num_ranks": 2,
        "extra": {
            "step/total_s": 2.0,
            "trainer/forward_backward_s": 1.25,
            "trainer/optimizer_s": 0.25,
            "trainer/num_tokens": 12,
        },
    }
    return StepRecord(step, step, **(parts | changes))


def test_row_has_every_metric_by_hand() -> None:
    row = row_of(record(3))
    assert row.keys() == METRICS.keys()
    assert (row["reward/mean"], row["reward/failures"], row["reward/rollouts"]) == (1.0, 1, 2)
    assert row["parity/k3"] == pytest.approx((4 * 0.5 + 2 * 0.2) / 6)
    assert row["reward/no_spread_fraction"] == 1.0, "one reward of the only group failed, and one is no spread"
    assert row["parity/k3_stale"] is None
    assert row["policy/entropy"] == pytest.approx(1.5)
    assert row["rollout/tokens_per_s"] == 6 / 2.0
    assert row["rollout/truncated_fraction"] == 0.5
    assert row["rollout/evictions"] == 3
    assert row["trainer/tokens_per_s_per_rank"] == 12 / 1.5 / 2
    assert (row["sync/replicas_committed"], row["sync/total_s"], row["sync/watermark_bytes"]) == (1, 0.06, 1 << 20)
    assert row["eval/reward"] is None


def test_each_reward_has_metrics_of_its_own() -> None:
    rollouts = [Rollout([5, 2], [-1.0, -0.5], [2, 2], "a", "stop")] * 2
    group = Group(
        Prompt(0, (1,), "p"), rollouts, [1.0, None], [{"right": 1.0, "short": 0.5}, {"right": 0.0, "short": None}]
    )
    other = Group(Prompt(1, (1,), "p"), rollouts[:1], [1.0], [{"right": 1.0}])
    rewards = RewardNames(("right", "short"), ["short"])
    evaluation = Evaluation(2, 2, {"": [other]}, evaluate_groups({"": [other]}, 2, EvalNames((), (1,)), 1.0))
    row = row_of(
        record(3, groups=[group, other], staleness_steps=[1, 1], evaluations=[evaluation]), rewards, EvalNames((), (1,))
    )
    assert row["reward/right_mean"] == pytest.approx(2 / 3)
    assert row["reward/no_spread_fraction"] == 1.0, "a group of one response does not count"
    assert (row["reward/right_failures"], row["reward/short_failures"], row["reward/short_mean"]) == (0, 1, 0.5)
    assert (row["eval/right_mean"], row["eval/short_mean"]) == (1.0, None)
    assert (row["eval/pass_at_1"], row["eval/pass_at_1_se"], row["eval/version_spread"]) == (1.0, None, 0)
    assert row.keys() == METRICS.keys() | {
        *("eval/pass_at_1", "eval/pass_at_1_se"),
        *(name.replace("<name>", reward) for name in REWARD_METRICS for reward in ("right", "short")),
        *(name.replace("<name>", "short") for name in JUDGE_METRICS),
    }


def test_groups_without_spread_are_counted_and_on_the_line_when_they_are_all(tmp_path: Path) -> None:
    rollouts = [Rollout([1, 2], [-1.0, -1.0], [0, 0], "a", "stop")] * 2
    groups = [Group(Prompt(i, (1,), "p"), rollouts, [0.0, reward]) for i, reward in enumerate((0.0, 1.0, None, 0.0))]
    some = record(1, groups=groups, staleness_steps=[0, 1, 3, 0])
    none = record(2, groups=groups[:1], staleness_steps=[0])
    row = row_of(some)
    assert row["reward/no_spread_fraction"] == 0.75
    assert (row["staleness/mean"], row["staleness/max"]) == (1.0, 3)
    assert (row["reward/mean"], row["reward/std"]) == pytest.approx((1 / 7, math.sqrt(6) / 7))
    alone = record(1, groups=[Group(Prompt(0, (1,), "p"), rollouts[:1], [1.0])], staleness_steps=[0])
    assert row_of(alone)["reward/no_spread_fraction"] is None
    text = StringIO()
    rewards = RewardNames(("right", "short"))
    groups[0].parts.extend([{"right": 0.25, "short": 0.5}] * 2)
    with open_telemetry(tmp_path, console=Console(file=text, width=300), rewards=rewards) as telemetry:
        telemetry.step(some)
        assert "equal" not in text.getvalue()
        telemetry.step(replace(none, step=10))
    line = text.getvalue().splitlines()[-1]
    assert "reward 0.000  right 0.250  short 0.500  groups of equal rewards 100%  tokens 2  cut off 0%" in line
    taught = [replace(one, teacher_logprobs=[-1.5, -1.5]) for one in rollouts]
    with open_telemetry(tmp_path, console=Console(file=text, width=300), rewards=rewards) as telemetry:
        telemetry.step(replace(none, step=10, groups=[replace(groups[0], rollouts=taught)]))
    assert "short 0.500  KL to the teacher 0.500  tokens 2" in text.getvalue().splitlines()[-1]


def test_routes_are_counted_by_hand() -> None:
    """Two rollouts of 3 + 2 and 3 + 4 tokens, of which the first has routes of four positions: 4 * 2 * 2 bytes, and one
    per position."""
    plain = record(3)
    assert row_of(plain)["parity/route_bytes_per_token"] is None and row_of(plain)["parity/flipped_routings"] is None
    rollouts = plain.groups[0].rollouts
    routes = Routes(np.zeros((4, 2, 2), np.uint8), np.array([True, True, True, False]))
    rollouts[0] = replace(rollouts[0], routes=routes)
    first, second = stats(4, 0.5), stats(2, 0.2)
    first.sums.update({"parity/num_flipped": 3.0, "parity/num_routings": 16.0})
    second.sums.update({"parity/num_flipped": 1.0, "parity/num_routings": 4.0})
    row = row_of(replace(plain, loss=[first, second, stats(0, 0.0)]))
    assert row["parity/route_bytes_per_token"] == (4 * 2 * 2 + 4) / 12
    assert row["parity/tokens_without_route"] == 1
    assert row["parity/flipped_routings"] == 4 / 20


def test_metric_outside_of_the_catalogue_is_refused() -> None:
    with pytest.raises(AssertionError, match="rewrad/mean"):
        row_of(record(1, extra={"rewrad/mean": 1.0}))


def open_telemetry(
    folder: Path,
    first_step: int = 0,
    console: Console | None = None,
    rewards: RewardNames = NO_REWARDS,
    evals: EvalNames = NO_EVALS,
    samples_per_step: int = 0,
    gpus: tuple[float, float] = (1.0, 1.0),
) -> Telemetry:
    progress = ProgressLine(console or Console(file=StringIO()))
    loggers = [TensorBoardEvents(folder / "tensorboard", after_step=first_step)]
    return Telemetry(
        RunFolder(folder),
        num_steps=10,
        first_step=first_step,
        progress=progress,
        gpus=gpus,
        loggers=loggers,
        rewards=rewards,
        evals=evals,
        samples_per_step=samples_per_step,
        max_sample_bytes_per_step=1 << 20,
    )


class Gone(StringIO):
    """A terminal after a SIGHUP."""

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_that_has_gone_costs_no_row(tmp_path: Path, is_terminal: bool) -> None:
    with open_telemetry(tmp_path, console=Console(file=Gone(), force_terminal=is_terminal)) as telemetry:
        for step in range(3):
            telemetry.step(record(step))
    with RunLog(tmp_path / "run.log", Console(file=Gone(), force_terminal=is_terminal)) as log:
        log.say("done")
    assert len(list(read_rows(tmp_path / "metrics.jsonl"))) == 3


def test_a_step_leaves_its_samples_and_its_timeline(tmp_path: Path) -> None:
    with open_telemetry(tmp_path, samples_per_step=2) as telemetry:
        telemetry.step(record(3, timeline=StepTimeline(10.0, 12.0)))
        telemetry.step(replace(record(4), policy_version=9))
    folder = RunFolder(tmp_path)
    (line,) = folder.timeline.read_text().splitlines()
    row = json.loads(line)
    assert (row["step"], row["from"], row["to"]) == (3, 10.0, 12.0)
    assert len(row["publish"]["replicas"]) == 2
    samples = [json.loads(line) for line in folder.samples.read_text().splitlines()]
    assert [(row["step"], row["policy_version"]) for row in samples] == [(3, 3)] * 2 + [(4, 9)] * 2


def test_a_steps_row_is_written_after_what_other_files_have_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume after a kill takes a step that has its row for done: what came after it would be missing for good."""
    folder, found = RunFolder(tmp_path), list[tuple[str, int]]()

    def look(path: Path, row: JsonObject) -> None:
        found.append((folder.metrics.read_text(), folder.samples.read_text().count("\n")))
        write_row(path, row)

    monkeypatch.setattr("slipstream.orchestrator.metrics.telemetry.write_row", look)
    with open_telemetry(tmp_path, samples_per_step=2) as opened:
        opened.step(record(3, timeline=StepTimeline(10.0, 12.0)))
    assert found == [("", 2)]
    assert [row["step"] for row in read_rows(folder.metrics)] == [3]


def test_a_resume_continues_rows_and_curves_after_the_checkpoint(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_telemetry(tmp_path) as first:
        for step in range(6):
            first.step(record(step))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "half a li')  # the crash
    with open_telemetry(tmp_path, first_step=3) as second:
        second.step(record(4))
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    curves = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in curves.Scalars("optim/lr")] == [0, 1, 2, 3, 4], "they do not double back"


def test_numbers_that_are_not_finite_are_null_and_rows_stay_json(tmp_path: Path) -> None:
    with open_telemetry(tmp_path) as telemetry:
        telemetry.step(record(1, optim=OptimStats(0, math.nan, 1e-3, False), sync=None))
    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert (row["optim/grad_norm"], row["optim/skipped"], row["sync/total_s"]) == (None, 1, None)


def test_progress_line_shows_step_numbers_and_time_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = StringIO()
    compiles = {**record(1).extra, "step/total_s": 60.0}
    with caplog.at_level("INFO"), open_telemetry(tmp_path, console=Console(file=text)) as telemetry:
        telemetry.step(record(1, extra=compiles))
        telemetry.step(record(2))
    assert "step 1/10" in text.getvalue() and "reward 1.000" in text.getvalue()
    first, second = (line for line in caplog.messages if line.startswith("step "))
    assert "left" not in first
    assert "left 0:16" in second  # eight steps of 2 s
    assert format_s(3725) == "1:02:05"


def test_responses_without_a_reward_are_told_until_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def evaluated(*rewards: float | None) -> list[Evaluation]:
        group = Group(Prompt(0, (1,), "p"), [Rollout([5], [-1.0], [2], "a", "stop")] * len(rewards), [*rewards])
        return [Evaluation(0, 0, {"": [group]}, evaluate_groups({"": [group]}, 0, EvalNames(), 1.0))]

    def told_after(*steps: StepRecord) -> tuple[list[str], str]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        caplog.clear()
        with caplog.at_level("INFO"), open_telemetry(folder) as telemetry:
            for one in steps:
                telemetry.step(one)
        result = RunResult(RunFolder(folder), 2, 2, "reward", telemetry.last_eval_reward, None, None)
        return [line for line in caplog.messages if line.startswith("step ")], result.summary()

    shown, summary = told_after(
        record(1, evaluations=evaluated(1.0, 0.0)), record(2, evaluations=evaluated(1.0, None, None))
    )
    assert [line.count("failed 1 of 2") for line in shown] == [1, 1]
    assert [line.count("eval failed 2 of 3") for line in shown] == [0, 1]
    assert re.search(r"failed rewards +2 of 4$", summary, re.MULTILINE), "of both steps"
    assert re.search(r"failed held-out +2 of 3$", summary, re.MULTILINE), "of the last evaluation"
    rewarded = [replace(group, rewards=[1.0, 0.0]) for group in record(1).groups]
    shown, summary = told_after(record(1, groups=rewarded, evaluations=evaluated(1.0, 0.0)))
    assert "failed" not in shown[0] + summary


def test_curves_are_drawn_from_the_rows_alone(tmp_path: Path) -> None:
    with open_telemetry(tmp_path) as telemetry:
        telemetry.step(StepRecord(0, 0))
        telemetry.step(record(1))
    draw_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_an_evaluation_is_told_with_its_step_and_each_of_its_sets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sets = {
        name: [Group(Prompt(0, (1,), "p"), [Rollout([5], [-1.0], [2], "a", "stop")], [reward])]
        for name, reward in (("aime", 1.0), ("gsm8k", 0.5))
    }
    names = EvalNames(("aime", "gsm8k"))
    figures = evaluate_groups(sets, 0, names, 1.0)
    with caplog.at_level("INFO"), open_telemetry(tmp_path, evals=names) as telemetry:
        telemetry.step(record(4, evaluations=[Evaluation(3, 3, sets, figures)]))
        telemetry.step(record(5))
    words = "0.750 (aime 1.000, gsm8k 0.500)"
    shown = [line for line in caplog.messages if line.startswith("step ")]
    assert [f"eval (step 3) {words}" in line for line in shown] == [True, True]
    result = RunResult(RunFolder(tmp_path), 5, 5, "reward", 0.75, None, None)
    assert re.search(rf"held-out reward +{re.escape(words)}$", result.summary(), re.MULTILINE)


def test_a_step_says_what_its_time_is_measured_by(tmp_path: Path) -> None:
    """Steps of 2 s that begin 2.5 s apart, on 2 GPUs and 0.5 for each of 4 workers; then 4 to 6 are made again."""

    def at(step: int) -> StepRecord:
        extra = {**record(step).extra, "rollout/replicas_wanted": 4, "rollout/replicas_serving": 4}
        timeline = StepTimeline(2.5 * step, 2.5 * step + 2.0)
        return record(step, extra=extra, timeline=timeline, optim=OptimStats(step, 1.0, 1e-3, True))

    with open_telemetry(tmp_path, gpus=(2.0, 0.5)) as telemetry:
        rows = [telemetry.step(at(step)) for step in range(1, 7)]
    assert {row["step/gpus"] for row in rows} == {4.0}
    assert [row["step/between_s"] for row in rows] == [None, *[pytest.approx(0.5)] * 5]
    assert [row["step/goodput"] for row in rows[:3]] == [None] * 3, "the first one compiles, and three are quiet"
    # Six steps of 2 s, and five pauses of half a second.
    assert rows[-1]["step/goodput"] == pytest.approx(12 / 14.5)
    with open_telemetry(tmp_path, first_step=3, gpus=(2.0, 0.5)) as telemetry:
        again = [telemetry.step(at(step)) for step in (4, 5)]
    assert [row["step/redone_s"] for row in again] == [pytest.approx(3 * 2.5), None]
    assert again[0]["step/between_s"] is None


def test_a_row_counts_seconds_from_its_step(tmp_path: Path) -> None:
    ended = [Activity("rollout-1", "sample", 99.5, 101.25, 17), Activity(TRAINER, "optimizer", 100.5, 103.0)]
    report = publish_report(3, [outcome(True), outcome(False, "gone")])
    report = replace(report, begin_s=1.0, prepare_s=2.0, write_s=3.0, verify_s=4.0, commit_s=5.0, relay_s=6.0)
    row = row_of_step(4, StepTimeline(100.0004, 104.0, ended), report)
    published = row.pop("publish")
    assert row == {
        "step": 4,
        "from": 100.0,
        "to": 104.0,
        "spans": [["rollout-1", "sample", -0.5004, 1.2496, 17], ["trainer", "optimizer", 0.4996, 2.9996, None]],
        "num_left_out": 0,
    }
    assert [published[f"{name}_s"] for name in ("begin", "prepare", "write", "verify", "commit", "relay")] == [
        *(1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    ]
    assert (published["version"], published["bytes"]) == (3, report.num_bytes)
    assert (published["peak_bytes"], published["watermark_bytes"]) == (report.peak_bytes, report.watermark_bytes)
    assert [(one["committed"], one["error"]) for one in published["replicas"]] == [(True, None), (False, "gone")]
    assert [one["pause_s"] for one in published["replicas"]] == [one.pause_s for one in report.replicas]
    for number in (4, 5):
        write_row(tmp_path / "timeline.jsonl", row_of_step(number, StepTimeline(1.0, 2.0), None))
    rows = [json.loads(line) for line in (tmp_path / "timeline.jsonl").read_text().splitlines()]
    assert [(row["step"], row["spans"], row["publish"]) for row in rows] == [(4, [], None), (5, [], None)]


def test_the_shortest_are_left_out_and_none_of_the_trainers() -> None:
    """In the order in which they ended, whatever their length."""
    others = [Activity(REWARDS, "judge", 0.0, 1.0 + (i * 7) % MOST_SPANS, i) for i in range(MOST_SPANS)]
    ended = [*others, Activity(TRAINER, "wait", 0.0, 0.5), Activity(TRAINER, "step", 0.5, 0.75)]
    row = row_of_step(1, StepTimeline(0.0, 9.0, ended), None)
    kept = [one for one in ended if one.who == TRAINER or one.to_s > 2.0]
    assert len(kept) == MOST_SPANS and row["num_left_out"] == 2
    assert [(span[0], span[3], span[4]) for span in row["spans"]] == [
        (one.who, one.to_s, one.prompt_id) for one in kept
    ]


def test_what_was_taken_is_not_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.orchestrator.files.timeline.time.time", lambda: 12.5)
    activities = Activities()
    activities.note("rollout-0", "sample", 10.0, 3)
    activities.note(TRAINER, "wait", 11.0)
    assert activities.take() == [Activity("rollout-0", "sample", 10.0, 12.5, 3), Activity(TRAINER, "wait", 11.0, 12.5)]
    assert activities.take() == []
