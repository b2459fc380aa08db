"""From the rows of a run's fleet.jsonl to the phases of a recovery and to tokens per second. Pure.

    killed ... noticed ... process up ... imports ... engine ... weights ... first token ... former throughput

Every phase ends with its mark and begins where the one before it ended. A mark that came before an earlier one has a
phase of 0 s: the two went on side by side. "Former throughput" is reached at the first moment t, after the first token,
from which on `window_s` seconds have on average at least SHARE of the tokens/s of `steady_s` seconds before the kill.
"""

import statistics
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Counts = Mapping[str, Sequence[tuple[float, float]]]
"""Process -> (time, response tokens since its start), ascending."""

SHARE = 0.97
MARKS = {
    "failed": "noticed",
    "process_up": "process up",
    "imported": "imports",
    "freed": "waits for memory",
    "engine_up": "engine up",
    "layout_known": "layout recorded",
    "up": "warm-up",
    "serving": "weights",
    "first_token": "first token",
    "returned": "former throughput",
}
"""Event -> the phase that it ends, in order."""


def phases_of(began_at: float, marks: Mapping[str, float]) -> dict[str, float]:
    """Seconds of every phase whose mark is known."""
    phases: dict[str, float] = {}
    last = began_at
    for mark, phase in MARKS.items():
        if mark in marks:
            phases[phase] = max(0.0, marks[mark] - last)
            last = max(last, marks[mark])
    return phases


def marks_after(rows: Iterable[Row], worker: int, killed_at: float) -> dict[str, float]:
    """When the worker that was killed came how far; of a process whose start failed nothing is kept."""
    marks: dict[str, float] = {}
    for row in sorted(rows, key=lambda row: row["time"]):
        if row["worker"] != worker or row["time"] < killed_at:
            continue
        if row["event"] == "restarting":
            marks = {name: at for name, at in marks.items() if name == "failed"}
        elif row["event"] in MARKS:
            marks.setdefault(row["event"], row["time"])
    return marks


def counts_of(rows: Iterable[Row], worker: int | None = None) -> dict[str, list[tuple[float, float]]]:
    """Tokens over time of all processes, or of one worker's."""
    counts: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["event"] in ("tokens", "first_token") and worker in (None, row["worker"]):
            counts.setdefault(row["name"], []).append((row["time"], float(row.get("tokens", 0))))
    return {name: sorted(samples) for name, samples in counts.items()}


def tokens_at(counts: Counts, at: float) -> float:
    """Tokens of all processes up to then; between two samples on a straight line, after the last one no more."""
    total = 0.0
    for samples in counts.values():
        index = bisect_right(samples, at, key=lambda sample: sample[0])
        if index == len(samples):
            total += samples[-1][1]
        elif index:
            (t0, n0), (t1, n1) = samples[index - 1], samples[index]
            total += n0 + (n1 - n0) * (at - t0) / (t1 - t0)
    return total


def tokens_per_s(counts: Counts, begin: float, end: float) -> float:
    """Mean of a window."""
    return (tokens_at(counts, end) - tokens_at(counts, begin)) / (end - begin)


def last_sample(counts: Counts) -> float:
    """Until when tokens are known."""
    return max((samples[-1][0] for samples in counts.values()), default=0.0)


def returned_at(counts: Counts, former: float, after: float, window_s: float) -> float | None:
    """The first moment from which on a window has the former throughput; None: not yet."""
    until = last_sample(counts) - window_s
    times = {after, *(at for samples in counts.values() for at, _ in samples if at > after)}
    for at in sorted(times):
        if at <= until and tokens_per_s(counts, at, at + window_s) >= SHARE * former:
            return at
    return None


def recovery_of(rows: Sequence[Row], worker: int, killed_at: float, *, steady_s: float, window_s: float) -> Row:
    """Everything that one kill shows so far; `returned_s` and `worker_returned_s` are None until they are known."""
    marks = marks_after(rows, worker, killed_at)
    fleet, own = counts_of(rows), counts_of(rows, worker)
    former, own_former = (tokens_per_s(counts, killed_at - steady_s, killed_at) for counts in (fleet, own))
    found: dict[str, Any] = {"worker": worker, "former_tokens_per_s": former, "worker_former_tokens_per_s": own_former}
    windows = [killed_at - steady_s + second for second in range(int(steady_s - window_s) + 1)]
    found["former_windows_tokens_per_s"] = [
        pick(tokens_per_s(fleet, begin, begin + window_s) for begin in windows) for pick in (min, max)
    ]
    found["returned_s"] = found["worker_returned_s"] = None
    if "first_token" in marks:
        first = marks["first_token"]
        for name, counts, rate in (("returned_s", fleet, former), ("worker_returned_s", own, own_former)):
            at = returned_at(counts, rate, first, window_s)
            found[name] = None if at is None else at - killed_at
        if found["returned_s"] is not None:
            marks["returned"] = killed_at + found["returned_s"]
        found["away_tokens_per_s"] = tokens_per_s(fleet, killed_at, first)
        found["first_token_s"] = first - killed_at
    later = [row for row in rows if row["worker"] == worker and row["time"] >= killed_at]
    weights = [row for row in later if row["event"] in ("read", "waiting")]
    if "serving" in marks and weights and weights[-1]["event"] == "read":  # otherwise a publish brought them
        read = weights[-1]
        found["read_bytes"], found["read_s"] = read["bytes"], read["read_s"]
        found["read_gb_per_s"] = read["bytes"] / read["read_s"] / 1e9
    found["phases"] = phases_of(killed_at, marks)
    end = marks.get("returned", last_sample(fleet)) + window_s
    found["tokens_per_s_by_second"] = [
        (begin - killed_at, tokens_per_s(fleet, begin, begin + 2.0))
        for begin in (killed_at - steady_s + 2.0 * index for index in range(int((end - killed_at + steady_s) / 2)))
    ]
    return found


def median_phases(ways: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Median seconds of each phase over the repeats that have it, in order."""
    names = [phase for phase in MARKS.values() if any(phase in way for way in ways)]
    return {name: statistics.median(way[name] for way in ways if name in way) for name in names}
