"""A worker in adapter mode is killed and comes back: real trainer rank, real engines, Mooncake over TCP, ZMQ.

Two workers; the engine of worker 0 is killed (SIGKILL) in every test, and each test leaves both workers serving one
version. What the supervisor decides is written out here by hand; it decides itself in test_run.py.
"""

import asyncio
import multiprocessing
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from cases.rank_helpers import draw, rank_of
from fakes.readable_engine import ReadableEngine
from system.test_adapter_mode import KEY, PROMPT, SHORT, config_of

from slipstream.conf.schema import Device
from slipstream.orchestrator.cluster.rollout_workers import worker_options
from slipstream.orchestrator.inputs.model_folder import prepare_model
from slipstream.rollout.errors import ReplicaNotServing
from slipstream.rollout.types import Rollout, WorkerOptions
from slipstream.rollout.worker import RolloutWorker
from slipstream.trainer.rank import TrainerRank
from slipstream.weight_sync.errors import PlanMismatch, TransportError
from slipstream.weight_sync.publish.publisher import PublishReport

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

TIMEOUT_S = 20.0


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
    version: int = 0

    async def start_worker(self, index: int, base: Path | None = None) -> RolloutWorker:
        """With dummy weights of its own: seeds differ, so nothing is equal by chance. Or with those of `base`."""
        before = engines()
        assert self.options.adapters is not None
        options = replace(self.options, adapters=replace(self.options.adapters, base=base))
        worker = RolloutWorker(options, seed=100 + len(self.processes), make_engine=ReadableEngine)
        await worker.start()
        (process,) = engines() - before
        self.workers[index : index + 1], self.processes[index : index + 1] = [worker], [process]
        return worker

    async def publish(self, exclude: list[int] | None = None) -> PublishReport:
        """The next version, drawn at random."""
        self.version += 1
        draw(self.trainer, 1000 + self.version, std=0.3)
        return await asyncio.to_thread(self.trainer.delivery.publish, self.version, exclude=exclude or [])

    async def kill_and_start_again(self, base: Path | None = None) -> RolloutWorker:
        """Worker 0 is lost; a publish finds it so, and the other one goes on."""
        self.processes[0].send_signal(signal.SIGKILL)
        began = time.monotonic()
        report = await self.publish()
        assert time.monotonic() - began < TIMEOUT_S + 60
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


async def sample(worker: RolloutWorker) -> Rollout:
    (rollout,) = await worker.generate_group(PROMPT, 1, sampling=SHORT, seed=5)
    return rollout


async def refuses(worker: RolloutWorker, why: str = "samples only from a committed version") -> None:
    with pytest.raises(ReplicaNotServing, match=why):
        await sample(worker)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def setup(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Setup]:
    folder, config = tmp_path_factory.mktemp("adapter"), config_of()
    config = replace(config, weight_sync=replace(config.weight_sync, timeout_s=TIMEOUT_S))
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
        await made.publish()
        await made.assert_equal()
        yield made
    finally:
        for worker in made.workers:
            await worker.stop()
        await asyncio.to_thread(trainer.shutdown)


async def serves_on(setup: Setup) -> None:
    """Worker 0 takes what is published from now on: more than there are slots."""
    await setup.reconnect()
    for _ in range(4):
        assert [replica.error for replica in (await setup.publish()).replicas] == [None, None]
        await setup.assert_equal()


async def slot_bytes(worker: RolloutWorker) -> int:
    assert worker.adapter_replica is not None
    return sum(param.num_bytes for rank in await worker.adapter_replica.describe() for param in rank.layout.params)


async def test_a_killed_worker_reads_base_and_newest_version_from_its_peer_and_a_newer_one_without_the_base(
    setup: Setup,
):
    fresh, peer = await setup.kill_and_start_again(), setup.workers[1]
    sampling = asyncio.create_task(sample(peer))
    offers = await peer.offer()
    pulled = await fresh.pull(offers)
    (base,) = await fresh.base.describe()
    assert pulled.num_bytes == await slot_bytes(fresh) + sum(param.num_bytes for param in base.layout.params)
    await refuses(fresh, "no adapter yet")
    assert await peer.offer() == offers, "the peer has not moved"
    assert (await sampling).policy_versions == [setup.version] * SHORT.max_tokens
    await setup.publish(exclude=[0])
    newer = await peer.offer()
    assert (await fresh.pull(newer)).num_bytes == await slot_bytes(fresh)
    await fresh.adopt(newer[-1].version, newer[-1].epoch)
    await setup.assert_equal()
    await fresh.release(newer)
    assert await fresh.offer() != newer, "its own addresses"
    await serves_on(setup)


async def test_a_worker_whose_peer_is_gone_gets_base_and_version_from_the_trainer(setup: Setup):
    fresh = await setup.kill_and_start_again()
    offers = await setup.workers[1].offer()
    gone = [replace(offer, binding=replace(offer.binding, session="127.0.0.1:9")) for offer in offers]
    began = time.monotonic()
    with pytest.raises(TransportError):
        await fresh.pull(gone)
    assert time.monotonic() - began < TIMEOUT_S + 60
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
    assert (await fresh.pull([slot])).num_bytes == await slot_bytes(fresh)
    await refuses(fresh, "no adapter yet")
    await fresh.adopt(slot.version, slot.epoch)
    await setup.assert_equal()
    await fresh.release([slot])
    assert len(await fresh.offer()) == 1, "a worker that starts after it reads the slot from it, and the base from disk"
    await serves_on(setup)
