"""What a start does and for how long: the line that says what it waits for, and startup.jsonl.

    training.py, cluster/ --enter--> Startup --every second--> progress line   "starting, 34 s: engines 1 of 2 up"
                                              |------at the end----> startup.jsonl   a row per start, restarts included

Owns: the spans (who did what from when to when), their words, the file. Does not own: how the line is shown
(run_log.py). Invariant: each process is in one phase at a time: entering a phase ends the one before.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import psutil

from slipstream.conf.json_files import JsonObject
from slipstream.conf.whole_files import append_line
from slipstream.orchestrator.files.row_files import of_rows_alone, rows_read_by

logger = logging.getLogger(__name__)

RUN = "run"
"""Who does what the whole run waits for, before and after ranks and engines start."""
FIRST_PHASE = "options and files"
"""What the run does then, from the command on."""
_SHOW_EVERY_S = 1.0


@dataclass(slots=True)
class Span:
    """One phase of one process. Example: Span("rollout-1", "building the model", 21.3, 24.0)."""

    who: str
    what: str
    from_s: float
    """Seconds since the command was given."""
    to_s: float | None = None
    """None while it goes on."""
    cpu_s: float | None = None
    """Seconds of a core that the controller used meanwhile; of the run's own phases alone."""


@dataclass(frozen=True, slots=True)
class Start:
    """A row of startup.jsonl: who was started, in how many seconds, by which phases."""

    start: str
    total_s: float
    spans: Sequence[Span]


class Startup:
    """See the module's docstring. As a context manager it shows the run's start, until `end`. `show`: gets the seconds
    since the command, and what is waited for. `now_s`: seconds since the command was given."""

    def __init__(
        self, file: Path, show: Callable[[float, str], None], *, now_s: Callable[[], float] | None = None
    ) -> None:
        self._file = file
        self._show = show
        self._now_s = now_s or clock_of_this_process()
        self._spans: list[Span] = []
        self._kinds: dict[str, Sequence[str]] = {}
        self._now: dict[str, Span] = {}
        """The phase of everybody who is not up yet."""
        self._showing: asyncio.Task[None] | None = None
        self._cpu_until_s = 0.0
        """What the phases of the run so far have used."""

    def expect(self, kind: str, names: Sequence[str]) -> None:
        """Count these processes under `kind`. Example: expect("engines", ["rollout-0", "rollout-1"])."""
        self._kinds[kind] = names
        for name in names:
            self.enter(name, "waiting for a process")

    def enter(self, who: str, what: str) -> None:
        """`who` begins with `what`. Nothing changes if it is at it already."""
        if who in self._now and self._now[who].what == what:
            return
        self.ready(who)
        self._now[who] = Span(who, what, self._now_s())
        self._spans.append(self._now[who])

    def ready(self, who: str) -> None:
        if who in self._now:
            span = self._now.pop(who)
            span.to_s = self._now_s()
            if who == RUN:
                span.cpu_s = round(time.process_time() - self._cpu_until_s, 2)
                self._cpu_until_s += span.cpu_s

    def waits_for(self) -> str:
        kinds = [self._state_of(kind, names) for kind, names in self._kinds.items()]
        if any(name in self._now for names in self._kinds.values() for name in names):
            return ", ".join(kinds)
        return self._now[RUN].what if RUN in self._now else ", ".join(kinds)

    def _state_of(self, kind: str, names: Sequence[str]) -> str:
        late = [name for name in names if name in self._now]
        state = f"{kind} {len(names) - len(late)} of {len(names)} up"
        if len(late) == 1:
            return f"{state} ({late[0]}: {self._now[late[0]].what})"
        phases = Counter(self._now[name].what for name in late)
        return f"{state} ({', '.join(f'{num} {what}' for what, num in phases.items())})" if late else state

    async def __aenter__(self) -> Startup:
        self.enter(RUN, FIRST_PHASE)
        self._now[RUN].from_s = 0.0  # it began with the command
        self._showing = asyncio.create_task(self._show_until_cancelled())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.end()

    async def _show_until_cancelled(self) -> None:
        while True:
            self._show(self._now_s(), self.waits_for())
            await asyncio.sleep(_SHOW_EVERY_S)

    def end(self) -> None:
        """The start is over, or has failed: show it no more, and write its row. A second call does nothing."""
        if self._showing is not None:
            self._showing.cancel()
            self._showing = None
            self.ready(RUN)
            self._keep(RUN, self._spans)

    def came_back(self, who: str) -> None:
        """Write the row of a process that was started again, or could not be."""
        self._keep(who, [span for span in self._spans if span.who == who])

    def _keep(self, what: str, spans: Sequence[Span]) -> None:
        """Append the row of one start, and forget its spans. What is still going on ends with it."""
        end_s = self._now_s()
        for span in spans:
            self._now.pop(span.who, None)
            span.to_s = end_s if span.to_s is None else span.to_s
        began = Start(what, end_s - spans[0].from_s, spans)
        row = {"start": what, "total_s": began.total_s, "spans": [_plain(span) for span in spans]}
        self._spans = [span for span in self._spans if span not in spans]
        with suppress(OSError):  # a full disk ends the run where its metrics are written
            append_line(self._file, json.dumps(row))
        for line in describe(began):
            logger.info("%s", line)


def read_starts(file: Path) -> list[Start]:
    return rows_read_by(file, of_rows_alone(msgspec.json.Decoder(Start).decode))


def describe(row: Start) -> list[str]:
    """One start, for people: the run's own phases, then those of the slowest of each kind of process."""
    by_name: dict[str, list[Span]] = {}
    for span in row.spans:
        by_name.setdefault(span.who, []).append(span)
    who = "start-up" if row.start == RUN else f"start of {row.start}"
    lines = [f"{who}, {row.total_s:.1f} s: {_seconds(by_name.pop(row.start, []))}"]
    slowest: dict[str, list[Span]] = {}
    for name, own in by_name.items():
        kind = name.partition("-")[0]
        slowest[kind] = max(slowest.get(kind, own), own, key=lambda spans: spans[-1].to_s or 0.0)
    return lines + [f"slowest {kind}, {own[0].who}: {_seconds(own)}" for kind, own in slowest.items()]


def _plain(span: Span) -> JsonObject:
    return {name: value for name, value in asdict(span).items() if value is not None}


def _seconds(spans: Sequence[Span]) -> str:
    """Without phases that round to 0."""
    taken = [(span.what, f"{(span.to_s or 0.0) - span.from_s:.1f}") for span in spans]
    return ", ".join(f"{what} {seconds}" for what, seconds in taken if seconds != "0.0")


def clock_of_this_process() -> Callable[[], float]:
    """Seconds since the command was given."""
    began = time.monotonic() - (time.time() - psutil.Process().create_time())
    return lambda: time.monotonic() - began
