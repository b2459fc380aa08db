"""What the system tests share: runs through the command line, each in a process of its own."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.conf.schema import Device
from slipstream.conf.whole_files import write_whole
from slipstream.orchestrator.cluster.own_ray import NUM_TRIES
from slipstream.orchestrator.files.row_files import read_rows
from slipstream.orchestrator.machine import DASHBOARD_PORT
from slipstream.rollout import worker_process
from slipstream.rollout.engine.engine_options import compile_cache, set_engine_environment
from slipstream.rollout.in_vllm import fork_server
from slipstream.rollout.in_vllm.fork_server import BEGUN_VARIABLE, imports_read

RUN_TIMEOUT_S = 560
"""Time limit of one run, on two cores that have other runs and more to do; a run alone takes a minute or two."""

ENDLESS = [
    "run.num_steps=1000", "run.eval_every_steps=0", "run.checkpoint_every_steps=0", "data.eval_path=null",
    "algorithm.groups_per_step=4", "algorithm.group_size=8", "reward.kind=tests.fakes.slow_reward:share_of_answer",
]  # fmt: skip
"""A run that goes on until it is stopped, and leaves most of the cores to what starts meanwhile: its steps are small
and wait for their rewards.
"""
HELD_REWARD = """
import time, zlib
from pathlib import Path

FOLDER = Path(__file__).parent

def is_held():
    try:
        num_rows = int((FOLDER / "held").read_text())
        return len((FOLDER / "latest" / "metrics.jsonl").read_text().splitlines()) >= num_rows
    except FileNotFoundError:
        return False

def judge(prompt, response, fields):
    while is_held():
        (FOLDER / "waits").touch()
        time.sleep(0.05)
    return zlib.crc32(f"{prompt} {response}".encode()) / 2**32
"""
ROOM = 16
"""Processes of runs that the cluster of those that need none of their own has room for."""
CLUSTER_VARIABLE = "SLIPSTREAM_TESTS_CLUSTER"
"""Environment variable with that cluster's address, where several processes share the tests."""
NAMED_SEGMENTS = """\
from multiprocessing import shared_memory

shared_memory._SHM_NAME_PREFIX = "/{prefix}"
"""
ONE_OF_EACH = ["trainer.num_ranks=1", "trainer.ep_size=1", "rollout.num_workers=1"]


def pytest_sessionstart(session: pytest.Session) -> None:
    """Where xdist's processes share the tests, they share the process of one_import_of_vllm() and the cluster, too."""
    if getattr(session.config.option, "dist", "no") != "no" and not hasattr(session.config, "workerinput"):
        folder = tempfile.mkdtemp(prefix="t")
        session.config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        with pytest.MonkeyPatch.context() as patch:
            for name, value in compile_cache().items():
                patch.setenv(name, os.environ.get(name, value))
            begin_for_runs(patch)
            patch.setenv("TMPDIR", folder)
            nodes = Nodes(ROOM)
        session.config.add_cleanup(nodes.close)  # before its folder is removed
        os.environ[CLUSTER_VARIABLE] = nodes.address


def begin_for_runs(patch: pytest.MonkeyPatch) -> None:
    """Begin the process that imports vLLM for runs which start in this one's environment; unless it names one."""
    root = str(Path(__file__).parents[2])
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    patch.setenv("PYTHONPATH", os.pathsep.join(dict.fromkeys([root, *filter(None, given)])))
    there = {"OMP_NUM_THREADS": "1", **os.environ}  # as Ray sets it
    set_engine_environment(Device.cpu, batch_invariant=False, environment=there)
    fork_server.begin(imports_read(there), also=[worker_process.PRELOAD])


@pytest.fixture(scope="session", autouse=True)
def one_import_of_vllm(private_tmp: None) -> Iterator[None]:
    """One process imports vLLM for the engines of all runs of this session. A run elsewhere begins a process of its own
    for that, as in tests with `own_import`.
    """
    with pytest.MonkeyPatch.context() as patch:
        begin_for_runs(patch)
        yield
        del os.environ[BEGUN_VARIABLE]


@contextlib.contextmanager
def own_import() -> Iterator[None]:
    """Runs that start in the block have a process of their own that imports vLLM."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(BEGUN_VARIABLE)
        yield


@contextlib.contextmanager
def dashboard_beside_another() -> Iterator[str]:
    """The option of a run with Ray's dashboard, whose start takes 20 s of a core; its usual port is taken meanwhile."""
    with socket.socket() as another:
        another.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # a run beside the tests has it
            another.bind(("127.0.0.1", DASHBOARD_PORT))
            another.listen()
        yield "cluster.dashboard=true"


def command(words: list[str], folder: Path, module: str = "slipstream.orchestrator.cli.main") -> list[str]:
    """The command line of a small run under `folder`: of the quick start unless a word names another experiment, and on
    a Ray cluster of its own, without its dashboard, unless a word says otherwise.
    """
    if not any(word.startswith(("cluster.ray_address=", "cluster.dashboard")) for word in words):
        words = ["cluster.dashboard=false", *words]
    return [
        sys.executable,
        "-m",
        module,
        "train",
        *([] if any(word.startswith("experiment=") for word in words) else ["experiment=quickstart"]),
        f"run.dir={folder}",
        *words,
    ]


@dataclass(frozen=True)
class FinishedRun:
    """A run that ended by itself."""

    folder: Path
    exit_code: int
    stderr: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        return rows_of(self.folder)


@contextlib.contextmanager
def nothing_left() -> Iterator[Path]:
    """A folder like /tmp, which every user may enter and write; short, because sockets lie below it. Whatever runs
    of the block leave there, in the process table or in /dev/shm fails it: their segments have names of their own,
    because tests beside them kill what has segments, too.
    """
    folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    folder.chmod(0o1777)
    prefix = f"psm_{folder.name[-4:]}"
    on_path = [Path(part) / "sitecustomize.py" for part in os.environ["PYTHONPATH"].split(os.pathsep)]
    hidden = [file.read_text() for file in on_path if file.exists()][:1]  # by the one that is written here
    (folder / "names").mkdir()
    (folder / "names" / "sitecustomize.py").write_text("\n".join([*hidden, NAMED_SEGMENTS.format(prefix=prefix)]))
    with own_import(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder / "names"), os.environ["PYTHONPATH"]]))
        yield folder
    deadline = time.monotonic() + 120
    while (left := _processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []
    assert [path.name for path in folder.glob("slipstream-*") if path.lstat().st_uid == os.geteuid()] == []
    assert list(Path("/dev/shm").glob(f"{prefix}*")) == []
    shutil.rmtree(folder)


def _processes_of(tmp: Path) -> list[str]:
    """Processes whose TMPDIR lies there."""
    left: list[str] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get("TMPDIR", "").startswith(str(tmp)):
                left.append(" ".join(process.cmdline()))
    return left


class RunUnderWay:
    """A run in a process of its own, which is looked at while it goes on. Use as a context manager, which prints its
    log where a test fails.

    Args:
        words: As for `command`.
        folder: Empty before.
    """

    def __init__(self, words: list[str], folder: Path) -> None:
        self.folder = folder / "latest"
        self._said = folder / "said.txt"
        with self._said.open("w") as said:
            self._process = subprocess.Popen(command(words, folder), stdout=said, stderr=said, start_new_session=True)

    def __enter__(self) -> RunUnderWay:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        deadline = time.monotonic() + 10
        while self._process.poll() is None and time.monotonic() < deadline:  # killed, it would leave its processes
            self._process.send_signal(signal.SIGINT)
            time.sleep(0.05)
        self._process.kill()
        if kind is not None:
            print(self._said.read_text(), self.log if (self.folder / "run.log").exists() else "", sep="\n")

    @property
    def rows(self) -> list[dict[str, Any]]:
        return rows_of(self.folder)

    @property
    def pid(self) -> int:
        """The controller's, and its process group's."""
        return self._process.pid

    @property
    def said(self) -> str:
        return self._said.read_text()

    @property
    def log(self) -> str:
        return (self.folder / "run.log").read_text()

    def worker(self, name: str) -> psutil.Process:
        """The process of "rollout-0" (.1 where it was started again), which run.log names."""
        (pid,) = re.findall(rf"{re.escape(name)} is process (\d+) ", self.log)
        return psutil.Process(int(pid))

    def engine_of(self, worker: str) -> psutil.Process:
        """Its engine's process."""
        (pid,) = re.findall(rf"{re.escape(worker)} is process .*; its engine is process (\d+)", self.log)
        return psutil.Process(int(pid))

    def wait_until(self, is_enough: Callable[[list[dict[str, Any]]], bool]) -> None:
        """Look at the rows until they are."""
        self.wait_for(lambda: is_enough(self.rows), every_s=0.2)

    def wait_for_returns(self, times: int) -> None:
        """Wait until workers came back so many times, and for two steps more."""
        self.wait_until(lambda rows: sum(row["rollout/recoveries"] or 0 for row in rows) == times)
        num_rows = len(self.rows)
        self.wait_until(lambda rows: len(rows) >= num_rows + 2)

    def wait_for(self, is_there: Callable[[], bool], every_s: float = 0.05) -> None:
        """Look again and again until it is."""
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while not is_there():
            assert self._process.poll() is None, "the run ended by itself"
            assert time.monotonic() < deadline
            time.sleep(every_s)

    def tell_to_end(self) -> None:
        """SIGTERM to the process and to its group, as `timeout` and batch systems send it."""
        self._process.terminate()
        os.killpg(self._process.pid, signal.SIGTERM)

    def resume(self) -> None:
        """`slipstream resume` of a run whose command has ended."""
        words = [sys.executable, "-m", "slipstream.orchestrator.cli.main", "resume", str(self.folder.resolve())]
        with self._said.open("a") as said:
            self._process = subprocess.Popen(words, stdout=said, stderr=said, start_new_session=True)

    def stop(self) -> None:
        """Tell it to end, and see that it does."""
        self.tell_to_end()
        assert self.exit_code() == 128 + signal.SIGTERM

    def exit_code(self) -> int:
        """Wait for the end."""
        return self._process.wait(RUN_TIMEOUT_S)


class HeldReward:
    """A reward in a file beside a run's folder, which can hold the run up: a step is not over before its samples are
    judged. What it gives is the same for equal responses, and as good as random.
    """

    def __init__(self, folder: Path) -> None:
        file = folder / "reward.py"
        file.write_text(HELD_REWARD)
        self._held, self._waits = (file.with_name(name) for name in ("held", "waits"))
        self.words = [f"reward.kind={file}:judge", f"reward.timeout_s={RUN_TIMEOUT_S}"]

    def hold(self, num_rows: int = 0) -> None:
        """From now on judge nothing once the run has so many rows."""
        write_whole(self._held, str(num_rows))

    def wait_until_held(self, run: RunUnderWay) -> None:
        """Whoever waited before has ended."""
        self._waits.unlink(missing_ok=True)
        run.wait_for(self._waits.exists)

    def let_go(self) -> None:
        self._held.unlink()


def trainer_ranks(run: Path) -> list[psutil.Process]:
    """The processes of a run's trainer ranks, which run.log names each time that they start."""
    pids = re.findall(r"trainer ranks are processes ([\d, ]+)", (run / "run.log").read_text())[-1]
    return [psutil.Process(int(pid)) for pid in pids.split(", ")]


def assert_all_end(processes: Sequence[psutil.Process]) -> None:
    """They end soon. What only waits to be reaped has ended: psutil calls it running."""
    deadline = time.monotonic() + 120
    while (left := [process for process in processes if _is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_workers_came_back(rows: list[dict[str, Any]], *, times: int, num_workers: int = 2) -> None:
    """One of the workers was away so many times. Each time the others carried the steps; the one that came back
    takes every publish again, and in every batch the log-probabilities of all workers are the trainer's.
    """
    returns = [number for number, row in enumerate(rows) if row["rollout/recoveries"]]
    assert len(returns) == times == sum(row["rollout/restarts"] or 0 for row in rows)
    assert [row["policy_version"] for row in rows] == list(range(len(rows))), "no step was lost or repeated"
    for begin, end in itertools.pairwise([0, *returns]):
        alone = [row for row in rows[begin:end] if row["rollout/replicas_serving"] == num_workers - 1]
        assert alone, "steps went on while a worker was away"
        assert rows[end]["rollout/down_s"] > 0
    assert {row["rollout/replicas_serving"] for row in rows[returns[-1] :]} == {num_workers}
    assert {row["sync/replicas_committed"] for row in rows[returns[-1] + 1 :]} == {num_workers}
    on_policy = [row["parity/k3"] for row in rows[1:] if row["parity/k3"] is not None]
    assert on_policy and all(0 <= k3 < 1e-3 for k3 in on_policy)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl of a run folder, without a line that is being written."""
    return read_rows(folder / "metrics.jsonl")


def train(words: list[str], folder: Path, module: str = "slipstream.orchestrator.cli.main") -> FinishedRun:
    """One run, to its end."""
    done = subprocess.run(
        command(words, folder, module), capture_output=True, text=True, timeout=RUN_TIMEOUT_S, env={**os.environ}
    )
    return FinishedRun((folder / "latest").resolve(), done.returncode, done.stderr + done.stdout[-3000:])


@pytest.fixture(scope="session")
def cluster(one_import_of_vllm: None) -> Iterator[str]:
    """The option that names a Ray cluster for runs that need none of their own, whose start takes 10 s of a core."""
    if shared := os.environ.get(CLUSTER_VARIABLE):
        yield f"cluster.ray_address={shared}"
        return
    nodes = Nodes(ROOM)
    yield f"cluster.ray_address={nodes.address}"
    nodes.close()


class Nodes:
    """tests/system/ray_nodes.py in a process of its own."""

    def __init__(self, *tickets: int) -> None:
        script = Path(__file__).with_name("ray_nodes.py")
        for _ in range(NUM_TRIES):
            self._process = subprocess.Popen(
                [sys.executable, str(script), *map(str, tickets)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert self._process.stdout is not None
            self.address = self._process.stdout.readline().strip()
            if self.address:
                return
            self._process.wait(240)
        raise AssertionError(f"Ray's nodes did not start {NUM_TRIES} times, for what is said above")

    def lose(self, address: str) -> None:
        """End a node and all that runs there."""
        assert self._asked(address) == "gone"

    def join(self) -> str:
        """Another node, with room. Returns its address."""
        return self._asked("join")

    def _asked(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        """End the rest."""
        self._process.communicate(timeout=240)
