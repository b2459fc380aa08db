"""Where a row of metrics goes beside metrics.jsonl: TensorBoard's events and Ray's gauges.

Owns: the format of both. Does not own: what is in a row (step_rows). Needs no torch.
"""

from __future__ import annotations

import importlib
import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.files.metrics_catalogue import Value


class TensorBoardEvents:
    """A file of TensorBoard events, written through TensorBoard's record writer. (Its event writer uses a thread, in
    which nobody would catch the error of a full disk.)

    Args:
        after_step: TensorBoard is told to forget events of later steps.
    """

    def __init__(self, folder: Path, *, after_step: int) -> None:
        events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        records: Any = importlib.import_module("tensorboard.summary.writer.record_writer")
        self._Event, self._Summary = events.Event, summaries.Summary
        is_resumed = folder.is_dir()
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._writer = records.RecordWriter((folder / name).open("xb", buffering=0))
        self._add(file_version="brain.Event:2")
        if is_resumed:
            self._add(step=after_step + 1, session_log=events.SessionLog(status=events.SessionLog.START))

    def write(self, step: int, row: Mapping[str, Value]) -> None:
        """Add every finite number of a row."""
        values = [
            self._Summary.Value(tag=name, simple_value=value)
            for name, value in row.items()
            if value is not None and math.isfinite(value)
        ]
        self._add(step=step, summary=self._Summary(value=values))

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _add(self, **fields: Any) -> None:
        self._writer.write(self._Event(wall_time=time.time(), **fields).SerializeToString())


class RayGauges:
    """The newest row as Ray gauges. Does nothing when this process is not part of a Ray cluster.

    Args:
        meanings: what each metric means, by name.
    """

    def __init__(self, meanings: Mapping[str, str]) -> None:
        self._meanings = meanings
        self._gauges: dict[str, Any] = {}

    def set(self, row: Mapping[str, Value]) -> None:
        """Show every finite number of a row."""
        try:
            import ray
            from ray.util.metrics import Gauge
        except ImportError:
            return
        if not ray.is_initialized():
            return
        for name, value in row.items():
            if value is None or not math.isfinite(value):
                continue
            if name not in self._gauges:
                self._gauges[name] = Gauge("slipstream_" + name.replace("/", "_"), description=self._meanings[name])
            self._gauges[name].set(float(value))
