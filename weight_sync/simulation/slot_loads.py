"""A rank's schedule cut into slot loads: what one staging slot carries at once.

Owns: where loads begin and end, and how many bytes each brings to each destination. Does not own: time (simulate.py).
Invariant: loads are cut as pipeline.py cuts them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from weight_sync.errors import PlanError
from weight_sync.layout import Destination
from weight_sync.plan.budget import Staging, aligned
from weight_sync.plan.columns import Ints, as_list, first_true
from weight_sync.plan.tasks import MESH_GROUPS, Task, TaskTable


@dataclass(frozen=True, slots=True)
class SlotLoad:
    """What one slot carries at once, summed per destination."""

    mesh_group: str
    packed_bytes: int
    """Bytes that are packed and hashed, once for all replicas that get them."""
    num_packets: int
    flows: Mapping[Destination, tuple[int, int]]
    """Destination -> bytes, and entries of its batched write."""
    sent_bytes: int
    """Bytes that are sent, to all destinations together."""


def cut_loads(tasks: Sequence[Task], staging: Staging) -> tuple[list[SlotLoad], int]:
    """Slot loads in schedule order, and the size of a slot, as pipeline.py makes them.

    Here a row of a table is a packet. If the same ranks of several replicas are cut differently, the pipeline may find
    a few more equal packets.

    Raises:
        PlanError: a task is larger than a slot.
    """
    if not tasks:
        return [], 0
    table = tasks if isinstance(tasks, TaskTable) else TaskTable.of(tasks[0].source_rank, tasks)
    sizes, max_slot_bytes = table.num_bytes, staging.max_slot_bytes
    for row in first_true(sizes > max_slot_bytes):
        raise PlanError(
            f"a task of {sizes[row]} bytes for {table.params[int(table.param[row])]} does not fit a slot of "
            f"{max_slot_bytes} bytes"
        )
    padded = aligned(sizes)
    slot_bytes = staging.slot_bytes(int(padded.sum()), int(padded.max()))
    before: Ints = np.cumsum(padded) - padded
    reach = before + sizes  # where each row's bytes end, if all were in one slot
    edges = [0]
    while (first := edges[-1]) < len(sizes):
        last = int(reach.searchsorted(int(before[first]) + slot_bytes, side="right"))
        edges.append(min(last, first + staging.max_load_packets(len(edges) - 1)))
    loads: list[SlotLoad] = []
    num_dests = 1 + int(table.dest_rank.max())
    keys = table.replicas * num_dests + table.dest_rank
    for first, last in itertools.pairwise(edges):
        flows: dict[Destination, tuple[int, int]] = {}
        used, which = np.unique(keys[first:last], return_inverse=True)
        num_bytes = np.bincount(which, sizes[first:last]).astype(np.int64)  # exact: far below 2^53
        for key, size, num_ops in zip(as_list(used), as_list(num_bytes), as_list(np.bincount(which))):
            for replica in table.replica_sets[key // num_dests]:
                where = (replica, key % num_dests)
                held, ops = flows.get(where, (0, 0))
                flows[where] = (held + size, ops + num_ops)
        group = MESH_GROUPS[int(table.group[first])]
        sent_bytes = int((sizes[first:last] * table.num_replicas[first:last]).sum())
        loads.append(SlotLoad(group, int(sizes[first:last].sum()), last - first, flows, sent_bytes))
    return loads, slot_bytes
