"""The rollout worker's side of a publish, over an engine that only notes what it is asked, in which order.

What a real engine makes of it is shown by tests/contract/test_engine_vllm.py.
"""

import asyncio
import gc
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.model_engine import BINDING, DESCRIBED, OFFER, REPLIES, ModelEngine

import slipstream.rollout.base_replica
import slipstream.rollout.engine.vllm_process
from slipstream.conf.schema import Device, DType, PauseMode, RolloutConfig, SamplingConfig, WeightSyncConfig
from slipstream.orchestrator.inputs.character_tokenizer import save_character_tokenizer
from slipstream.rollout.engine.vllm_engine import VllmEngine
from slipstream.rollout.errors import EngineDied, EngineError, ReplicaNotServing
from slipstream.rollout.types import ABORTED, NOTHING_YET, AdapterSlotsSpec, Prompt, Rollout, WorkerOptions
from slipstream.rollout.worker import RolloutWorker
from slipstream.rollout.worker_process import with_its_share
from slipstream.weight_sync.errors import IntegrityError, PlanMismatch, ProtocolError, StaleEpoch
from slipstream.weight_sync.layout import TensorMeta
from slipstream.weight_sync.record.layout_wire import layouts_digest
from slipstream.weight_sync.replica.clients import ReplicaClients
from slipstream.weight_sync.replica.messages import Bound, Described, Expected, PublishId, ReplicaVerbs
from slipstream.weight_sync.replica.recovery import Pulled

PROMPT = Prompt(0, (1, 5), "a")
EXPECTED = Expected("9f", bytes(8), bytes(8))


def make(folder: Path, adapters: AdapterSlotsSpec | None = None, **more: Any) -> tuple[RolloutWorker, ModelEngine]:
    engine: Any = ModelEngine()
    save_character_tokenizer(folder, vocab_size=64)
    return worker_of(folder, adapters, make_engine=lambda *_, **__: engine, **more), engine


@pytest.fixture(autouse=True)
def node_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What this node keeps for later runs, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def worker_of(
    folder: Path,
    adapters: AdapterSlotsSpec | None = None,
    *,
    keep_special_tokens: bool = False,
    make_engine: Callable[..., Any] = VllmEngine,
    **sync: Any,
) -> RolloutWorker:
    options = WorkerOptions(
        folder=folder, config=RolloutConfig(sampling=SamplingConfig(max_tokens=8)),
        weight_sync=WeightSyncConfig(**sync), dtype=DType.float32, device=Device.cpu,
        tensors=[TensorMeta("w", (2,), "float32")], key=b"k" * 16, adapters=adapters,
        keep_special_tokens=keep_special_tokens,
    )  # fmt: skip
    return RolloutWorker(options, seed=0, make_engine=make_engine)


@pytest.mark.parametrize(
    ("options", "device", "expected"),
    [
        ({"num_workers": 4, "workers_per_gpu": 4}, Device.cuda, int((80 << 30) * 0.85 / 4) - 8 - (3 << 30)),
        ({"num_workers": 4, "workers_per_gpu": 4, "kv_cache_bytes": 5}, Device.cuda, 5),
        ({"num_workers": 4, "workers_per_gpu": 4}, Device.cpu, None),
        ({"num_workers": 4}, Device.cuda, None),
    ],
)
def test_an_engine_that_shares_its_gpu_is_told_how_large_its_cache_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, int], device: Device, expected: int | None
) -> None:
    """The others measure it: their neighbours' memory would count as their own."""
    monkeypatch.setattr(slipstream.rollout.engine.vllm_process, "gpu_bytes", lambda: 80 << 30)
    options_of_all = WorkerOptions(
        folder=tmp_path, config=RolloutConfig(**options), weight_sync=WeightSyncConfig(), dtype=DType.float32,
        device=device, tensors=[TensorMeta("w", (2,), "float32")], key=b"k" * 16,
    )  # fmt: skip
    assert with_its_share(options_of_all).kv_cache_bytes == expected


async def begin(worker: RolloutWorker, version: int, epoch: int) -> None:
    await worker.base.endpoint.describe("test")
    begun = await worker.base.endpoint.begin(PublishId("test", version, epoch, "digest"), ())
    assert list(begun.bindings) == [Bound.of(BINDING)] * 2


async def commit(worker: RolloutWorker, version: int, epoch: int) -> None:
    await worker.base.endpoint.commit(PublishId("test", version, epoch, "digest"), (EXPECTED,) * 2)


async def publish(worker: RolloutWorker, version: int, epoch: int) -> None:
    await begin(worker, version, epoch)
    await asyncio.sleep(0)  # bytes arrive
    await commit(worker, version, epoch)


async def test_a_response_is_text_and_a_folder_without_a_tokenizer_is_refused(tmp_path):
    worker, _ = make(tmp_path)
    await publish(worker, 0, 1)
    (rollout,) = await worker.generate_group(PROMPT, 1)
    assert (rollout.token_ids, rollout.text) == ([7], "c")  # 5 is "a"
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(EngineError, match=r"no response can be made text: .*tokenizer\.json"):
        worker_of(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(EngineError, match=r"no response can be made text: .*tokenizer\.json"):
        worker_of(tmp_path)


@pytest.mark.parametrize(("keep", "text"), [(False, "c"), (True, "c<eos>")])
async def test_special_tokens_are_in_the_text_where_they_are_asked_for(tmp_path, keep, text):
    worker, engine = make(tmp_path, keep_special_tokens=keep)
    engine.token_ids = [7, 2]
    await publish(worker, 0, 1)
    (rollout,) = await worker.generate_group(PROMPT, 1)
    assert (rollout.token_ids, rollout.text) == ([7, 2], text)


async def test_start_describes_every_rank_and_stop_ends_the_engine(tmp_path):
    worker, engine = make(tmp_path)
    address = await worker.start()
    try:
        assert address == worker.endpoint()
        assert address.startswith("tcp://127.0.0.1:")
        assert [rank.binding for rank in await worker.base.describe()] == [BINDING, BINDING]
        assert engine.is_alive
    finally:
        await worker.stop()
    assert not engine.is_alive


async def test_an_engine_that_cannot_be_described_is_ended(tmp_path):
    worker, engine = make(tmp_path)
    engine.failing = "slipstream_describe"
    with pytest.raises(IntegrityError):
        await worker.start()
    assert not engine.is_alive


async def test_a_publish_pauses_before_bytes_change_and_moves_the_version_before_it_resumes(tmp_path):
    worker, engine = make(tmp_path)
    await publish(worker, 3, 1)
    assert (engine.version, engine.is_running, engine.has_old_blocks) == (3, True, False)
    assert engine.pause_modes == [PauseMode.keep]
    assert (worker.state.phase, worker.state.version, worker.state.epoch) == ("clean", 3, 1)
    (rollout,) = await worker.generate_group(PROMPT, 1)
    assert rollout.policy_versions == [3]


@pytest.mark.parametrize("end", ["commit", "abort", "stop"])
async def test_no_garbage_collection_starts_while_the_engine_stands_still(tmp_path, end):
    worker, _ = make(tmp_path)
    ends = {
        "commit": lambda: commit(worker, 3, 1),
        "abort": lambda: worker.base.endpoint.abort(PublishId("test", 3, 1, "digest"), "a reason"),
        "stop": worker.stop,
    }
    await begin(worker, 3, 1)
    assert not gc.isenabled()
    await ends[end]()
    assert gc.isenabled()


class HangingLlm:
    """vLLM whose ranks answer nothing from `hangs` on."""

    errored = False
    vllm_config = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=1))

    def __init__(self, hangs: str) -> None:
        self.engine_core = self
        self._hangs = hangs

    async def get_output_async(self) -> None:
        await asyncio.Event().wait()

    def shutdown(self, timeout: float = 0.0) -> None:
        pass

    async def pause_scheduler_async(self, **_: Any) -> None:
        await self._answer("pause")

    async def collective_rpc(self, method: str, args: Any) -> list[Any]:
        await self._answer(method)
        return [("", "", REPLIES.get(method))] * 2

    async def _answer(self, method: str) -> None:
        if method == self._hangs:
            await asyncio.Event().wait()


@pytest.mark.parametrize("hangs", ["pause", "slipstream_begin"])
async def test_a_rank_that_hangs_costs_one_begin_and_the_endpoint_answers_on(monkeypatch, tmp_path, hangs, caplog):
    monkeypatch.setattr(slipstream.rollout.base_replica, "CALL_SLACK_S", 0.1)
    monkeypatch.setattr(slipstream.rollout.engine.vllm_process, "WAIT_LOG_S", 0.05)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    save_character_tokenizer(tmp_path, vocab_size=64)
    hanging: Any = HangingLlm(hangs)
    worker = worker_of(tmp_path, make_engine=partial(VllmEngine, make_llm=lambda _: hanging), timeout_s=0.1)
    address = await worker.start()
    clients = ReplicaClients([address], b"k" * 16)

    def ask(verb: Any, *arguments: object) -> Any:
        return clients.call(verb, {0: arguments}, {0: 10.0})[0]

    try:
        assert isinstance(await asyncio.to_thread(ask, ReplicaVerbs.describe, clients.publisher), Described)
        publish = PublishId(clients.publisher, 0, 1, "d")
        error = await asyncio.to_thread(ask, ReplicaVerbs.begin, publish, ())
        assert "did not answer" in str(error)
        assert "must be restarted" in str(error)
        assert gc.isenabled()
        with pytest.raises(EngineDied, match="left a call unanswered"):
            worker.engine.check()
        assert "for the engine's" in caplog.text
        assert isinstance(await asyncio.to_thread(ask, ReplicaVerbs.describe, clients.publisher), Described)
    finally:
        clients.close()
        await worker.stop()


async def test_requests_that_outlast_a_pause_for_them_do_not_end_the_engine(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    hanging: Any = HangingLlm("pause")
    engine = VllmEngine(
        tmp_path, RolloutConfig(), dtype=DType.float32, device=Device.cpu, seed=0, make_llm=lambda _: hanging
    )
    await engine.start()
    with pytest.raises(EngineError, match=r"requests in flight did not end within 0\.1 s"):
        await engine.pause(PauseMode.wait, timeout_s=0.1)
    engine.check()


@pytest.mark.parametrize(
    ("sync", "mode", "keeps_blocks"),
    [
        ({"pause_mode": PauseMode.keep_kv}, PauseMode.keep_kv, True),
        ({"pause_mode": PauseMode.wait}, PauseMode.wait, False),
        ({"pause_mode": PauseMode.abort}, PauseMode.abort, False),
    ],
)
async def test_pause_follows_the_configuration(tmp_path, sync, mode, keeps_blocks):
    worker, engine = make(tmp_path, **sync)
    await publish(worker, 0, 1)
    assert (engine.pause_modes, engine.has_old_blocks) == ([mode], keeps_blocks)


async def test_the_engine_does_not_resume_before_blocks_of_older_weights_are_dropped(tmp_path):
    worker, engine = make(tmp_path)
    engine.cleared.clear()
    publishing = asyncio.create_task(publish(worker, 0, 1))
    for _ in range(20):
        await asyncio.sleep(0)
    assert engine.ranks_did[-1] == "slipstream_verify", "bytes are proven meanwhile, and no rank is committed"
    assert not engine.is_running
    engine.cleared.set()
    await publishing
    assert engine.is_running


async def test_no_phase_but_clean_samples(tmp_path):
    worker, engine = make(tmp_path)

    async def refuses() -> bool:
        with pytest.raises(ReplicaNotServing, match="samples only from a committed version"):
            await worker.generate_group(PROMPT, 1)
        return True

    assert await refuses()
    await begin(worker, 0, 1)
    assert await refuses()
    await commit(worker, 0, 1)
    await worker.generate_group(PROMPT, 1)
    await begin(worker, 1, 2)
    assert await refuses()
    await worker.stop()
    assert await refuses()
    assert len(engine.requests) == 1


@pytest.mark.parametrize("failing", ["slipstream_begin", "slipstream_verify", "slipstream_commit"])
async def test_a_failed_step_leaves_the_engine_paused_and_dirty_until_a_later_publish(tmp_path, failing):
    worker, engine = make(tmp_path)
    await publish(worker, 0, 1)
    engine.failing = failing
    with pytest.raises(IntegrityError):
        await publish(worker, 1, 2)
    assert not engine.is_running
    assert engine.version == 0
    assert worker.state.phase == "dirty"
    engine.failing = ""
    await publish(worker, 1, 3)
    assert worker.state.phase == "clean"
    assert engine.version == 1


async def test_steps_out_of_order_are_refused(tmp_path):
    worker, _ = make(tmp_path)
    await publish(worker, 0, 2)
    with pytest.raises(StaleEpoch):
        await begin(worker, 1, 2)
    await begin(worker, 1, 3)
    with pytest.raises(ProtocolError):
        await commit(worker, 2, 3)
    assert worker.state.phase == "dirty"


async def test_a_group_that_a_publish_aborted_is_sampled_again_under_the_new_version(tmp_path):
    worker, engine = make(tmp_path, pause_mode=PauseMode.abort)
    await publish(worker, 0, 1)
    engine.finish_reasons = [ABORTED]
    engine.gate.clear()
    group = asyncio.create_task(worker.generate_group(PROMPT, 2))
    while not engine.requests:
        await asyncio.sleep(0)
    await begin(worker, 1, 2)
    engine.gate.set()
    while engine.finish_reasons:
        await asyncio.sleep(0)
    assert not group.done()
    await commit(worker, 1, 2)
    assert [rollout.policy_versions for rollout in await group] == [[1], [1]]


async def test_an_abort_that_nobody_asked_for_is_an_error(tmp_path):
    worker, engine = make(tmp_path)
    await publish(worker, 0, 1)
    engine.finish_reasons = [ABORTED]
    with pytest.raises(EngineError, match="nobody asked it to"):
        await worker.generate_group(PROMPT, 1)


@pytest.mark.parametrize("pause_mode", [PauseMode.keep, PauseMode.abort])
async def test_what_an_engine_had_sampled_is_handed_over_when_it_dies(tmp_path: Path, pause_mode: PauseMode) -> None:
    worker, engine = make(tmp_path, pause_mode=pause_mode)
    await publish(worker, 3, 1)
    engine.finish_reasons, engine.is_killed = [ABORTED], True
    (rollout,) = await worker.generate_group(PROMPT, 1)
    assert (rollout.token_ids, rollout.policy_versions, rollout.finish_reason) == ([7], [3], ABORTED)


async def test_sampling_of_one_group_can_differ(tmp_path):
    worker, engine = make(tmp_path)
    await publish(worker, 0, 1)
    await worker.generate_group(PROMPT, 1, sampling=SamplingConfig(max_tokens=3))
    await worker.generate_group(PROMPT, 2)
    assert engine.requests == [(1, 3), (2, 8)]


async def test_a_recovery_pauses_reads_and_serves_only_when_it_is_adopted(tmp_path):
    worker, engine = make(tmp_path)
    await worker.start()
    try:
        assert await worker.pull([OFFER, OFFER]) == Pulled(200, 0.5, 0.25)
        assert worker.state.phase == "verified"
        with pytest.raises(ReplicaNotServing):
            await worker.generate_group(PROMPT, 1)
        with pytest.raises(ReplicaNotServing):
            await worker.offer()
        await worker.adopt(3, 7)
        assert (engine.version, engine.is_running, engine.has_old_blocks) == (3, True, False)
        assert (worker.state.phase, worker.state.version, worker.state.epoch) == ("clean", 3, 7)
        await worker.release([OFFER, OFFER])
        assert engine.ranks_did[-1] == "slipstream_release"
        assert await worker.offer() == [OFFER, OFFER]
        assert worker.state.is_serving, "a publisher learns its epoch"
        await publish(worker, 4, 8)
    finally:
        await worker.stop()


async def test_a_recovery_that_fails_leaves_the_worker_dirty_until_a_publish(tmp_path):
    worker, engine = make(tmp_path)
    await worker.start()
    try:
        with pytest.raises(PlanMismatch, match="2 ranks' weights and 0 ranks' adapter slots; its peer makes 1 offers"):
            await worker.pull([OFFER])
        engine.failing = "slipstream_pull"
        with pytest.raises(IntegrityError):
            await worker.pull([OFFER, OFFER])
        assert worker.state.phase == "dirty"
        assert worker.state.epoch == 7, "a publisher that comes later learns it, and begins a later one"
        with pytest.raises(ProtocolError):
            await worker.adopt(3, 7)
        engine.failing = ""
        await publish(worker, 4, 8)
        assert worker.state.phase == "clean"
    finally:
        await worker.stop()


async def test_a_base_that_this_machine_does_not_have_is_named_before_the_engine_starts(tmp_path):
    worker, engine = make(tmp_path, AdapterSlotsSpec(2, 8, ("q_proj",), (), base=tmp_path / "elsewhere"))
    with pytest.raises(EngineError, match=r"elsewhere: no such folder on this machine"):
        await worker.start()
    assert not engine.is_alive and engine.ranks_did == []


@pytest.mark.parametrize("is_on_disk", [False, True])
async def test_a_base_that_engines_load_themselves_is_neither_described_nor_wanted(tmp_path, is_on_disk):
    slots = AdapterSlotsSpec(2, 8, ("q_proj",), (), base=tmp_path if is_on_disk else None)
    worker, engine = make(tmp_path, slots)
    await worker.start()
    try:
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
    finally:
        await worker.stop()


def damage(folder: Path) -> None:
    for file in folder.rglob("*.digests"):
        file.write_text("[1")


async def test_a_later_worker_of_the_same_kind_is_told_the_layout(tmp_path: Path, node_cache: Path) -> None:
    digest = layouts_digest((DESCRIBED.layout,))
    told: list[list[str] | None] = []
    for is_damaged in (False, False, True, False):
        if is_damaged:
            damage(node_cache)
        worker, engine = make(tmp_path)
        await worker.start()
        await worker.stop()
        told.append(engine.known_layouts)
    assert told == [[], [digest, digest], [], [digest, digest]]


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
    begun = [Rollout([4], [-1.0], [2], "", ABORTED)]
    assert await worker.generate_group(PROMPT, 1, None, None, begun) == begun
    assert len(engine.requests) == num_requests


async def test_a_worker_goes_on_with_what_another_one_handed_over(tmp_path: Path) -> None:
    worker, engine = make(tmp_path)
    await publish(worker, 3, 1)
    ended = Rollout([9, 8], [-2.0, -3.0], [1, 1], "", "stop")
    begun = Rollout([5], [-2.0], [2], "", ABORTED)
    first, second = await worker.generate_group(PROMPT, 2, None, None, [ended, begun])
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
    (rollout,) = await worker.generate_group(PROMPT, 1, None, None, [Rollout([5], [-2.0], [2], "", ABORTED)])
    assert (rollout.token_ids, rollout.policy_versions) == ([7], [3])


async def test_whoever_tells_a_worker_to_go_is_named(tmp_path: Path) -> None:
    worker, _ = make(tmp_path)
    told = asyncio.create_task(worker.told_to_go())
    await asyncio.sleep(0)
    assert not told.done()
    worker.tell_to_go("SIGTERM")
    assert await told == await worker.told_to_go() == "SIGTERM"
