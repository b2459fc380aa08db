"""The rollout worker's side of a publish, over an engine that only notes what it is asked, in which order.

What a real engine makes of it is shown by tests/contract/test_engine_vllm.py.
"""

import asyncio
import contextlib
import gc
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cases.noting_workers import PROMPT, begin, commit, make, publish, worker_of
from fakes.model_engine import BINDING, REPLIES

import slipstream.rollout.base_replica
import slipstream.rollout.engine.vllm_process
from slipstream.conf.schema import (
    Device,
    DType,
    EvalSampling,
    EvalSamplingConfig,
    PauseMode,
    RolloutConfig,
    SamplingConfig,
    WeightSyncConfig,
)
from slipstream.orchestrator.inputs.character_tokenizer import save_character_tokenizer
from slipstream.rollout.engine.vllm_engine import VllmEngine
from slipstream.rollout.errors import EngineDied, EngineError, ReplicaNotServing
from slipstream.rollout.types import ABORTED, Prompt, WorkerOptions
from slipstream.rollout.worker_process import with_its_share
from slipstream.rollout.worker_verbs import WorkerClient, WorkerVerbs, digest_of
from slipstream.weight_sync.calls.server import CallServer
from slipstream.weight_sync.errors import IntegrityError
from slipstream.weight_sync.layout import TensorMeta
from slipstream.weight_sync.replica.clients import ReplicaClients
from slipstream.weight_sync.replica.messages import Described, PublishId, ReplicaVerbs

pytestmark = pytest.mark.usefixtures("node_cache")


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


@pytest.mark.parametrize(("keep", "text"), [(False, "c"), (True, "c<eos>")])
async def test_a_response_is_text_with_special_tokens_where_they_are_asked_for(tmp_path, keep, text):
    worker, engine = make(tmp_path, keep_special_tokens=keep)
    engine.token_ids = [7, 2]  # 5 is "a"
    await publish(worker, 0, 1)
    (rollout,) = await worker.generate_group(PROMPT, 1)
    assert (rollout.token_ids, rollout.text) == ([7, 2], text)


@pytest.mark.parametrize("content", ["{}", None])
def test_a_folder_without_a_tokenizer_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(EngineError, match=r"no response can be made text: .*tokenizer\.json"):
        worker_of(tmp_path)


async def test_start_describes_every_rank_and_stop_ends_the_engine(tmp_path):
    worker, engine = make(tmp_path)
    address = await worker.start()
    assert address == worker.endpoint() and address.startswith("tcp://127.0.0.1:")
    assert [rank.binding for rank in await worker.base.describe()] == [BINDING, BINDING]
    assert engine.is_alive
    await worker.stop()
    assert not engine.is_alive


async def test_an_engine_that_cannot_be_described_is_ended(tmp_path):
    worker, engine = make(tmp_path)
    engine.failing = "slipstream_describe"
    with pytest.raises(IntegrityError):
        await worker.start()
    assert not engine.is_alive


@pytest.mark.parametrize("mode", PauseMode)
async def test_a_publish_pauses_before_bytes_change_and_moves_the_version_before_it_resumes(tmp_path, mode):
    worker, engine = make(tmp_path, pause_mode=mode)
    await publish(worker, 3, 1)
    assert (engine.version, engine.is_running, engine.pause_modes) == (3, True, [mode])
    assert engine.has_old_blocks == (mode is PauseMode.keep_kv)
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
        error = str(await asyncio.to_thread(ask, ReplicaVerbs.begin, publish))
        assert "did not answer" in error and "must be restarted" in error and gc.isenabled()
        with pytest.raises(EngineDied, match="left a call unanswered"):
            worker.engine.check()
        assert "for the engine's" in caplog.text
        assert isinstance(await asyncio.to_thread(ask, ReplicaVerbs.describe, clients.publisher), Described)
    finally:
        clients.close()
        await worker.stop()


async def test_requests_that_outlast_a_pause_for_them_do_not_end_the_engine(engine_of: Callable[..., VllmEngine]):
    engine = engine_of(HangingLlm("pause"))
    with pytest.raises(EngineError, match=r"requests in flight did not end within 0\.1 s"):
        await engine.pause(PauseMode.wait, timeout_s=0.1)
    engine.check()


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
    steps = (
        None,
        partial(begin, worker, 0, 1),
        partial(commit, worker, 0, 1),
        partial(begin, worker, 1, 2),
        worker.stop,
    )
    for number, step in enumerate(steps):
        if step is not None:
            await step()
        serves = contextlib.nullcontext() if number == 2 else pytest.raises(ReplicaNotServing, match="only from a comm")
        with serves:
            await worker.generate_group(PROMPT, 1)
    assert len(engine.requests) == 1


@pytest.mark.parametrize("failing", ["slipstream_begin", "slipstream_verify", "slipstream_commit"])
async def test_a_failed_step_leaves_the_engine_paused_and_dirty_until_a_later_publish(tmp_path, failing):
    worker, engine = make(tmp_path)
    await publish(worker, 0, 1)
    engine.failing = failing
    with pytest.raises(IntegrityError):
        await publish(worker, 1, 2)
    assert (engine.is_running, engine.version, worker.state.phase) == (False, 0, "dirty")
    engine.failing = ""
    await publish(worker, 1, 3)
    assert (engine.version, worker.state.phase) == (1, "clean")


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


async def test_a_sequence_is_scored_by_one_version_or_by_none(tmp_path):
    worker, engine = make(tmp_path)
    assert await worker.score([1, 2], -1) is None, "it serves none"
    await publish(worker, 0, 1)
    assert [await worker.score([1, 2], version) for version in (0, 1)] == [[-1.0], None]
    engine.while_it_scores = partial(publish, worker, 1, 2)
    assert await worker.score([1, 2], 0) is None, "a publish came between"


async def test_a_group_that_was_sampled_for_a_controller_that_is_gone_is_not_sampled_again(tmp_path: Path) -> None:
    """Asked over the socket, from another process's view: the second client takes the place of the first."""
    worker, engine = make(tmp_path, num_versions_kept=1)
    await publish(worker, 0, 1)
    key = b"k" * 32
    server = CallServer(worker, WorkerVerbs, key, another_came=worker.kept.hand_on)
    address = await server.start()
    former, later = WorkerClient.at(address, key), WorkerClient.at(address, key)
    evaluation = EvalSampling(max_tokens=4, drawing=EvalSamplingConfig())
    done = await former.generate_group(PROMPT, 2)
    await former.generate_group(PROMPT, 2, evaluation)
    await former.generate_group(PROMPT, 2, None, 0)
    await former.generate_group(PROMPT, 2, None, None, done)
    engine.gate.clear()
    under_way = asyncio.create_task(former.generate_group(PROMPT, 3, SamplingConfig(max_tokens=5)))
    while len(engine.requests) < 4:
        await asyncio.sleep(0.01)
    assert sorted(await later.groups_left()) == sorted(
        [digest_of(PROMPT, 2, None), digest_of(PROMPT, 3, SamplingConfig(max_tokens=5))]
    )
    assert await later.generate_group(PROMPT, 2) == done
    again = asyncio.create_task(later.generate_group(PROMPT, 3, SamplingConfig(max_tokens=5)))
    await asyncio.sleep(0.05)
    engine.gate.set()
    assert len(await again) == 3
    assert await later.groups_left() == []
    await later.generate_group(PROMPT, 2, evaluation)
    assert engine.requests == [(2, 8), (2, 4), (2, 8), (3, 5), (2, 4)], "evaluations and kept versions are sampled anew"
    under_way.cancel()
    for client in (former, later):
        client.connection.close()
    server.close()


@pytest.mark.parametrize(
    ("prompt", "n", "sampling"),
    [
        (Prompt(1, (1, 5), "a"), 2, None), (Prompt(0, (5, 1), "a"), 2, None), (PROMPT, 3, None),
        (PROMPT, 2, SamplingConfig(seed=1)), (PROMPT, 2, EvalSampling(drawing=EvalSamplingConfig())),
    ],
)  # fmt: skip
def test_unequal_requests_are_told_apart(prompt: Prompt, n: int, sampling: SamplingConfig | None) -> None:
    assert digest_of(PROMPT, 2, None) == digest_of(Prompt(0, (1, 5), "other text", {"answer": "a"}), 2, None)
    assert digest_of(prompt, n, sampling) != digest_of(PROMPT, 2, None)
