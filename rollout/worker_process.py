"""A rollout worker in a process of its own, which answers calls on a socket (weight_sync/calls).

    process of the owner                                     worker process, one event loop
      WorkerProcess.start()  ---- forks or starts it ---->
                             ---- Beginning ------------->   RolloutWorker(options), CallServer
                             <--- address, or an error ---
      ended()                <--- end of the connection --

It is forked from the fork server that the owner has joined (in_vllm/fork_server.py), in which all of vLLM is imported,
and the engine's process from this one. Where there is none, or where it cannot be used, both are started and import
vLLM, 6 to 15 s of a core.
Owns: that process and its end.
Invariant: the two processes end together. An owner that dies ends the worker, whatever that is doing; when the worker
dies, the owner is told. The connection between them (rollout/channel.py) carries one message each way.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import signal
import socket
import subprocess
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from slipstream.conf.errors import SlipstreamError, named_error
from slipstream.conf.schema import Device, RolloutConfig
from slipstream.rollout.channel import BlockingChannel, Channel, Disconnected
from slipstream.rollout.crash_reports import death_in, how_it_ended, report_crashes
from slipstream.rollout.die_with_owner import end_with
from slipstream.rollout.engine.engine_options import METHOD_VARIABLE
from slipstream.rollout.errors import EngineDied
from slipstream.rollout.in_vllm import fork_server
from slipstream.rollout.notice import tell_of_notice
from slipstream.rollout.types import WorkerOptions
from slipstream.rollout.worker_verbs import WorkerVerbs
from slipstream.weight_sync.calls.server import CallServer
from slipstream.weight_sync.typed_msgpack import pack, unpack

logger = logging.getLogger(__name__)

PRELOAD = "slipstream.rollout.worker"
"""What the server of workers imports beside vLLM."""
END_TIMEOUT_S = 1.0
"""Longest wait for the exit code of a process that has closed its end of the connection."""
MAIN = f"{__name__}:main"
READY = "ready"
"""Before the worker's address; in its place, the name of an error's class, with its text."""
Process = fork_server.Forked | subprocess.Popen[bytes]


@dataclass(frozen=True, slots=True)
class Beginning:
    """What the worker's process is told first. See WorkerProcess.start()."""

    owner_pid: int
    options: WorkerOptions
    seed: int
    host: str
    name: str
    report: Path | None


class WorkerProcess:
    """See the module's docstring. All methods belong to one event loop."""

    def __init__(self, address: str, process: Process, channel: Channel, report: Path | None) -> None:
        self.address = address
        self._process = process
        self._report = report
        self._ended = asyncio.get_running_loop().create_task(_end_of(process, channel))

    @classmethod
    async def start(
        cls, options: WorkerOptions, *, seed: int, host: str, name: str, report: Path | None = None
    ) -> WorkerProcess:
        """Start the process, in this one's environment and with its output, and wait until it has its imports.

        Args:
            host: Address at which trainer ranks and the controller reach this worker.
            name: In its log.
            report: Where it leaves a word when it dies of a signal (crash_reports.py); None: nowhere.

        Raises:
            SlipstreamError: The worker cannot be made, or (EngineDied) the process has ended.
        """
        ours, process = await asyncio.to_thread(_start)
        channel = await Channel.over(ours)
        channel.send(pack(Beginning(os.getpid(), options, seed, host, name, report)))
        try:
            said, text = await channel.receive()
        except Disconnected:
            await _end_of(process, channel)
            raise _death(process, report) from None
        if said != READY:
            raise (named_error(said, SlipstreamError) or RuntimeError)(text)
        return cls(text, process, channel, report)

    async def ended(self) -> EngineDied:
        await asyncio.shield(self._ended)
        return _death(self._process, self._report)


async def _end_of(process: Process, channel: Channel) -> None:
    """Wait for the end of a process, which closes its end of the connection."""
    with contextlib.suppress(Disconnected):
        await channel.receive()
    with contextlib.suppress(subprocess.TimeoutExpired):
        await asyncio.to_thread(process.wait, END_TIMEOUT_S)  # so that it is known how it ended


def _death(process: Process, report: Path | None) -> EngineDied:
    how = (death_in(report) if report is not None else "") or how_it_ended(process.returncode)
    return EngineDied(f"process {process.pid} of the rollout worker {how}")


def _start() -> tuple[socket.socket, Process]:
    """Start the process. Call it in a thread: it waits until the fork server has imported vLLM."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process: Process = fork_server.fork(MAIN, theirs)
        except fork_server.CannotFork as why:
            logger.warning("no fork server (%s): the rollout worker and its engine import vLLM themselves", why)
            os.environ.setdefault(METHOD_VARIABLE, "spawn")  # what keeps the server from forking keeps the worker, too
            descriptor = theirs.fileno()
            process = subprocess.Popen(fork_server.python_calls(MAIN, descriptor), pass_fds=(descriptor,))
    atexit.register(process.kill)
    return ours, process


def main(descriptor: int) -> None:
    from setproctitle import setproctitle

    os.set_inheritable(descriptor, False)
    connection = socket.socket(fileno=descriptor)
    begin = unpack(Beginning, BlockingChannel(connection).receive())
    setproctitle(f"slipstream::{begin.name}")
    end_with(begin.owner_pid)
    os.register_at_fork(after_in_child=partial(_be_forked, os.getpid(), connection))
    log_to_stderr(begin.name)
    if begin.report is not None:
        report_crashes(begin.report)
    asyncio.run(_serve(connection, begin.options, begin.seed, begin.host))
    os._exit(0)  # the owner is gone; vLLM's clean-up at a normal exit has nobody to talk to


def _be_forked(worker_pid: int, connection: socket.socket) -> None:
    """Runs in the process that the worker forks for its engine, which ends with the worker from now on.
    in_vllm/engine_process.py sees to that once vLLM imports it; until then the engine's process would wait minutes for
    a worker that is gone, and hold its sockets. A signal to this process must not reach the worker's event loop."""
    connection.close()
    end_with(worker_pid)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def log_to_stderr(name: str) -> None:
    """Write the log of this process to stderr, which Ray keeps in a file for each actor."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s %(levelname).1s [{name}] %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # at INFO it has a line for every request


async def _serve(connection: socket.socket, options: WorkerOptions, seed: int, host: str) -> None:
    """Make the worker, tell where it answers, and answer until the owner closes its end of the connection. SIGTERM
    tells it to go, or a notice (notice.py), which its run does with it (fleet/scaling.py)."""
    channel = await Channel.over(connection)
    try:
        from slipstream.rollout.engine.vllm_engine import VllmEngine
        from slipstream.rollout.worker import RolloutWorker

        mine = replace(options, config=with_its_share(options))
        worker = RolloutWorker(mine, seed=seed, host=host, make_engine=VllmEngine)
        server = CallServer(worker, WorkerVerbs, options.key, host=host, another_came=worker.kept.hand_on)
        await server.start()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.tell_to_go, "SIGTERM")
        notice = options.config.notice
        watching = None if notice is None else asyncio.create_task(tell_of_notice(notice, worker.tell_to_go))
    except Exception as error:  # raised by start() in the owner's process
        name, text = type(error).__name__, str(error)
        if not isinstance(error, SlipstreamError):
            logger.exception("the rollout worker cannot be made")
            text = f"{name}: {text}"
        channel.send([name, text])
        return
    channel.send([READY, server.address])
    with contextlib.suppress(Disconnected):
        await channel.receive()
    if watching is not None:
        watching.cancel()


def with_its_share(options: WorkerOptions) -> RolloutConfig:
    """The worker's config; with the size of its KV cache, if the engine shares a GPU."""
    config = options.config
    if options.device != Device.cuda or config.workers_per_gpu == 1 or config.kv_cache_bytes is not None:
        return config
    from slipstream.rollout.engine.engine_options import cache_bytes
    from slipstream.rollout.engine.vllm_process import gpu_bytes

    return replace(config, kv_cache_bytes=cache_bytes(config, options.tensors, options.adapters, gpu_bytes()))
