"""A rollout worker in a process of its own, and the calls that reach it there.

    process of the caller                                     worker process, one event loop
      WorkerProcess.start()  ------ forks or spawns it ---->  RolloutWorker(options)
      call("generate_group", ...) --(number, name, args)--->  worker.generate_group(...)
                             <--(number, error, result)-----

Why not the caller's own process: a process that has not imported vLLM takes 6 to 15 s of a core to do so. This one is
forked from the fork server that the caller has joined (in_vllm/fork_server.py), in which all of it is imported. Where
there is none, or where it cannot be used, the process is spawned and imports vLLM itself.

Owns: that process, its end, and calls. Does not own: what is called (worker.py), the server, or Ray.
Invariant: the two processes end together. A caller that dies ends the worker, whatever that is doing; when the worker
dies, the caller is told.
Messages are pickles, on a pipe of multiprocessing that only these two processes have.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import inspect
import itertools
import logging
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.errors import SlipstreamError
from rollout.crash_reports import death_in, how_it_ended, report_crashes
from rollout.die_with_owner import end_with
from rollout.errors import EngineDied
from rollout.in_vllm import fork_server
from rollout.in_vllm.process_imports import come_first

if TYPE_CHECKING:
    from conf.schema import Device, DType, RolloutConfig, WeightSyncConfig
    from rollout.types import AdapterSlotsSpec, RoutingShape
    from weight_sync.layout import TensorMeta

logger = logging.getLogger(__name__)

PRELOAD = "rollout.worker"
"""What the server of workers imports beside vLLM."""
END_TIMEOUT_S = 1.0
"""Longest wait for the exit code of a process that has closed its end of the pipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What every rollout worker of a run is built from (rollout.worker.RolloutWorker has the meanings)."""

    folder: Path
    config: RolloutConfig
    weight_sync: WeightSyncConfig
    dtype: DType
    device: Device
    tensors: Sequence[TensorMeta]
    key: bytes
    adapters: AdapterSlotsSpec | None
    routing: RoutingShape | None
    keep_special_tokens: bool
    batch_invariant: bool


class WorkerProcess:
    """See the module's docstring. All methods belong to one event loop.

    Args:
        process: Started.
        connection: Our end of its pipe.
        on_end: Called once in the event loop when the process has ended, or has closed its end of the pipe.
        report: See start().
    """

    def __init__(
        self, process: BaseProcess, connection: Connection, on_end: Callable[[], object], report: Path | None
    ) -> None:
        self._report = report
        self._process = process
        self._connection = connection
        self._on_end = on_end
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._has_ended = False
        self._loop = asyncio.get_running_loop()
        # A thread, because a pipe's messages are read whole: neither end ever waits for the other one to read.
        threading.Thread(target=self._read, name="results of the rollout worker", daemon=True).start()

    @classmethod
    async def start(
        cls,
        options: WorkerOptions,
        *,
        seed: int,
        host: str,
        name: str,
        on_end: Callable[[], object],
        report: Path | None = None,
    ) -> WorkerProcess:
        """Start the process, in this one's environment and with its output. Blocks until the fork server is ready.

        Args:
            options: What the worker is built from.
            seed: This worker's.
            host: Address at which trainer ranks reach this worker.
            name: In its log.
            on_end: See the class.
            report: Where it leaves a word when it dies of a signal (crash_reports.py); None: nowhere.
        """
        process, connection = await asyncio.to_thread(_start, (options, seed, host, name, report))
        return cls(process, connection, on_end, report)

    async def call(self, name: str, *args: object) -> Any:
        """Call a method of the worker, or read an attribute.

        Raises:
            SlipstreamError: The method's own error.
            RuntimeError: Any other error of the method, as text.
            EngineDied: The process has ended.
        """
        if self._has_ended:
            raise self._death()
        number = next(self._numbers)
        result = self._calls[number] = self._loop.create_future()
        try:
            self._connection.send((number, name, args))
        except OSError:
            raise self._death() from None
        return await result

    def _read(self) -> None:
        """In the thread."""
        try:
            while True:
                self._loop.call_soon_threadsafe(self._settle, *self._connection.recv())
        except (EOFError, OSError):
            pass
        except Exception:  # what cannot be read answers some call, which would wait for ever
            logger.exception("the rollout worker is given up: its answer cannot be read")
        self._process.join(END_TIMEOUT_S)  # so that it is known how it ended
        self._loop.call_soon_threadsafe(self._end)

    def _settle(self, number: int, error: BaseException | None, result: object) -> None:
        call = self._calls.pop(number)
        if call.done():  # whoever waited has given up
            return
        if error is None:
            call.set_result(result)
        else:
            call.set_exception(error)

    def _end(self) -> None:
        self._has_ended = True
        for call in self._calls.values():
            if not call.done():
                call.set_exception(self._death())
        self._calls.clear()
        self._on_end()

    def _death(self) -> EngineDied:
        how = death_in(self._report) if self._report is not None else ""
        how = how or how_it_ended(self._process.exitcode)
        return EngineDied(f"process {self._process.pid} of the rollout worker {how}")


def _start(arguments: tuple[Any, ...]) -> tuple[BaseProcess, Connection]:
    """In a thread: waits until the fork server has imported vLLM."""
    context: BaseContext = fork_server.ForkContext()
    if why := fork_server.why_not(imported_as_here=True):
        logger.warning("no fork server (%s): the rollout worker imports vLLM itself", why)
        context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process: BaseProcess = context.Process(target=_work, args=(theirs, os.getpid(), *arguments))  # pyright: ignore[reportAttributeAccessIssue]
    with come_first():
        process.start()
    theirs.close()
    atexit.register(process.kill)  # multiprocessing would wait for its end, and it for ours
    return process, ours


def _work(
    connection: Connection,
    owner_pid: int,
    options: WorkerOptions,
    seed: int,
    host: str,
    name: str,
    report: Path | None,
) -> None:
    """In the worker's process."""
    from setproctitle import setproctitle

    setproctitle(f"slipstream::{name}")
    end_with(owner_pid)
    log_to_stderr(name)
    if report is not None:
        report_crashes(report)
    asyncio.run(_answer(connection, options, seed, host))
    os._exit(0)  # the caller is gone; vLLM's clean-up at a normal exit has nobody to talk to


def log_to_stderr(name: str) -> None:
    """Write the log of this process to stderr, which Ray keeps in a file for each actor."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s %(levelname).1s [{name}] %(name)s: %(message)s")


async def _answer(connection: Connection, options: WorkerOptions, seed: int, host: str) -> None:
    """Make the worker at the first call, and answer until the caller closes its end of the pipe."""
    loop = asyncio.get_running_loop()
    calls: asyncio.Queue[tuple[int, str, tuple[Any, ...]] | None] = asyncio.Queue()

    def read() -> None:
        try:
            while True:
                loop.call_soon_threadsafe(calls.put_nowait, connection.recv())
        except (EOFError, OSError):
            loop.call_soon_threadsafe(calls.put_nowait, None)

    threading.Thread(target=read, name="calls of the rollout worker", daemon=True).start()
    worker: Any = None
    under_way: set[asyncio.Task[None]] = set()

    async def answer(number: int, name: str, args: tuple[Any, ...]) -> None:
        nonlocal worker
        try:
            if worker is None:
                worker = _make(options, seed, host)
            found = getattr(worker, name)
            result = found(*args) if callable(found) else found
            reply = pickle.dumps((number, None, await result if inspect.isawaitable(result) else result))
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - raised by call()
            reply = pickle.dumps((number, _as_sent(error, name), None))
        with contextlib.suppress(OSError):  # the caller is gone
            connection.send_bytes(reply)

    while (call := await calls.get()) is not None:
        task = asyncio.create_task(answer(*call))
        under_way.add(task)
        task.add_done_callback(under_way.discard)


def _make(options: WorkerOptions, seed: int, host: str) -> Any:
    from rollout.worker import RolloutWorker

    return RolloutWorker(
        options.folder,
        config=options.config,
        weight_sync=options.weight_sync,
        dtype=options.dtype,
        device=options.device,
        seed=seed,
        tensors=options.tensors,
        key=options.key,
        host=host,
        adapters=options.adapters,
        routing=options.routing,
        keep_special_tokens=options.keep_special_tokens,
        batch_invariant=options.batch_invariant,
    )


def _as_sent(error: BaseException, name: str) -> BaseException:
    """The error that the other process raises: ours as it is; of others the text, for they may not survive a pipe."""
    if isinstance(error, SlipstreamError):
        return error
    logger.error("%s failed", name, exc_info=error)
    return RuntimeError(f"{type(error).__name__}: {error}")
