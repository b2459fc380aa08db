"""Adapter mode with a real trainer rank, real engines, Mooncake over TCP and ZMQ: attention and feed-forward adapters;
then a worker that is killed and comes back.

Two workers serve all tests of this file, in order. The oracle is another engine, which loads what `save_adapter` wrote.
Adapters are drawn at random for every version, so that versions are far apart. In each test of recovery the engine of
worker 0 is killed, and both workers serve one version in the end. What the supervisor decides is written out here by
hand; it decides itself in test_run.py. Experts: tests/gpu/test_adapter_gpu.py. Slots, and requests that lose theirs:
tests/unit/rollout/adapters.
"""

import asyncio
import multiprocessing
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from cases.rank_helpers import draw, rank_of
from fakes.readable_engine import ReadableEngine
from fakes.vllm_oracle import vllm_serves_adapter

from slipstream.conf.load import load_run_config
from slipstream.conf.schema import Device, PauseMode, RunConfig, SamplingConfig
from slipstream.orchestrator.cluster.rollout_workers import worker_options
from slipstream.orchestrator.inputs.model_folder import prepare_model
from slipstream.rollout.adapters.adapter_replica import AdapterReplica
from slipstream.rollout.errors import ReplicaNotServing
from slipstream.rollout.types import Prompt, Rollout, WorkerOptions
from slipstream.rollout.worker import RolloutWorker
from slipstream.trainer.rank import TrainerRank
from slipstream.weight_sync.errors import PlanMismatch, TransportError
from slipstream.weight_sync.publish.report import PublishReport

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

KEY = b"k" * 32
NUM_SLOTS = 3
TIMEOUT_S = 60.0
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
            "model.hf_config.max_position_embeddings=1024", "weight_sync.mode=adapter",
            f"weight_sync.timeout_s={TIMEOUT_S}", f"algorithm.max_staleness_steps={NUM_SLOTS - 2}",
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


def engines() -> set[psutil.Process]:
    """Engine processes of this one."""
    return {psutil.Process(child.pid) for child in multiprocessing.active_children() if "EngineCore" in child.name}


@dataclass
class Setup:
    """One trainer rank, two workers."""

    folder: Path
    options: WorkerOptions
    trainer: TrainerRank
    workers: list[RolloutWorker]
    processes: list[psutil.Process]
    deaf_error: str | None = None
    """What a publish met while engine 0 ignored adapters."""
    version: int = 0

    @property
    def worker(self) -> RolloutWorker:
        """The first one."""
        return self.workers[0]

    @property
    def engine(self) -> WatchedEngine:
        assert isinstance(self.worker.engine, WatchedEngine)
        return self.worker.engine

    @property
    def replica(self) -> AdapterReplica:
        assert self.worker.adapter_replica is not None
        return self.worker.adapter_replica

    async def start_worker(self, index: int, base: Path | None = None) -> RolloutWorker:
        """With dummy weights of its own: seeds differ, so nothing is equal by chance. Or with those of `base`."""
        before = engines()
        assert self.options.adapters is not None
        options = replace(self.options, adapters=replace(self.options.adapters, base=base))
        worker = RolloutWorker(options, seed=100 + len(self.processes), make_engine=WatchedEngine)
        await worker.start()
        (process,) = engines() - before
        self.workers[index : index + 1], self.processes[index : index + 1] = [worker], [process]
        return worker

    async def publish(self, exclude: list[int] | None = None) -> PublishReport:
        """The next version: drawn, kept on disk, published."""
        self.version += 1
        draw(self.trainer, 1000 + self.version, std=0.3)
        self.trainer.states.save_adapter(self.adapter(self.version))
        return await asyncio.to_thread(self.trainer.delivery.publish, self.version, exclude=exclude or [])

    def adapter(self, version: int) -> Path:
        """Where a version is on disk."""
        return self.folder / f"adapter-{version}"

    def use(self, policy: PauseMode, timeout_s: float = TIMEOUT_S) -> None:
        """Choose pause_mode, and how long a publish waits for a slot."""
        self.replica.config = replace(self.replica.config, pause_mode=policy, timeout_s=timeout_s)

    async def slots(self) -> list[dict[str, str]]:
        """sha256 of every buffer of every slot."""
        return (await self.engine.call_ranks("read_slots"))[0]

    async def start_long(self, n: int = 1) -> asyncio.Task[list[Rollout]]:
        """A group that is being sampled when this returns, by an engine that is slow until it is told otherwise."""
        await self.engine.be_slow()
        before = self.engine.num_generated_tokens
        task = asyncio.create_task(self.worker.generate_group(PROMPT, n, sampling=LONG, seed=3))
        while self.engine.num_generated_tokens < before + 5:
            await asyncio.sleep(0.005)
        return task

    async def kill_and_start_again(self, base: Path | None = None) -> RolloutWorker:
        """Worker 0 is lost; a publish finds it so, and the other one goes on."""
        self.processes[0].send_signal(signal.SIGKILL)
        report = await self.publish()
        assert [replica.committed for replica in report.replicas] == [False, True]
        await self.workers[0].stop()
        await asyncio.to_thread(self.trainer.delivery.disconnect, [0])
        fresh = await self.start_worker(0, base)
        await refuses(fresh, "no adapter yet" if base else "samples only from a committed version")
        return fresh

    async def reconnect(self) -> None:
        """The trainer meets worker 0 again."""
        endpoint, base = await self.workers[0].adapter_endpoint(), await self.workers[0].base_wanted_at()
        await asyncio.to_thread(self.trainer.delivery.reconnect, 0, endpoint, base)

    async def assert_equal(self) -> None:
        """Both workers serve the present version, from the same bytes, with the same log-probabilities."""
        sampled = [await sample(worker) for worker in self.workers]
        assert [one.policy_versions for one in sampled] == [[self.version] * SHORT.max_tokens] * 2
        assert sampled[0].token_ids == sampled[1].token_ids
        assert sampled[0].logprobs == sampled[1].logprobs
        weights = [await worker.engine.call_ranks("read_params") for worker in self.workers]
        assert weights[0] == weights[1]


async def sample(worker: RolloutWorker, sampling: SamplingConfig = SHORT, seed: int = 5) -> Rollout:
    (rollout,) = await worker.generate_group(PROMPT, 1, sampling=sampling, seed=seed)
    return rollout


async def refuses(worker: RolloutWorker, why: str = "samples only from a committed version") -> None:
    with pytest.raises(ReplicaNotServing, match=why):
        await sample(worker)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def setup(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Setup]:
    folder, config = tmp_path_factory.mktemp("adapter"), config_of()
    model = prepare_model(config.model, folder / "model")
    options = worker_options(config, model.hf_config, model.folder, Device.cpu, KEY)
    trainer = rank_of(config, KEY, hf_config=model.hf_config)
    trainer.load()
    trainer.states.save_merged(folder / "base")  # B is still zero: the merged model is the base
    made = Setup(folder, options, trainer, [], [])
    try:
        for index in range(2):
            await made.start_worker(index)
        slots = [await worker.adapter_endpoint() for worker in made.workers]
        addresses = [worker.endpoint() for worker in made.workers]
        await asyncio.to_thread(trainer.delivery.connect, addresses, None, slots)
        made.engine.ignores_adapters = True
        made.deaf_error = (await made.publish()).replicas[0].error
        made.engine.ignores_adapters = False
        yield made
    finally:
        for worker in made.workers:
            await worker.stop()
        await asyncio.to_thread(trainer.shutdown)


async def test_an_engine_that_ignores_adapters_is_refused_by_name(setup: Setup):
    assert "ignores adapters of attention, feed-forward" in str(setup.deaf_error)


async def test_a_slot_holds_what_vllm_loads_from_disk_and_samples_the_same(setup: Setup):
    report = await setup.publish()
    assert report.replicas[0].error is None
    rollout = await sample(setup.worker)
    assert rollout.policy_versions == [setup.version] * 8
    held = [slot for slot in await setup.slots() if len(set(slot.values())) > 2]
    assert len(held) == 1, "one slot holds the adapter, the others are zero"
    hashes, tokens, logprobs = await asyncio.to_thread(
        vllm_serves_adapter, setup.folder / "base", setup.adapter(setup.version), list(PROMPT.token_ids),
        num_tokens=8, seed=5, options=setup.options,
    )  # fmt: skip
    assert [held[0]] == hashes
    assert tokens == rollout.token_ids
    assert logprobs == rollout.logprobs


async def test_one_request_outlives_three_publishes_on_its_own_version(setup: Setup):
    setup.use(PauseMode.wait)
    await setup.publish()
    first = setup.version
    alone = await sample(setup.worker, LONG, seed=3)
    task = await setup.start_long()
    for _ in range(3):
        assert (await setup.publish()).replicas[0].error is None
    assert not task.done(), "the request was meant to be in flight still"
    assert (await sample(setup.worker)).policy_versions == [first + 3] * 8
    await setup.engine.be_slow(False)
    (outlived,) = await task
    assert outlived.policy_versions == [first] * LONG.max_tokens
    assert outlived.token_ids == alone.token_ids, "sampled by another adapter, or from another's prefix"


async def test_versions_share_no_prefix_and_slots_are_not_confused(setup: Setup):
    seen = []
    for _ in range(NUM_SLOTS + 1):
        assert (await setup.publish()).replicas[0].error is None
        first, again = [await sample(setup.worker) for _ in range(2)]
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
    tasks = await fill_all_slots(setup)
    newest = setup.version
    setup.use(PauseMode.wait, timeout_s=0.02)
    report = await setup.publish()
    assert "no adapter slot became free" in str(report.replicas[0].error)
    assert (await sample(setup.worker)).policy_versions == [newest] * 8
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


async def serves_on(setup: Setup) -> None:
    """Worker 0 takes what is published from now on: more than there are slots."""
    await setup.reconnect()
    for _ in range(4):
        assert [replica.error for replica in (await setup.publish()).replicas] == [None, None]
        await setup.assert_equal()


async def slot_bytes(setup: Setup) -> int:
    return sum(param.num_bytes for rank in await setup.replica.describe() for param in rank.layout.params)


async def test_a_killed_worker_reads_base_and_newest_version_from_its_peer_and_a_newer_one_without_the_base(
    setup: Setup,
):
    fresh, peer = await setup.kill_and_start_again(), setup.workers[1]
    sampling = asyncio.create_task(sample(peer))
    offers = await peer.offer()
    pulled = await fresh.pull(offers)
    (base,) = await fresh.base.describe()
    assert pulled.num_bytes == await slot_bytes(setup) + sum(param.num_bytes for param in base.layout.params)
    await refuses(fresh, "no adapter yet")
    assert await peer.offer() == offers, "the peer has not moved"
    assert (await sampling).policy_versions == [setup.version] * SHORT.max_tokens
    await setup.publish(exclude=[0])
    newer = await peer.offer()
    assert (await fresh.pull(newer)).num_bytes == await slot_bytes(setup)
    await fresh.adopt(newer[-1].version, newer[-1].epoch)
    await setup.assert_equal()
    await fresh.release(newer)
    assert await fresh.offer() != newer, "its own addresses"
    await serves_on(setup)


async def test_a_worker_whose_peer_is_gone_gets_base_and_version_from_the_trainer(setup: Setup):
    fresh = await setup.kill_and_start_again()
    offers = await setup.workers[1].offer()
    gone = [replace(offer, binding=replace(offer.binding, session="127.0.0.1:9")) for offer in offers]
    with pytest.raises(TransportError):
        await fresh.pull(gone)
    await refuses(fresh)
    assert await fresh.base_wanted_at() == fresh.endpoint()
    await setup.reconnect()
    assert await fresh.base_wanted_at() == ""
    await refuses(fresh, "no adapter yet")
    assert [replica.error for replica in (await setup.publish()).replicas] == [None, None]
    await setup.assert_equal()


async def test_a_worker_that_loads_its_base_from_disk_reads_the_newest_version_alone_from_its_peer(setup: Setup):
    """As on an INT4 base, where no worker has more to offer; the base is bfloat16 here."""
    fresh = await setup.kill_and_start_again(setup.folder / "base")
    assert await fresh.base_wanted_at() == ""
    *weights, slot = await setup.workers[1].offer()
    with pytest.raises(PlanMismatch, match="0 ranks' weights and 1 ranks' adapter slots; its peer makes 2 offers"):
        await fresh.pull([*weights, slot])
    assert (await fresh.pull([slot])).num_bytes == await slot_bytes(setup)
    await refuses(fresh, "no adapter yet")
    await fresh.adopt(slot.version, slot.epoch)
    await setup.assert_equal()
    await fresh.release([slot])
    assert len(await fresh.offer()) == 1, "a worker that starts after it reads the slot from it, and the base from disk"
    await serves_on(setup)
