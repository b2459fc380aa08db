"""One run's folder, as the page asks for it: what is new is read, and what is large is read where it is shown.

    metrics.jsonl, fleet.jsonl, timeline.jsonl   read once, then what is added
    samples.jsonl                                what rows are sorted by, once, then what is added (samples.py);
                                                 the rows of one page whole, by their offsets
    traces/publish-N.json                        the one that is asked for

Owns: which file answers what, and what is kept in memory. Does not own: the form of any file, HTTP (server.py).
Invariants: nothing is written, and the run is asked nothing. A run that writes meanwhile is read up to its last whole
row. Not thread-safe: one call at a time.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import JsonObject, is_object, object_in
from slipstream.orchestrator.control.control_folder import state_of
from slipstream.orchestrator.files.row_files import GrowingFile, objects, rows_by
from slipstream.orchestrator.files.run_folder import RunFolder, flatten, saved_options
from slipstream.orchestrator.files.timeline import read_step
from slipstream.orchestrator.view.samples import (
    ENTRY,
    FAILED,
    KINDS,
    PAGE,
    TRUNCATED,
    SampleQuery,
    TokenText,
    chosen,
    detail,
    extended,
    preview,
)
from slipstream.orchestrator.view.tables import FleetTable, MetricsTable, concluded

LONGEST_PREVIEWED = 1 << 20
"""Bytes of a row that is read for a list; longer ones are read when they are opened."""
MOST_TRACE_BYTES = 64 << 20


class RunReader:
    """See the module's docstring. Raises ConfigError: it is no run folder, or its config.yaml is damaged."""

    def __init__(self, root: Path) -> None:
        self.folder = RunFolder(root.resolve())
        saved = dict(flatten(saved_options(root)))
        self.options: JsonObject = {name: str(one) if one == math.inf else one for name, one in saved.items()}
        """By their full names, as JSON has them: algorithm.correction_max may be infinite."""
        self._tokens = TokenText(self.folder.model)
        self._metrics = MetricsTable(self.folder.metrics)
        self._fleet_file, self._fleet = GrowingFile(self.folder.fleet), FleetTable()
        self._timeline_file = GrowingFile(self.folder.timeline)
        self._timeline: dict[int, tuple[int, int]] = {}
        self._publishes: list[tuple[float, int, list[bool]]] = []
        self._index = np.zeros(0, ENTRY)

    # ---------------------------------------------------------------------------------------------- figures

    def summary(self) -> JsonObject:
        self._metrics.refresh()
        num_steps = self.options.get("run.num_steps")
        step = self._metrics.steps[-1] if self._metrics.steps else None
        state, error = state_of(self.folder, step, num_steps if isinstance(num_steps, int) else 0)
        return {
            "name": self.folder.run_id,
            "path": str(self.folder.root),
            "state": state,
            "error": error,
            "step": step,
            "num_steps": num_steps,
            "rows": len(self._metrics.steps),
            "generation": self._metrics.generation,
            "samples": _size(self.folder.samples),
            "names": self._metrics.names,
            "last": self._metrics.last,
        }

    def metrics(self, names: list[str] | None, after_row: int) -> JsonObject:
        self._metrics.refresh()
        return self._metrics.columns(names, after_row)

    def environment(self) -> JsonObject:
        """environment.json; empty where there is none."""
        return object_in(self.folder.environment)

    # --------------------------------------------------------------------------------------------- timeline

    def steps_with_timeline(self) -> JsonObject:
        """Steps that have a row in timeline.jsonl, and versions whose publish was traced."""
        self._refresh_timeline()
        traced = sorted(self.folder.traces.glob("publish-*.json"))
        return {"steps": list(self._timeline), "traces": [path.stem.removeprefix("publish-") for path in traced]}

    def timeline(self, step: int) -> JsonObject:
        """One row, and what follows from it. Raises ConfigError: the step has none."""
        self._refresh_timeline()
        place = self._timeline.get(step)
        row = _row_at(self.folder.timeline, *place) if place else None
        if row is None:
            raise ConfigError(f"step {step} has no timeline")
        return {"row": row, **concluded(row)}

    def trace(self, name: str) -> JsonObject:
        """The timeline of one publish (weight_sync.trace_every_steps). `name`: "000010", or "000010-round1". Raises
        ConfigError: there is none, or it is too large to be shown here."""
        path = self.folder.traces / f"publish-{name}.json"
        if not name.replace("-round", "").isdigit() or not path.is_file():
            raise ConfigError(f"there is no trace of publish {name!r}; weight_sync.trace_every_steps writes them")
        if path.stat().st_size > MOST_TRACE_BYTES:
            raise ConfigError(f"{path} is too large for this page; open it with ui.perfetto.dev")
        return {"file": str(path), **object_in(path)}

    def fleet(self) -> JsonObject:
        """Rollout workers: states, versions, tokens per second."""
        self._refresh_timeline()
        news = self._fleet_file.news()
        if news.is_another_file:
            self._fleet = FleetTable()
        self._fleet.add(row for _, row in objects(news))
        return self._fleet.plain(self._publishes)

    # ---------------------------------------------------------------------------------------------- samples

    def samples(self, query: SampleQuery) -> JsonObject:
        """One page of samples, each with its figures and the start of its text."""
        self._refresh_index()
        numbers = chosen(self._index, query)
        page = numbers[query.page * PAGE : (query.page + 1) * PAGE]
        return {
            "all": len(self._index),
            "total": len(numbers),
            "page": query.page,
            "page_size": PAGE,
            "rows": [self._listed(int(number)) for number in page],
        }

    def sample(self, number: int, *, first_token: int = 0, first_char: int = 0) -> JsonObject:
        """One sample, token by token. Raises ConfigError: there is none of this number, or its row cannot be read."""
        self._refresh_index()
        row = self._sample_row(number)
        if row is None:
            raise ConfigError(f"sample {number} cannot be read from {self.folder.samples}")
        return {
            "number": number,
            **detail(row, self._tokens.pieces, first_token=first_token, first_char=first_char),
            "siblings": self._siblings(number),
        }

    def _listed(self, number: int) -> JsonObject:
        entry = self._index[number]
        figures = {name: _plain(entry[name]) for name in ENTRY.names or () if name not in ("offset", "length", "flags")}
        row = self._sample_row(number) if entry["length"] <= LONGEST_PREVIEWED else None
        return {
            **figures,
            "number": number,
            "kind": KINDS[entry["kind"]],
            "truncated": bool(entry["flags"] & TRUNCATED),
            "failed": bool(entry["flags"] & FAILED),
            "bytes": int(entry["length"]),
            "preview": None if row is None else preview(row),
        }

    def _siblings(self, number: int) -> list[JsonObject]:
        """Shown samples of the same prompt in the same step."""
        own = self._index[number]
        first, end = np.searchsorted(self._index["step"], [own["step"], own["step"] + 1])
        near = self._index[first:end]
        same = np.flatnonzero((near["prompt_id"] == own["prompt_id"]) & (near["kind"] == own["kind"])) + first
        return [{"number": int(i), "reward": _plain(self._index["reward"][i])} for i in same]

    def _sample_row(self, number: int) -> JsonObject | None:
        if not 0 <= number < len(self._index):
            return None
        entry = self._index[number]
        return _row_at(self.folder.samples, int(entry["offset"]), int(entry["length"]))

    def _refresh_index(self) -> None:
        self._index = extended(self.folder.samples, self._index)

    def _refresh_timeline(self) -> None:
        news = self._timeline_file.news()
        if news.is_another_file:
            self._timeline, self._publishes = {}, []
        lengths = {offset: len(line) for offset, line in news.lines}
        for offset, row in rows_by(news, read_step):
            self._timeline[row["step"]] = offset, lengths[offset]
            if facts := row.get("publish"):
                committed = [replica.get("committed", False) for replica in facts.get("replicas", [])]
                self._publishes.append((row["to"], facts.get("version", 0), committed))


def _row_at(path: Path, offset: int, length: int) -> JsonObject | None:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            found = json.loads(file.read(length))
    except (OSError, ValueError):  # the run was resumed from an earlier step meanwhile
        return None
    return found if is_object(found) else None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _plain(value: Any) -> float | int | None:
    """A number of NumPy as JSON has it, which has no NaN."""
    number = value.item()
    return None if isinstance(number, float) and not math.isfinite(number) else number
