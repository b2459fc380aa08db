"""timeline.jsonl: what the trainer, the rollout workers and the rewards did in each step, and when.

    router, sampler, stopwatch --note--> Activities --take--> row_of_step --> timeline.jsonl      a row per step

    {"step": 3, "from": 1767225600.2, "to": 1767225604.9, "spans": [["trainer", "wait for rollouts", -0.0, 1.2, null],
     ["rollout-1", "sample", -0.3, 1.1, 17], ["rewards", "judge", 1.1, 1.2, 17], ...], "num_left_out": 0,
     "publish": {"version": 3, ...}}

Owns: the form of a row, and its size: MOST_SPANS of about 45 bytes. Does not own: what is noted (its callers), or what
follows from it (view/tables.py).
Invariants: `from` and `to` are seconds since 1970 by the controller's clock, times of spans are seconds after `from`,
below 0 where a span began in an earlier step. A span is in the row of the step in which it ended.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

import msgspec

from slipstream.conf.json_files import JsonObject
from slipstream.conf.whole_files import append_line
from slipstream.orchestrator.files.row_files import of_rows_alone
from slipstream.weight_sync.publish.report import PublishReport

TRAINER = "trainer"
REWARDS = "rewards"
MOST_SPANS = 512
"""Spans of one step; beyond them the shortest are left out."""
_MOST_KEPT = 16384


@dataclass(frozen=True, slots=True)
class Activity:
    """What somebody did. Example: Activity("rollout-1", "sample", 1767225600.2, 1767225601.7, 17)."""

    who: str
    """TRAINER, REWARDS or "rollout-N", N the worker's number."""
    what: str
    from_s: float
    """Seconds since 1970."""
    to_s: float
    prompt_id: int | None = None


class Activities:
    """Activities since they were last taken."""

    def __init__(self) -> None:
        self._ended: deque[Activity] = deque(maxlen=_MOST_KEPT)

    def note(self, who: str, what: str, from_s: float, prompt_id: int | None = None) -> None:
        """Note that `who` has just ended `what`, begun at `from_s`, a reading of time.time()."""
        self._ended.append(Activity(who, what, from_s, time.time(), prompt_id))

    def take(self) -> list[Activity]:
        """All of them, in the order in which they ended."""
        taken = list(self._ended)
        self._ended.clear()
        return taken


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """When a step began and ended, and what was done meanwhile."""

    from_s: float
    to_s: float
    activities: Sequence[Activity] = ()


def row_of_step(step: int, timeline: StepTimeline, sync: PublishReport | None) -> JsonObject:
    """One row, see the module's docstring."""
    ended = timeline.activities
    longest_first = sorted(range(len(ended)), key=lambda i: (ended[i].who != TRAINER, ended[i].from_s - ended[i].to_s))
    chosen = [ended[i] for i in sorted(longest_first[:MOST_SPANS])]
    origin = timeline.from_s
    return {
        "step": step,
        "from": round(origin, 3),
        "to": round(timeline.to_s, 3),
        "spans": [
            [one.who, one.what, round(one.from_s - origin, 4), round(one.to_s - origin, 4), one.prompt_id]
            for one in chosen
        ],
        "num_left_out": len(ended) - len(chosen),
        "publish": None if sync is None else _publish(sync),
    }


class _Replica(TypedDict, total=False):
    committed: bool


class _Publish(TypedDict, total=False):
    version: int
    replicas: list[_Replica]


TimelineRow = TypedDict(
    "TimelineRow",
    {
        "step": int,
        "from": float,
        "to": float,
        "spans": NotRequired[list[tuple[str, str, float, float, int | None]]],
        "publish": NotRequired[_Publish | None],
    },
)
"""What readers take of a row."""

read_step: Callable[[bytes], TimelineRow | None] = of_rows_alone(msgspec.json.Decoder(TimelineRow).decode)
"""Reads a line of timeline.jsonl; None of one that is damaged, or has other values."""


def write_row(path: Path, row: JsonObject) -> None:
    append_line(path, json.dumps(row, separators=(",", ":")))


def _publish(report: PublishReport) -> JsonObject:
    seconds = ("begin_s", "prepare_s", "write_s", "verify_s", "commit_s", "relay_s", "total_s")
    return {
        "version": report.version,
        **{name: round(getattr(report, name), 5) for name in seconds},
        "bytes": report.num_bytes,
        "peak_bytes": report.peak_bytes,
        "watermark_bytes": report.watermark_bytes,
        "replicas": [
            {"pause_s": round(one.pause_s, 5), "committed": one.committed, "error": one.error}
            for one in report.replicas
        ],
    }
