"""The transfer plan: who sends which bytes to whom, in which order. Pure, deterministic, computed once, then replayed.

Owns: how the parts of planning follow each other, the digest, the wire form. Does not own: cutting (holders.py,
chunks.py), the choice of sources and the order (schedule.py), addresses (an engine's `Binding` joins them at run time),
moving bytes (pipeline.py), what a layout is (layout.py), the proof that a plan is right (proof.py; `build_plan` runs
it on every plan that it returns).

    SourceLayout x ranks ---> holders.py: disjoint cells of each checkpoint tensor, and the ranks that hold each
                                                |
    DestLayout x replicas --> loads, cut into contiguous runs of a parameter that lie in one cell
                                                |   chunks.py: neighbours of the same holders merge, long ones are cut
                                              chunks
                                                |   schedule.py: a source each, least bytes so far among the holders
                                              tasks, per source: dense before experts, layer order, destinations in turn

A cluster's plan has millions of tasks; here they are rows of columns (tasks.py), and objects only where they are used.
Equal ranks of several replicas are cut once and share their rows.

Invariant: every byte of every parameter that is not derived and not a declared fill is written by exactly one task,
and is the byte that the engine's own loader would have put there. No task is longer than `max_task_bytes`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]
import numpy as np

from weight_sync.errors import PlanError
from weight_sync.layout import DTYPE_BYTES, DestLayout, PostLoad, SourceLayout
from weight_sync.plan.chunks import Chunks, TensorFacts, check_layout, cut_layout
from weight_sync.plan.columns import COLUMNS, Ints, LoadTable
from weight_sync.plan.holders import Holders, find_holders
from weight_sync.plan.proof import prove_coverage
from weight_sync.plan.schedule import MIN_SHARED_BYTES, Alike, Needs, choose_sources, schedule_of
from weight_sync.plan.tasks import DTYPES, MESH_GROUPS, PieceColumns, Task, TaskTable

FORMAT_VERSION = 2
"""Version of the wire form and of the digest; the two ends of a publish must agree on it."""

SHARES_PER_SOURCE = 64
"""A chunk with several holders is cut to 1/64 of a source's fair share: greedy choice then ends within 2 % of even."""


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """Facts about a plan, for logs and `slipstream plan`."""

    digest: str
    num_tasks: int
    num_bytes: int
    largest_task_bytes: int
    group_bytes: dict[str, int]
    """Bytes per mesh group."""
    sent_bytes: dict[int, int]
    """Bytes per source rank; idle ranks are listed with 0."""
    received_bytes: dict[tuple[int, int], int]
    """Bytes per (replica, destination rank)."""
    send_balance: float
    """Largest / mean of `sent_bytes`; 1.0 is even."""
    receive_balance: float
    """Largest / mean of `received_bytes`."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The part of a plan that one source rank replays. Its tasks were checked against the digest of the whole plan."""

    digest: str
    rank: int
    max_task_bytes: int
    tasks: tuple[Task, ...]
    """In schedule order."""


@dataclass(frozen=True)
class TransferPlan:
    """The whole plan: every source rank's tasks in schedule order."""

    digest: str
    """sha256, hex, over the format, the bound, the checkpoint, every destination layout and every task."""
    max_task_bytes: int
    tasks: Mapping[int, Sequence[Task]]
    """Schedule per source rank, in ascending order of rank; every source rank has an entry. Kept as `TaskTable`s."""
    expected: Mapping[tuple[int, int], Mapping[str, int]]
    """(replica, destination rank) -> parameter -> bytes that a publish writes into it; derived ones are absent."""
    layouts_digest: str
    """sha256, hex, over the checkpoint and the destination layouts alone; part of `digest`."""
    rank_digests: Mapping[int, str]
    """sha256, hex, over each source rank's tasks; part of `digest`, so that a rank can check its own part."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", {rank: TaskTable.of(rank, tasks) for rank, tasks in self.tasks.items()})

    @property
    def tables(self) -> Mapping[int, TaskTable]:
        """`tasks`, as columns."""
        return cast(Mapping[int, TaskTable], self.tasks)

    @property
    def num_tasks(self) -> int:
        """Tasks of all source ranks together."""
        return sum(len(tasks) for tasks in self.tasks.values())

    def summary(self) -> PlanSummary:
        """Totals and balance."""
        group_bytes: dict[str, int] = dict.fromkeys(MESH_GROUPS, 0)
        sent = dict.fromkeys(self.tasks, 0)
        received = dict.fromkeys(self.expected, 0)
        largest = num_tasks = 0
        num_dests = 1 + max((rank for _, rank in self.expected), default=0)
        for rank, table in self.tables.items():
            num_tasks += len(table)
            if not table.num_rows:
                continue
            rows = table.num_bytes * table.num_replicas
            for number, name in enumerate(MESH_GROUPS):
                group_bytes[name] += int(rows[table.group == number].sum())
            sent[rank] = int(rows.sum())
            largest = max(largest, int(table.num_bytes.max()))
            to, at = np.unique(table.replicas * num_dests + table.dest_rank, return_inverse=True)
            sums = np.zeros(len(to), np.int64)
            np.add.at(sums, at, table.num_bytes)
            for key, size in zip(to.tolist(), sums.tolist()):
                for replica in table.replicas_of(key // num_dests):
                    received[replica, key % num_dests] += size
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
        """One source rank's part, as plain data for msgpack; `rank_plan_from_wire` is the inverse."""
        return {
            "format_version": FORMAT_VERSION,
            "digest": self.digest,
            "layouts_digest": self.layouts_digest,
            "max_task_bytes": self.max_task_bytes,
            "rank_digests": [[source, digest] for source, digest in self.rank_digests.items()],
            "rank": rank,
            "tasks": self.tables[rank].to_wire(),
        }


def rank_plan_from_wire(wire: Mapping[str, Any]) -> RankPlan:
    """Read what `TransferPlan.to_wire` wrote. Raises PlanError if its tasks are not the ones that the digest names."""
    if wire["format_version"] != FORMAT_VERSION:
        raise PlanError(f"the plan has format {wire['format_version']}, this process reads format {FORMAT_VERSION}")
    rank, bound = int(wire["rank"]), int(wire["max_task_bytes"])
    rank_digests = {int(source): str(digest) for source, digest in wire["rank_digests"]}
    if _digest(wire["tasks"]) != rank_digests.get(rank):
        raise PlanError(f"the tasks of source rank {rank} differ from those that plan {wire['digest']} names")
    if _plan_digest(bound, wire["layouts_digest"], rank_digests) != wire["digest"]:
        raise PlanError(f"source rank {rank}: the parts of the plan do not add up to its digest {wire['digest']}")
    tasks = tuple(TaskTable.from_wire(rank, wire["tasks"]))
    return RankPlan(digest=wire["digest"], rank=rank, max_task_bytes=bound, tasks=tasks)


def build_plan(
    sources: Sequence[SourceLayout], replicas: Sequence[Sequence[DestLayout]], *, max_task_bytes: int
) -> TransferPlan:
    """Join what the trainer ranks hold with what the engine ranks need, and prove the result.

    Args:
        sources: one layout a trainer rank; ranks are distinct, the checkpoint is the same on all.
        replicas: for every replica, one layout an engine rank.
        max_task_bytes: no task is longer; a quarter of a staging slot, so that slots are nearly full (budget.py).

    Raises:
        PlanError: the sides do not fit, or one is empty. Names the tensor, the parameter and the rank.
    """
    if max_task_bytes < 1:
        raise PlanError(f"max_task_bytes must be >= 1, got {max_task_bytes}")
    if not replicas:
        raise PlanError("there is no replica to plan for")
    holders = find_holders(sources)
    ranks = sorted(source.rank for source in sources)
    destinations = _check_destinations(holders, replicas)
    alike = _alike(destinations, holders)
    expected: dict[tuple[int, int], dict[str, int]] = {}
    for one in alike:
        expected |= dict.fromkeys(((replica, one.dest_rank) for replica in one.replicas), _expected_bytes(one.layout))
    num_bytes = sum(sum(params.values()) for params in expected.values())
    needs = _cut(alike, holders, max_task_bytes, max(MIN_SHARED_BYTES, num_bytes // len(ranks) // SHARES_PER_SOURCE))
    schedule = schedule_of(needs, choose_sources(needs, holders, ranks), ranks, num_replicas=len(replicas))

    layouts_digest = _layouts_digest(holders, alike)
    rank_digests = {rank: _digest(table.to_wire()) for rank, table in schedule.items()}
    plan = TransferPlan(
        digest=_plan_digest(max_task_bytes, layouts_digest, rank_digests),
        max_task_bytes=max_task_bytes,
        tasks=schedule,
        expected={where: expected[where] for where in destinations},
        layouts_digest=layouts_digest,
        rank_digests=rank_digests,
    )
    prove_coverage(plan, replicas, sources)
    return plan


def _check_destinations(
    holders: Holders, replicas: Sequence[Sequence[DestLayout]]
) -> dict[tuple[int, int], DestLayout]:
    """Check every destination layout and key it by (replica, rank)."""
    destinations: dict[tuple[int, int], DestLayout] = {}
    checked: set[int] = set()
    for replica, layouts in enumerate(replicas):
        if not layouts:
            raise PlanError(f"replica {replica} has no engine rank")
        for layout in layouts:
            where = (replica, layout.rank)
            if where in destinations:
                raise PlanError(f"replica {replica}: two layouts claim rank {layout.rank}")
            destinations[where] = layout
            if id(layout) not in checked:
                check_layout(layout, holders, f"replica {replica} rank {layout.rank}")
                checked.add(id(layout))
    return destinations


def _alike(destinations: Mapping[tuple[int, int], DestLayout], holders: Holders) -> list[Alike]:
    """Group the engine ranks by rank and layout; layouts are equal when their digests are."""
    digests: dict[int, str] = {}
    groups: dict[tuple[int, str], list[tuple[int, DestLayout]]] = {}
    for (replica, rank), layout in destinations.items():
        if id(layout) not in digests:
            digests[id(layout)] = _layout_digest(layout, holders)
        groups.setdefault((rank, digests[id(layout)]), []).append((replica, layout))
    return [
        Alike(rank, members[0][1], digest, tuple(replica for replica, _ in members))
        for (rank, digest), members in groups.items()
    ]


def _expected_bytes(layout: DestLayout) -> dict[str, int]:
    """Parameter -> bytes that a publish writes: all of it, less the declared fills."""
    expected = {param.name: param.num_bytes for param in layout.params if param.post_load is not PostLoad.derived}
    sizes = {param.name: DTYPE_BYTES[param.dtype] for param in layout.params}
    for fill in layout.fills:
        if fill.param in expected:
            expected[fill.param] -= fill.num_elements * sizes[fill.param]
    return expected


def _cut(alike: Sequence[Alike], holders: Holders, max_task_bytes: int, max_shared_bytes: int) -> Needs:
    """Cut what every group of equal engine ranks needs, once."""
    facts = TensorFacts.of(holders.metas)
    names: dict[str, int] = {}
    found: list[tuple[Chunks, Ints, Ints]] = []
    for one in alike:
        who = f"replica {one.replicas[0]} rank {one.dest_rank}"
        chunks = cut_layout(
            one.layout, holders, facts, who, max_task_bytes=max_task_bytes, max_shared_bytes=max_shared_bytes
        )
        numbers = np.array([names.setdefault(param.name, len(names)) for param in one.layout.params], np.int64)
        dtypes = np.array([DTYPES.index(param.dtype) for param in one.layout.params], np.int64)
        found.append((chunks, numbers[chunks.param], dtypes[chunks.param]))

    def joined(column: str) -> Any:
        return np.concatenate([getattr(chunks, column) for chunks, _, _ in found])

    def pieces(column: str) -> Any:
        return np.concatenate([getattr(chunks.pieces, column) for chunks, _, _ in found])

    columns = {name: joined(name) for name in Chunks.__slots__ if name != "pieces"}
    piece_columns = {name: pieces(name) for name in PieceColumns.__slots__ if name != "names"}
    chunks = Chunks(**columns, pieces=PieceColumns(holders.names, **piece_columns))
    dtype = np.concatenate([dtypes for _, _, dtypes in found])
    size = np.array([DTYPE_BYTES[name] for name in DTYPES], np.int64)[dtype]
    return Needs(
        alike,
        tuple(names),
        np.repeat(np.arange(len(alike)), [len(chunks.param) for chunks, _, _ in found]),
        chunks,
        np.concatenate([params for _, params, _ in found]),
        chunks.offset * size,
        chunks.num_elements * size,
        dtype,
    )


def _digest(plain: object) -> str:
    """sha256, hex, of plain data; msgpack writes equal data as equal bytes (lists and tuples alike)."""
    packed = cast(bytes, msgpack.packb(plain))  # pyright: ignore[reportUnknownMemberType]
    return hashlib.sha256(packed).hexdigest()


def _layout_digest(layout: DestLayout, holders: Holders) -> str:
    """Digest of a layout but for its rank, whatever form its loads have; tensors by their place in the checkpoint."""
    table = LoadTable.of(layout.loads)
    columns = {name: getattr(table, name) for name in COLUMNS}
    columns["tensor"] = holders.tensors_of(table)
    columns["param"] = table.params_in({param.name: number for number, param in enumerate(layout.params)})
    dims = int((table.axes & 7).max(initial=1))
    columns |= {name: np.ascontiguousarray(columns[name][:, :dims]) for name in ("start", "shape", "stride")}
    return _digest(
        [
            [[p.name, p.shape, p.dtype, p.post_load.value] for p in layout.params],
            [column.astype("<i8", copy=False).tobytes() for column in columns.values()],
            [[f.param, f.offset, f.num_elements, f.value] for f in layout.fills],
        ]
    )


def _layouts_digest(holders: Holders, alike: Sequence[Alike]) -> str:
    """Digest of the checkpoint and of every destination."""
    checkpoint = [[meta.name, meta.shape, meta.dtype] for meta in holders.metas]
    return _digest(
        [checkpoint, sorted([replica, one.dest_rank, one.digest] for one in alike for replica in one.replicas)]
    )


def _plan_digest(max_task_bytes: int, layouts_digest: str, rank_digests: Mapping[int, str]) -> str:
    """Digest of the whole plan, from the digests of its parts."""
    return _digest([FORMAT_VERSION, max_task_bytes, layouts_digest, list(rank_digests.items())])


def _max_over_mean(values: Iterable[int]) -> float:
    """Largest / mean; 1.0 when there is nothing."""
    numbers = list(values)
    total = sum(numbers)
    return max(numbers) * len(numbers) / total if total else 1.0
