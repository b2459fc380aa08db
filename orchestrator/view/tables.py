"""metrics.jsonl as columns; fleet.jsonl as what became of each rollout worker, with the versions of timeline.jsonl; and
who waited for whom in one step, from its row there:

    trainer    |--- wait for rollouts ---|-- forward and backward --|- optimizer -|- publish -|
    rollout-0  |--- samples ----|        idle ........................................|paused-|
    rollout-1  |--- samples ----------|  idle ........................................|paused-|
    rewards                    judge  |--|

Owns: columns; states, stretches of time in them, tokens per second, versions; what is concluded of a step. Does not
own: names of metrics (metrics/catalogue.py), events of workers (fleet/fleet_log.py), what is noted of a step
(files/timeline.py).
The last response of a batch is what the trainer waited for. A worker without a request is idle; it waits for whatever
the trainer does meanwhile, because no group may be sampled before that (the staleness bound), or for its requests to be
made at all.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from slipstream.conf.json_files import JsonObject
from slipstream.orchestrator.files.row_files import GrowingFile, figures

T = TypeVar("T")

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


def _thinned(points: list[T]) -> list[T]:
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


Span = Sequence[Any]
WAIT = "wait for rollouts"
SHORTEST_IDLE_S = 0.001


def concluded(row: JsonObject) -> JsonObject:
    """What the page says about a step. Returns "seconds" of the step; "waits": sentences; "idle": worker -> [from, to,
    what the trainer did meanwhile]."""
    spans: list[Span] = [span for span in row.get("spans", []) if isinstance(span, list)]
    seconds = float(row.get("to", 0.0)) - float(row.get("from", 0.0))
    trainer = [span for span in spans if span[0] == "trainer"]
    publish: JsonObject = row.get("publish") or {}
    replicas: list[Any] = publish.get("replicas", [])
    workers = {f"rollout-{number}" for number in range(len(replicas))}  # one that sampled nothing is idle, too
    workers = sorted(workers | {str(span[0]) for span in spans if str(span[0]).startswith("rollout-")})
    idle = {worker: _idle(spans, worker, trainer, seconds) for worker in workers}
    return {"seconds": seconds, "waits": [*_trainer_waits(spans, trainer), *_worker_waits(idle)], "idle": idle}


def _trainer_waits(spans: Sequence[Span], trainer: Sequence[Span]) -> list[str]:
    said: list[str] = []
    for _, what, begin, end, _ in trainer:
        if what != WAIT or end - begin < SHORTEST_IDLE_S:
            continue
        said.append(f"The trainer waited {end - begin:.2f} s for rollouts{_last_before(spans, end)}.")
    return said


def _last_before(spans: Sequence[Span], end: float) -> str:
    """Which prompt came last, and who was at it."""
    judged = [span for span in spans if span[0] == "rewards" and span[3] <= end + SHORTEST_IDLE_S]
    if not judged:
        return ""
    _, _, judged_from, judged_to, prompt = max(judged, key=lambda span: span[3])
    sampled = [
        span for span in spans if span[4] == prompt and span[1] == "sample" and span[3] <= judged_from + SHORTEST_IDLE_S
    ]
    if not sampled:
        return f"; last came prompt {prompt}, judged in {judged_to - judged_from:.2f} s"
    worker, _, begin, finish, _ = max(sampled, key=lambda span: span[3])
    return (
        f"; last came prompt {prompt}: {worker} sampled it in {finish - begin:.2f} s, "
        f"the rewards judged it in {judged_to - judged_from:.2f} s"
    )


def _worker_waits(idle: dict[str, list[tuple[float, float, str]]]) -> list[str]:
    said: list[str] = []
    for worker, gaps in idle.items():
        by_cause: dict[str, float] = {}
        for begin, end, cause in gaps:
            by_cause[cause] = by_cause.get(cause, 0.0) + end - begin
        total = sum(by_cause.values())
        if total >= SHORTEST_IDLE_S:
            parts = ", ".join(f"{seconds:.2f} s during {cause}" for cause, seconds in by_cause.items())
            said.append(f"{worker} had nothing to sample for {total:.2f} s: {parts}.")
    return said


def _idle(
    spans: Sequence[Span], worker: str, trainer: Sequence[Span], seconds: float
) -> list[tuple[float, float, str]]:
    """Stretches of the step without a request, cut where the trainer began with something else."""
    busy = sorted((max(span[2], 0.0), min(span[3], seconds)) for span in spans if span[0] == worker)
    gaps: list[tuple[float, float]] = []
    at = 0.0
    for begin, end in [*busy, (seconds, seconds)]:
        if begin - at >= SHORTEST_IDLE_S:
            gaps.append((at, begin))
        at = max(at, end)
    cut: list[tuple[float, float, str]] = []
    for begin, end in gaps:
        for _, what, other_begin, other_end, _ in trainer:
            first, last = max(begin, other_begin), min(end, other_end)
            if last - first >= SHORTEST_IDLE_S:
                cut.append((first, last, _CAUSES.get(what, f"the trainer's {what}")))
    return cut


_CAUSES = {
    WAIT: "the trainer's wait for other workers and rewards",
    "wait for the evaluation": "the evaluation's wait for other workers",
    "publish": "the publish",
}
