"""metrics.jsonl as columns; fleet.jsonl as what became of each rollout worker, with the versions of timeline.jsonl.

Owns: columns; states, stretches of time in them, tokens per second, versions. Does not own: names of metrics
(files/metrics_catalogue.py), events of workers (fleet/fleet_log.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from slipstream.conf.json_files import JsonObject
from slipstream.orchestrator.files.row_files import GrowingFile, figures

MOST_POINTS = 400
MOST_EVENTS = 200
_STATE_AFTER = {
    "process_up": "starting",
    "up": "up",
    "serving": "serving",
    "first_token": "serving",
    "tokens": "serving",
    "waiting": "waits for a publish",
    "failed": "failed",
    "restarting": "restarting",
    "out": "out of service",
    "joining": "starting",
    "leaving": "hands over",
    "gone": "gone",
}
"""Event -> state of the worker from then on; other events change nothing."""


@dataclass
class WorkerHistory:
    name: str = ""
    events: list[JsonObject] = field(default_factory=list[JsonObject])
    """Without `tokens`."""
    counts: list[tuple[float, str, int]] = field(default_factory=list[tuple[float, str, int]])
    """(time, process, its tokens since its start)."""


class FleetTable:
    """All workers of a run. `add` takes rows as they are written, `plain` says what the page shows."""

    def __init__(self) -> None:
        self._workers: dict[int, WorkerHistory] = {}

    def add(self, rows: Iterable[JsonObject]) -> None:
        for row in rows:
            worker, time, event = row.get("worker"), row.get("time"), row.get("event")
            if not (isinstance(worker, int) and isinstance(time, (int, float)) and isinstance(event, str)):
                continue
            history = self._workers.setdefault(worker, WorkerHistory())
            history.name = str(row.get("name", history.name))
            if event == "tokens" and isinstance(row.get("tokens"), int):
                history.counts.append((float(time), history.name, row["tokens"]))
            else:
                history.events.append(row)

    def plain(self, publishes: list[tuple[float, int, list[bool]]]) -> JsonObject:
        """Everything, for the page. `publishes`: (end, version, whether each replica committed it), in order."""
        return {
            "workers": [self._plain(number, history, publishes) for number, history in sorted(self._workers.items())],
            "trainer": _thinned([(at, version) for at, version, _ in publishes]),
        }

    def _plain(self, number: int, history: WorkerHistory, publishes: list[tuple[float, int, list[bool]]]) -> JsonObject:
        events = sorted(history.events, key=lambda row: row["time"])
        # A worker that samples serves, whether its row `serving` was written or not, as at the run's start.
        sampled = [{"time": count[0], "event": "tokens"} for count in (history.counts[:1] + history.counts[-1:])]
        stretches = _stretches([*events, *sampled])
        versions = [
            (at, version) for at, version, committed in publishes if number < len(committed) and committed[number]
        ]
        return {
            "worker": number,
            "name": history.name,
            "state": stretches[-1][2] if stretches else "unknown",
            "version": versions[-1][1] if versions else None,
            "restarts": sum(row["event"] == "restarting" for row in events),
            "tokens": sum({process: tokens for _, process, tokens in history.counts}.values()),
            "stretches": stretches,
            "rates": _thinned(_rates(history.counts)),
            "versions": _thinned(versions),
            "events": events[-MOST_EVENTS:],
        }


def _stretches(rows: list[JsonObject]) -> list[tuple[float, float, str]]:
    """(from, to, state), one after the other; the last one ends with the last row."""
    found: list[tuple[float, float, str]] = []
    began, state = 0.0, ""
    for row in sorted(rows, key=lambda row: row["time"]):
        after = _STATE_AFTER.get(row["event"], state)
        if after != state:
            if state:
                found.append((began, row["time"], state))
            began, state = row["time"], after
    if state:
        found.append((began, max(row["time"] for row in rows), state))
    return found


def _rates(counts: list[tuple[float, str, int]]) -> list[tuple[float, float]]:
    """(time, tokens per second since the question before); a process that was started again counts from 0."""
    return [
        (at, (tokens - before) / (at - since))
        for (since, name, before), (at, same, tokens) in pairwise(counts)
        if name == same and at > since and tokens >= before
    ]


def _thinned(points: list[tuple[float, Any]]) -> list[tuple[float, Any]]:
    """At most MOST_POINTS of the points, at even distances, with the last one."""
    every = -(-len(points) // MOST_POINTS) or 1
    return points[(len(points) - 1) % every :: every] if points else []


Number = float | int | None


class MetricsTable:
    """Columns of one run: metric -> a number per row, None where it has none."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)
        self.steps: list[int] = []
        self._columns: dict[str, list[Number]] = {}
        self.generation = 0
        """Rises when earlier rows are void, because the run was resumed from an earlier step."""

    def refresh(self) -> None:
        news = self._file.news()
        if news.is_another_file:
            self.steps, self._columns = [], {}
            self.generation += 1
        for row in figures(news):
            self._append(row)

    def _append(self, row: JsonObject) -> None:
        self.steps.append(row["step"])
        for name, value in row.items():
            if value is None or name == "step":
                continue
            column = self._columns.setdefault(name, [])
            column.extend([None] * (len(self.steps) - 1 - len(column)))
            column.append(value)

    @property
    def names(self) -> list[str]:
        """Metrics that have a number in some row, in the order in which they came."""
        return list(self._columns)

    @property
    def last(self) -> dict[str, Number]:
        return {name: column[-1] for name, column in self._columns.items() if column}

    def columns(self, names: list[str] | None = None, after_row: int = 0) -> JsonObject:
        """Rows from number `after_row` on, of these metrics; None: of all."""
        chosen = self.names if names is None else [name for name in names if name in self._columns]
        rows = range(after_row, len(self.steps))
        padded = {name: self._columns[name] for name in chosen}
        return {
            "generation": self.generation,
            "from_row": after_row,
            "steps": self.steps[after_row:],
            "columns": {
                name: [column[row] if row < len(column) else None for row in rows] for name, column in padded.items()
            },
        }
