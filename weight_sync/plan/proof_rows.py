"""What the proof of a plan reads: the tasks of all sources as rows of one table, with names numbered anew.

Owns: collecting rows, and showing one as a task. Does not own: what is proved of them (`proof.py`, its only caller).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from slipstream.weight_sync.errors import PlanError
from slipstream.weight_sync.plan.columns import Columns, Flags, Ints, first_true, spread, starts_of, widened
from slipstream.weight_sync.plan.tasks import DTYPES, MESH_GROUPS, PieceColumns, Task, TaskTable, mesh_group_of
from slipstream.weight_sync.plan.transfer_plan import TransferPlan


@dataclass(frozen=True, slots=True)
class Numbering:
    """Numbers for names, the same for all tables and loads. Lists of names are cached by identity."""

    params: dict[str, int]
    tensors: dict[str, int]
    columns: dict[tuple[int, int], tuple[Sequence[str], Ints]]
    groups: list[int]
    """Mesh groups of the first tensors."""

    def mesh_groups(self) -> Ints:
        """The mesh group that each tensor is sent in; every name is read once."""
        self.groups.extend(mesh_group_of(name) for name in islice(self.tensors, len(self.groups), None))
        return np.array(self.groups, np.int64)

    def column(self, names: Sequence[str], numbers: dict[str, int]) -> Ints:
        """The number of every name of a list. Keeps the list alive, so that its identity is not used again."""
        key = (id(names), id(numbers))
        if key not in self.columns:
            column = np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)
            self.columns[key] = (names, column)
        return self.columns[key][1]


@dataclass(frozen=True, slots=True)
class Rows(Columns):
    """Rows of all sources; names numbered anew, the same for all."""

    names: Numbering
    param: Ints
    offset: Ints
    num_bytes: Ints
    dtype: Ints
    group: Ints
    source: Ints
    dest_rank: Ints
    gets: Flags
    """(rows, replicas): whether the replica gets the row."""
    num_pieces: Ints
    pieces: PieceColumns
    """Those of all rows, row after row."""

    @classmethod
    def of(cls, plan: TransferPlan, num_replicas: int, names: Numbering) -> Rows:
        """Collect the rows of all sources, once: a plan has hundreds of them, and each goes to every engine rank."""
        tables = list(plan.tasks.values())
        pieces = [table.pieces for table in tables]
        width = max(one.start.shape[1] for one in pieces)
        tensor = np.concatenate([names.column(one.names, names.tensors)[one.tensor] for one in pieces])
        return cls(
            names,
            param=np.concatenate([names.column(table.params, names.params)[table.param] for table in tables]),
            offset=np.concatenate([table.dest_offset_bytes for table in tables]),
            num_bytes=np.concatenate([table.num_bytes for table in tables]),
            dtype=np.concatenate([table.dtype for table in tables]),
            group=np.concatenate([table.group for table in tables]),
            source=np.repeat([table.source_rank for table in tables], [table.num_rows for table in tables]),
            dest_rank=np.concatenate([table.dest_rank for table in tables]),
            gets=np.concatenate([_receivers(table, num_replicas) for table in tables]),
            num_pieces=np.concatenate([table.num_pieces for table in tables]),
            pieces=PieceColumns(
                list(names.tensors),
                tensor,
                start=np.concatenate([widened(one.start, width, 0) for one in pieces]),
                shape=np.concatenate([widened(one.shape, width, 1) for one in pieces]),
                axes=np.concatenate([one.axes for one in pieces]),
                offset=np.concatenate([one.offset for one in pieces]),
            ),
        )

    def going_to(self, dest_rank: int) -> Rows:
        """The rows of engine ranks of one number."""
        own = np.flatnonzero(self.dest_rank == dest_rank)
        row, within = spread(self.num_pieces[own])
        return replace(self.take(own), pieces=self.pieces.take(starts_of(self.num_pieces)[own][row] + within))

    def task(self, row: int) -> Task:
        """A row as an object, for messages."""
        first = int(self.num_pieces[:row].sum())
        return Task(
            MESH_GROUPS[int(self.group[row])],
            int(self.source[row]),
            int(self.gets[row].argmax()),
            -1,
            next(name for name, number in self.names.params.items() if number == self.param[row]),
            int(self.offset[row]),
            int(self.num_bytes[row]),
            DTYPES[int(self.dtype[row])],
            self.pieces.expanded(first, int(self.num_pieces[row])),
        )


def _receivers(table: TaskTable, num_replicas: int) -> Flags:
    """(rows, replicas): whether the replica gets the row.

    Raises:
        PlanError: a row names a replica twice.
    """
    times = np.zeros((len(table.replica_sets), num_replicas), np.int64)
    for number, members in enumerate(table.replica_sets):
        np.add.at(times[number], list(members), 1)
    for row in first_true(times.max(axis=1, initial=0)[table.replicas] > 1):
        raise PlanError(
            f"source rank {table.source_rank}: {table.params[int(table.param[row])]}: written twice: a row names "
            f"replicas {table.replica_sets[int(table.replicas[row])]}"
        )
    return (times > 0)[table.replicas]
