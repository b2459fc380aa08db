"""Imports vLLM for an engine's process while the rollout worker imports it for itself.

    rollout worker        begin()   imports vLLM      builds the config   fork_engine(): EngineCore ----+
                             |                                                                         |
    fork server              +----> preload.py: imports vLLM, then waits --> forks what looks at the   +--> forks it
                                                                             model's class

Without this, vLLM spawns the EngineCore process after the worker's own import, and it imports all of it again: 16 s of
a start on a host with GPUs, one after the other; and so does the process that imports the class of a model which vLLM
meets for the first time on this node. The server is one of multiprocessing's, but not the one that every other user of
"forkserver" in this process shares. It runs no kernel and never opens a GPU, so that what is forked from it may.

Later engines of the process are forked from the same server, as long as the variables that imports read (IMPORTS_READ)
are what they were when the first one was forked.

Owns: that server, and the processes that vLLM gets from it. Does not own: the workers of an engine with
tp_size > 1, which their EngineCore spawns (process_imports.py).
Invariant: the EngineCore has the environment that a spawned one would have, as it was when vLLM asked for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Generator
from importlib import import_module
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any, TypeVar

from rollout.in_vllm.vllm_patches import inspect_models_by, make_processes_in

T = TypeVar("T")
logger = logging.getLogger(__name__)

PRELOAD = "rollout.in_vllm.preload"
PRELOAD_TIMEOUT_S = 300.0
"""Longest wait until the server has imported vLLM."""
IMPORTS_READ = (
    "PYTHON", "LD_", "VLLM_", "TORCH", "PYTORCH_", "TRITON_", "CUDA_", "NVIDIA_", "NCCL_", "HF_", "TRANSFORMERS_",
    "OMP_", "MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_", "ATEN_",
)  # fmt: skip
"""Beginnings of the names of variables that Python, vLLM or its libraries may read while they are imported."""
OF_ONE_ENGINE = "VLLM_RPC_BASE_PATH"
"""The one among them that each engine has of its own: its folder of sockets."""
_USABLE, _NOT_IMPORTED, _NO_GPU = range(3)
"""What the server's children find in it."""
_server = forkserver.ForkServer()
_is_begun = False
_in_use = threading.Lock()
_imported_under: dict[str, str] | None = None
"""Variables that imports read, when the first engine was forked; None before."""


def begin() -> None:
    """Start the fork server of this process. Call it with the first engine's environment set, before vLLM is imported
    here. Later calls do nothing.
    """
    global _is_begun
    if not _is_begun:
        _is_begun = True
        _server.set_forkserver_preload([PRELOAD])
        _server.ensure_running()


@contextlib.contextmanager
def fork_engine() -> Generator[None]:
    """While the block runs, vLLM forks its EngineCore from the server. Without begin(), while another thread is in such
    a block, and where the server cannot be used, the block changes nothing: vLLM spawns it.
    """
    global _imported_under
    if not _is_begun or not _in_use.acquire(blocking=False):
        yield
        return
    try:
        context = EngineContext()
        if why := _why_not(context):
            logger.warning("no fork server (%s): vLLM is imported once more", why)
            yield
            return
        with make_processes_in(context), inspect_models_by(call_in_fork):
            yield
        if _imported_under is None:
            _imported_under = _read_by_imports()  # vLLM has set some of them
    finally:
        _in_use.release()


def _read_by_imports() -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if name.startswith(IMPORTS_READ) and name != OF_ONE_ENGINE
    }


def _why_not(context: EngineContext) -> str:
    """Why the server cannot be used; empty if it can."""
    if _imported_under is not None and (changed := _imported_under.items() ^ _read_by_imports().items()):
        return f"changed since the first engine: {', '.join(sorted({name for name, _ in changed}))}"
    found = _state_of_server(context)
    if found == _USABLE:
        return ""
    why = {_NOT_IMPORTED: "it has not imported vLLM", _NO_GPU: "what it forks cannot use the GPU"}
    return why.get(found, f"it ended with {found}")


def _state_of_server(context: EngineContext) -> int:
    """Fork a process that tries what an EngineCore will do. It waits until the server has imported vLLM."""
    process = context.Process(target=_look)
    process.start()
    process.join(PRELOAD_TIMEOUT_S)
    return _NOT_IMPORTED if process.exitcode is None else process.exitcode


def _look() -> None:
    """In the forked process."""
    if PRELOAD not in sys.modules:
        sys.exit(_NOT_IMPORTED)
    torch = import_module("torch")
    try:
        if torch.cuda.device_count():
            torch.ones(1, device="cuda").item()
    except RuntimeError:  # an import of the server has opened a GPU: CUDA cannot be used in what it forks
        sys.exit(_NO_GPU)
    sys.exit(_USABLE)


def call_in_fork(function: Callable[[], T]) -> T:
    """Call a function, which cloudpickle can pickle, in a process forked from the server.

    Raises:
        RuntimeError: The function raised there, or its process ended without a result.
    """
    cloudpickle = import_module("cloudpickle")
    context = EngineContext()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(cloudpickle.dumps(function), sender))
    process.start()
    sender.close()
    try:
        result, error = cloudpickle.loads(receiver.recv_bytes())
    except EOFError:
        process.join()
        raise RuntimeError(f"a process of the fork server ended with exit code {process.exitcode}") from None
    finally:
        receiver.close()
    process.join()
    if error is not None:
        raise RuntimeError(f"in a process of the fork server: {error}")
    return result


def _call(pickled: bytes, sender: Connection) -> None:
    """In the forked process."""
    cloudpickle = import_module("cloudpickle")
    try:
        answer = (cloudpickle.loads(pickled)(), None)
    except Exception as error:  # noqa: BLE001 - raised by call_in_fork()
        answer = (None, f"{type(error).__name__}: {error}")
    sender.send_bytes(cloudpickle.dumps(answer))


class _Popen(popen_forkserver.Popen):
    """Asks our server for the process."""

    _asking = threading.Lock()

    def _launch(self, process_obj: Any) -> None:
        shared = forkserver.connect_to_new_process
        with self._asking:
            forkserver.connect_to_new_process = _server.connect_to_new_process
            try:
                super()._launch(process_obj)  # pyright: ignore[reportAttributeAccessIssue]
            finally:
                forkserver.connect_to_new_process = shared


class _Process(ForkServerProcess):
    """A process with the environment in which it was made. (A fork server's children have the server's.)"""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._environment = dict(os.environ)

    @staticmethod
    def _Popen(process_obj: Any) -> _Popen:
        return _Popen(process_obj)

    def run(self) -> None:
        """Called in the forked process."""
        for name in os.environ.keys() - self._environment.keys():
            del os.environ[name]
        # Only what differs: setproctitle looks for the strings with which the process began.
        os.environ.update({name: value for name, value in self._environment.items() if os.environ.get(name) != value})
        super().run()


class EngineContext(ForkServerContext):
    """What vLLM makes its EngineCore in."""

    Process = _Process  # type: ignore[assignment]
