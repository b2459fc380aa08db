"""What a plan is: every trainer rank's tasks, the bytes that they write, and the digests that name them.

Owns: tasks, as objects and as columns; the plan's totals, its digest, the wire form of one rank's part. Does not own:
how a plan is made (plan.py), proven (proof.py) or replayed (pipeline.py, which iterates over objects).
Invariant: `digest` covers everything that a publish depends on, so two processes with equal digests replay the same
plan; a rank's part cannot be changed without its digest telling.

    row i of a table   bytes that are packed once, and the replicas that get them, in schedule order
                       its pieces are the next num_pieces[i] of the table's, in the same order
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import msgpack
import numpy as np

from slipstream.weight_sync.errors import PlanError
from slipstream.weight_sync.layout import DTYPE_BYTES, Destination, Region
from slipstream.weight_sync.plan.columns import Columns, Ints, Narrow, as_list, axes_of, num_dims, region_of, starts_of

FORMAT_VERSION = 2
"""Version of the wire form and of the digest; the two ends of a publish must agree on it."""

MESH_GROUPS: tuple[str, str] = ("dense", "experts")
"""In sending order."""

DTYPES: tuple[str, ...] = tuple(DTYPE_BYTES)
"""Columns hold positions in it."""


def mesh_group_of(tensor: str) -> int:
    """Position in MESH_GROUPS."""
    return MESH_GROUPS.index("experts" if ".experts." in tensor else "dense")


def layer_of(tensor: str) -> int:
    """The layer number in a checkpoint name: its first integer component; -1 when there is none."""
    match = re.search(r"\.(\d+)\.", tensor)
    return int(match.group(1)) if match else -1


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of a checkpoint tensor inside a task: permuted by `axes`, row-major, from `offset_elements` on.

    Example: rows 0..31 of an up projection behind 32 x 64 elements of gate:
    Piece("model.layers.0.mlp.experts.3.up_proj.weight", Region((0, 0), (32, 64)), (0, 1), 2048).
    """

    tensor: str
    region: Region
    axes: tuple[int, ...]
    offset_elements: int


@dataclass(frozen=True, slots=True)
class Task:
    """One contiguous range of one parameter of one engine rank, written by one trainer rank with one one-sided write.

    The source packs the pieces, in order and without gaps, cast to `dtype`. Tasks that differ in `replica` alone
    carry the same bytes; they share the `pieces` object and follow each other in the schedule, so a pipeline may pack
    and hash them once.
    """

    mesh_group: str
    source_rank: int
    replica: int
    dest_rank: int
    param: str
    dest_offset_bytes: int
    num_bytes: int
    dtype: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class PieceColumns(Columns):
    """Pieces of many rows. `tensor` numbers `names`; start and shape have one entry per dim of the tensor."""

    names: Sequence[str]
    tensor: Narrow
    start: Narrow
    shape: Narrow
    axes: Narrow
    offset: Ints

    def expanded(self, first: int, count: int) -> tuple[Piece, ...]:
        """Pieces first, ..., first + count - 1 as objects."""
        window = slice(first, first + count)
        columns = (column[window].tolist() for column in (self.tensor, self.start, self.shape, self.axes, self.offset))
        return tuple(
            Piece(self.names[int(tensor)], region_of(start, shape, len(axes_of(axes))), axes_of(axes), offset)
            for tensor, start, shape, axes, offset in zip(*columns)
        )


_ROW_COLUMNS = ("replicas", "group", "dest_rank", "param", "dest_offset_bytes", "num_bytes", "dtype", "num_pieces")
"""As the wire form has them."""


@dataclass(frozen=True, eq=False)
class TaskTable:
    """The tasks of one trainer rank in schedule order, one row per block of bytes."""

    source_rank: int
    params: Sequence[str]
    replica_sets: Sequence[tuple[int, ...]]
    replicas: Ints
    """Number of the row's replica set."""
    group: Ints
    dest_rank: Ints
    param: Ints
    dest_offset_bytes: Ints
    num_bytes: Ints
    """Bytes that one replica gets."""
    dtype: Ints
    num_pieces: Ints
    pieces: PieceColumns
    """Those of all rows, row after row; their `names` may be more than these use."""

    @cached_property
    def num_replicas(self) -> Ints:
        """Tasks of each row."""
        sizes = np.array([len(members) for members in self.replica_sets], np.int64)
        return sizes[self.replicas] if len(sizes) else np.zeros(0, np.int64)

    def flows(self) -> dict[Destination, tuple[int, int]]:
        """Bytes and tasks for each (replica, rank) that gets any."""
        flows: dict[Destination, tuple[int, int]] = {}
        num_dests = 1 + int(self.dest_rank.max(initial=0))
        to, at, counts = np.unique(self.replicas * num_dests + self.dest_rank, return_inverse=True, return_counts=True)
        sums = np.zeros(len(to), np.int64)
        np.add.at(sums, at, self.num_bytes)
        for key, size, count in zip(as_list(to), as_list(sums), as_list(counts)):
            for replica in self.replica_sets[key // num_dests]:
                where = (replica, key % num_dests)
                held, tasks = flows.get(where, (0, 0))
                flows[where] = (held + size, tasks + count)
        return flows

    def __len__(self) -> int:
        return int(self.num_replicas.sum())

    @property
    def num_rows(self) -> int:
        return len(self.num_bytes)

    def rows(self) -> Iterator[tuple[Task, tuple[int, ...]]]:
        """Every row's first task, and its replicas."""
        columns = (self.replicas, self.group, self.dest_rank, self.param, self.dest_offset_bytes, self.num_bytes)
        columns = (*columns, self.dtype, starts_of(self.num_pieces), self.num_pieces)
        members, group, dest_rank, param, offset, size, dtype, first, count = map(as_list, columns)
        for row in range(len(members)):
            replicas = self.replica_sets[members[row]]
            yield (
                Task(
                    MESH_GROUPS[group[row]],
                    self.source_rank,
                    replicas[0],
                    dest_rank[row],
                    self.params[param[row]],
                    offset[row],
                    size[row],
                    DTYPES[dtype[row]],
                    self.pieces.expanded(first[row], count[row]),
                ),
                replicas,
            )

    def __iter__(self) -> Iterator[Task]:
        for task, replicas in self.rows():
            yield task
            for replica in replicas[1:]:
                yield replace(task, replica=replica)

    def to_wire(self) -> dict[str, Any]:
        """Plain data for msgpack: names by number in order of use, columns as little-endian 64-bit numbers."""
        pieces = self.pieces
        names, tensor = _renumbered(pieces.names, pieces.tensor)
        params, param = _renumbered(self.params, self.param)
        used, replicas = _renumbered(self.replica_sets, self.replicas)
        rows = {name: getattr(self, name) for name in _ROW_COLUMNS} | {"replicas": replicas, "param": param}
        width = int(num_dims(pieces.axes).max(initial=1))
        columns = (tensor, pieces.axes, pieces.offset, *pieces.start.T[:width], *pieces.shape.T[:width])
        return {
            "tensors": names,
            "params": params,
            "replica_sets": [list(members) for members in used],
            "num_rows": self.num_rows,
            "rows": _to_bytes(rows.values()),
            "num_pieces": len(pieces.tensor),
            "pieces": _to_bytes(columns),
        }

    @classmethod
    def from_wire(cls, source_rank: int, wire: Mapping[str, Any]) -> TaskTable:
        """Inverse of `to_wire`."""
        columns = _from_bytes(wire["rows"], wire["num_rows"])
        tensor, axes, offset, *bounds = _from_bytes(wire["pieces"], wire["num_pieces"])
        half = len(bounds) // 2
        start, shape = np.stack(bounds[:half], axis=1), np.stack(bounds[half:], axis=1)
        return cls(
            source_rank,
            tuple(wire["params"]),
            tuple(tuple(members) for members in wire["replica_sets"]),
            **dict(zip(_ROW_COLUMNS, columns)),
            pieces=PieceColumns(tuple(wire["tensors"]), tensor, start, shape, axes, offset),
        )


def _renumbered(names: Sequence[Any], column: Narrow) -> tuple[list[Any], Ints]:
    """The names that a column uses, in order of first use, and the column in their numbers."""
    first = np.full(len(names), -1, np.int64)
    first[column[::-1]] = np.arange(len(column))[::-1]  # of several values for one place, the last one stays
    used = np.flatnonzero(first >= 0)
    used = used[np.argsort(first[used])]
    first[used] = np.arange(len(used))
    return [names[number] for number in as_list(used)], first[column]


def _to_bytes(columns: Iterable[Narrow]) -> bytes:
    return np.stack([np.asarray(column, np.int64) for column in columns]).astype("<i8", copy=False).tobytes()


def _from_bytes(data: bytes, length: int) -> list[Ints]:
    numbers = np.frombuffer(data, "<i8").astype(np.int64)
    if length:
        return list(numbers.reshape(-1, length))
    return [numbers] * 8


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """A plan's totals, for logs and `slipstream plan`."""

    digest: str
    num_tasks: int
    num_bytes: int
    largest_task_bytes: int
    group_bytes: dict[str, int]
    """Bytes per mesh group."""
    sent_bytes: dict[int, int]
    """Bytes per source rank; idle ranks are listed with 0."""
    received_bytes: dict[Destination, int]
    """Bytes per (replica, destination rank)."""
    send_balance: float
    """Largest / mean of `sent_bytes`; 1.0 is even."""
    receive_balance: float
    """Largest / mean of `received_bytes`."""


@dataclass(frozen=True, slots=True)
class TransferPlan:
    max_task_bytes: int
    tasks: Mapping[int, TaskTable]
    """Schedule per source rank, in ascending order of rank; every source rank has an entry."""
    expected: Mapping[Destination, Mapping[str, int]]
    """(replica, destination rank) -> parameter -> bytes that a publish writes into it; derived ones are absent."""
    layouts_digest: str
    """sha256, hex, over the checkpoint and the destination layouts alone; part of `digest`."""
    rank_digests: Mapping[int, str]
    """sha256, hex, over each source rank's tasks; part of `digest`, so that a rank can check its own part."""

    @property
    def named(self) -> list[Any]:
        """What its digest is of."""
        return [FORMAT_VERSION, self.max_task_bytes, self.layouts_digest, list(self.rank_digests.items())]

    @property
    def digest(self) -> str:
        """sha256, hex, over the format, the bound, the checkpoint, every destination layout and every task."""
        return digest_of(self.named)

    def summary(self) -> PlanSummary:
        group_bytes: dict[str, int] = dict.fromkeys(MESH_GROUPS, 0)
        sent = dict.fromkeys(self.tasks, 0)
        received = dict.fromkeys(self.expected, 0)
        largest = num_tasks = 0
        for rank, table in self.tasks.items():
            num_tasks += len(table)
            if not table.num_rows:
                continue
            rows = table.num_bytes * table.num_replicas
            for number, name in enumerate(MESH_GROUPS):
                group_bytes[name] += int(rows[table.group == number].sum())
            sent[rank] = int(rows.sum())
            largest = max(largest, int(table.num_bytes.max()))
            for where, (size, _) in table.flows().items():
                received[where] += size
        return PlanSummary(
            digest=self.digest,
            num_tasks=num_tasks,
            num_bytes=sum(sent.values()),
            largest_task_bytes=largest,
            group_bytes=group_bytes,
            sent_bytes=sent,
            received_bytes=received,
            send_balance=_max_over_mean(sent.values()),
            receive_balance=_max_over_mean(received.values()),
        )

    def to_wire(self, rank: int) -> dict[str, object]:
        """One source rank's part, as plain data for msgpack; `rank_tasks_from_wire` reads it."""
        return {"digest": self.digest, "named": self.named, "rank": rank, "tasks": self.tasks[rank].to_wire()}


def rank_tasks_from_wire(wire: Mapping[str, Any]) -> tuple[Task, ...]:
    """The tasks of one source rank, in schedule order.

    Raises:
        PlanError: the format is another one, or the tasks are not those that the digest names.
    """
    rank, (version, *_, rank_digests) = wire["rank"], wire["named"]
    if version != FORMAT_VERSION:
        raise PlanError(f"the plan has format {version}, this process reads format {FORMAT_VERSION}")
    if digest_of(wire["tasks"]) != dict(rank_digests).get(rank):
        raise PlanError(f"the tasks of source rank {rank} differ from those that plan {wire['digest']} names")
    if digest_of(wire["named"]) != wire["digest"]:
        raise PlanError(f"source rank {rank}: the parts of the plan do not add up to its digest {wire['digest']}")
    return tuple(TaskTable.from_wire(rank, wire["tasks"]))


def digest_of(plain: object) -> str:
    """sha256, hex, of plain data; msgpack writes equal data as equal bytes (lists and tuples alike)."""
    return hashlib.sha256(msgpack.packb(plain)).hexdigest()


def _max_over_mean(values: Iterable[int]) -> float:
    """Largest / mean; 1.0 when there is nothing."""
    numbers = list(values)
    total = sum(numbers)
    return max(numbers) * len(numbers) / total if total else 1.0
