"""The timeline of a publish: what a tracer notes, and the file it becomes."""

import gc
import json
import time
from pathlib import Path

import pytest
import torch

from slipstream.weight_sync.pipeline.trace import Span, Tracer, write_trace

CPU = torch.device("cpu")


def test_spans_are_on_the_wall_clock_and_sorted_by_start() -> None:
    wall_before, before = time.time(), time.monotonic()
    tracer = Tracer(CPU, is_on=True)
    wall_late, late = time.time(), time.monotonic()
    with tracer.host("pack", "load 1", bytes=7):
        pass
    tracer.add("begin", "ask", late - 1.0, late)
    first, second = [span for span in tracer.finish() if span.track != "gc"]
    assert (first.track, first.name, first.stop_s - first.start_s) == ("begin", "ask", pytest.approx(1.0))
    assert (second.track, second.name, second.facts) == ("pack", "load 1", {"bytes": 7})
    # whenever between them the tracer read either clock
    assert wall_before - late <= first.stop_s - late <= wall_late - before
    assert first.stop_s <= second.start_s <= second.stop_s


def test_a_stage_that_raises_is_noted_too() -> None:
    tracer = Tracer(CPU, is_on=True)
    with pytest.raises(RuntimeError), tracer.host("gather", "source.begin"):
        raise RuntimeError
    assert [span.name for span in tracer.finish() if span.track != "gc"] == ["source.begin"]


def test_a_tracer_that_is_off_keeps_nothing() -> None:
    callbacks = list(gc.callbacks)
    tracer = Tracer(CPU, is_on=False)
    with tracer.host("pack", "load 0"):
        tracer.add("pack", "load 0", 0.0, 1.0)
    tracer.device("pack", "load 0", tracer.mark(), tracer.mark())
    assert gc.callbacks == callbacks
    assert tracer.finish() == []


def test_the_file_has_a_process_each_and_microseconds_from_the_first_span(tmp_path: Path) -> None:
    ranks = {"rank 0": [Span("pack", "load 0", 10.0, 10.5, {"bytes": 3}), Span("write", "load 0", 10.5, 11.0)]}
    write_trace(tmp_path / "deep" / "t.json", ranks | {"replica": [Span("phases", "pause", 9.0, 9.25)]})
    events = json.loads((tmp_path / "deep" / "t.json").read_text())["traceEvents"]
    spans = {(e["pid"], e["tid"], e["name"]): (e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    assert spans == {(0, 0, "load 0"): (1e6, 5e5), (0, 1, "load 0"): (1.5e6, 5e5), (1, 0, "pause"): (0, 2.5e5)}
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names["process_name", 0, 0] == "rank 0"
    assert names["process_name", 1, 0] == "replica"
    assert names["thread_name", 0, 1] == "write"
    assert next(e["args"] for e in events if e["ph"] == "X") == {"bytes": 3}
