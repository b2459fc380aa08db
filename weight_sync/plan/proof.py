"""The proof that a plan is right, independent of the code that makes plans.

Owns: checking, from the tasks alone, that every byte of every parameter that is not derived and not a declared fill
is written exactly once, and with the element that the engine's own loader put there. Does not own: finding the load or
shard that a piece lies in (`piece_proof.py`), nor how tasks are made; it shares no code with that, except the columns
that hold tasks and loads.

The argument, per engine rank:
  1. loads and fills have as many elements as each parameter, and tasks and fills, sorted by offset, tile it without
     gap or overlap: so every byte is written once;
  2. a piece lies inside the region of a load of the same tensor, and the two affine maps (tensor coordinates ->
     element of the parameter) agree on it: so every byte is the right one. From 1 and 2 it follows that loads do not
     overlap;
  3. the source rank holds every piece that it packs.
A proof for one replica is a proof for every other one that has the same layout and gets the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np

from slipstream.weight_sync.errors import PlanError
from slipstream.weight_sync.layout import DTYPE_BYTES, Destination, DestLayout, Param, PostLoad, SourceLayout
from slipstream.weight_sync.plan.columns import (
    Columns,
    Flags,
    Ints,
    LoadTable,
    as_list,
    axes_of,
    changes,
    first_true,
    folded,
    spread,
    starts_of,
    widened,
)
from slipstream.weight_sync.plan.piece_proof import Numbers, are_loaded, prove_held
from slipstream.weight_sync.plan.transfer_plan import (
    DTYPES,
    MESH_GROUPS,
    PieceColumns,
    Task,
    TaskTable,
    TransferPlan,
    mesh_group_of,
)


def prove_coverage(
    plan: TransferPlan, replicas: Sequence[Sequence[DestLayout]], sources: Sequence[SourceLayout]
) -> None:
    """Check a plan against the layouts that it was made for.

    Raises:
        PlanError: at the first error; names the replica, rank, parameter, offset and tensor.
    """
    wanted = {(replica, layout.rank): layout for replica, layouts in enumerate(replicas) for layout in layouts}
    for table in plan.tasks.values():
        for replica, rank in table.flows():
            if (replica, rank) not in wanted:
                raise PlanError(
                    f"a task of source rank {table.source_rank} goes to replica {replica} rank {rank}, unknown"
                )
    tensors = Numbers()
    all_rows = _Rows.of(plan, len(replicas), tensors)
    for dest_rank in sorted({rank for _, rank in wanted}):
        rows = all_rows.going_to(dest_rank)
        alike: dict[int, list[int]] = {}
        for replica, rank in wanted:
            if rank == dest_rank:
                alike.setdefault(id(wanted[replica, rank]), []).append(replica)
        for members in alike.values():
            _Proof(plan, dest_rank, members, wanted[members[0], dest_rank], rows, tensors).run()
    for where, layout in wanted.items():
        _check_expected(plan, where, layout)
    prove_held(plan, sources, tensors)


@dataclass(frozen=True, slots=True)
class _Rows(Columns):
    """The tasks of all sources as rows of one table; names numbered anew, the same for all."""

    params: Sequence[str]
    tensor_groups: Sequence[int]
    """In which mesh group each tensor is sent."""
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
    def of(cls, plan: TransferPlan, num_replicas: int, tensors: Numbers) -> _Rows:
        """Collect the rows once: a plan has hundreds of tables, and each goes to every engine rank."""
        tables, params = list(plan.tasks.values()), Numbers()
        pieces = [table.pieces for table in tables]
        width = max(one.start.shape[1] for one in pieces)
        param = np.concatenate([params.of(table.params)[table.param] for table in tables])
        tensor = np.concatenate([tensors.of(one.names)[one.tensor] for one in pieces])
        return cls(
            params=list(params.of_name),
            tensor_groups=[mesh_group_of(name) for name in tensors.of_name],
            param=param,
            offset=np.concatenate([table.dest_offset_bytes for table in tables]),
            num_bytes=np.concatenate([table.num_bytes for table in tables]),
            dtype=np.concatenate([table.dtype for table in tables]),
            group=np.concatenate([table.group for table in tables]),
            source=np.repeat([table.source_rank for table in tables], [table.num_rows for table in tables]),
            dest_rank=np.concatenate([table.dest_rank for table in tables]),
            gets=np.concatenate([_receivers(table, num_replicas) for table in tables]),
            num_pieces=np.concatenate([table.num_pieces for table in tables]),
            pieces=PieceColumns(
                list(tensors.of_name),
                tensor,
                start=np.concatenate([widened(one.start, width, 0) for one in pieces]),
                shape=np.concatenate([widened(one.shape, width, 1) for one in pieces]),
                axes=np.concatenate([one.axes for one in pieces]),
                offset=np.concatenate([one.offset for one in pieces]),
            ),
        )

    def going_to(self, dest_rank: int) -> _Rows:
        """The rows of engine ranks of one number."""
        own = np.flatnonzero(self.dest_rank == dest_rank)
        row, within = spread(self.num_pieces[own])
        return replace(self.take(own), pieces=self.pieces.take(starts_of(self.num_pieces)[own][row] + within))

    def task(self, row: int) -> Task:
        """A row as an object, for messages."""
        return Task(
            MESH_GROUPS[int(self.group[row])],
            int(self.source[row]),
            int(self.gets[row].argmax()),
            -1,
            self.params[int(self.param[row])],
            int(self.offset[row]),
            int(self.num_bytes[row]),
            DTYPES[int(self.dtype[row])],
            self.pieces.expanded(int(self.num_pieces[:row].sum()), int(self.num_pieces[row])),
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


class _Proof:
    """The proof for the engine ranks of one number in replicas with one layout, over the rows that they get."""

    def __init__(
        self,
        plan: TransferPlan,
        dest_rank: int,
        replicas: Sequence[int],
        layout: DestLayout,
        rows: _Rows,
        tensors: Numbers,
    ) -> None:
        self.plan, self.dest_rank, self.replicas, self.layout, self.rows = plan, dest_rank, replicas, layout, rows
        self.loads = LoadTable.of(layout.loads)
        self.numbers = {param.name: number for number, param in enumerate(layout.params)}
        known = np.array([self.numbers.get(name, -1) for name in rows.params], np.int64)
        own = np.flatnonzero(rows.gets[:, replicas].any(axis=1))
        param = known[rows.param[own]] if len(own) else own
        if (param < 0).any():
            strange = sorted({rows.task(int(row)).param for row in own[param < 0]})
            name = self.name_of(int(own[param < 0][0]))
            raise PlanError(f"{name}: tasks write parameters that it does not have: {', '.join(strange)}")
        order = np.lexsort((rows.offset[own], param))
        self.own, self.param = own[order], param[order]
        self.load_param = self.loads.params_in(self.numbers)
        self.load_tensor = tensors.of(self.loads.names)[self.loads.tensor]
        self.sizes = np.array([DTYPE_BYTES[one.dtype] for one in layout.params], np.int64)
        self.derived = np.array([one.post_load is PostLoad.derived for one in layout.params], np.bool_)

    def name_of(self, row: int) -> str:
        """The first engine rank that gets a row, for messages."""
        return self.name(next(replica for replica in self.replicas if self.rows.gets[row, replica]))

    def name(self, replica: int) -> str:
        return f"replica {replica} rank {self.dest_rank}"

    def run(self) -> None:
        """Check every parameter, and that nothing else is written. Rows are alike for all replicas, ranges are not."""
        for index in first_true(self.derived[self.param]):
            row = int(self.own[index])
            name = self.layout.params[int(self.param[index])].name
            raise PlanError(f"{self.name_of(row)}: {name} is derived, and {self.rows.task(row)} writes it")
        self.check_counts()
        self.check_tiling()
        self.check_rows()
        self.check_pieces()

    def check_counts(self) -> None:
        """Step 1: loads and fills have as many elements as each parameter."""
        params, fills = self.layout.params, self.layout.fills
        elements = np.array([param.num_elements for param in params], np.int64)
        loaded, filled = np.zeros_like(elements), np.zeros_like(elements)
        np.add.at(loaded, self.load_param, folded(np.multiply, self.loads.shape))
        np.add.at(filled, [self.numbers[fill.param] for fill in fills], [fill.num_elements for fill in fills])
        for index in first_true(~self.derived & (loaded + filled != elements)):
            tensors = {self.loads.names[i] for i in as_list(self.loads.tensor[self.load_param == index])}
            raise PlanError(
                f"{self.name(self.replicas[0])}: {params[index].name} has {elements[index]} elements, its loads bring "
                f"{loaded[index]} and its fills {filled[index]}; tensors: {', '.join(sorted(tensors)) or 'none'}"
            )

    def check_tiling(self) -> None:
        """Step 1: in every replica, ranges tile the parameters."""
        params = self.layout.params
        # Put an empty range at the end of every parameter: then each range must begin where the one before it ended.
        fixed = [(self.numbers[f.param], f.offset, f.num_elements, False) for f in self.layout.fills]
        fixed += [(number, param.num_elements, 0, True) for number, param in enumerate(params)]
        fixed = [one for one in fixed if not self.derived[one[0]]]
        columns = np.array(fixed, np.int64).reshape(-1, 4).T
        size_of = self.sizes[columns[0]]
        param = np.concatenate([self.param, columns[0]])
        begin = np.concatenate([self.rows.offset[self.own], columns[1] * size_of])
        size = np.concatenate([self.rows.num_bytes[self.own], columns[2] * size_of])
        is_end = np.concatenate([np.zeros(len(self.own), np.bool_), columns[3].astype(np.bool_)])
        order = np.lexsort((size, begin, is_end, param))
        param, begin, size, is_end = param[order], begin[order], size[order], is_end[order]
        row = np.concatenate([self.own, np.full(len(fixed), -1)])[order]
        gets = np.ones((len(row), len(self.replicas)), np.bool_)
        gets[row >= 0] = self.rows.gets[row[row >= 0]][:, self.replicas]
        for replica, taken in zip(self.replicas, np.ascontiguousarray(gets.T)):
            there = np.flatnonzero(taken)
            first = changes(param[there])
            end_before = np.append(0, (begin + size)[there][:-1])
            for index in first_true(begin[there] != np.where(first, 0, end_before)):
                at = int(there[index])
                before = None if first[index] else int(there[index - 1])
                self.raise_gap(self.name(replica), params[int(param[at])], at, before, begin, size, is_end, row)

    def raise_gap(
        self, who: str, param: Param, at: int, before: int | None, begin: Ints, size: Ints, is_end: Flags, row: Ints
    ) -> NoReturn:
        """Raise an error that says where ranges leave a gap or overlap."""

        def named(index: int | None) -> str:
            if index is None:
                return "the start"
            if row[index] < 0:
                return "a fill"
            pieces = self.rows.task(int(row[index])).pieces
            return pieces[0].tensor if pieces else "nothing"

        start, stop = int(begin[at]), 0 if before is None else int(begin[before] + size[before])
        if is_end[at]:
            raise PlanError(f"{who}: {param.name}: tasks and fills end at byte {stop} of {param.num_bytes}")
        kind = "nobody writes" if start > stop else "written twice:"
        raise PlanError(
            f"{who}: {param.name}: {kind} bytes {min(start, stop)}..{max(start, stop) - 1} "
            f"(between {named(before)} and {named(at)})"
        )

    def check_rows(self) -> None:
        """Every task has its parameter's dtype and is not longer than the bound. It begins at an element, because those
        before it, which tile the parameter, pack whole elements."""
        rows, own = self.rows, self.own
        dtypes = np.array([DTYPES.index(one.dtype) for one in self.layout.params], np.int64)
        wrong = rows.dtype[own] != dtypes[self.param]
        wrong |= (rows.num_bytes[own] < 1) | (rows.num_bytes[own] > self.plan.max_task_bytes)
        for index in first_true(wrong):
            task = rows.task(int(own[index]))
            raise PlanError(
                f"{self.called(int(own[index]))}: {task.num_bytes} bytes of {task.dtype}, the parameter is "
                f"{self.layout.params[int(self.param[index])].dtype}, the bound {self.plan.max_task_bytes} bytes"
            )

    def check_pieces(self) -> None:
        """Step 2: every piece is packed right after the one before it, and is where a load puts it."""
        rows = self.rows
        place = np.full(len(rows.num_bytes), -1)
        place[self.own] = np.arange(len(self.own))
        row, _ = spread(rows.num_pieces)
        mine = np.flatnonzero(place[row] >= 0)
        pieces, row = rows.pieces.take(mine), row[mine]
        start, shape = pieces.start.astype(np.int64), pieces.shape.astype(np.int64)
        elements = folded(np.multiply, shape)
        behind = starts_of(elements)
        first = changes(row)
        packed = behind - np.maximum.accumulate(np.where(first, behind, 0))
        totals = np.bincount(row, elements, minlength=len(rows.num_bytes)).astype(np.int64)[self.own]
        at = rows.offset[row] // self.sizes[self.param][place[row]] + packed
        groups = np.array(rows.tensor_groups, np.int64)

        def fail(wrong: Flags, say: Callable[[int], str]) -> None:
            for index in first_true(wrong):
                raise PlanError(f"{self.called(int(row[index]))}: {say(index)}")

        def tensor(index: int) -> str:
            return pieces.names[int(pieces.tensor[index])]

        def block(index: int) -> str:
            axes = axes_of(int(pieces.axes[index]))
            return (
                f"no load puts {tensor(index)} start {as_list(start[index, : len(axes)])} shape "
                f"{as_list(shape[index, : len(axes)])} axes {list(axes)} at element {at[index]}"
            )

        fail(folded(np.minimum, shape) < 1, lambda i: f"a piece of {tensor(i)} is empty")
        fail(pieces.offset != packed, lambda i: f"{tensor(i)} is packed at {pieces.offset[i]}, not at {packed[i]}")
        fail(
            groups[pieces.tensor] != rows.group[row] if len(row) else first,
            lambda i: f"{tensor(i)} is sent in mesh group {MESH_GROUPS[int(rows.group[row[i]])]}",
        )
        fail(~are_loaded(pieces, self.param[place[row]], at, self.loads, self.load_param, self.load_tensor), block)
        wrong = totals * self.sizes[self.param] != rows.num_bytes[self.own]
        for index in first_true(wrong):
            task = rows.task(int(self.own[index]))
            packs = int(totals[index] * self.sizes[self.param[index]])
            raise PlanError(
                f"{self.called(int(self.own[index]))}: its pieces pack to {packs} bytes, it says {task.num_bytes}"
            )

    def called(self, row: int) -> str:
        """A task, for messages."""
        task = self.rows.task(row)
        where = f"task at byte {task.dest_offset_bytes} of source rank {task.source_rank}"
        return f"{self.name_of(row)}: {task.param}: {where}"


def _check_expected(plan: TransferPlan, where: Destination, layout: DestLayout) -> None:
    """The bytes that the plan expects per parameter are those that its layout needs."""
    kept = {param.name: param for param in layout.params if param.post_load is not PostLoad.derived}
    needed = {name: param.num_bytes for name, param in kept.items()}
    for fill in layout.fills:
        if fill.param in kept:
            needed[fill.param] -= fill.num_elements * DTYPE_BYTES[kept[fill.param].dtype]
    if dict(plan.expected.get(where, {})) != needed:
        raise PlanError(
            f"replica {where[0]} rank {where[1]}: the expected bytes per parameter differ from what its layout needs"
        )
