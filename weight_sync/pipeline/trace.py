"""The timeline of a publish, for ui.perfetto.dev or chrome://tracing, with a track per stage and process.

Owns clocks, spans and the file's format. Does not own which stages there are: pipeline.py notes what a trainer rank
does, transaction.py what the replicas answered, and rank 0 writes the file.

    trainer rank r   begin | gather | pack slot 0, 1 | hash slot 0, 1 | write replica i rank j | verify | commit | gc
    replica i        pause | mark dirty | writes arrive | verify | commit

Clocks. Host stages are timed with time.monotonic() and shifted once per publish to the wall clock: ranks of one host
line up exactly, ranks of several hosts as well as their clocks. Device stages are CUDA events: the tracer waits for an
anchor event when the publish starts, and places every other event by its distance from it. A replica reports how long
its phases took, not when, so rank 0 places them from the moment at which it asked.

A Tracer that is off makes no event, reads no clock and keeps nothing.
"""

import contextlib
import gc
import json
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from slipstream.conf.json_files import JsonObject

Facts = dict[str, int | str]


@dataclass(frozen=True, slots=True)
class Span:
    """One stage of one process. Example: Span("pack slot 0", "load 3", 1764.25, 1764.27, {"bytes": 4096})."""

    track: str
    name: str
    start_s: float
    """Time of the wall clock."""
    stop_s: float
    facts: Facts = field(default_factory=dict)


class Tracer:
    """The spans of one publish in one process. Used by several threads; each note is one append."""

    def __init__(self, device: torch.device, *, is_on: bool) -> None:
        self.is_on = is_on
        self._device = device
        self._spans: list[Span] = []
        self._marks: list[tuple[str, str, torch.cuda.Event, torch.cuda.Event, Facts]] = []
        self._gc_began = 0.0
        if not is_on:
            return
        self._offset_s = time.time() - time.monotonic()
        self._anchor = self.mark()
        if self._anchor is not None:
            self._anchor.synchronize()
        self._anchor_s = time.monotonic()
        gc.callbacks.append(self._note_collection)

    @contextlib.contextmanager
    def host(self, track: str, name: str, **facts: int | str) -> Generator[None]:
        """Time a stage of the calling thread."""
        if not self.is_on:
            yield
            return
        began = time.monotonic()
        try:
            yield
        finally:
            self.add(track, name, began, time.monotonic(), **facts)

    def add(self, track: str, name: str, start_s: float, stop_s: float, **facts: int | str) -> None:
        """Add a stage between two readings of time.monotonic()."""
        if self.is_on:
            self._spans.append(Span(track, name, start_s + self._offset_s, stop_s + self._offset_s, facts))

    def mark(self) -> torch.cuda.Event | None:
        """Record an event on the current stream; None if the tracer is off, or without a GPU."""
        if not self.is_on or self._device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def device(
        self, track: str, name: str, start: torch.cuda.Event | None, stop: torch.cuda.Event | None, **facts: int | str
    ) -> None:
        """Add a stage of the device between two marks."""
        if start is not None and stop is not None:
            self._marks.append((track, name, start, stop, facts))

    def finish(self) -> list[Span]:
        """All spans, by start. Waits for the device; nothing can be added afterwards."""
        if not self.is_on:
            return []
        self.is_on = False
        gc.callbacks.remove(self._note_collection)
        first = self._anchor_s + self._offset_s
        for track, name, start, stop, facts in self._marks:
            stop.synchronize()
            assert self._anchor is not None
            times = [first + self._anchor.elapsed_time(event) / 1e3 for event in (start, stop)]
            self._spans.append(Span(track, name, times[0], times[1], facts))
        return sorted(self._spans, key=lambda span: span.start_s)

    def _note_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._gc_began = time.monotonic()
        else:
            self.add("gc", f"generation {info['generation']}", self._gc_began, time.monotonic())


def write_trace(file: Path, processes: Mapping[str, Sequence[Span]]) -> None:
    """Write the spans of every process as Chrome's Trace Event Format: complete events in microseconds. Tracks appear
    in the order in which they are first used. The file's folder is made."""
    first = min((span.start_s for spans in processes.values() for span in spans), default=0.0)
    events: list[JsonObject] = []
    for pid, (process, spans) in enumerate(processes.items()):
        events.append(_name("process", pid, 0, process))
        tracks: dict[str, int] = {}
        for span in spans:
            if span.track not in tracks:
                tracks[span.track] = len(tracks)
                events.append(_name("thread", pid, tracks[span.track], span.track))
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": span.track,
                    "pid": pid,
                    "tid": tracks[span.track],
                    "ts": (span.start_s - first) * 1e6,
                    "dur": (span.stop_s - span.start_s) * 1e6,
                    "args": span.facts,
                }
            )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _name(kind: str, pid: int, tid: int, name: str) -> JsonObject:
    return {"ph": "M", "name": f"{kind}_name", "pid": pid, "tid": tid, "args": {"name": name}}
