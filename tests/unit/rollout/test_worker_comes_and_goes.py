"""A rollout worker at its start, in a recovery and at its end, over an engine that only notes what it is asked."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cases.noting_workers import PROMPT, make, publish
from fakes.model_engine import DESCRIBED, OFFER, ModelEngine

from slipstream.conf.schema import PauseMode
from slipstream.rollout.errors import EngineError, ReplicaNotServing
from slipstream.rollout.types import ABORTED, NOTHING_YET, AdapterSlotsSpec, Rollout
from slipstream.rollout.worker import RolloutWorker
from slipstream.weight_sync.errors import IntegrityError, PlanMismatch, ProtocolError
from slipstream.weight_sync.record.layout_wire import layouts_digest
from slipstream.weight_sync.replica.recovery import Pulled

pytestmark = pytest.mark.usefixtures("node_cache")
BEGUN = Rollout([5], [-2.0], [2], "", ABORTED)


@contextlib.asynccontextmanager
async def started(folder: Path, *slots: AdapterSlotsSpec) -> AsyncIterator[tuple[RolloutWorker, ModelEngine]]:
    worker, engine = make(folder, *slots)
    await worker.start()
    try:
        yield worker, engine
    finally:
        await worker.stop()


@pytest.mark.parametrize("pause_mode", [PauseMode.keep, PauseMode.abort])
async def test_what_an_engine_had_sampled_is_handed_over_when_it_dies(tmp_path: Path, pause_mode: PauseMode) -> None:
    worker, engine = make(tmp_path, pause_mode=pause_mode)
    await publish(worker, 3, 1)
    engine.finish_reasons, engine.is_killed = [ABORTED], True
    (rollout,) = await worker.generate_group(PROMPT, 1)
    assert (rollout.token_ids, rollout.policy_versions, rollout.finish_reason) == ([7], [3], ABORTED)


async def test_a_recovery_pauses_reads_and_serves_only_when_it_is_adopted(tmp_path):
    async with started(tmp_path) as (worker, engine):
        assert await worker.pull([OFFER, OFFER]) == Pulled(200, 0.5, 0.25)
        assert worker.state.phase == "verified"
        for call in (worker.generate_group(PROMPT, 1), worker.offer()):
            with pytest.raises(ReplicaNotServing):
                await call
        await worker.adopt(3, 7)
        assert (engine.version, engine.is_running, engine.has_old_blocks) == (3, True, False)
        assert (worker.state.phase, worker.state.version, worker.state.epoch) == ("clean", 3, 7)
        await worker.release([OFFER, OFFER])
        assert engine.ranks_did[-1] == "slipstream_release"
        assert await worker.offer() == [OFFER, OFFER]
        assert worker.state.is_serving, "a publisher learns its epoch"
        await publish(worker, 4, 8)


@pytest.mark.parametrize("failing", ["slipstream_pull", "slipstream_adopt"])
async def test_a_recovery_that_fails_leaves_the_worker_dirty_until_a_publish(tmp_path, failing):
    async with started(tmp_path) as (worker, engine):
        with pytest.raises(PlanMismatch, match="2 ranks' weights and 0 ranks' adapter slots; its peer makes 1 offers"):
            await worker.pull([OFFER])
        engine.failing = failing
        with pytest.raises(IntegrityError):
            await worker.pull([OFFER, OFFER])
            await worker.adopt(3, 7)
        assert worker.state.phase == "dirty"
        assert worker.state.epoch == 7, "a publisher that comes later learns it, and begins a later one"
        with pytest.raises(ProtocolError):
            await worker.adopt(3, 7)
        engine.failing = ""
        await publish(worker, 4, 8)
        assert worker.state.phase == "clean"


async def test_a_base_that_this_machine_does_not_have_is_named_before_the_engine_starts(tmp_path):
    worker, engine = make(tmp_path, AdapterSlotsSpec(2, 8, ("q_proj",), (), base=tmp_path / "elsewhere"))
    with pytest.raises(EngineError, match=r"elsewhere: no such folder on this machine"):
        await worker.start()
    assert not engine.is_alive and engine.ranks_did == []


@pytest.mark.parametrize("is_on_disk", [False, True])
async def test_a_base_that_engines_load_themselves_is_neither_described_nor_wanted(tmp_path, is_on_disk):
    slots = AdapterSlotsSpec(2, 8, ("q_proj",), (), base=tmp_path if is_on_disk else None)
    async with started(tmp_path, slots) as (worker, engine):
        opened = "slipstream_open_link" if is_on_disk else "slipstream_describe"
        assert engine.ranks_did == [opened, "slipstream_open_slots"]
        assert await worker.base_wanted_at() == ("" if is_on_disk else worker.endpoint())
        with pytest.raises(
            ReplicaNotServing, match="no adapter yet" if is_on_disk else "only from a committed version"
        ):
            await worker.generate_group(PROMPT, 1)
        if is_on_disk:
            with pytest.raises(PlanMismatch, match="0 ranks' weights and 2 ranks' adapter slots; its peer makes 4"):
                await worker.pull([OFFER] * 4)


def damage(folder: Path) -> None:
    (file,) = folder.rglob("*.digests")
    file.write_text("[1")


async def test_a_later_worker_of_the_same_kind_is_told_the_layout(tmp_path: Path, node_cache: Path) -> None:
    digest = layouts_digest((DESCRIBED.layout,))
    for told in ([], [digest, digest], [], [digest, digest]):
        async with started(tmp_path) as (_, engine):
            assert engine.known_layouts == told
        if told:
            damage(node_cache)


async def test_a_worker_that_hands_over_returns_responses_as_they_stand_and_begins_no_more(tmp_path: Path) -> None:
    worker, engine = make(tmp_path)
    await publish(worker, 3, 1)
    engine.gate.clear()
    call = asyncio.create_task(worker.generate_group(PROMPT, 2))
    await asyncio.sleep(0)
    await worker.hand_over()
    assert [(one.token_ids, one.policy_versions, one.finish_reason) for one in await call] == [([7], [3], ABORTED)] * 2
    num_requests = len(engine.requests)
    assert await worker.generate_group(PROMPT, 2) == [NOTHING_YET] * 2
    assert await worker.generate_group(PROMPT, 1, None, None, [BEGUN]) == [BEGUN]
    assert len(engine.requests) == num_requests


async def test_a_worker_goes_on_with_what_another_one_handed_over(tmp_path: Path) -> None:
    worker, engine = make(tmp_path)
    await publish(worker, 3, 1)
    ended = Rollout([9, 8], [-2.0, -3.0], [1, 1], "", "stop")
    first, second = await worker.generate_group(PROMPT, 2, None, None, [ended, BEGUN])
    assert engine.requests == [(1, 7)], "of 8 tokens one is there"
    assert engine.asked == [([1, 5, 5], None)]
    assert (first.token_ids, first.policy_versions, first.finish_reason) == ([9, 8], [1, 1], "stop")
    assert (second.token_ids, second.logprobs, second.policy_versions) == ([5, 7], [-2.0, -1.0], [2, 3])
    assert (second.text, second.finish_reason) == ("ac", "stop")


async def test_a_group_handed_over_that_a_publish_aborts_begins_anew(tmp_path: Path) -> None:
    """pause_mode=abort: siblings have one version."""
    worker, engine = make(tmp_path, pause_mode=PauseMode.abort)
    await publish(worker, 3, 1)
    engine.finish_reasons = [ABORTED]
    (rollout,) = await worker.generate_group(PROMPT, 1, None, None, [BEGUN])
    assert (rollout.token_ids, rollout.policy_versions) == ([7], [3])


async def test_whoever_tells_a_worker_to_go_is_named(tmp_path: Path) -> None:
    worker, _ = make(tmp_path)
    told = asyncio.create_task(worker.told_to_go())
    await asyncio.sleep(0)
    assert not told.done()
    worker.tell_to_go("SIGTERM")
    assert await told == await worker.told_to_go() == "SIGTERM"
