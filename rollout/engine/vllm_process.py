"""The process of a vLLM engine, seen from the one that makes it: how it is started, watched, called and ended.

Owns: vLLM's client (AsyncLLM) and its life, deadlines of calls, and how a death is told. Does not own what vLLM is told
(`engine_options.py`), requests and versions (`vllm_engine.py`), nor the process that has imported vLLM for this one
(`in_vllm/fork_server.py`).

Processes: this one, which imports vLLM; forked from it the EngineCore with the model in it (tp_size=1), or with tp_size
ranks that it forks. vLLM's processes would outlive a parent that is killed. in_vllm/engine_process.py, and before it
whoever forks them (worker_process.py), makes them end with it (`die_with_owner.py`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import multiprocessing
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from slipstream.conf.failures import in_daemon_thread
from slipstream.conf.json_files import JsonObject
from slipstream.conf.schema import Device
from slipstream.rollout.crash_reports import death_of_a_child, how_it_ended
from slipstream.rollout.die_with_owner import OWNER_VARIABLE
from slipstream.rollout.engine.engine_options import (
    METHOD_VARIABLE,
    SOCKETS_VARIABLE,
    architectures_of,
    set_engine_environment,
)
from slipstream.rollout.engine.start_log import IMPORTING, OutputSince, last_error_in, phase_in, why_it_failed
from slipstream.rollout.errors import EngineDied, EngineError
from slipstream.rollout.in_vllm.process_imports import (
    ask_classes_here,
    forks_can_use_gpu,
    import_vllm,
    without_torchao,
)
from slipstream.rollout.in_vllm.vllm_patches import RELEASES, send_logprobs_together, stop_watching
from slipstream.rollout.node_cache import same_path

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

T = TypeVar("T")
WAIT_LOG_S = 30.0
LOOK_EVERY_S = 1.0
"""Pause between two looks at whether the engine still runs, while a call is under way."""
START_LOOK_S = 0.2
"""The same, while the engine starts."""
SHUTDOWN_TIMEOUT_S = 1.0
"""How long the engine's processes get to end after SIGTERM. They hold nothing that must be saved."""


def vllm_arguments(arguments: JsonObject) -> AsyncEngineArgs:
    """Arguments in vLLM's class. Raises EngineError if this vLLM does not know one."""
    import_vllm()
    from vllm.engine.arg_utils import AsyncEngineArgs

    unknown = set(arguments) - {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    if unknown:
        raise EngineError(
            f"this vLLM does not know the engine arguments {', '.join(sorted(unknown))}; "
            f"supported releases are {RELEASES}"
        )
    if arguments["load_format"] == "dummy":
        arguments = {**arguments, "model": str(same_path(Path(arguments["model"])))}
    return AsyncEngineArgs(**arguments)


def make_llm(arguments: JsonObject) -> AsyncLLM:
    """vLLM's engine, started. Its processes are forked from this one, which has imported vLLM, unless it has used a GPU
    or METHOD_VARIABLE says otherwise. Raises: see vllm_arguments()."""
    given = os.environ.get(METHOD_VARIABLE)
    chosen = vllm_arguments(arguments)
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    with without_torchao():
        ask_classes_here(architectures_of(Path(arguments["model"])))
        config = chosen.create_engine_config(UsageContext.ENGINE_CONTEXT)
        with send_logprobs_together(), processes_started_by(given or method_here(), afterwards=given):
            return AsyncLLM.from_vllm_config(config, disable_log_stats=chosen.disable_log_stats)


@contextmanager
def processes_started_by(method: str, *, afterwards: str | None) -> Generator[None]:
    """METHOD_VARIABLE says fork or spawn, and then what it is to say `afterwards`: on CPUs vLLM has set it to spawn."""
    os.environ[METHOD_VARIABLE] = method
    try:
        yield
    finally:
        del os.environ[METHOD_VARIABLE]
        if afterwards is not None:
            os.environ[METHOD_VARIABLE] = afterwards


def method_here() -> str:
    """fork; spawn where no fork could use a GPU."""
    if forks_can_use_gpu():
        return "fork"
    logger.warning("this process has opened a GPU, so that none of its forks can use one: vLLM is imported once more")
    return "spawn"


def gpu_bytes() -> int:
    """Memory of this process's GPU, by the driver's management library: no GPU is opened."""
    import_vllm()
    from vllm.platforms import current_platform

    return current_platform.get_device_total_memory()


class VllmProcess:
    """See the module's docstring. `make` is called with the arguments, which are AsyncEngineArgs'. All methods belong
    to one event loop."""

    def __init__(
        self, arguments: JsonObject, device: Device, *, batch_invariant: bool, make: Callable[[JsonObject], AsyncLLM]
    ) -> None:
        self.arguments = arguments
        """What start() will hand to `make`."""
        self._device = device
        self._batch_invariant = batch_invariant
        self._make = make
        self.llm: AsyncLLM | None = None
        """None: it does not run."""
        self.children: list[BaseProcess] = []
        """The engine's processes, of those that this one has started."""
        self._sockets: tempfile.TemporaryDirectory[str] | None = None
        """Folder for the sockets between vLLM's processes. vLLM does not remove them, and would leave them in /tmp."""
        self._output: OutputSince | None = None
        """What the engine's processes have written since they were started."""
        self._death: asyncio.Future[EngineError] | None = None
        """Done when the engine is gone; one watches for all requests. None: nobody has asked yet."""
        self._reported = ""
        """How one of the engine's processes died, at the last look."""
        self._hangs = False
        """Whether a call passed its deadline. From then on it is unknown what the engine's ranks hold."""

    @property
    def start_phase(self) -> str:
        """What start() is doing."""
        return IMPORTING if self._output is None else phase_in(self._output.read())

    async def prepare(self) -> None:
        """Import vLLM, in the environment that the engine needs."""
        self._set_environment()
        await asyncio.to_thread(import_vllm)

    async def start(self) -> None:
        """Start the engine's processes. Raises EngineError if vLLM refused an argument or failed to come up, or if one
        of them has died: vLLM waits minutes for one that dies between two of its messages."""
        self._set_environment()
        others, started = set(multiprocessing.active_children()), set[BaseProcess]()
        # In a thread, so that the event loop goes on, and vLLM's output handler starts only at the first request.
        building = asyncio.wrap_future(in_daemon_thread(self._build))
        while not building.done():
            await asyncio.wait([building], timeout=START_LOOK_S)
            started.update(multiprocessing.active_children())
            dead = [child for child in started - others if child.exitcode]
            if dead and not (await asyncio.wait([building], timeout=LOOK_EVERY_S))[0]:  # vLLM knows no more
                raise EngineError(f"the engine did not start: its process {self._how_they_died(dead)}")
        await building

    def _set_environment(self) -> None:
        set_engine_environment(self._device, batch_invariant=self._batch_invariant)
        os.environ[OWNER_VARIABLE] = str(os.getpid())

    def _build(self) -> None:
        own = SOCKETS_VARIABLE not in os.environ
        if own:
            self._sockets = tempfile.TemporaryDirectory(prefix="vllm-")
            os.environ[SOCKETS_VARIABLE] = self._sockets.name
        self._output = output = OutputSince()
        others = multiprocessing.active_children()
        try:
            self.llm = self._make(self.arguments)  # no local: libraries that keep a frame of the start would keep it
        except Exception as e:  # the edge to vLLM: pydantic, ValueError, RuntimeError, EngineDeadError
            self._drop_sockets()
            if isinstance(e, EngineError):
                raise
            how = death_of_a_child()
            why = f"its process {how}" if how else why_it_failed(e, output.read())
            raise EngineError(f"the engine did not start: {why}") from e
        finally:
            self.children = [child for child in multiprocessing.active_children() if child not in others]
            if own:  # the next engine of this process makes a folder of its own
                del os.environ[SOCKETS_VARIABLE]

    def running(self) -> AsyncLLM:
        """vLLM's client. Raises EngineError (EngineDied) if there is none that answers."""
        if self.llm is None:
            raise EngineError("the engine is not running")
        if self.llm.errored:
            raise self.death()
        if self._hangs:
            raise EngineDied("the engine left a call unanswered; this rollout worker must be restarted")
        return self.llm

    def check(self) -> None:
        """Raise EngineDied if one of the engine's processes has ended, or a call was left unanswered. A process that a
        signal ends may hang in a library's handler, after ours has written its report: if two looks find the same
        report, it has ended."""
        if self.llm is not None:
            before, self._reported = self._reported, death_of_a_child()
            is_reported = bool(before) and before == self._reported
            if is_reported or any(process.exitcode is not None for process in self.children):
                raise self.death()
        self.running()

    async def in_time(self, call: Awaitable[T], what: str, timeout_s: float) -> T:
        """The call's result. If it does not come in time, the engine takes no further calls."""
        try:
            return await self.within(call, what, timeout_s)
        except TimeoutError as e:
            self._hangs = True
            raise EngineDied(
                f"the engine did not answer {what} within {timeout_s:g} s: a rank of it hangs; this rollout worker must"
                " be restarted"
            ) from e

    async def within(self, call: Awaitable[T], what: str, timeout_s: float) -> T:
        """Return the call's result, or raise TimeoutError, or EngineDied if the engine died meanwhile: vLLM leaves
        calls under way unanswered then. Logs every WAIT_LOG_S what it waits for."""
        task, began, logged_s = asyncio.ensure_future(call), time.monotonic(), 0.0
        try:
            while (left_s := began + timeout_s - time.monotonic()) > 0:
                done, _ = await asyncio.wait([task], timeout=min(LOOK_EVERY_S, left_s))
                if done:
                    return task.result()
                self.check()
                waited_s = time.monotonic() - began
                if waited_s - logged_s >= WAIT_LOG_S:
                    logged_s = waited_s
                    logger.warning("waited %.0f s of at most %g s for the engine's %s", waited_s, timeout_s, what)
        finally:
            task.cancel()
        raise TimeoutError

    async def or_death(self, call: Awaitable[T]) -> T:
        """The call's result, however long it takes. Raises EngineDied if the engine dies meanwhile: vLLM tells that to
        requests, but not where it dies before their first output."""
        if self._death is None or self._death.done():
            self._death = asyncio.ensure_future(self._dies())
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait([task, self._death], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self._death.result()
            return task.result()
        finally:
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody else asks for it
            task.cancel()

    async def _dies(self) -> EngineError:
        """Wait until the engine is gone; how."""
        while True:
            try:
                self.check()
            except EngineError as e:
                return e
            await asyncio.sleep(LOOK_EVERY_S)

    def death(self) -> EngineDied:
        """The engine's process is gone: how, if that is known, and unless by a signal with the last error it wrote."""
        return EngineDied(
            f"the engine's process {self._how_they_died(self.children)}; this rollout worker must be restarted"
        )

    def _how_they_died(self, processes: Sequence[BaseProcess]) -> str:
        codes = [code for process in processes if (code := process.exitcode) is not None]
        how = death_of_a_child() or (how_it_ended(codes[0]) if codes else "died")
        by_signal = any(code < 0 for code in codes)
        said = "" if by_signal or self._output is None else last_error_in(self._output.read())
        return f"{how}; its last error: {said}" if said else how

    def last_output(self, request_id: str) -> Any:
        """The output that vLLM's client holds of a request of an engine that is gone, as if the request had been
        aborted. None if it holds none."""
        if self.llm is None:
            return None
        processor: Any = self.llm.output_processor
        if not processor.external_req_ids.get(request_id):
            return None
        queue = processor.request_states[processor.external_req_ids[request_id][0]].queue
        processor.abort_requests([request_id], internal=False)
        return queue.get_nowait()

    def shutdown(self) -> None:
        """End the engine's processes. Idempotent."""
        if self.llm is not None:
            stop_watching(self.llm)
            self.llm.shutdown(timeout=SHUTDOWN_TIMEOUT_S)
            self.llm = None
            self._drop_sockets()

    def _drop_sockets(self) -> None:
        if self._sockets is not None:
            self._sockets.cleanup()
            self._sockets = None
