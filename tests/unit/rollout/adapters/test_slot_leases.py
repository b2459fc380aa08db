"""Promises of rollout/adapters/slot_leases.py: what is read is never chosen, and commits, not version numbers, give
the order."""

import asyncio
from contextlib import ExitStack

import pytest
from hypothesis import given, strategies as st

from slipstream.rollout.adapters.slot_leases import SlotTable


def publish(table: SlotTable, version: int) -> int | None:
    slot = table.free()
    if slot is not None:
        table.write(slot)
        table.commit(slot, version)
    return slot


def test_nothing_is_served_before_the_first_commit():
    table = SlotTable(2)
    assert table.newest is None
    with pytest.raises(LookupError), table.lease():
        pass
    table.write(0)
    assert table.newest is None
    table.commit(0, 7)
    assert table.newest is not None and table.newest.version == 7


def test_one_slot_cannot_serve_and_be_written():
    with pytest.raises(ValueError, match="2 slots"):
        SlotTable(1)


def test_two_slots_take_turns_and_a_reader_blocks_its_own():
    table = SlotTable(2)
    assert [publish(table, v) for v in range(4)] == [0, 1, 0, 1]
    with table.lease() as old:
        assert publish(table, 4) == 0
        assert table.free() is None
        assert table.oldest_read() == old
        assert table.num_readers == {3: 1}
    assert table.free() == 1


def test_a_failed_write_leaves_the_newest_and_its_slot_is_next():
    table = SlotTable(3)
    for version in range(3):
        publish(table, version)
    slot = table.free()
    assert slot is not None
    table.write(slot)  # and no commit follows
    assert table.newest is not None and table.newest.version == 2
    assert table.free() == slot


def test_versions_may_go_back_and_names_tell_versions_apart_in_one_slot():
    table = SlotTable(2)
    publish(table, 9)
    with table.lease() as first:
        publish(table, 3)
        assert table.newest is not None and table.newest.version == 3
        assert table.oldest_read() == first
    publish(table, 4)
    with table.lease() as again:
        assert (again.slot, again.lora_id) == (first.slot, first.lora_id)
        assert again.name != first.name


def test_what_is_read_cannot_be_written():
    table = SlotTable(2)
    publish(table, 0)
    with pytest.raises(AssertionError, match="slot 0 is read"):
        table.write(0)


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


def test_a_version_that_is_kept_is_read_beside_newer_ones_and_never_written():
    table = SlotTable(3)
    publish(table, 0)
    assert table.keep(0) and not SlotTable(2).keep(0)
    for version in range(1, 6):
        assert publish(table, version) != 0
        with table.lease(0) as kept, table.lease() as newest, table.lease(9) as unknown:
            assert (kept.version, newest.version, unknown.version) == (0, version, version)
            assert table.oldest_read() is None  # a publish must not end the requests of the kept version
    with pytest.raises(AssertionError, match="slot 0 is read"):
        table.write(0)
    assert not table.keep(4)  # no longer the newest: nothing is kept
    with table.lease(0) as newest:
        assert newest.version == 5
    assert publish(table, 6) == 0


@given(st.integers(2, 5), st.lists(st.sampled_from(["publish", "fail", "lease", "release", "keep"]), max_size=60))
def test_a_lease_sees_one_version_whatever_is_published_meanwhile(num_slots: int, steps: list[str]):
    table, leases, content = SlotTable(num_slots), [], [-1] * num_slots
    version, kept = 0, None
    for step in steps:
        if step in ("publish", "fail") and (slot := table.free()) is not None:
            table.write(slot)
            content[slot] = -2  # half-written
            if step == "publish":
                content[slot] = version
                table.commit(slot, version)
                version += 1
        elif step == "lease" and table.newest is not None:
            stack = ExitStack()
            leases.append((stack, stack.enter_context(table.lease())))
        elif step == "keep" and num_slots > 2:
            kept = table.newest if table.newest is not None and table.keep(table.newest.version) else None
        elif step == "release" and leases:
            leases.pop(0)[0].close()
        if kept is not None:
            with table.lease(kept.version) as again:
                assert again == kept and content[kept.slot] == kept.version
        for _, adapter in leases:
            assert content[adapter.slot] == adapter.version
        if table.newest is not None:
            assert content[table.newest.slot] == table.newest.version
        assert sum(table.num_readers.values()) == len(leases)
