"""Promises of rollout/adapters/slot_leases.py: what is read is never chosen, and commits, not version numbers, give
the order."""

import asyncio
from collections import Counter
from contextlib import ExitStack

import pytest
from hypothesis import given, strategies as st

from slipstream.rollout.adapters.slot_leases import SlotTable
from slipstream.rollout.types import Adapter


def publish(table: SlotTable, version: int) -> int | None:
    slot = table.free()
    if slot is not None:
        table.write(slot)
        table.commit(slot, version)
    return slot


def test_nothing_is_served_before_the_first_commit_or_with_one_slot():
    with pytest.raises(ValueError, match="2 slots"):
        SlotTable(1)
    table = SlotTable(2)
    with pytest.raises(LookupError), table.lease():
        pass
    table.write(0)
    assert table.newest is None and not table.keep(0)
    table.commit(0, 7)
    assert table.newest == Adapter(0, 7)


def test_names_tell_versions_apart_in_one_slot():
    first, again = Adapter(0, 9), Adapter(0, 4)
    assert again.lora_id == first.lora_id and again.name != first.name


async def test_the_end_of_a_lease_wakes_who_waits():
    table = SlotTable(2)
    publish(table, 0)
    with table.lease():
        publish(table, 1)
        waiting = asyncio.create_task(table.wait_changed())
        await asyncio.sleep(0)
        assert table.free() is None
    await waiting
    assert table.free() == 0


STEPS = st.tuples(
    st.sampled_from(["publish", "fail", "lease", "lease kept", "release", "keep", "unkeep"]), st.integers(0, 9)
)


@given(st.integers(2, 5), st.lists(STEPS, min_size=30, max_size=80))
def test_a_lease_sees_one_version_whatever_is_published_meanwhile(num_slots: int, steps: list[tuple[str, int]]):
    """Versions may go back. An empty slot is written first, then the one that was committed first, of those that nobody
    reads; neither the newest nor a kept one is."""
    table = SlotTable(num_slots)
    committed: list[Adapter] = []  # in order, each in a slot of its own
    leases: list[tuple[ExitStack, Adapter]] = []
    kept: Adapter | None = None
    for step, version in steps:
        newest = committed[-1] if committed else None
        if step in ("publish", "fail") and (slot := table.free()) is not None:
            table.write(slot)
            committed = [held for held in committed if held.slot != slot]
            if step == "publish":
                table.commit(slot, version)
                committed.append(Adapter(slot, version))
        elif step.startswith("lease") and newest is not None:
            asked = kept.version if step == "lease kept" and kept is not None else None
            leases.append((stack := ExitStack(), stack.enter_context(table.lease(asked))))
            assert leases[-1][1] == (kept if asked is not None else newest)
            with table.lease(99) as unknown:
                assert unknown == newest
        elif step == "keep" and num_slots > 2:
            asked = newest.version if newest is not None and version < 8 else 10 + version
            assert table.keep(asked) == (newest is not None and version < 8)
            kept = newest if version < 8 else None
        elif step == "unkeep":
            assert not table.keep(None)
            kept = None
        elif step == "release" and leases:
            leases.pop(0)[0].close()
        readers = Counter(adapter for _, adapter in leases)
        assert readers.keys() <= set(committed) and (kept is None or kept in committed), "nothing of these was written"
        assert table.newest == (committed[-1] if committed else None)
        if len({held.version for held in committed}) == len(committed):
            assert table.num_readers == {held.version: number for held, number in readers.items()}
        older = [held for held in committed[:-1] if held != kept]
        assert table.oldest_read() == next((held for held in older if readers[held]), None)
        empty = set(range(num_slots)) - {held.slot for held in committed}
        assert table.free() == next(iter([*sorted(empty), *(held.slot for held in older if not readers[held])]), None)
        for held in {*committed[-1:], *readers, *([kept] if kept else [])}:
            with pytest.raises(AssertionError, match=f"slot {held.slot} is read"):
                table.write(held.slot)
