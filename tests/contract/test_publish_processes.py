"""Publishes between real processes: two trainer ranks over gloo, two replicas, Mooncake over TCP, control over ZMQ."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
from fakes.publish import KEY, NUM_ENGINE_RANKS, DictSource, PlainEngine

from conf.schema import WeightSyncConfig
from weight_sync.endpoint import ReplicaEndpoint
from weight_sync.publisher import EXCLUDED, Publisher, PublishReport
from weight_sync.transport.mooncake import MooncakeTransport

NUM_TRAINER_RANKS = 2
START_TIMEOUT_S = 90
STEP_TIMEOUT_S = 60
SYNC_TIMEOUT_S = 10.0

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "fakes.publish", "weight_sync.publisher", "weight_sync.transport.mooncake"])


# ---- what runs in the replica processes ----


def run_replica(pipe: Connection) -> None:
    """One replica: an endpoint on an event loop and two engine ranks with plain parameters; the pipe gives orders."""
    torch.set_num_threads(1)
    asyncio.run(_serve(pipe))


async def _serve(pipe: Connection) -> None:
    engine = PlainEngine([MooncakeTransport(timeout_s=SYNC_TIMEOUT_S) for _ in range(NUM_ENGINE_RANKS)])
    endpoint = ReplicaEndpoint(engine, KEY)
    pipe.send(await endpoint.start())
    while True:
        verb, *args = await asyncio.to_thread(pipe.recv)
        if verb == "wrong":
            pipe.send((engine.wrong_params(args[0]), endpoint.state))
        elif verb == "zero":
            for params in engine.params:
                for tensor in params.values():
                    tensor.zero_()
            pipe.send(None)
        elif verb == "die_when_written":
            _die_when_written(engine)
            pipe.send(None)
        else:
            await endpoint.close()
            return


def _die_when_written(engine: PlainEngine) -> None:
    """SIGKILL this process as soon as a byte of its parameters changes; it never gets as far as a proof."""
    before = [tensor.clone() for params in engine.params for tensor in params.values()]

    def watch() -> None:
        tensors = [tensor for params in engine.params for tensor in params.values()]
        while all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True)):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    engine.verify = never  # type: ignore[method-assign]
    threading.Thread(target=watch, daemon=True).start()


# ---- what runs in the trainer processes ----


class FaultyTransport:
    """The real link with one planted fault, on writes to one session's parameter: the first write that meets it."""

    def __init__(self, inner: MooncakeTransport) -> None:
        self._inner = inner
        self.fault: tuple[str, str] | None = None
        self._scratch = torch.zeros(1 << 16, dtype=torch.uint8)
        inner.register([self._scratch])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(
        self, session: str, src: Sequence[int], dst: Sequence[int], sizes: Sequence[int], *, timeout_s: float
    ) -> None:
        src, dst, sizes = list(src), list(dst), list(sizes)
        if self.fault is not None and self.fault[1] == session:
            kind = self.fault[0]
            self.fault = None
            if kind == "flip":
                copy = self._scratch[: sizes[0]]
                _memmove(copy.data_ptr(), src[0], sizes[0])
                copy[sizes[0] // 2] ^= 1
                src[0] = copy.data_ptr()
            elif kind == "skip":
                src, dst, sizes = src[1:], dst[1:], sizes[1:]
            elif kind == "offset":
                sizes[0] -= 2
                dst[0] += 2
        self._inner.write(session, src, dst, sizes, timeout_s=timeout_s)


def _memmove(destination: int, source: int, size: int) -> None:
    import ctypes

    ctypes.memmove(destination, source, size)


def run_trainer_rank(rank: int, rendezvous: str, endpoints: list[str], pipe: Connection) -> None:
    """One trainer rank: connects, then publishes when told."""
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=NUM_TRAINER_RANKS)
    transport = FaultyTransport(MooncakeTransport(timeout_s=SYNC_TIMEOUT_S))
    source = DictSource(rank, NUM_TRAINER_RANKS)
    publisher = Publisher(
        source,
        transport,  # type: ignore[arg-type]
        rank=rank,
        world_size=NUM_TRAINER_RANKS,
        group=dist.group.WORLD,
        config=WeightSyncConfig(watermark_bytes=1 << 16, timeout_s=SYNC_TIMEOUT_S),
        key=KEY,
    )
    pipe.send(publisher.connect(endpoints))
    while True:
        verb, *args = pipe.recv()
        if verb == "publish":
            version, fault, source_error, exclude = args
            if fault is not None:
                kind, replica = fault
                publisher._pipeline.run = _with_fault(publisher._pipeline, transport, kind, replica)  # type: ignore[method-assign]
            source.begin_error = source_error
            pipe.send(publisher.publish(version, exclude=exclude))
        else:
            publisher.close()
            transport.close()
            dist.destroy_process_group()
            return


def _with_fault(pipeline: Any, transport: FaultyTransport, kind: str, replica: int) -> Callable[..., Any]:
    """Pipeline.run that arms the fault for one replica's first engine rank, once the bindings are known."""
    run = type(pipeline).run

    def armed(version: int, bindings: Any, budgets_s: Any) -> Any:
        transport.fault = (kind, bindings[replica, 0].session)
        del pipeline.run
        return run(pipeline, version, bindings, budgets_s)

    return armed


# ---- the test's side ----


class Child:
    """A process and the pipe to it."""

    def __init__(self, target: Callable[..., None], *args: object) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        self.process: BaseProcess = CONTEXT.Process(target=target, args=(*args, theirs), daemon=True)  # type: ignore[attr-defined]
        self.process.start()
        theirs.close()

    def get(self, timeout_s: float = STEP_TIMEOUT_S) -> Any:
        assert self._pipe.poll(timeout_s), f"no answer within {timeout_s} s"
        return self._pipe.recv()

    def tell(self, *message: object) -> None:
        self._pipe.send(message)

    def ask(self, *message: object) -> Any:
        self.tell(*message)
        return self.get()

    def end(self) -> None:
        if self.process.is_alive():
            self.tell("end")
            self.process.join(STEP_TIMEOUT_S)
        if self.process.is_alive():
            self.process.kill()


class Cluster:
    """Two replicas and two trainer ranks."""

    def __init__(self, num_replicas: int = 2) -> None:
        self.replicas = [Child(run_replica) for _ in range(num_replicas)]
        endpoints = [replica.get(START_TIMEOUT_S) for replica in self.replicas]
        self._folder = tempfile.TemporaryDirectory()
        rendezvous = f"file://{self._folder.name}/rendezvous"
        self.ranks = [Child(run_trainer_rank, rank, rendezvous, endpoints) for rank in range(NUM_TRAINER_RANKS)]
        self.summaries = [rank.get(START_TIMEOUT_S) for rank in self.ranks]

    def publish(
        self,
        version: int,
        fault: tuple[str, int] | None = None,
        source_error: Exception | None = None,
        exclude: Sequence[int] = (),
    ) -> PublishReport:
        """Publish on all ranks; `fault` is planted on rank 0, `source_error` raised on rank 1."""
        for number, rank in enumerate(self.ranks):
            mine = (fault if number == 0 else None, source_error if number == 1 else None)
            rank.tell("publish", version, *mine, exclude)
        reports = [rank.get() for rank in self.ranks]
        assert all(report == reports[0] for report in reports)
        return reports[0]

    def close(self) -> None:
        for rank in self.ranks:
            rank.tell("end")
        for rank in self.ranks:
            rank.process.join(STEP_TIMEOUT_S)
            rank.process.kill()
        for replica in self.replicas:
            replica.end()
        self._folder.cleanup()


@pytest.fixture(scope="module")
def clusters() -> Iterator[list[Cluster]]:
    """Every cluster of this module; ended together."""
    made: list[Cluster] = []
    yield made
    for cluster in made:
        cluster.close()


@pytest.fixture
def cluster(clusters: list[Cluster]) -> Cluster:
    """The last test's cluster if all of it lives, else another."""
    if not clusters or not all(child.process.is_alive() for child in (*clusters[-1].ranks, *clusters[-1].replicas)):
        clusters.append(Cluster())
    return clusters[-1]


def committed(report: PublishReport) -> list[bool]:
    return [replica.committed for replica in report.replicas]


def test_every_rank_has_the_same_plan(cluster: Cluster) -> None:
    assert cluster.summaries[0] == cluster.summaries[1]
    assert set(cluster.summaries[0].sent_bytes) == {0, 1}
    assert all(cluster.summaries[0].sent_bytes.values())


def test_parameters_zeroed_before_a_publish_are_equal_after(cluster: Cluster) -> None:
    for version in (0, 1):
        for replica in cluster.replicas:
            replica.ask("zero")
        report = cluster.publish(version)
        assert committed(report) == [True, True]
        assert 0 < report.peak_bytes <= report.watermark_bytes
        for replica in cluster.replicas:
            wrong, state = replica.ask("wrong", version)
            assert wrong == []
            assert state.is_serving
            assert state.version == version


@pytest.mark.parametrize("kind", ["flip", "skip", "offset"])
def test_a_planted_error_is_named_and_costs_one_replica(cluster: Cluster, kind: str) -> None:
    assert committed(cluster.publish(2)) == [True, True]
    report = cluster.publish(3, fault=(kind, 1))
    assert committed(report) == [True, False]
    error = report.replicas[1].error or ""
    assert error.startswith("IntegrityError: ")
    assert "version 3" in error
    assert "rank 0" in error
    wrong, state = cluster.replicas[1].ask("wrong", 3)
    assert not state.is_serving
    damaged = [name.removeprefix("0:") for name in wrong if name.startswith("0:") and name != "0:absorbed"]
    assert any(f"{name} (from " in error for name in damaged)
    assert cluster.replicas[0].ask("wrong", 3)[0] == []

    assert committed(cluster.publish(4)) == [True, True]
    assert cluster.replicas[1].ask("wrong", 4)[0] == []


def test_a_rank_that_cannot_read_its_weights_fails_everywhere_and_blocks_nobody(cluster: Cluster) -> None:
    report = cluster.publish(5, source_error=RuntimeError("gather broke"))
    assert committed(report) == [False, False]
    assert "trainer rank 1: RuntimeError: gather broke" in (report.replicas[0].error or "")
    assert committed(cluster.publish(6)) == [True, True]


def test_a_stopped_replica_that_is_excluded_is_not_waited_for_and_may_come_back(cluster: Cluster) -> None:
    assert committed(cluster.publish(0)) == [True, True]
    pid = cluster.replicas[0].process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        for version in (1, 2):
            report = cluster.publish(version, exclude=[0])
            assert committed(report) == [False, True]
            assert report.replicas[0].error == EXCLUDED, "it was not asked"
            assert cluster.replicas[1].ask("wrong", version)[0] == []
    finally:
        os.kill(pid, signal.SIGCONT)
    assert cluster.replicas[0].ask("wrong", 0)[0] == [], "nothing was written to it"
    assert committed(cluster.publish(3)) == [True, True]
    assert cluster.replicas[0].ask("wrong", 3)[0] == []


def test_a_replica_killed_during_a_publish_costs_itself_alone(cluster: Cluster) -> None:
    assert committed(cluster.publish(0)) == [True, True]
    cluster.replicas[0].ask("die_when_written")
    report = cluster.publish(1)
    assert committed(report) == [False, True]
    assert report.replicas[0].error
    assert cluster.replicas[1].ask("wrong", 1)[0] == []
    report = cluster.publish(2)
    assert committed(report) == [False, True]
    assert "is gone" in (report.replicas[0].error or "")
    assert cluster.replicas[1].ask("wrong", 2)[0] == []
