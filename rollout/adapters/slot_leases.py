"""Which adapter slot holds which version, who reads it, and which one the next publish may write. Pure bookkeeping.

    empty --begin--> writing --commit--> newest --a later commit--> older --last reader ends--> free --begin--> ...
      ^                 |
      +---- failed -----+            the newest slot is never written, whether or not anybody reads it

An evaluation beside training keeps one slot for its duration, with or without readers.

Owns: leases, and the choice. Does not own: the slots' memory (adapter_slots.py) nor the policy when none is free
(adapter_replica.py). Invariant: a slot with a reader, the newest slot and the one that is kept are never chosen.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from slipstream.rollout.types import Adapter


class SlotTable:
    """See the module's docstring. At least two slots: one serves while the other is written."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 2:
            raise ValueError(f"adapter mode needs 2 slots at least, got {num_slots}")
        self._held: list[Adapter | None] = [None] * num_slots
        self._readers = [0] * num_slots
        self._order: list[int] = []
        """Slots that hold a version, in the order of their commits: a version may be older than the one before it."""
        self._kept: int | None = None
        """Slot that keeps its version whether or not anybody reads it."""
        self._changed = asyncio.Event()

    @property
    def newest(self) -> Adapter | None:
        return self._held[self._order[-1]] if self._order else None

    @property
    def num_readers(self) -> dict[int, int]:
        """Version -> requests in flight on it, for versions that have any."""
        return {held.version: n for held, n in zip(self._held, self._readers, strict=True) if held is not None and n}

    @contextmanager
    def lease(self, version: int | None = None) -> Iterator[Adapter]:
        """Read the kept slot if it holds `version`, else the newest one: it keeps its version until the block ends."""
        kept = None if self._kept is None else self._held[self._kept]
        chosen = kept if kept is not None and kept.version == version else self.newest
        if chosen is None:
            raise LookupError("no version was committed yet")
        self._readers[chosen.slot] += 1
        try:
            yield chosen
        finally:
            self._readers[chosen.slot] -= 1
            self._changed.set()

    def keep(self, version: int | None) -> bool:
        """Keep the newest slot's version from now on, in place of what was kept before. None: keep nothing. Returns
        whether `version` is the newest one, and kept. If it is not, nothing is kept."""
        newest = self.newest
        self._kept = newest.slot if newest is not None and newest.version == version else None
        self._changed.set()
        return self._kept is not None

    def free(self) -> int | None:
        """A slot that may be written: an empty one, or else, of the slots without readers, the one committed first."""
        empty = [slot for slot, held in enumerate(self._held) if held is None]
        older = [slot for slot in self._order[:-1] if not self._readers[slot] and slot != self._kept]
        return next(iter([*empty, *older]), None)

    def oldest_read(self) -> Adapter | None:
        """The earliest committed older version that requests still read, except the kept one; None if there is none."""
        older = [slot for slot in self._order[:-1] if slot != self._kept]
        return next((self._held[slot] for slot in older if self._readers[slot]), None)

    def write(self, slot: int) -> None:
        """Note that a publish overwrites the slot, which then holds no version."""
        if self._readers[slot] or slot == self._kept or (self._order and self._order[-1] == slot):
            raise AssertionError(f"slot {slot} is read")
        self._held[slot] = None
        if slot in self._order:
            self._order.remove(slot)

    def commit(self, slot: int, version: int) -> None:
        """Note that the slot holds `version`. New requests use it from here on."""
        self._held[slot] = Adapter(slot, version)
        self._order.append(slot)
        self._changed.set()

    async def wait_changed(self) -> None:
        """Return after the next end of a lease, or the next commit."""
        self._changed.clear()
        await self._changed.wait()
