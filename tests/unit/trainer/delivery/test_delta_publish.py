"""Promises of a publish that sends only changes (weight_sync.delta_bytes), from a trainer rank to an engine's memory:
engines hold the same bytes as after a whole publish, less is sent, and nothing is assumed of what an engine holds.
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases.delta_world import ZONE_BYTES, before_writes
from cases.rank_helpers import SYNC_KEY
from fakes.memory_transport import MemoryTransport
from fakes.publish import EndpointThread
from fakes.ranked_engine import REPACKED, MirrorEngine

from slipstream.conf.schema import TrainMode
from slipstream.weight_sync.changes import max_records
from slipstream.weight_sync.pipeline.landings import Landing
from slipstream.weight_sync.pipeline.staging_slots import Slots
from slipstream.weight_sync.plan import budget
from slipstream.weight_sync.publish import publisher as publisher_module


@pytest.mark.parametrize(
    ("watermark_bytes", "more"),
    [(1 << 30, {}), (300_000, {}), (1 << 30, {"lr": 1e-6, "mode": TrainMode.full})],
    ids=["one load", "a watermark that is used up", "all weights, compared with what was kept"],
)
def test_engines_hold_every_byte_of_each_version_and_get_fewer(make_world, watermark_bytes, more):
    world = make_world(watermark_bytes=watermark_bytes, **more)
    sent = []
    for _ in range(5):
        report = world.publish()
        assert report.num_committed == 1, report
        assert world.all_hold_it()
        assert held_bytes(world.rank.delivery._publisher._pipeline._slots) <= report.peak_bytes <= watermark_bytes
        assert report.peak_bytes > 0.99 * watermark_bytes or watermark_bytes == 1 << 30
        sent.append(report.num_bytes)
        world.step()
    assert sent[0] == world.whole_bytes, "nothing is known of an engine that was just met"
    assert max(sent[1:]) < 0.5 * world.whole_bytes, sent


def held_bytes(slots: Slots) -> int:
    """Memory of tensors on the trainer's device, and the scratch of hashing."""
    members = [vars(owner) for owner in (slots, slots.changes)]
    tensors = [one for names in members for name, one in names.items() if "_host" not in name and torch.is_tensor(one)]
    assert slots._hash_scratch_bytes is not None
    return sum(one.nbytes for one in tensors) + slots._hash_scratch_bytes


def test_staging_and_streams_that_are_given_up_are_not_registered_any_more(make_world):
    world = make_world()
    world.publish()
    pipeline = world.rank.delivery._publisher._pipeline
    assert pipeline._slots.changes is not None and len(pipeline._transport.registered) == 2
    world.rank.delivery._publisher.release()
    assert pipeline._transport.registered == []
    world.step()
    assert world.publish().num_bytes < 0.5 * world.whole_bytes and world.all_hold_it(), "as if it had stayed"


def test_the_share_of_changes_is_that_since_the_publish_before(make_world, monkeypatch):
    """What slipstream push tells, however many loads there are; a run has a figure of its own (probes.py)."""
    found = []
    for first_packets in (512, 1):
        monkeypatch.setattr(budget, "FIRST_PACKETS", first_packets)
        world, shares = make_world(lr=1e-6, mode=TrainMode.full), []
        for version in range(3):
            shares.append(world.rank.delivery._publisher.publish(version).changed_fraction)
            if version == 0:
                world.step()
        assert shares[0] is None and shares[1] > 0 == shares[2], shares
        found.append((shares[1], len(world.rank.delivery._publisher._pipeline.loads)))
    (one, num_loads), (other, more_loads) = found
    assert one == other and more_loads > num_loads


@pytest.mark.parametrize("zone", [64, 1 << 11])
def test_what_finds_no_room_in_the_zone_goes_whole(make_world, zone):
    world = make_world(delta_bytes=zone, zone=zone)
    sent = []
    for _ in range(3):
        report = world.publish()
        assert report.num_committed == 1
        assert world.all_hold_it()
        sent.append(report.num_bytes)
        world.step()
    assert 0.4 * world.whole_bytes < sent[-1] < world.whole_bytes


def test_an_engine_without_a_zone_or_with_another_one_gets_every_byte(make_world):
    for zone in (0, ZONE_BYTES // 2):
        world = make_world(zone=zone).stepped()
        assert world.publish().num_bytes == world.whole_bytes and world.all_hold_it()


def test_an_engine_that_missed_two_versions_gets_every_byte_and_the_others_what_changed(make_world, monkeypatch):
    world = make_world(2).stepped()
    both = world.publish().num_bytes
    world.step()
    written = set()
    with monkeypatch.context() as patch:
        before_writes(world, patch, lambda number, *_: written.add(number))
        one = world.publish(exclude=[1]).num_bytes
    assert one < both < world.whole_bytes // 2 and written == {0}
    world.step()
    world.publish(exclude=[1])
    world.step()
    report = world.publish()
    assert report.num_committed == 2 and world.all_hold_it() and report.num_takers == 1
    assert world.whole_bytes / 2 <= report.num_bytes < world.whole_bytes / 2 + 2 * one
    world.add_engines(2)
    sent = []
    for _ in range(2):
        world.step()
        sent.append(world.publish().num_bytes)
        assert world.all_hold_it()
    assert sent[0] == 2 * world.whole_bytes > 2 * sent[1], "once, where further ones have joined"


def test_changes_land_while_engines_serve_and_what_goes_whole_is_written_once_they_have_paused(make_world, monkeypatch):
    """The second engine turns out to hold something else, and gets every byte."""
    world = make_world(2, delta_bytes=1 << 11, zone=1 << 11).stepped()
    world.engines[1].receivers[0]._holds = "another version's digest"
    zones = [engine.receivers[0]._landing.address for engine in world.engines]
    seen = set()

    def note(number, places, timeout_s):
        assert 0 < timeout_s <= 60.0, "what a replica's writes may take, also those of changes ahead"
        is_serving = world.engines[number].receivers[0].state.is_serving
        seen.update((number, is_serving, 0 <= place - zones[number] < 1 << 11) for place in places)

    before_writes(world, monkeypatch, note)
    report = world.publish()
    assert (report.num_committed, report.num_takers) == (2, 1) and world.all_hold_it(), report
    assert seen == {(number, is_ahead, is_ahead) for number in (0, 1) for is_ahead in (True, False)}
    assert world.whole_bytes / 2 < report.num_bytes < world.whole_bytes


def test_what_is_sent_ahead_is_in_the_timeline_and_its_seconds_are_in_the_report(make_world, monkeypatch, tmp_path):
    world = make_world().stepped()
    publisher, clock = world.rank.delivery._publisher, SimpleNamespace(now=0.0)
    monkeypatch.setattr(publisher_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    ahead = publisher._pipeline.send_ahead

    def send_ahead(*given, **more):
        clock.now += 1000.0
        return ahead(*given, **more)

    monkeypatch.setattr(publisher._pipeline, "send_ahead", send_ahead)
    report = publisher.publish(1, trace=tmp_path / "trace.json")
    assert report.num_committed == report.num_takers == 1 and report.total_s >= 1000.0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(one["args"].get("bytes", 0) for one in events if one["name"].startswith("load ")) == report.num_bytes


def test_only_loads_of_which_something_goes_whole_are_packed_again(make_world, monkeypatch):
    world = make_world(lr=1e-6, watermark_bytes=300_000).stepped()
    real, packed = Slots.pack, []

    def noting(self, slot, load, *more, **options):
        packed.append(load.number)
        return real(self, slot, load, *more, **options)

    monkeypatch.setattr(Slots, "pack", noting)
    assert world.publish().num_committed == 1 and world.all_hold_it()
    loads = world.rank.delivery._publisher._pipeline.loads
    again = [
        number
        for number, packets in enumerate(loads)
        if any(task.param == REPACKED or max_records(task.num_bytes) <= 0 for one in packets for task in one.tasks)
    ]
    assert packed == [*range(len(loads)), *again] and 0 < len(again) < len(loads) - 1


def test_nothing_is_sent_ahead_to_some_alone_because_the_others_have_all_packed_again(make_world, monkeypatch):
    world = make_world(2, lr=1e-6)
    for excluded in ([], [1]):
        world.publish(exclude=excluded)
        world.step()
    serving = []
    before_writes(world, monkeypatch, lambda number, *_: serving.append(world.engines[number].receivers[0].state))
    report = world.publish()
    assert (report.num_committed, report.num_takers) == (2, 1) and world.all_hold_it()
    assert serving and not any(state.is_serving for state in serving)


def test_nothing_is_sent_ahead_to_where_an_engine_was_before_it_was_started_again(make_world):
    world = make_world(2).stepped()
    world.links[1].close()
    world.links[1] = MemoryTransport(world.fabric)
    world.engines[1] = MirrorEngine(world.rank.delivery.source.layout().tensors, world.links[1], world.zone)
    world.endpoints.append(EndpointThread(world.engines[1], key=SYNC_KEY))
    world.rank.delivery.reconnect(1, world.endpoints[-1].address)
    report = world.publish()
    assert (report.num_committed, report.num_takers) == (2, 1) and world.all_hold_it(), report


def test_engines_that_are_met_anew_get_every_byte(make_world):
    """The second one is the only one by then, where another one was before."""
    world = make_world(2).stepped()
    world.rank.delivery._publisher.connect([world.endpoints[1].address])
    report = world.publish()
    del world.engines[0]
    assert (report.num_committed, report.num_bytes) == (1, world.whole_bytes // 2) and world.all_hold_it(), report


def test_a_part_of_a_zone_is_never_left():
    part = Landing(address=1000, first=16, stop=64)
    assert [part.take(size) for size in (1, 16, 20, 16)] == [16, 32, None, 48]
    assert part.take(1) is None
    assert replace(part, rows=[(1, 2, 3, 4, 5)]).to_bytes() == np.array([1, 2, 3, 4, 5], "<i8").tobytes()


def test_loads_that_changed_too_much_are_not_marked_for_a_while(make_world, monkeypatch):
    monkeypatch.setattr("slipstream.weight_sync.pipeline.landings.SKIPPED", 3)
    world = make_world(lr=0.05)
    world.publish()
    changes = world.rank.delivery._publisher._pipeline._slots.changes
    marked: list[int] = []
    fill = changes.fill
    monkeypatch.setattr(changes, "fill", lambda slot, load: (marked.append(load), fill(slot, load)))
    monkeypatch.setattr(
        "slipstream.weight_sync.pipeline.landings.max_records", lambda _: -1
    )  # as if everything had changed
    receiver, serving = world.engines[0].receivers[0], set()
    before_writes(world, monkeypatch, lambda *_: serving.add(receiver.state.is_serving))
    counts = []
    for _ in range(6):
        world.step()
        marked.clear()
        assert world.publish().num_bytes == world.whole_bytes
        assert world.all_hold_it()
        counts.append(len(marked))
    num_loads = len(world.rank.delivery._publisher._pipeline.loads)
    assert counts == [num_loads, 0, 0, num_loads, 0, 0]
    assert serving == {False}, "what goes whole waits until engines have paused"
