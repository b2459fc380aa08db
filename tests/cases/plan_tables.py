"""What tests make and read of a plan's columns: tables of any tasks, and sums by names."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from slipstream.weight_sync.layout import Destination
from slipstream.weight_sync.pipeline.sums import Sums
from slipstream.weight_sync.plan.columns import axes_code, padded
from slipstream.weight_sync.plan.transfer_plan import DTYPES, MESH_GROUPS, PieceColumns, Task, TaskTable


def table_of(source_rank: int, tasks: Sequence[Task] | TaskTable) -> TaskTable:
    """The columns of any tasks of one trainer rank; a table is itself."""
    if isinstance(tasks, TaskTable):
        return tasks
    blocks: list[tuple[Task, list[int]]] = []
    for task in tasks:
        assert task.source_rank == source_rank
        if blocks and replace(blocks[-1][0], replica=task.replica) == task:
            blocks[-1][1].append(task.replica)
        else:
            blocks.append((task, [task.replica]))
    names: dict[str, int] = {}
    params: dict[str, int] = {}
    sets: dict[tuple[int, ...], int] = {}
    rows = [
        (
            sets.setdefault(tuple(replicas), len(sets)),
            MESH_GROUPS.index(task.mesh_group),
            task.dest_rank,
            params.setdefault(task.param, len(params)),
            task.dest_offset_bytes,
            task.num_bytes,
            DTYPES.index(task.dtype),
            len(task.pieces),
        )
        for task, replicas in blocks
    ]
    replicas, group, dest_rank, param, offset, size, dtype, num_pieces = np.array(rows, np.int64).reshape(-1, 8).T
    pieces = [piece for task, _ in blocks for piece in task.pieces]
    return TaskTable(
        source_rank,
        tuple(params),
        tuple(sets),
        replicas,
        group,
        dest_rank,
        param,
        offset,
        size,
        dtype,
        num_pieces,
        PieceColumns(
            tuple(dict.fromkeys(piece.tensor for piece in pieces)),
            np.array([names.setdefault(piece.tensor, len(names)) for piece in pieces], np.int64),
            padded([piece.region.start for piece in pieces], 0),
            padded([piece.region.shape for piece in pieces], 1),
            np.array([axes_code(piece.axes) for piece in pieces], np.int64),
            np.array([piece.offset_elements for piece in pieces], np.int64),
        ),
    )


def by_name(sums: Sums) -> dict[Destination, dict[str, tuple[int, int]]]:
    """Bytes and hash sums of what was written. Example: {(0, 3): {"lm_head.weight": (2048, 9127364)}}."""
    found: dict[Destination, dict[str, tuple[int, int]]] = {}
    for dest, names in sums.places.params.items():
        sizes, hashes = sums.part(dest)
        for name, size, total in zip(names, sizes.tolist(), hashes.view(np.uint64).tolist(), strict=True):
            if size:
                found.setdefault(dest, {})[name] = (size, total)
    return found
