"""Which writes send a schedule: per load and destination the arguments of one write, and of each destination all its
writes in columns.

Owns: where in a slot each write reads, where in a parameter it lands, and to which sum it counts. All of it is fixed by
the plan and the addresses of the slots. Does not own: the slots (`staging_slots.py`, its only caller), nor the engines'
addresses, which come with each publish.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.weight_sync.layout import Binding, Destination
from slipstream.weight_sync.merging.factors import is_factor
from slipstream.weight_sync.pipeline.packing import Packet
from slipstream.weight_sync.pipeline.sums import Places
from slipstream.weight_sync.plan.columns import Flags, Ints


@dataclass(frozen=True, slots=True)
class Batch:
    """One destination's part of a load: the arguments of one write, without the engine's addresses."""

    span: slice
    """This part's range in the destination's entries."""
    sources: tuple[list[int], ...]
    """Source addresses, for each slot that the load may be in."""
    sizes: list[int]
    packets: list[int]
    """Indices of the packets in the load."""


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """All writes to one destination in schedule order, in columns."""

    params: tuple[str, ...]
    param: Ints
    """Index in `params`."""
    offset: Ints
    """Where its first byte lies in the parameter."""
    sizes: Ints
    packets: Ints
    """Index of the packet in the schedule."""
    columns: Ints
    """Column of the parameter in the sums."""
    is_factor: Flags
    """Whether it is of a factor that the engine merges."""

    def addresses(self, binding: Binding) -> list[int]:
        """Where each write goes."""
        starts = np.array([binding.addresses[param] for param in self.params], np.int64)
        return (starts[self.param] + self.offset).tolist()


def compile_writes(
    cut: Sequence[Sequence[Packet]], slot_addresses: Sequence[int], places: Places
) -> tuple[list[dict[Destination, Batch]], dict[Destination, Entries]]:
    """The writes of a schedule: per load and destination, and all of each destination."""
    rows: dict[Destination, list[tuple[str, int, int, int]]] = {}
    batches: list[dict[Destination, Batch]] = []
    number = 0
    for packets in cut:
        indices: dict[Destination, list[int]] = {}
        for index, packet in enumerate(packets):
            for task in packet.tasks:
                dest = (task.replica, task.dest_rank)
                indices.setdefault(dest, []).append(index)
                rows.setdefault(dest, []).append((task.param, task.dest_offset_bytes, task.num_bytes, number))
            number += 1
        load: dict[Destination, Batch] = {}
        for dest, own in indices.items():
            span = slice(len(rows[dest]) - len(own), len(rows[dest]))
            sources = tuple([address + packets[index].offset_bytes for index in own] for address in slot_addresses)
            load[dest] = Batch(span, sources, [size for _, _, size, _ in rows[dest][span]], own)
        batches.append(load)
    entries: dict[Destination, Entries] = {}
    for dest, own in rows.items():
        names = [name for name, _, _, _ in own]
        known = {name: place for place, name in enumerate(dict.fromkeys(names))}
        param = np.array([known[name] for name in names], np.int64)
        columns = np.array([places.column(dest, name) for name in known], np.int64)
        offset, sizes, packets = np.array([numbers for _, *numbers in own], np.int64).T
        factors = np.array([is_factor(name) for name in known], np.bool_)
        entries[dest] = Entries(tuple(known), param, offset, sizes, packets, columns[param], factors[param])
    return batches, entries
