"""Publishes between real processes: two trainer ranks over gloo, replicas, Mooncake over TCP, control over ZMQ.

A `Cluster` is all of them, as children of the test. Faults are real ones: signals to a process in the middle of a
write.
"""

import asyncio
import gc
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import psutil
import torch

from fakes.publish import KEY, NUM_ENGINE_RANKS, DictSource, PlainEngine
from fakes.stopped import stop_process
from slipstream.conf.schema import WeightSyncConfig
from slipstream.weight_sync.errors import WeightSyncError
from slipstream.weight_sync.publish.publisher import Publisher
from slipstream.weight_sync.publish.report import PublishReport
from slipstream.weight_sync.replica.endpoint import ReplicaEndpoint
from slipstream.weight_sync.transport.mooncake import MooncakeTransport

NUM_TRAINER_RANKS = 2
START_TIMEOUT_S = 600
STEP_TIMEOUT_S = 60
SYNC_TIMEOUT_S = 10.0

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch", "fakes.publish", "slipstream.weight_sync.publish.publisher", "slipstream.weight_sync.transport.mooncake"]
)


# ---- what runs in the replica processes ----


def run_replica(timeout_s: float, pipe: Connection) -> None:
    """One replica: an endpoint on an event loop and two engine ranks with plain parameters; the pipe gives orders."""
    torch.set_num_threads(1)
    asyncio.run(_serve(timeout_s, pipe))


async def _serve(timeout_s: float, pipe: Connection) -> None:
    engine = PlainEngine([MooncakeTransport(timeout_s=timeout_s) for _ in range(NUM_ENGINE_RANKS)])
    endpoint = ReplicaEndpoint(engine, KEY)
    versions = _note_versions(engine)
    pipe.send(await endpoint.start())
    while True:
        verb, *args = await asyncio.to_thread(pipe.recv)
        if verb == "wrong":
            pipe.send((engine.wrong_params(args[0]), endpoint.state))
        elif verb == "versions":
            pipe.send(versions)
        elif verb == "resources":
            pipe.send(resources([receiver.transport for receiver in engine.receivers]))
        elif verb == "when_written":
            _when_written(engine, args[0])
            pipe.send(None)
        else:
            await endpoint.close()
            return


def _when_written(engine: PlainEngine, signum: int) -> None:
    """Send this process a signal as soon as a byte of its parameters changes; it gets as far as a proof only later."""
    before = [tensor.clone() for params in engine.params for tensor in params.values()]

    def watch() -> None:
        tensors = [tensor for params in engine.params for tensor in params.values()]
        while all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True)):
            pass
        os.kill(os.getpid(), signum)
        hit.set()

    hit = threading.Event()
    verify = engine.verify

    async def verify_later(*args: Any) -> None:
        await asyncio.to_thread(hit.wait)
        await verify(*args)

    engine.verify = verify_later  # type: ignore[method-assign]
    threading.Thread(target=watch, daemon=True).start()


def _note_versions(engine: PlainEngine) -> list[int]:
    """Every version that the engine commits from now on, in order."""
    versions: list[int] = []
    commit = engine.commit

    async def noting(version: int, epoch: int) -> None:
        await commit(version, epoch)
        versions.append(version)

    engine.commit = noting  # type: ignore[method-assign]
    return versions


def resources(transports: Sequence[Any]) -> dict[str, int]:
    """What this process holds that a publish must not make more of."""
    gc.collect()
    process = psutil.Process()
    return {
        "rss_bytes": process.memory_info().rss,
        "files": process.num_fds(),
        "threads": process.num_threads(),
        "registrations": sum(len(transport._registered) for transport in transports),
    }


# ---- what runs in the trainer processes ----


class FaultyTransport:
    """The real link with one planted fault, on writes to one session's parameter: the first write that meets it.

    die, stop send this process a signal when the first piece has landed. stall stops process `fault_pid`, the
    replica's, before the first piece.
    """

    def __init__(self, inner: MooncakeTransport) -> None:
        self._inner = inner
        self.fault: tuple[str, str] | None = None
        self.fault_pid = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(
        self, session: str, src: Sequence[int], dst: Sequence[int], sizes: Sequence[int], *, timeout_s: float
    ) -> None:
        if self.fault is not None and self.fault[1] == session:
            kind = self.fault[0]
            self.fault = None
            if kind == "stall":
                stop_process(self.fault_pid)
            else:
                self._inner.write(session, src[:1], dst[:1], sizes[:1], timeout_s=timeout_s)
                os.kill(os.getpid(), signal.SIGKILL if kind == "die" else signal.SIGSTOP)
        self._inner.write(session, src, dst, sizes, timeout_s=timeout_s)


def run_trainer_rank(
    rank: int, rendezvous: str, endpoints: list[str], config: WeightSyncConfig, group_timeout_s: float, pipe: Connection
) -> None:
    """One trainer rank: connects, then publishes when told."""
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=NUM_TRAINER_RANKS,
        timeout=timedelta(seconds=group_timeout_s),
    )  # fmt: skip
    transport = FaultyTransport(MooncakeTransport(timeout_s=config.timeout_s))
    source = DictSource(rank, NUM_TRAINER_RANKS)
    publisher = Publisher(
        source,
        transport,  # type: ignore[arg-type]
        rank=rank,
        world_size=NUM_TRAINER_RANKS,
        group=dist.group.WORLD,
        config=config,
        key=KEY,
    )
    pipe.send(publisher.connect(endpoints))
    while True:
        verb, *args = pipe.recv()
        if verb == "publish":
            version, fault = args
            if fault is not None:
                kind, replica, *transport_pid = fault
                transport.fault_pid = transport_pid[0] if transport_pid else 0
                publisher._pipeline.run = _with_fault(publisher._pipeline, transport, kind, replica)  # type: ignore[method-assign]
            try:
                pipe.send(publisher.publish(version))
            except WeightSyncError as e:
                pipe.send(e)
        elif verb == "resources":
            pipe.send(resources([transport]))
        else:
            publisher.close()
            transport.close()
            dist.destroy_process_group()
            return


def _with_fault(pipeline: Any, transport: FaultyTransport, kind: str, replica: int) -> Callable[..., Any]:
    """Pipeline.run that arms the fault for one replica's first engine rank, once the bindings are known."""
    run = type(pipeline).run

    def armed(version: int, bindings: Any, *others: Any) -> Any:
        transport.fault = (kind, bindings[replica, 0].session)
        del pipeline.run
        return run(pipeline, version, bindings, *others)

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

    def signal(self, signum: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signum)


class Cluster:
    """Two replicas and two trainer ranks.

    Args:
        group_timeout_s: Longest wait of a trainer rank for the other one, in one collective.
        config: Of the trainer ranks.
    """

    def __init__(self, *, group_timeout_s: float = 60.0, **config: Any) -> None:
        self._group_timeout_s = group_timeout_s
        self._config = WeightSyncConfig(**{"watermark_bytes": 1 << 16, "timeout_s": SYNC_TIMEOUT_S, **config})
        self.replicas = [Child(run_replica, self._config.timeout_s) for _ in range(2)]
        self._endpoints = [replica.get(START_TIMEOUT_S) for replica in self.replicas]
        self._folder = tempfile.TemporaryDirectory()
        self.start_trainer()

    def start_trainer(self) -> None:
        """Two trainer ranks that know nothing of earlier ones."""
        rendezvous = f"file://{tempfile.mktemp(dir=self._folder.name)}"
        args = (rendezvous, self._endpoints, self._config, self._group_timeout_s)
        self.ranks = [Child(run_trainer_rank, rank, *args) for rank in range(NUM_TRAINER_RANKS)]
        for rank in self.ranks:
            rank.get(START_TIMEOUT_S)

    def end_trainer(self) -> None:
        """SIGKILL to what is left of it."""
        for rank in self.ranks:
            rank.process.kill()
            rank.process.join(STEP_TIMEOUT_S)

    def publish(self, version: int) -> PublishReport:
        for rank in self.ranks:
            rank.tell("publish", version, None)
        reports = [rank.get() for rank in self.ranks]
        assert not any(isinstance(report, Exception) for report in reports), reports
        assert all(report == reports[0] for report in reports)
        return reports[0]

    def close(self) -> None:
        for rank in self.ranks:
            if rank.process.is_alive():
                rank.tell("end")
        for rank in self.ranks:
            rank.process.join(STEP_TIMEOUT_S)
            rank.process.kill()
        for replica in self.replicas:
            replica.end()
        self._folder.cleanup()
