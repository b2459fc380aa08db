"""Imports vLLM once for many processes: a server that has imported it forks them.

    a node of a run (orchestrator/cluster)

    ray_host.py       begin()   beside Ray's start
    ForkServerActor   begin()   that one, or one of its own
    RolloutActor      join()    fork() makes the worker's process, of which vLLM forks the engine's (vllm_process.py)

    who asks                                                             server
      three descriptors, then [function, variables, ...]  --------->     forks
      <-- ["forked", pid] or ["refused", why] ----  the forked process, or the server
      <-- [exit code] ----------------------------  the server, when that process has ended

Without it, each worker imports all of vLLM: 15 s of its start on a host with GPUs. The server has one thread, runs no
kernel and never opens a GPU, so that what is forked from it may. It listens in a folder that only this user can enter,
and forks as long as the variables that imports read (IMPORTS_READ) are what they were when it imported. Where they are
not, or the server is gone, fork() says so, and who asks starts a process that imports vLLM.
Owns: these servers, and the processes that they fork.
Invariant: a forked process has the environment, the folder, the path of modules and the output of the process that
asked for it, and the variables that vLLM's imports have set, as a spawned one would.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from slipstream.rollout.channel import BlockingChannel, Disconnected
from slipstream.rollout.die_with_owner import OWNER_VARIABLE, end_with
from slipstream.rollout.in_vllm.process_imports import forks_can_use_gpu, import_vllm

ANSWER_TIMEOUT_S = 300.0
"""Longest wait for the answer of a server, which may be importing vLLM."""
IMPORTS_READ = (
    "PYTHON", "LD_", "VLLM_", "TORCH", "PYTORCH_", "TRITON_", "CUDA_", "NVIDIA_", "NCCL_", "HF_", "TRANSFORMERS_",
    "OMP_", "MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_", "ATEN_",
)  # fmt: skip
"""Beginnings of the names of variables that Python, vLLM or its libraries may read while they are imported."""
OF_ONE_PROCESS = ("VLLM_RPC_BASE_PATH", "CUDA_VISIBLE_DEVICES", "PYTHONBREAKPOINT")
"""Those among them that may differ: the folder of sockets and the GPUs of a worker or engine, and what Ray sets."""
BEGUN_VARIABLE = "SLIPSTREAM_FORK_SERVER"
"""Environment variable with the address of a server, and the variables that its imports read, as JSON; not an
option."""


class CannotFork(Exception):
    """Why the server forks no process for this one."""


class Forked:
    """A process that the server has forked, as its owner sees it: the part of subprocess.Popen that is needed."""

    def __init__(self, pid: int, server: BlockingChannel) -> None:
        self.pid = pid
        self.returncode: int | None = None
        """None: it goes on, or it ended after its server, which alone would know."""
        self._server = server
        self._process: int | None = None
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            self._process = os.pidfd_open(pid)

    def wait(self, timeout: float) -> int | None:
        """Wait for its end. Returns its exit code, negative if a signal ended it."""
        if self.returncode is None and self._server.hears(timeout):
            with contextlib.suppress(Disconnected):
                (self.returncode,) = self._server.receive()
        return self.returncode

    def kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)


class _Server:
    """The server of this process: its own, or another process's."""

    def __init__(self) -> None:
        self.address = ""
        """The path of the socket where it listens; empty: there is none."""
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self, environment: Mapping[str, str], also: Sequence[str]) -> None:
        """Start one, which ends with this process and inherits its output. `environment` replaces what imports read."""
        self._folder = tempfile.TemporaryDirectory(prefix="forks-")
        self.address = str(Path(self._folder.name, "server"))
        others = {name: value for name, value in os.environ.items() if not name.startswith(IMPORTS_READ)}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen()
            self._process = subprocess.Popen(
                python_calls(f"{__name__}:serve", listener.fileno(), list(also)),
                pass_fds=(listener.fileno(),),
                stdin=subprocess.DEVNULL,
                env=others | dict(environment) | {OWNER_VARIABLE: str(os.getpid())},
            )

    @property
    def has_died(self) -> bool:
        """Whether this process started the server, and it is gone."""
        return self._process is not None and self._process.poll() is not None


_server = _Server()


def python_calls(function: str, *arguments: object) -> list[str]:
    """The command line of a Python process that finds modules where this one does, and calls "module:function"."""
    module, _, name = function.partition(":")
    given = ", ".join(map(repr, arguments))
    return [sys.executable, "-c", f"import sys; sys.path = {sys.path!r}; import {module} as m; m.{name}({given})"]


def begin(environment: Mapping[str, str], also: Sequence[str] = ()) -> str:
    """Start this process's server for processes of an environment (imports_read()), unless it has one that lives, or
    its own environment names one for them. Processes that this one starts find it there. `also`: modules to import
    after vLLM. Returns the server's address, for join()."""
    if _server.has_died or not _server.address:
        if address := _begun(environment):
            return address
        _server.begin(environment, also)
        os.environ[BEGUN_VARIABLE] = json.dumps([_server.address, _comparable(environment)])
    return _server.address


def _begun(environment: Mapping[str, str]) -> str:
    """Address of the server that this process's environment names, if it runs and imported under that one; or empty."""
    begun = os.environ.get(BEGUN_VARIABLE)
    if begun:
        address, read = json.loads(begun)
        with socket.socket(socket.AF_UNIX) as asking:
            if read == _comparable(environment) and asking.connect_ex(address) == 0:
                return address
    return ""


def join(address: str) -> None:
    """Let this process's workers be forked from a server that another process has begun."""
    _server.address = address


def imports_read(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that imports may read."""
    return {name: value for name, value in environment.items() if name.startswith(IMPORTS_READ)}


def _comparable(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in imports_read(environment).items() if name not in OF_ONE_PROCESS}


def fork(function: str, connection: socket.socket) -> Forked:
    """Let the server fork a process, which calls "module:function" with the number of its descriptor of `connection`.
    Waits until the server has imported vLLM. Raises CannotFork if it does not."""
    if not _server.address:
        raise CannotFork("there is none")
    with contextlib.ExitStack() as refused:
        asking = refused.enter_context(socket.socket(socket.AF_UNIX))
        try:
            asking.connect(_server.address)
            socket.send_fds(asking, [b"+"], [1, 2, connection.fileno()])
            server = BlockingChannel(asking)
            server.send([function, dict(os.environ), os.getcwd(), sys.path])
            if not server.hears(ANSWER_TIMEOUT_S):
                raise CannotFork(f"the fork server did not answer within {ANSWER_TIMEOUT_S:g} s")
            answer = server.receive()
        except OSError as error:
            raise CannotFork(f"the fork server is gone ({type(error).__name__})") from error
        match answer:
            case ["forked", int() as pid]:
                refused.pop_all()
                return Forked(pid, server)
            case ["refused", str() as why]:
                raise CannotFork(why)
            case _:
                raise CannotFork(f"a process of the fork server ended with exit code {answer[0]}")


def serve(listening: int, also: Sequence[str]) -> None:
    """Runs in the server's process: imports, then forks for whoever asks at the socket with this descriptor."""
    before = dict(os.environ)
    end_with(int(os.environ[OWNER_VARIABLE]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import_vllm()
    for name in also:
        import_module(name)
    set_by_imports = {name: value for name, value in os.environ.items() if before.get(name) != value}
    sys.stdout.flush()  # or each process would print again what waits here
    with socket.socket(fileno=listening) as listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is None:
                    _answer(listener, selector, before, set_by_imports)
                    continue
                pid, asking = key.data
                _, status = os.waitpid(pid, 0)
                asking.send([os.waitstatus_to_exitcode(status)])
                asking.close()
                selector.unregister(key.fd)
                os.close(key.fd)


def _answer(
    listener: socket.socket,
    selector: selectors.BaseSelector,
    before: Mapping[str, str],
    set_by_imports: dict[str, str],
) -> None:
    """Take one request to fork, and answer it."""
    connection, _ = listener.accept()
    asking = BlockingChannel(connection)
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
    try:
        request = asking.receive()
        changed = {name for name, _ in _comparable(before).items() ^ _comparable(request[1]).items()}
        if changed:
            asking.send(["refused", f"changed since its imports: {', '.join(sorted(changed))}"])
        elif pid := os.fork():
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, asking))
            return
        else:
            listener.close()
            selector.close()
            _become(request, set_by_imports, descriptors, asking)
    except Disconnected:  # it only wanted to know whether there is a server
        pass
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    asking.close()


def _become(
    request: tuple[str, dict[str, str], str, list[str]],
    set_by_imports: dict[str, str],
    descriptors: Sequence[int],
    asking: BlockingChannel,
) -> None:
    """Runs in a forked process, to its end."""
    function, environment, folder, path = request
    exit_code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        *output, connection = descriptors
        for descriptor, sent in enumerate(output, start=1):
            os.dup2(sent, descriptor)
            os.close(sent)
        _take(set_by_imports | environment)
        os.chdir(folder)
        sys.path[:] = path
        if forks_can_use_gpu():  # asked of a fork: whoever counts GPUs cannot fork a process that uses one
            asking.send(["forked", os.getpid()])
            module, _, name = function.partition(":")
            getattr(import_module(module), name)(connection)
        else:
            asking.send(["refused", "what it forks cannot use the GPU"])
        exit_code = 0
    except BaseException:  # noqa: BLE001 - the boundary of this process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


def _take(environment: Mapping[str, str]) -> None:
    """Give this process another environment."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    threads = environment.get("OMP_NUM_THREADS", "")
    if threads != os.environ.get("OMP_NUM_THREADS", "") and threads.isdecimal() and "torch" in sys.modules:
        import_module("torch").set_num_threads(int(threads))  # which has read the server's
    # Only what differs: setproctitle looks for the strings with which the process began.
    os.environ.update({name: value for name, value in environment.items() if os.environ.get(name) != value})
