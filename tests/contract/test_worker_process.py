"""A rollout worker is forked, as its engine and its ranks are, from a process that has imported vLLM, and ends with its
caller; where it cannot be forked it is spawned and works the same. Real vLLM. And what a server of forks promises of
any process.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cases.tiny_configs import DENSE
from cases.vllm_process import import_path

from slipstream.orchestrator.inputs.character_tokenizer import save_character_tokenizer
from slipstream.rollout.channel import BlockingChannel
from slipstream.rollout.die_with_owner import OWNER_VARIABLE
from slipstream.rollout.in_vllm import fork_server
from slipstream.rollout.in_vllm.fork_server import CannotFork, Forked

TIMEOUT_S = 240.0
BEFOREHAND = """
import json, os, subprocess, sys
from slipstream.conf.schema import Device
from slipstream.rollout.engine.engine_options import set_engine_environment
from slipstream.rollout.in_vllm import fork_server

ASK = (
    "import os, sys; from slipstream.rollout.in_vllm import fork_server as f;"
    "read = {**f.imports_read(os.environ), **dict(word.split('=') for word in sys.argv[1:])}; "
    "print(f.begin(read)); os._exit(0)"
)
there = dict(os.environ)
set_engine_environment(Device.cpu, batch_invariant=False, environment=there)
before = dict(os.environ)
fork_server.begin(fork_server.imports_read(there))
begun = there[fork_server.BEGUN_VARIABLE] = os.environ.pop(fork_server.BEGUN_VARIABLE)
assert dict(os.environ) == before
address, _ = json.loads(begun)
print(fork_server._server._process.pid, address, flush=True)
for line in sys.stdin:
    print(subprocess.check_output([sys.executable, "-c", ASK, *line.split()], env=there, text=True).strip(), flush=True)
"""
NODE = """
import os, sys
from slipstream.conf.schema import Device
from slipstream.rollout import worker_process
from slipstream.rollout.engine.engine_options import set_engine_environment
from slipstream.rollout.in_vllm import fork_server

set_engine_environment(Device.cpu, batch_invariant=False)
also = [worker_process.PRELOAD, "cases.asks_here"]
for _ in sys.stdin:
    print(fork_server.begin(fork_server.imports_read(os.environ), also), flush=True)
"""
CALLER = """
import asyncio, json, os, signal, sys
from pathlib import Path

from slipstream.conf.schema import Device, DType, RolloutConfig, SamplingConfig, WeightSyncConfig
from slipstream.orchestrator.inputs.model_folder import engine_checkpoint
from slipstream.rollout.worker_verbs import WorkerClient
from slipstream.rollout.engine.engine_options import set_engine_environment
from slipstream.rollout.in_vllm import fork_server
from slipstream.rollout.types import Prompt
from slipstream.rollout.types import WorkerOptions
from slipstream.rollout.worker_process import WorkerProcess

def tell(**facts):
    print("told:", json.dumps(facts), flush=True)

async def main(folder, address, what):
    set_engine_environment(Device.cpu, batch_invariant=False)
    if address:
        fork_server.join(address)
    options = WorkerOptions(
        folder=Path(folder),
        config=RolloutConfig(
            tp_size=2 if what == "engine" else 1, max_model_len=64, kv_cache_bytes=64 << 20,
            sampling=SamplingConfig(max_tokens=8),
        ),
        weight_sync=WeightSyncConfig(), dtype=DType.float32, device=Device.cpu,
        tensors=engine_checkpoint(json.loads(Path(folder, "config.json").read_text()), DType.float32), key=b"k" * 32,
    )
    started = await WorkerProcess.start(options, seed=3, host="127.0.0.1", name="rollout-7")
    worker = WorkerClient.at(started.address, options.key)
    phase = (await worker.start_status()).phase
    error = who = None
    if what == "engine":
        await worker.prepare()
        await worker.start()
        try:
            await worker.generate_group(Prompt(0, (1, 2), "ab", {}), 1)
        except Exception as raised:
            error = type(raised).__name__
        os.kill((await worker.start_status()).pids[0], signal.SIGTERM)
        who = await worker.told_to_go()
    tell(pids=(await worker.start_status()).pids, phase=phase, error=error, told_to_go_by=who)
    if what == "leave":
        return
    ended = await started.ended()
    tell(ended=[type(ended).__name__, str(ended)])

asyncio.run(main(*sys.argv[1:]))
"""


@contextlib.contextmanager
def program(text: str, *words: str, log: Path | None = None, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process whose stdout is read and whose stderr goes to the test's, or to `log`."""
    left = {"VLLM_WORKER_MULTIPROC_METHOD"}  # by vLLM, in a process that has made a configuration for CPUs
    environ = {name: value for name, value in os.environ.items() if name not in left}
    environ |= {"PYTHONPATH": import_path(), **environment}
    command = [sys.executable, "-c", text, *words]
    stderr = contextlib.nullcontext() if log is None else log.open("w")
    pipe = subprocess.PIPE
    with stderr as to, subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe, stderr=to, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def told(process: subprocess.Popen[str]) -> dict:
    """What it tells next. Other lines are vLLM's."""
    assert process.stdout
    line = next(line for line in process.stdout if line.startswith("told:"))
    return json.loads(line.removeprefix("told:"))


def wait_for_end(pids: list[int]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while any(runs(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def runs(pid: int) -> bool:
    """Whether it does, and is not just waiting for its parent to notice its end."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(DENSE | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32}))
    save_character_tokenizer(folder, vocab_size=64)
    return str(folder)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """A process that begins a server when it is asked. What vLLM found out about models' classes is forgotten."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("cache")))
        with program(NODE) as node:
            yield node


def ask(node: subprocess.Popen[str]) -> tuple[str, int]:
    """Address and pid of the node's server, which is begun where there is none."""
    assert node.stdin
    assert node.stdout
    node.stdin.write("begin\n")
    node.stdin.flush()
    address = node.stdout.readline().strip()
    servers = [child for child in psutil.Process(node.pid).children() if "fork_server" in " ".join(child.cmdline())]
    return address, servers[0].pid


def test_worker_engine_and_ranks_are_forked_and_end_with_the_caller(
    folder: str, node: subprocess.Popen[str], tmp_path: Path
) -> None:
    address, server = ask(node)
    log = tmp_path / "log"
    with program(CALLER, folder, address, "engine", log=log) as caller:
        facts = told(caller)
        worker, engine = facts["pids"]
        assert psutil.Process(worker).ppid() == server
        assert psutil.Process(engine).ppid() == worker
        tree = psutil.Process(worker).children(recursive=True)
        titles = [" ".join(process.cmdline()) for process in tree]
        assert sum("VLLM::Worker" in title for title in titles) == 2
        assert not any("spawn_main" in title or "fork_server" in title for title in titles), "imported vLLM anew"
        assert (facts["error"], facts["told_to_go_by"]) == ("ReplicaNotServing", "SIGTERM")
        assert "[rollout-7] slipstream.rollout.worker: the engine is up: 2 ranks" in log.read_text()
        caller.kill()
        wait_for_end([worker, *(process.pid for process in tree)])


def test_an_engine_ends_with_its_worker_while_it_starts(folder: str, node: subprocess.Popen[str]) -> None:
    """vLLM's process would wait five minutes for the worker that forked it."""
    address, server = ask(node)
    with program(CALLER, folder, address, "engine") as caller:
        while not (engines := [child for child in psutil.Process(server).children(recursive=True) if is_engine(child)]):
            assert caller.poll() is None
        (engine,) = engines
        engine.parent().kill()
        wait_for_end([engine.pid])
        assert caller.wait(TIMEOUT_S) == 1


def is_engine(process: psutil.Process) -> bool:
    """By its title. A program that a worker starts has the worker's title until it is executed, and an engine's the
    engine's."""
    with contextlib.suppress(psutil.NoSuchProcess):
        titles = process.parent().cmdline()[:1], process.cmdline()[:1]
        return titles == (["slipstream::rollout-7"], ["VLLM::EngineCore"])
    return False


def test_a_caller_that_returns_does_not_wait_for_its_worker(folder: str, node: subprocess.Popen[str]) -> None:
    address, server = ask(node)
    with program(CALLER, folder, address, "leave") as caller:
        (worker,) = told(caller)["pids"]
        assert psutil.Process(worker).ppid() == server
        assert caller.wait(TIMEOUT_S) == 0
        wait_for_end([worker])


def test_a_caller_is_told_that_its_worker_was_killed(folder: str, node: subprocess.Popen[str]) -> None:
    with program(CALLER, folder, ask(node)[0], "stay") as caller:
        (worker,) = told(caller)["pids"]
        psutil.Process(worker).kill()
        assert told(caller)["ended"] == ["EngineDied", f"process {worker} of the rollout worker was ended by SIGKILL"]


@pytest.mark.parametrize("where", ["variables that imports read differ", "the server is gone"])
def test_a_worker_is_spawned_where(where: str, folder: str, node: subprocess.Popen[str]) -> None:
    is_gone = where == "the server is gone"
    address, other = ("/gone/listener", {}) if is_gone else (ask(node)[0], {"VLLM_LOGGING_PREFIX": "other: "})
    with program(CALLER, folder, address, "stay", **other) as caller:
        facts = told(caller)
        (worker,) = facts["pids"]
        assert psutil.Process(worker).ppid() == caller.pid
        assert facts["phase"] == "importing vLLM"


def test_a_server_that_was_killed_is_begun_again_and_its_worker_goes_on(
    folder: str, node: subprocess.Popen[str]
) -> None:
    killed, server = ask(node)
    with program(CALLER, folder, killed, "stay") as caller:
        (worker,) = told(caller)["pids"]
        psutil.Process(server).kill()
        wait_for_end([server])
        address, server = ask(node)
        assert address != killed
        with program(CALLER, folder, address, "stay") as other:
            (forked,) = told(other)["pids"]
            assert psutil.Process(forked).ppid() == server
        psutil.Process(worker).kill()
        assert told(caller)["ended"] == ["EngineDied", f"process {worker} of the rollout worker has ended"]


def test_a_server_begun_beforehand_is_found_by_workers_whose_imports_read_the_same() -> None:
    """And is used by whoever would begin another one for them, unless its imports read others, or it is gone."""
    with program(BEFOREHAND) as before:
        assert before.stdin
        assert before.stdout

        def found(*words: str) -> str:
            """The address of the server of a process with these variables, too."""
            before.stdin.write(" ".join(words) + "\n")
            before.stdin.flush()
            return before.stdout.readline().strip()

        pid, address = before.stdout.readline().split()
        assert found("PYTHONBREAKPOINT=0", "CUDA_VISIBLE_DEVICES=1") == address
        assert found("VLLM_LOGGING_PREFIX=other") not in ("", address)
        psutil.Process(int(pid)).kill()
        wait_for_end([int(pid)])
        assert found() not in ("", address)


SERVER = """
import os, sys
from slipstream.rollout.in_vllm import fork_server, process_imports

def asked():
    with open(sys.argv[2], "a") as file:
        print(os.getpid(), file=file)
    return True

process_imports.num_gpus, process_imports.can_use_gpu = (lambda: 1), asked
fork_server.import_vllm = lambda: None
fork_server.serve(int(sys.argv[1]), [])
"""


def test_a_forked_process_has_the_environment_in_which_it_was_asked_for_and_its_end_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server imports nothing here. And whether a GPU can be used is asked of another process than the one that is
    to fork an engine: whoever has counted GPUs cannot.
    """
    monkeypatch.setenv("SET_BEFORE", "1")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "server"))
    listener.listen()
    environ = {**os.environ, "PYTHONPATH": import_path(), OWNER_VARIABLE: str(os.getpid())}
    command = [sys.executable, "-c", SERVER, str(listener.fileno()), str(tmp_path / "asked")]
    monkeypatch.setattr(fork_server, "_server", fork_server._Server())
    fork_server.join(str(tmp_path / "server"))
    with subprocess.Popen(command, env=environ, pass_fds=(listener.fileno(),)) as server, contextlib.ExitStack() as end:
        end.callback(server.kill)
        listener.close()
        monkeypatch.setenv("PYTHONPATH", import_path())
        first, written = ask_for_one()
        assert written["SET_BEFORE"] == "1"
        assert first.wait(TIMEOUT_S) == 0
        counted = (tmp_path / "asked").read_text().split()
        assert len(counted) == 1 and counted != [str(first.pid)]
        monkeypatch.delenv("SET_BEFORE")
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setenv("SET_LATER", "1")
        second, written = ask_for_one()
        assert (written.get("SET_BEFORE"), written.get("SET_LATER")) == (None, "1")
        assert psutil.Process(second.pid).ppid() == server.pid
        second.kill()
        assert second.wait(TIMEOUT_S) == -9
        monkeypatch.setenv("TORCH_OTHER", "1")
        with pytest.raises(CannotFork, match="changed since its imports: TORCH_OTHER"):
            ask_for_one()
    with pytest.raises(CannotFork, match="the fork server is gone"):
        ask_for_one()


def ask_for_one() -> tuple[Forked, dict[str, str]]:
    """A process that tells its environment, is where this one is, and then ends, or waits where SET_LATER is set."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = fork_server.fork("cases.environment_of_a_child:told_environment", theirs)
    environment, *place = BlockingChannel(ours).receive()
    assert place == [os.getcwd(), sys.path]
    return process, environment
