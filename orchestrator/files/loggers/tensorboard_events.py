"""Rows of metrics as TensorBoard's events, beside metrics.jsonl.

Owns: their format. Does not own: what is in a row (step_rows). Needs no torch.
"""

import importlib
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


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

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        values = [self._Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._add(step=step, summary=self._Summary(value=values))

    def close(self) -> None:
        self._writer.close()

    def _add(self, **fields: Any) -> None:
        self._writer.write(self._Event(wall_time=time.time(), **fields).SerializeToString())
