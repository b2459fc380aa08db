"""The transfer plan: who sends which bytes to whom, in which order. Pure, deterministic, computed once, then replayed.

Owns: choosing a source for every chunk, the order, the digest, the wire form. Does not own: cutting (holders.py,
chunks.py), addresses (an engine's `Binding` joins them at run time), moving bytes (pipeline.py), what a layout is
(layout.py), the proof that a plan is right (coverage.py; `build_plan` runs it on every plan that it returns).

    SourceLayout x ranks ---> holders.py: disjoint cells of each checkpoint tensor, and the ranks that hold each
                                                |
    DestLayout x replicas --> loads, cut into contiguous runs of a parameter that lie in one cell
                                                |   chunks.py: neighbours of the same holders merge, long ones are cut
                                              chunks
                                                |   a source each: least bytes so far among the holders
                                              tasks, per source: dense before experts, layer order, destinations rotated

Invariant: every byte of every parameter that is not derived and not a declared fill is written by exactly one task,
and is the byte that the engine's own loader would have put there. No task is longer than `max_task_bytes`.

Callers: publisher.py (builds it, or receives its part of it), pipeline.py (replays tasks).
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]

from weight_sync.chunks import Chunk, Piece, check_layout, cut_layout
from weight_sync.coverage import prove_coverage
from weight_sync.errors import PlanError
from weight_sync.holders import find_holders
from weight_sync.layout import DTYPE_BYTES, DestLayout, Param, PostLoad, Region, SourceLayout

FORMAT_VERSION = 1
"""Version of the wire form and of the digest; the two ends of a publish must agree on it."""

MESH_GROUPS: tuple[str, str] = ("dense", "experts")
"""Sending order. A tensor belongs to "experts" when its name contains ".experts."."""

SHARES_PER_SOURCE = 64
"""A chunk with several holders is cut to 1/64 of a source's fair share: greedy choice then ends within 2 % of even."""

MIN_SHARED_BYTES = 1 << 20
"""... but never finer than this: below it a write costs its latency, not its bytes."""


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


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """The whole plan: every source rank's tasks in schedule order."""

    digest: str
    """sha256, hex, over the format, the bound, the checkpoint, every destination layout and every task."""
    max_task_bytes: int
    tasks: Mapping[int, tuple[Task, ...]]
    """Schedule per source rank, in ascending order of rank; every source rank has an entry."""
    expected: Mapping[tuple[int, int], Mapping[str, int]]
    """(replica, destination rank) -> parameter -> bytes that a publish writes into it; derived ones are absent."""
    layouts_digest: str
    """sha256, hex, over the checkpoint and the destination layouts alone; part of `digest`."""
    rank_digests: Mapping[int, str]
    """sha256, hex, over each source rank's tasks; part of `digest`, so that a rank can check its own part."""

    def tasks_of(self, rank: int) -> tuple[Task, ...]:
        """The tasks of one source rank, in schedule order."""
        return self.tasks[rank]

    @property
    def num_tasks(self) -> int:
        """Tasks of all source ranks together."""
        return sum(len(tasks) for tasks in self.tasks.values())

    def expected_bytes(self, replica: int, dest_rank: int) -> Mapping[str, int]:
        """Parameter -> bytes that a publish writes into it, on one engine rank."""
        return self.expected[replica, dest_rank]

    def summary(self) -> PlanSummary:
        """Totals and balance."""
        group_bytes: dict[str, int] = dict.fromkeys(MESH_GROUPS, 0)
        sent = dict.fromkeys(self.tasks, 0)
        received = dict.fromkeys(self.expected, 0)
        largest = 0
        for rank, tasks in self.tasks.items():
            for task in tasks:
                group_bytes[task.mesh_group] += task.num_bytes
                sent[rank] += task.num_bytes
                received[task.replica, task.dest_rank] += task.num_bytes
                largest = max(largest, task.num_bytes)
        return PlanSummary(
            digest=self.digest,
            num_tasks=self.num_tasks,
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
            "tasks": _tasks_to_wire(self.tasks[rank]),
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
    return RankPlan(digest=wire["digest"], rank=rank, max_task_bytes=bound, tasks=_tasks_from_wire(wire["tasks"], rank))


def build_plan(
    sources: Sequence[SourceLayout], replicas: Sequence[Sequence[DestLayout]], *, max_task_bytes: int
) -> TransferPlan:
    """Join what the trainer ranks hold with what the engine ranks need, and prove the result.

    Args:
        sources: one layout a trainer rank; ranks are distinct, the checkpoint is the same on all.
        replicas: for every replica, one layout an engine rank.
        max_task_bytes: no task is longer; half of the watermark, so that one is packed while another is written.

    Raises:
        PlanError: the sides do not fit. Names the tensor, the parameter and the rank.
    """
    if max_task_bytes < 1:
        raise PlanError(f"max_task_bytes must be >= 1, got {max_task_bytes}")
    holders = find_holders(sources)
    ranks = sorted(source.rank for source in sources)
    destinations = _check_destinations(sources[0], replicas)
    expected = {where: _expected_bytes(layout) for where, layout in destinations.items()}
    fair_share = sum(sum(params.values()) for params in expected.values()) // len(ranks)
    # Replicas are alike: equal ranks of them are cut once, and their tasks share their pieces.
    alike: dict[tuple[int, DestLayout], list[int]] = {}
    for (replica, dest_rank), layout in destinations.items():
        alike.setdefault((dest_rank, layout), []).append(replica)
    needs: list[_Need] = []
    for (dest_rank, layout), members in alike.items():
        chunks = cut_layout(
            layout,
            holders,
            _name(members[0], dest_rank),
            max_task_bytes=max_task_bytes,
            max_shared_bytes=max(MIN_SHARED_BYTES, fair_share // SHARES_PER_SOURCE),
        )
        for chunk in chunks:
            param = layout.params[chunk.param_index]
            needs.append(_Need(tuple(members), dest_rank, param, chunk, chunk.num_elements * DTYPE_BYTES[param.dtype]))
    schedule = _schedule(_choose_sources(needs, ranks), num_replicas=len(replicas))

    layouts_digest = _layouts_digest(sources[0], destinations)
    rank_digests = {rank: _digest(_tasks_to_wire(tasks)) for rank, tasks in schedule.items()}
    plan = TransferPlan(
        digest=_plan_digest(max_task_bytes, layouts_digest, rank_digests),
        max_task_bytes=max_task_bytes,
        tasks=schedule,
        expected=expected,
        layouts_digest=layouts_digest,
        rank_digests=rank_digests,
    )
    prove_coverage(plan, replicas, sources)
    return plan


@dataclass(frozen=True, slots=True)
class _Need:
    """A chunk that an engine rank needs from somebody, in each of the replicas."""

    replicas: tuple[int, ...]
    dest_rank: int
    param: Param
    chunk: Chunk
    num_bytes: int
    """Of one replica."""


def _check_destinations(
    source: SourceLayout, replicas: Sequence[Sequence[DestLayout]]
) -> dict[tuple[int, int], DestLayout]:
    """Check every destination layout and key it by (replica, rank)."""
    metas = {meta.name: meta for meta in source.tensors}
    destinations: dict[tuple[int, int], DestLayout] = {}
    checked: set[tuple[object, ...]] = set()
    for replica, layouts in enumerate(replicas):
        if not layouts:
            raise PlanError(f"replica {replica} has no engine rank")
        for layout in layouts:
            where = (replica, layout.rank)
            if where in destinations:
                raise PlanError(f"replica {replica}: two layouts claim rank {layout.rank}")
            destinations[where] = layout
            key = (layout.params, layout.loads, layout.fills)
            if key not in checked:
                check_layout(layout, metas, _name(*where))
                checked.add(key)
    return destinations


def _expected_bytes(layout: DestLayout) -> dict[str, int]:
    """Parameter -> bytes that a publish writes: all of it, less the declared fills."""
    expected = {param.name: param.num_bytes for param in layout.params if param.post_load is not PostLoad.derived}
    sizes = {param.name: DTYPE_BYTES[param.dtype] for param in layout.params}
    for fill in layout.fills:
        if fill.param in expected:
            expected[fill.param] -= fill.num_elements * sizes[fill.param]
    return expected


def _choose_sources(needs: list[_Need], ranks: list[int]) -> dict[int, list[_Need]]:
    """Give every need to one holder: the only one, or the one with the least bytes so far (lowest rank on a tie).

    Bytes that leave no choice are counted before any choice is made; choices are made for the largest needs first.
    """
    chosen: dict[int, list[_Need]] = {rank: [] for rank in ranks}
    total = dict.fromkeys(ranks, 0)
    open_needs: list[_Need] = []
    for need in needs:
        if len(need.chunk.holders) == 1:
            rank = need.chunk.holders[0]
            chosen[rank].append(need)
            total[rank] += need.num_bytes * len(need.replicas)
        else:
            open_needs.extend(replace(need, replicas=(replica,)) for replica in need.replicas)
    open_needs.sort(key=lambda need: -need.num_bytes)  # stable, so the order of needs breaks ties
    heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for need in open_needs:
        holders = need.chunk.holders
        heap = heaps.get(holders)
        if heap is None:
            heap = heaps[holders] = [(total[rank], rank) for rank in holders]
            heapq.heapify(heap)
        # Totals only grow: an entry that another set of holders made stale is pushed down until the top is current.
        while heap[0][0] != total[heap[0][1]]:
            heapq.heapreplace(heap, (total[heap[0][1]], heap[0][1]))
        rank = heap[0][1]
        chosen[rank].append(need)
        total[rank] += need.num_bytes
        heapq.heapreplace(heap, (total[rank], rank))
    return chosen


def _schedule(chosen: Mapping[int, list[_Need]], num_replicas: int) -> dict[int, tuple[Task, ...]]:
    """Order every source's needs: dense before experts, then by layer.

    Inside a layer source i begins with destination i, so that no engine rank is hit by all at once. Equal chunks of
    several replicas follow each other.
    """
    num_dests = 1 + max((need.dest_rank for needs in chosen.values() for need in needs), default=0)
    schedule: dict[int, tuple[Task, ...]] = {}
    for index, (rank, needs) in enumerate(chosen.items()):
        first_replica = index // num_dests % num_replicas

        def order(need: _Need, index: int = index, first_replica: int = first_replica) -> tuple[int, ...]:
            chunk = need.chunk
            turn = (need.dest_rank - index) % num_dests
            replica = (need.replicas[0] - first_replica) % num_replicas
            return (chunk.is_expert, chunk.layer, turn, chunk.param_index, chunk.offset, replica)

        needs.sort(key=order)
        schedule[rank] = tuple(
            Task(
                mesh_group=MESH_GROUPS[need.chunk.is_expert],
                source_rank=rank,
                replica=replica,
                dest_rank=need.dest_rank,
                param=need.param.name,
                dest_offset_bytes=need.chunk.offset * DTYPE_BYTES[need.param.dtype],
                num_bytes=need.num_bytes,
                dtype=need.param.dtype,
                pieces=need.chunk.pieces,
            )
            for need in needs
            for replica in sorted(
                need.replicas, key=lambda member, first=first_replica: (member - first) % num_replicas
            )
        )
    return schedule


_PieceRow = tuple[int, list[int], list[int], list[int], int]
"""Tensor (as a position among the names), start, shape, axes, offset_elements."""
_TaskRow = tuple[list[int], int, int, int, int, int, int, list[_PieceRow]]
"""Replicas, mesh group, dest_rank, param (a name), dest_offset_bytes, num_bytes, dtype (a name), pieces."""


def _tasks_to_wire(tasks: Sequence[Task]) -> list[Any]:
    """Plain lists: the names used, and a row per block of pieces with where it goes and the replicas that get it."""
    names: dict[str, int] = {}
    rows: list[Any] = []
    previous: Task | None = None
    for task in tasks:
        if (
            previous is not None
            and task.pieces is previous.pieces
            and task.dest_offset_bytes == previous.dest_offset_bytes
            and task.dest_rank == previous.dest_rank
            and task.param == previous.param
        ):
            rows[-1][0].append(task.replica)
            continue
        previous = task
        rows.append(
            [
                [task.replica],
                MESH_GROUPS.index(task.mesh_group),
                task.dest_rank,
                names.setdefault(task.param, len(names)),
                task.dest_offset_bytes,
                task.num_bytes,
                names.setdefault(task.dtype, len(names)),
                [
                    [names.setdefault(p.tensor, len(names)), p.region.start, p.region.shape, p.axes, p.offset_elements]
                    for p in task.pieces
                ],
            ]
        )
    return [list(names), rows]


def _tasks_from_wire(wire: Sequence[Any], rank: int) -> tuple[Task, ...]:
    """Inverse of `_tasks_to_wire`; tasks of several replicas share their pieces again."""
    names: list[str] = wire[0]
    rows: list[_TaskRow] = wire[1]
    tasks: list[Task] = []
    for replicas, group, dest_rank, param, offset, num_bytes, dtype, piece_rows in rows:
        pieces = tuple(
            Piece(names[tensor], Region(tuple(start), tuple(shape)), tuple(axes), at)
            for tensor, start, shape, axes, at in piece_rows
        )
        for replica in replicas:
            tasks.append(
                Task(
                    mesh_group=MESH_GROUPS[group],
                    source_rank=rank,
                    replica=replica,
                    dest_rank=dest_rank,
                    param=names[param],
                    dest_offset_bytes=offset,
                    num_bytes=num_bytes,
                    dtype=names[dtype],
                    pieces=pieces,
                )
            )
    return tuple(tasks)


def _digest(plain: object) -> str:
    """sha256, hex, of plain data; msgpack writes equal data as equal bytes (lists and tuples alike)."""
    packed = cast(bytes, msgpack.packb(plain))  # pyright: ignore[reportUnknownMemberType]
    return hashlib.sha256(packed).hexdigest()


def _layouts_digest(source: SourceLayout, destinations: Mapping[tuple[int, int], DestLayout]) -> str:
    """Digest of the checkpoint and of every destination."""
    seen: dict[tuple[object, ...], str] = {}
    rows: list[object] = [[[meta.name, meta.shape, meta.dtype] for meta in source.tensors]]
    for where, layout in destinations.items():
        key = (layout.params, layout.loads, layout.fills)
        if key not in seen:
            seen[key] = _digest(
                [
                    [[p.name, p.shape, p.dtype, p.post_load.value] for p in layout.params],
                    [
                        [x.tensor, x.region.start, x.region.shape, x.axes, x.param, x.offset, x.stride]
                        for x in layout.loads
                    ],
                    [[f.param, f.offset, f.num_elements, f.value] for f in layout.fills],
                ]
            )
        rows.append([where, seen[key]])
    return _digest(rows)


def _plan_digest(max_task_bytes: int, layouts_digest: str, rank_digests: Mapping[int, str]) -> str:
    """Digest of the whole plan, from the digests of its parts."""
    return _digest([FORMAT_VERSION, max_task_bytes, layouts_digest, list(rank_digests.items())])


def _max_over_mean(values: Iterable[int]) -> float:
    """Largest / mean; 1.0 when there is nothing."""
    numbers = list(values)
    total = sum(numbers)
    return max(numbers) * len(numbers) / total if total else 1.0


def _name(replica: int, dest_rank: int) -> str:
    """How messages call an engine rank."""
    return f"replica {replica} rank {dest_rank}"
