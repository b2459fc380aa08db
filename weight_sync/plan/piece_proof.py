"""The proof's part about pieces: each is where a load of the engine puts it, and its source holds it.

Owns: finding the region that a piece lies in, among a layout's loads and among a rank's shards (steps 2 and 3 of
`proof.py`, its only caller). Does not own: how pieces are packed, nor what their rows tile.
"""

from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from slipstream.weight_sync.errors import PlanError
from slipstream.weight_sync.layout import SourceLayout
from slipstream.weight_sync.plan.columns import (
    Flags,
    Ints,
    LoadTable,
    as_list,
    folded,
    num_dims,
    padded,
    walk_orders,
    widened,
)
from slipstream.weight_sync.plan.transfer_plan import PieceColumns, TaskTable, TransferPlan


class Numbers:
    """A number for every name, the same for all lists of names. Lists are known by their identity: each is read once,
    and kept, so that its identity is not used again."""

    def __init__(self) -> None:
        self.of_name: dict[str, int] = {}
        self._known: dict[int, tuple[Sequence[str], Ints]] = {}

    def of(self, names: Sequence[str]) -> Ints:
        if id(names) not in self._known:
            found = [self.of_name.setdefault(name, len(self.of_name)) for name in names]
            self._known[id(names)] = (names, np.array(found, np.int64))
        return self._known[id(names)][1]


def are_loaded(
    pieces: PieceColumns, param: Ints, at: Ints, loads: LoadTable, load_param: Ints, load_tensor: Ints
) -> Flags:
    """Whether one of the loads of each piece's tensor into its parameter puts the piece at element `at`, packed.

    Args:
        param: Number of each piece's parameter; `load_param`: of each load's.
        load_tensor: Number of each load's tensor, in the numbers of `pieces.tensor`.
    """
    width = max(pieces.start.shape[1], loads.start.shape[1])
    start, shape = _boxes(pieces, width)
    # Sort loads by (parameter, tensor, lowest element). A load begins at its lowest element, so only loads up to
    # `at` are possible; nearly always it is the last of them.
    span = max(int(load_tensor.max(initial=0)), int(pieces.tensor.max(initial=0))) + 1
    order = np.lexsort((loads.offset, load_tensor, load_param))
    pair = (load_param * span + load_tensor)[order]
    wanted = param * span + pieces.tensor
    pairs, first = np.unique(pair, return_index=True)
    reach = max(int(loads.offset.max(initial=0)), int(at.max(initial=0))) + 1
    which = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    exists = pairs[which] == wanted
    ranked = np.repeat(np.arange(len(pairs)), np.diff(np.append(first, len(pair)))) * reach + loads.offset[order]
    last = np.searchsorted(ranked, which * reach + at, side="right") - 1

    found = np.zeros(len(at), np.bool_)
    open_pieces = np.flatnonzero(exists)
    while len(open_pieces):
        candidate = last[open_pieces]
        open_pieces = open_pieces[candidate >= first[which[open_pieces]]]
        load = order[last[open_pieces]]
        found[open_pieces] = _agree(
            start[open_pieces], shape[open_pieces], pieces.axes[open_pieces], at[open_pieces], loads, load, width
        )
        last[open_pieces] -= 1
        open_pieces = open_pieces[~found[open_pieces]]
    return found


def _agree(start: Ints, shape: Ints, axes: Ints, at: Ints, loads: LoadTable, load: Ints, width: int) -> Flags:
    """Whether a piece lies inside a load's region and both map it to the same elements of the parameter."""
    low, size = widened(loads.start, width, 0)[load], widened(loads.shape, width, 1)[load]
    stride = widened(loads.stride, width, 0)[load]
    agrees = folded(np.logical_and, (low <= start) & (start + shape <= low + size))
    agrees &= loads.offset[load] + folded(np.add, (start - low) * stride) == at
    agrees &= num_dims(axes) == num_dims(loads.axes[load])
    order = walk_orders(axes, width)
    inside = np.ones(len(at), np.int64)
    for position in range(width - 1, -1, -1):
        dim = order[:, position : position + 1]
        sizes, steps = (np.take_along_axis(one, dim, axis=1)[:, 0] for one in (shape, stride))
        agrees &= (sizes == 1) | (steps == inside)
        inside = inside * sizes
    return agrees


def _boxes(pieces: PieceColumns, width: int) -> tuple[Ints, Ints]:
    """Where pieces start and their shapes, in `width` dims."""
    return widened(pieces.start.astype(np.int64), width, 0), widened(pieces.shape.astype(np.int64), width, 1)


def prove_held(plan: TransferPlan, sources: Sequence[SourceLayout], tensors: Numbers) -> None:
    """Step 3: every source holds what it packs."""
    held = {source.rank: source for source in sources}
    for rank, table in plan.tasks.items():
        pieces = table.pieces
        shards = held[rank].shards if rank in held else ()
        numbers = tensors.of_name
        tensor = np.array([numbers.setdefault(shard.tensor, len(numbers)) for shard in shards], np.int64)
        order = np.argsort(tensor, kind="stable")
        low = padded([shard.region.start for shard in shards], 0)[order]
        high = low + padded([shard.region.shape for shard in shards], 1)[order]
        width = max(low.shape[1], pieces.start.shape[1])
        low, high = widened(low, width, 0), widened(high, width, 1)
        start, shape = _boxes(pieces, width)
        stop = start + shape
        wanted = tensors.of(pieces.names)[pieces.tensor]
        candidate = np.searchsorted(tensor[order], wanted, side="left")
        last = np.searchsorted(tensor[order], wanted, side="right")
        todo = np.arange(len(wanted))
        while len(todo):
            for index in as_list(todo[candidate[todo] >= last[todo]][:1]):
                _raise_not_held(table, index)
            shard = candidate[todo]
            inside = folded(np.logical_and, (low[shard] <= start[todo]) & (stop[todo] <= high[shard]))
            candidate[todo] += 1
            todo = todo[~inside]


def _raise_not_held(table: TaskTable, index: int) -> NoReturn:
    (piece,) = table.pieces.expanded(index, 1)
    row = int(np.searchsorted(np.cumsum(table.num_pieces), index, side="right"))
    raise PlanError(
        f"source rank {table.source_rank} is to send {piece.tensor} start {list(piece.region.start)} shape "
        f"{list(piece.region.shape)} to {table.params[int(table.param[row])]}, and does not hold it"
    )
