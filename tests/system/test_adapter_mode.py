"""Adapter mode with a real trainer rank, a real engine, Mooncake over TCP and ZMQ: attention and feed-forward adapters.

One worker serves all tests of this file, in order. The oracle is a second engine that loads what `save_adapter` wrote.
Adapters are drawn at random for every version, so that versions are far apart. Experts: tests/gpu/test_adapter_gpu.py.
Slots, and requests that lose theirs: tests/unit/rollout/adapters.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from cases.rank_helpers import draw, rank_of
from fakes.readable_engine import ReadableEngine
from fakes.vllm_oracle import vllm_serves_adapter

from slipstream.conf.load import load_run_config
from slipstream.conf.schema import Device, PauseMode, RunConfig, SamplingConfig
from slipstream.orchestrator.cluster.rollout_workers import worker_options
from slipstream.orchestrator.inputs.model_folder import prepare_model
from slipstream.rollout.types import Prompt, Rollout, WorkerOptions
from slipstream.rollout.worker import RolloutWorker
from slipstream.trainer.rank import TrainerRank
from slipstream.weight_sync.publish.report import PublishReport

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

KEY = b"k" * 32
NUM_SLOTS = 3
LONG = SamplingConfig(max_tokens=400, stop_at_eos=False)
SHORT = SamplingConfig(max_tokens=8, stop_at_eos=False)
PROMPT = Prompt(0, tuple(3 + (7 * i) % 60 for i in range(150)), "")
"""More than one block of the CPU engine's KV cache, so that a prefix can be reused at all."""


def config_of() -> RunConfig:
    """Rank 6 in slots of rank 8, and a scale of 2.5: neither is a power of two."""
    return load_run_config(
        [
            "experiment=quickstart", "model=tiny_qwen3", "trainer.ep_size=1", "trainer.num_ranks=1",
            "trainer.lora.rank=6", "trainer.lora.alpha=15", "model.dtype=bfloat16", "rollout.max_model_len=1024",
            "model.hf_config.max_position_embeddings=1024", "weight_sync.mode=adapter", "weight_sync.timeout_s=100",
            f"algorithm.max_staleness_steps={NUM_SLOTS - 2}",
        ]
    )  # fmt: skip


class WatchedEngine(ReadableEngine):
    """May ignore adapters; counts its pauses."""

    ignores_adapters = False
    num_pauses = 0

    async def next_logprobs(self, prompt_token_ids, adapter):
        return await super().next_logprobs(prompt_token_ids, None if self.ignores_adapters else adapter)

    async def pause(self, mode, **limit):
        self.num_pauses += 1
        await super().pause(mode, **limit)


@dataclass
class Setup:
    """One trainer rank, one worker."""

    folder: Path
    options: WorkerOptions
    trainer: TrainerRank
    worker: RolloutWorker
    engine: WatchedEngine
    deaf_error: str | None = None
    """What a publish met while the engine ignored adapters."""
    version: int = 0

    def draw(self, version: int) -> None:
        """Give the trainer another adapter."""
        draw(self.trainer, 1000 + version, std=0.3)
        self.version = version

    async def publish(self) -> PublishReport:
        """The next version: drawn, kept on disk, published."""
        self.draw(self.version + 1)
        self.trainer.states.save_adapter(self.adapter(self.version))
        return await asyncio.to_thread(self.trainer.delivery.publish, self.version)

    def adapter(self, version: int) -> Path:
        """Where a version is on disk."""
        return self.folder / f"adapter-{version}"

    def use(self, policy: PauseMode) -> None:
        """Choose pause_mode."""
        replica = self.worker.adapter_replica
        assert replica is not None
        replica.config = dataclasses.replace(replica.config, pause_mode=policy, timeout_s=60.0)

    async def slots(self) -> list[dict[str, str]]:
        """sha256 of every buffer of every slot."""
        return (await self.worker.engine.call_ranks("read_slots"))[0]

    async def start_long(self, n: int = 1) -> asyncio.Task[list[Rollout]]:
        """A group that is being sampled when this returns, by an engine that is slow until it is told otherwise."""
        await self.engine.be_slow()
        before = self.worker.engine.num_generated_tokens
        task = asyncio.create_task(self.worker.generate_group(PROMPT, n, sampling=LONG, seed=3))
        while self.worker.engine.num_generated_tokens < before + 5:
            await asyncio.sleep(0.005)
        return task


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def setup(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Setup]:
    folder = tmp_path_factory.mktemp("adapter")
    config = config_of()
    model = prepare_model(config.model, folder / "model")
    options = worker_options(config, model.hf_config, model.folder, Device.cpu, KEY)
    worker = RolloutWorker(options, seed=1, make_engine=WatchedEngine)
    trainer = rank_of(config, KEY, hf_config=model.hf_config)
    trainer.load()
    assert isinstance(worker.engine, WatchedEngine)
    made = Setup(folder, options, trainer, worker, worker.engine)
    address = await worker.start()
    try:
        slots = await worker.adapter_endpoint()
        await asyncio.to_thread(trainer.delivery.connect, [address], None, [slots])
        made.engine.ignores_adapters = True
        made.deaf_error = (await asyncio.to_thread(trainer.delivery.publish, 1)).replicas[0].error
        made.engine.ignores_adapters = False
        trainer.states.save_merged(folder / "base")  # B is still zero: the merged model is the base
        yield made
    finally:
        await worker.stop()
        await asyncio.to_thread(trainer.shutdown)


async def test_an_engine_that_ignores_adapters_is_refused_by_name(setup: Setup):
    assert "ignores adapters of attention, feed-forward" in str(setup.deaf_error)


async def test_a_slot_holds_what_vllm_loads_from_disk_and_samples_the_same(setup: Setup):
    report = await setup.publish()
    assert report.replicas[0].error is None
    rollouts = await setup.worker.generate_group(PROMPT, 1, sampling=SHORT, seed=5)
    assert rollouts[0].policy_versions == [1] * 8
    held = [slot for slot in await setup.slots() if len(set(slot.values())) > 2]
    assert len(held) == 1, "one slot holds the adapter, the others are zero"
    hashes, tokens, logprobs = await asyncio.to_thread(
        vllm_serves_adapter, setup.folder / "base", setup.adapter(1), list(PROMPT.token_ids), num_tokens=8, seed=5,
        options=setup.options,
    )  # fmt: skip
    assert [held[0]] == hashes
    assert tokens == rollouts[0].token_ids
    assert logprobs == rollouts[0].logprobs


async def test_one_request_outlives_three_publishes_on_its_own_version(setup: Setup):
    setup.use(PauseMode.wait)
    await setup.publish()
    first = setup.version
    (alone,) = await setup.worker.generate_group(PROMPT, 1, sampling=LONG, seed=3)
    task = await setup.start_long()
    for _ in range(3):
        assert (await setup.publish()).replicas[0].error is None
    assert not task.done(), "the request was meant to be in flight still"
    (newer,) = await setup.worker.generate_group(PROMPT, 1, sampling=SHORT, seed=3)
    assert newer.policy_versions == [first + 3] * 8
    await setup.engine.be_slow(False)
    (outlived,) = await task
    assert outlived.policy_versions == [first] * LONG.max_tokens
    assert outlived.token_ids == alone.token_ids, "sampled by another adapter, or from another's prefix"


async def test_versions_share_no_prefix_and_slots_are_not_confused(setup: Setup):
    seen = []
    for _ in range(NUM_SLOTS + 1):
        assert (await setup.publish()).replicas[0].error is None
        first, again = [(await setup.worker.generate_group(PROMPT, 1, sampling=SHORT, seed=9))[0] for _ in range(2)]
        assert first.logprobs == pytest.approx(again.logprobs, abs=0.05)
        seen.append((tuple(first.token_ids), first.logprobs[0]))
    assert len(set(seen)) == len(seen)


async def fill_all_slots(setup: Setup) -> list[asyncio.Task[list[Rollout]]]:
    """Requests in flight on every slot: the newest, and the older ones."""
    tasks = []
    for _ in range(NUM_SLOTS):
        assert (await setup.publish()).replicas[0].error is None
        tasks.append(await setup.start_long(2))
    return tasks


async def test_a_publish_waits_for_a_busy_slot_and_not_longer_than_its_time(setup: Setup):
    setup.use(PauseMode.wait)
    tasks = await fill_all_slots(setup)
    newest = setup.version
    replica = setup.worker.adapter_replica
    assert replica is not None
    replica.config = dataclasses.replace(replica.config, timeout_s=0.02)
    report = await setup.publish()
    assert "no adapter slot became free" in str(report.replicas[0].error)
    (served,) = await setup.worker.generate_group(PROMPT, 1, sampling=SHORT)
    assert served.policy_versions == [newest] * 8
    assert not tasks[0].done(), "the request was meant to be in flight still"
    await setup.engine.be_slow(False)
    setup.use(PauseMode.wait)
    report = await setup.publish()
    assert report.replicas[0].error is None
    assert tasks[0].done()
    for age, task in enumerate(tasks):
        assert {v for r in await task for v in r.policy_versions} == {newest - NUM_SLOTS + 1 + age}


async def test_a_busy_slots_requests_go_on_under_the_newest_version(setup: Setup):
    setup.use(PauseMode.keep)
    tasks = await fill_all_slots(setup)
    first = setup.version - NUM_SLOTS + 1
    assert (await setup.publish()).replicas[0].error is None
    await setup.engine.be_slow(False)
    for rollout in await tasks[0]:
        assert len(rollout.token_ids) == len(rollout.logprobs) == len(rollout.policy_versions) == LONG.max_tokens
        assert rollout.policy_versions == sorted(rollout.policy_versions)
        assert rollout.policy_versions[0] == first
        assert rollout.policy_versions[-1] > first
    await asyncio.gather(*tasks[1:])


async def test_no_publish_pauses_the_engine(setup: Setup):
    before = setup.engine.num_pauses  # the base came while it stood still
    assert (await setup.publish()).replicas[0].error is None
    assert setup.engine.num_pauses == before
