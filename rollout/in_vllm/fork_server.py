"""Imports vLLM once for many processes: a server that has imported it forks them.

    a node of a run (orchestrator/cluster)

    ray_host.py       begin_beforehand()  beside Ray's start
    ForkServerActor   begin_as()   that one, or one of its own
    RolloutActor      join()       it forks the worker's process, of which vLLM forks the engine's (vllm_process.py)

Without it, each worker imports all of vLLM: 15 s of its start on a host with GPUs. The server is one of
multiprocessing's, but not the one that every other user of "forkserver" in this process shares. It runs no kernel and
never opens a GPU, so that what is forked from it may.

Processes are forked as long as the variables that imports read (IMPORTS_READ) are what they were when the server
imported. Where they are not, and where the server is gone, why_not() says so and the process that is asked for imports
vLLM itself.

Owns: these servers, and the processes that they fork. Does not own: when a run has a server (orchestrator/cluster).
Invariant: a forked process has the environment and the output of the process that asked for it, and the variables that
vLLM's imports have set, as a spawned one would.
"""

import contextlib
import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing import forkserver, popen_forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.reduction import DupFd
from typing import Any

import psutil

from slipstream.rollout.crash_reports import report_beside_parent
from slipstream.rollout.die_with_owner import OWNER_VARIABLE
from slipstream.rollout.in_vllm.process_imports import can_use_gpu

PRELOAD = "slipstream.rollout.in_vllm.preload"
PRELOAD_TIMEOUT_S = 300.0
"""Longest wait for the answer of a forked process."""
IMPORTS_READ = (
    "PYTHON", "LD_", "VLLM_", "TORCH", "PYTORCH_", "TRITON_", "CUDA_", "NVIDIA_", "NCCL_", "HF_", "TRANSFORMERS_",
    "OMP_", "MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_", "ATEN_",
)  # fmt: skip
"""Beginnings of the names of variables that Python, vLLM or its libraries may read while they are imported."""
OF_ONE_PROCESS = ("VLLM_RPC_BASE_PATH", "CUDA_VISIBLE_DEVICES", "PYTHONBREAKPOINT")
"""Those among them that may differ: the folder of sockets and the GPUs of a worker or engine, and what Ray sets."""
BEGUN_VARIABLE = "SLIPSTREAM_FORK_SERVER"
"""Environment variable with pid and address of a server that was begun beforehand, and the variables that its imports
read, as JSON; not an option."""


class _Server(forkserver.ForkServer):
    """The server of this process: its own, or another process's."""

    _forkserver_address: str | None
    _forkserver_alive_fd: int | None
    _forkserver_pid: int | None

    def __init__(self) -> None:
        super().__init__()
        self._is_own = True
        self.is_known = False

    def begin(self, modules: Sequence[str]) -> None:
        self.is_known = True
        self.set_forkserver_preload(list(modules))
        self.ensure_running()

    def join(self, address: str, alive_fd: int) -> None:
        """Use another process's."""
        self.is_known, self._is_own = True, False
        self._forkserver_address, self._forkserver_alive_fd = address, alive_fd

    @property
    def pid(self) -> int:
        """Its process, of one that begin() has started."""
        assert self._forkserver_pid is not None, "begin() comes first"
        return self._forkserver_pid

    @property
    def address(self) -> str:
        """Where it listens: a socket, which processes of this user can connect to."""
        assert self._forkserver_address is not None, "begin() comes first"
        return self._forkserver_address

    def ensure_running(self) -> None:
        if self._is_own:
            super().ensure_running()
        else:
            resource_tracker.ensure_running()


_server = _Server()


def begin(also: Sequence[str] = ()) -> None:
    """Start this process's fork server, which ends with it. Call it with the environment of the engines set, before
    vLLM is imported here. Does nothing in a process that has a server.

    Args:
        also: Modules to import after vLLM.
    """
    if not _server.is_known:
        os.environ[OWNER_VARIABLE] = str(os.getpid())
        _server.begin([PRELOAD, *also])


def begin_beforehand(environment: Mapping[str, str], also: Sequence[str] = ()) -> None:
    """As begin(), for processes that this one will start and whose environment is known (imports_read()). They find
    the server by their environment (begin_as()). Does nothing where this process's own environment names one for them.
    """
    if _begun_beforehand(environment):
        return
    here = dict(os.environ)
    _set_imports_read(environment)
    try:
        begin(also)
    finally:
        os.environ.clear()
        os.environ.update(here)
    os.environ[BEGUN_VARIABLE] = json.dumps([_server.pid, _server.address, _comparable(environment)])


def begin_as(environment: Mapping[str, str], also: Sequence[str] = ()) -> str:
    """As begin(), in another process's environment (imports_read()), unless there is a server that was begun beforehand
    for it. If the server has died, another one is begun.

    Returns:
        The server's address, for join().
    """
    if _server.is_known:
        _server.ensure_running()
        return _server.address
    if address := _begun_beforehand(environment):
        return address
    _set_imports_read(environment)
    begin(also)
    return _server.address


def _begun_beforehand(environment: Mapping[str, str]) -> str:
    """Address of the server that this process's environment names, if it runs and imported under that one; or empty."""
    begun = os.environ.get(BEGUN_VARIABLE)
    if not begun:
        return ""
    pid, address, read = json.loads(begun)
    return address if read == _comparable(environment) and _runs(pid) else ""


def _set_imports_read(environment: Mapping[str, str]) -> None:
    for name in imports_read(os.environ).keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


def _runs(pid: int) -> bool:
    """Whether the server does; one that was killed may wait for its parent to notice."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def join(address: str) -> None:
    """Fork this process's engines, or other processes, from a server that another process has begun."""
    _server.join(address, os.open(os.devnull, os.O_RDONLY))


def imports_read(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that imports may read."""
    return {name: value for name, value in environment.items() if name.startswith(IMPORTS_READ)}


def _comparable(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in imports_read(environment).items() if name not in OF_ONE_PROCESS}


def why_not() -> str:
    """Why the server cannot be used for processes of this one, which has not imported vLLM; empty if it can. Waits
    until it has imported vLLM.
    """
    if not _server.is_known:
        return "there is none"
    context = ForkContext()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_look, args=(_comparable(os.environ), sender))
    try:
        process.start()
    except (OSError, EOFError) as error:
        receiver.close()
        return f"the fork server is gone ({type(error).__name__})"
    finally:
        sender.close()
    try:
        if not receiver.poll(PRELOAD_TIMEOUT_S):
            process.kill()
            return f"a process of the fork server did not answer within {PRELOAD_TIMEOUT_S:g} s"
        return receiver.recv()
    except EOFError:
        process.join()
        return f"a process of the fork server ended with exit code {process.exitcode}"
    finally:
        receiver.close()


def _look(variables: Mapping[str, str], sender: Connection) -> None:
    """Runs in a forked process: sends what why_not() is to say."""
    preload = sys.modules.get(PRELOAD)
    if preload is None:
        sender.send("it has not imported vLLM")
    elif names := {name for name, _ in _comparable(preload.BEFORE).items() ^ variables.items()}:
        sender.send(f"changed since its imports: {', '.join(sorted(names))}")
    else:
        sender.send("" if can_use_gpu() else "what it forks cannot use the GPU")


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
    """A process with the environment and the output of the one that made it. (A fork server's children have the
    server's.)
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._environment = dict(os.environ)
        self._output: dict[int, Any] = {}

    @staticmethod
    def _Popen(process_obj: Any) -> _Popen:
        return _Popen(process_obj)

    def __getstate__(self) -> dict[str, Any]:
        """Pickled while the process is started: only then can descriptors be sent along."""
        return self.__dict__ | {"_output": {descriptor: DupFd(descriptor) for descriptor in (1, 2)}}

    def run(self) -> None:
        """Called in the forked process."""
        for descriptor, sent in self._output.items():
            os.dup2(sent.detach(), descriptor)
        preload: Any = sys.modules.get(PRELOAD)
        environment = (preload.SET_BY_IMPORTS if preload else {}) | self._environment
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        threads = environment.get("OMP_NUM_THREADS", "")
        if threads != os.environ.get("OMP_NUM_THREADS", "") and threads.isdecimal() and "torch" in sys.modules:
            import_module("torch").set_num_threads(int(threads))  # which has read the server's
        # Only what differs: setproctitle looks for the strings with which the process began.
        os.environ.update({name: value for name, value in environment.items() if os.environ.get(name) != value})
        inherited: Any = forkserver._forkserver  # pyright: ignore[reportAttributeAccessIssue]
        _server.join(inherited._forkserver_address, inherited._forkserver_alive_fd)
        report_beside_parent()
        super().run()


class ForkContext(ForkServerContext):
    """The context of multiprocessing whose processes the server forks."""

    Process = _Process  # type: ignore[assignment]
