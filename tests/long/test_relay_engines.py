"""weight_sync.relay=node on one machine: real trainer rank, three real engines, Mooncake over TCP, ZMQ, no Ray.

Worker 0 is the primary. Tests follow each other on the same engines; the last one kills the primary. Supervisor and
relay are the product's own, and so are the calls that a Ray actor would make.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

import psutil
import pytest
import pytest_asyncio
from cases.rank_helpers import draw, rank_of
from fakes.readable_engine import ReadableEngine
from system.test_adapter_recovery import engines

from slipstream.conf.architecture.families import read_config
from slipstream.conf.load import load_run_config
from slipstream.conf.schema import Device, SamplingConfig
from slipstream.fleet.relay import publish_by_relay
from slipstream.fleet.replicas import ReplicaState
from slipstream.fleet.supervisor import Supervisor
from slipstream.orchestrator.inputs.character_tokenizer import save_character_tokenizer
from slipstream.rollout.errors import ReplicaNotServing
from slipstream.rollout.types import Progress, Prompt, Rollout, WorkerOptions
from slipstream.rollout.worker import RolloutWorker
from slipstream.trainer.rank import TrainerRank
from slipstream.weight_sync.errors import IntegrityError
from slipstream.weight_sync.publish.report import PublishReport
from slipstream.weight_sync.replica.recovery import Offer, Pulled

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

KEY = b"k" * 32
NUM_WORKERS = 3
TIMEOUT_S = 20.0
LONG = SamplingConfig(max_tokens=400, stop_at_eos=False)
SHORT = SamplingConfig(max_tokens=8, stop_at_eos=False)
PROMPT = Prompt(0, tuple(3 + (7 * i) % 60 for i in range(60)), "")


class Handle:
    """A worker of this process, as handles.RayRolloutWorker shows one. Keeps what was read."""

    def __init__(self, worker: RolloutWorker, name: str) -> None:
        self.worker = worker
        self.name = name
        self.endpoint = worker.endpoint()
        self.node = "here"
        self.pid = os.getpid()
        self.started_at = worker.started_at
        self.pulled: list[Pulled] = []
        self.spoils_next_pull = False

    async def generate_group(self, prompt: Prompt, n: int) -> list[Rollout]:
        return await self.worker.generate_group(prompt, n)

    async def check(self) -> None:
        await self.worker.check()

    async def progress(self) -> Progress:
        return await self.worker.progress()

    async def offer(self) -> list[Offer]:
        return await self.worker.offer()

    async def pull(self, offers: Sequence[Offer]) -> Pulled:
        if self.spoils_next_pull:  # as if a byte had changed on its way
            self.spoils_next_pull = False
            name = next(iter(offers[0].hashes))
            offers = [replace(offers[0], hashes=offers[0].hashes | {name: offers[0].hashes[name] ^ 1})]
        self.pulled.append(await self.worker.pull(offers))
        return self.pulled[-1]

    async def adopt(self, version: int, epoch: int) -> None:
        await self.worker.adopt(version, epoch)

    async def release(self, offers: Sequence[Offer]) -> None:
        await self.worker.release(offers)

    async def base_wanted_at(self) -> str:
        return await self.worker.base_wanted_at()


@dataclass
class Setup:
    """One trainer rank, three workers."""

    trainer: TrainerRank
    handles: list[Handle]
    processes: list[psutil.Process]
    supervisor: Supervisor
    version: int = 0

    async def publish(self) -> PublishReport:
        """The next version, drawn at random, as the controller publishes it."""
        self.version += 1
        draw(self.trainer, 1000 + self.version, std=0.3)

        async def write(exclude: Sequence[int], _number: int) -> PublishReport:
            return await asyncio.to_thread(self.trainer.delivery.publish, self.version, exclude=exclude)

        await self.supervisor.hold()
        report = await publish_by_relay(write, self.supervisor, timeout_s=TIMEOUT_S + 2)
        await self.supervisor.settle(report.replicas)
        return report

    async def assert_equal(self, handles: Sequence[Handle]) -> None:
        """They serve the present version, from the same bytes, with the same log-probabilities."""
        sampled = [await sample(handle.worker) for handle in handles]
        weights = [await handle.worker.engine.call_ranks("read_params") for handle in handles]
        for one, held in zip(sampled, weights, strict=True):
            assert one.policy_versions == [self.version] * SHORT.max_tokens
            assert (one.token_ids, one.logprobs) == (sampled[0].token_ids, sampled[0].logprobs)
            assert held == weights[0]


async def sample(worker: RolloutWorker) -> Rollout:
    (rollout,) = await worker.generate_group(PROMPT, 1, sampling=SHORT, seed=5)
    return rollout


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def setup(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Setup]:
    config = load_run_config(
        [
            "experiment=quickstart", "trainer.ep_size=1", "trainer.num_ranks=1", "model.dtype=bfloat16",
            "rollout.max_model_len=512", "weight_sync.relay=node",
        ]
    )  # fmt: skip
    sync = replace(config.weight_sync, timeout_s=TIMEOUT_S)
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(config.model.hf_config))
    save_character_tokenizer(folder, vocab_size=64)
    trainer = rank_of(config, KEY, weight_sync=sync)
    trainer.load()
    tensors = tuple(read_config(config.model.hf_config).checkpoint_tensors("bfloat16"))
    handles: list[Handle] = []
    processes: list[psutil.Process] = []
    try:
        for index in range(NUM_WORKERS):
            before = engines()
            options = WorkerOptions(
                folder=folder, config=config.rollout, weight_sync=sync, dtype=config.model.dtype, device=Device.cpu,
                tensors=tensors, key=KEY,
            )  # fmt: skip
            worker = RolloutWorker(options, seed=100 + index, make_engine=ReadableEngine)
            await worker.start()
            processes += engines() - before
            handles.append(Handle(worker, f"rollout-{index}"))
        await asyncio.to_thread(trainer.delivery.connect, [handle.endpoint for handle in handles])
        yield Setup(trainer, handles, processes, Supervisor(handles))
    finally:
        for handle in handles:
            await handle.worker.stop()
        await asyncio.to_thread(trainer.shutdown)


async def test_every_version_is_written_once_and_all_replicas_hold_the_same_bytes(setup: Setup):
    """Also the requests in flight: they cross the versions that are published meanwhile, without a gap."""
    first = await setup.publish()
    assert first.num_relayed == NUM_WORKERS - 1
    await setup.assert_equal(setup.handles)
    before = [handle.worker.engine.num_generated_tokens for handle in setup.handles]
    flying = [
        asyncio.create_task(handle.worker.generate_group(PROMPT, 1, sampling=LONG, seed=7)) for handle in setup.handles
    ]
    while any(h.worker.engine.num_generated_tokens < n + 5 for h, n in zip(setup.handles, before, strict=True)):
        await asyncio.sleep(0.002)
    for _ in range(3):
        report = await setup.publish()
        assert [replica.error for replica in report.replicas] == [None] * NUM_WORKERS
        assert report.num_relayed == NUM_WORKERS - 1
        assert report.num_bytes == first.num_bytes, "the trainer wrote to one of them"
        # Bytes of kernels' parameters, padding included: no fewer than were written.
        assert report.relay_bytes >= (NUM_WORKERS - 1) * report.num_bytes
        assert 0 < report.relay_s < report.total_s
    await setup.assert_equal(setup.handles)
    for (rollout,) in await asyncio.gather(*flying):
        versions = rollout.policy_versions
        assert sorted(versions) == versions
        assert set(versions) == set(range(versions[0], versions[-1] + 1)), "no version was skipped"
        assert len(set(versions)) > 1, "a publish came in between"


async def test_the_next_publish_costs_no_new_link(setup: Setup):
    """A link that is opened anew restarts the engine behind it, which takes about a second."""
    before = await asyncio.gather(*(handle.offer() for handle in setup.handles))
    await setup.publish()
    after = await asyncio.gather(*(handle.offer() for handle in setup.handles))
    assert [a[0].binding for a in after] == [b[0].binding for b in before]


async def test_a_killed_primary_is_replaced_in_the_same_publish(setup: Setup):
    setup.processes[0].send_signal(signal.SIGKILL)
    began = time.monotonic()
    report = await setup.publish()
    assert time.monotonic() - began < 2 * TIMEOUT_S + 60
    assert [replica.committed for replica in report.replicas] == [False, True, True]
    assert report.num_relayed == 1, "2 read from 1, which the trainer wrote to"
    reason = setup.supervisor.roster.replicas["rollout-0"].reason
    assert "the engine's process was ended by SIGKILL" in reason, "the publish alone has noticed it"
    await setup.assert_equal(setup.handles[1:])
    report = await setup.publish()
    assert [replica.committed for replica in report.replicas] == [False, True, True]
    assert report.num_relayed == 1
    await setup.assert_equal(setup.handles[1:])
    # What the supervisor does before it starts a successor; both go on serving, from another address.
    await setup.supervisor.starts.close_links_to(setup.supervisor.roster.replicas["rollout-0"])
    assert ["rollout-0" in replica.links for replica in setup.supervisor.roster.replicas.values()] == [False] * 3
    report = await setup.publish()
    assert [replica.committed for replica in report.replicas] == [False, True, True]
    await setup.assert_equal(setup.handles[1:])


async def test_bytes_that_are_not_the_primarys_never_serve(setup: Setup):
    setup.handles[2].spoils_next_pull = True
    report = await setup.publish()
    assert [replica.committed for replica in report.replicas] == [False, True, False]
    assert IntegrityError.__name__ in (report.replicas[2].error or "")
    with pytest.raises(ReplicaNotServing, match="samples only from a committed version"):
        await sample(setup.handles[2].worker)
    assert [replica.state for replica in setup.supervisor.roster.replicas.values()] == [
        ReplicaState.out, ReplicaState.serving, ReplicaState.out,
    ]  # fmt: skip
    await setup.assert_equal(setup.handles[1:2])
