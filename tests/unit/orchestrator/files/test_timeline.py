"""Locks: what a row of timeline.jsonl holds, and what is left out of one that would be too long."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.trainer import outcome, publish_report

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
