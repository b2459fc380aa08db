"""Locks: when a run's processes outlive its controller, for how long, and who takes its place. Without Ray."""

import errno
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from slipstream.conf.schema import RunConfig
from slipstream.orchestrator.checkpoints.journal import Whereabouts
from slipstream.orchestrator.cluster import ray_host
from slipstream.orchestrator.cluster.own_ray import OwnRay
from slipstream.orchestrator.cluster.private_folder import PrivateFolder
from slipstream.orchestrator.control.control_folder import alive, how_it_ended
from slipstream.orchestrator.files.run_folder import RunFolder
from slipstream.orchestrator.socket_folder import HOLD, LET_GO

GREETING = {"address": "127.0.0.1:6379", "dashboard": ""}


class Host:
    """The part of ray_host.py that watches, in a thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = PrivateFolder(folder)
        reads, self.controller = os.pipe()
        hears, self.hears_from = os.pipe()
        self.heard = os.fdopen(hears)
        self.reached = ray_host._Controller(reads, self.hears_from)
        self.reached.greeting = dict(GREETING)
        self.lost = ""
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        self.lost = ray_host._watch(self.folder, self.reached)

    def ends(self, within_s: float = 20.0) -> bool:
        self._thread.join(within_s)
        return not self._thread.is_alive()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setattr(ray_host, "_LOOK_EVERY_S", 0.05)
    host = Host(tmp_path)
    while not host.folder.door.exists():
        pass
    yield host


def server(folder: Path, name: str) -> subprocess.Popen[bytes]:
    """A process of this name."""
    return subprocess.Popen([shutil.copy(shutil.which("sleep") or "", folder / name), "600"])


@pytest.mark.parametrize("words", [b"", HOLD + LET_GO])
def test_without_a_word_everything_ends_with_the_controller(host: Host, words: bytes) -> None:
    os.write(host.controller, words)
    assert not host.ends(0.3)
    assert host.reached.has_let_go == bool(words)
    os.close(host.controller)
    assert host.ends()


RAY = """
import ctypes, os, signal
from types import SimpleNamespace

def get_runtime_context():
    return SimpleNamespace(gcs_address="127.0.0.1:6379")

def init(**_):
    {init}
    return SimpleNamespace(dashboard_url="")
"""
WORKER = """
from types import SimpleNamespace
global_worker = SimpleNamespace(node=SimpleNamespace(kill_log_monitor=lambda check_alive: None))
"""


@contextmanager
def program(folder: Path, init: str, *, start_s: float = 240.0) -> Iterator[subprocess.Popen[bytes]]:
    """The whole program, with a Ray that starts no server."""
    (folder / "ray" / "_private").mkdir(parents=True)
    (folder / "ray" / "__init__.py").write_text(RAY.format(init=init))
    (folder / "ray" / "_private" / "worker.py").write_text(WORKER)
    (folder / "own").mkdir()
    folders = dict.fromkeys(("folder", "logs", "crashes"), str(folder / "own"))
    code = f"""
from slipstream.orchestrator.cluster import ray_host
ray_host.START_S = {start_s}
ray_host.main(ray_host.HostOptions(**{folders}, has_dashboard=False, object_store_bytes=0, workers_import_under=None))
"""
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    pipe, environment = subprocess.PIPE, {**os.environ, "PYTHONPATH": path}
    started = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, env=environment)
    try:
        yield started
    finally:
        started.kill()


def test_a_start_in_which_ray_hangs_and_lets_no_thread_run_ends_all_the_same(tmp_path: Path) -> None:
    with program(tmp_path, "ctypes.PyDLL(None).sleep(600)", start_s=1.0) as hung:  # holds the interpreter
        assert hung.wait(240) == 1
        assert hung.stderr is not None and b"Timeout (0:00:01)" in hung.stderr.read()


def test_a_signal_does_not_end_it_whose_handler_ray_has_replaced(tmp_path: Path) -> None:
    with program(tmp_path, "signal.signal(signal.SIGTERM, lambda *_: os._exit(1))") as host:
        assert host.stdin is not None and host.stdout is not None
        assert json.loads(host.stdout.readline()) == GREETING
        host.terminate()
        host.stdin.close()
        assert host.wait(240) == 0


def test_when_held_it_ends_after_the_lease(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, ray_host.LEASE_S - 1, ray_host.LEASE_S])
    monkeypatch.setattr(ray_host, "time", SimpleNamespace(monotonic=clock.__next__))
    os.write(host.controller, HOLD)
    os.close(host.controller)
    assert host.ends() and list(clock) == []


async def test_another_controller_takes_the_place_and_may_be_killed_itself(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "another")
    os.write(host.controller, HOLD)
    os.close(host.controller)
    with socket.socket(socket.AF_UNIX) as killed:
        while killed.connect_ex(str(host.folder.door)) == errno.ECONNREFUSED:
            pass  # the door is there, and nobody listens yet
        assert json.loads(killed.recv(200)) == GREETING
    assert not host.ends(0.3)

    own = OwnRay(RunConfig(), RunFolder(tmp_path))
    left = Whereabouts(str(tmp_path), 1 << 30)
    assert await own.take_over(left)
    assert own.is_taken_over and own.whereabouts == left
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(tmp_path / "token")
    assert await own.address() == GREETING["address"]
    assert not host.ends(0.3)
    await own.end()
    assert host.ends()
    assert not host.folder.door.exists(), "what the host would remove at its end is removed where it could not"


def test_servers_that_end_are_told_once_and_the_end_of_the_controller_is_still_seen(host: Host, tmp_path: Path) -> None:
    """Both at once, as where the whole node is killed. They stay children until Ray asks for their ends. Nobody can go
    on without them, and nothing waits for another controller then.
    """
    names = ("gcs_server", "raylet")
    servers = [server(tmp_path, name) for name in names]
    os.write(host.controller, HOLD)
    time.sleep(0.2)
    for one in servers:
        one.kill()
    told = [json.loads(host.heard.readline()) for _ in servers]
    assert sorted(one["lost"] for one in told) == sorted(names)
    assert {one["how"] for one in told} == {"it was ended by SIGKILL"}
    time.sleep(0.2)
    os.close(host.controller)
    assert host.ends()
    os.close(host.hears_from)
    assert host.heard.read() == "", "each is told once"
    assert host.lost == f"{told[0]['lost']}, which holds the run's Ray cluster, is gone: it was ended by SIGKILL"
    assert not host.reached.has_let_go, "whoever ends in order says so: the others have nothing to tell any more"
    assert [one.wait() for one in servers] == [-signal.SIGKILL] * 2


def test_a_server_that_ends_before_the_next_one_has_started_is_told(host: Host, tmp_path: Path) -> None:
    """Ray itself would wait a minute for it."""
    gcs = server(tmp_path, "gcs_server")
    time.sleep(0.2)
    gcs.kill()
    assert select.select([host.heard], [], [], 20)[0]
    assert json.loads(host.heard.readline()) == {"lost": "gcs_server", "how": "it was ended by SIGKILL"}
    os.close(host.controller)
    assert host.ends()
    gcs.wait()


def test_a_server_whose_end_took_the_controller_with_it_is_named(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ray ends a driver that writes to a raylet which has just died. A busy host learns of both at once."""
    look, stands, goes_on = ray_host._vital_servers, threading.Event(), threading.Event()

    def busy(known: Collection[str]) -> dict[int, str]:
        if not known:
            return look(known)
        stands.set()
        goes_on.wait(20)
        return {}

    monkeypatch.setattr(ray_host, "_vital_servers", busy)
    raylet = server(tmp_path, "raylet")
    assert stands.wait(20)
    raylet.kill()
    raylet.wait()
    os.close(host.controller)
    goes_on.set()
    assert host.ends()
    assert host.lost.startswith("raylet, which holds the run's Ray cluster, is gone")


def test_a_child_that_ends_while_servers_are_looked_for_is_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's log monitor is ended just then, and took the whole run with it."""
    gone, *servers = started = [server(tmp_path, name) for name in ("gone", "gcs_server", "raylet")]
    children = [psutil.Process(one.pid) for one in started]
    gone.kill()
    gone.wait()
    monkeypatch.setattr(psutil.Process, "children", lambda _: children)
    found = ray_host._vital_servers(known=())
    assert sorted(found.values()) == ["gcs_server", "raylet"]
    assert list(ray_host._vital_servers(known=["gcs_server"]).values()) == ["raylet"]
    for one in servers:
        one.kill()
        one.wait()
    assert select.select([*found], [], [], 20)[0]


def test_a_controller_that_ray_has_ended_with_a_server_is_spoken_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run := tmp_path / "a run").mkdir()
    with alive(run):
        pass
    lost = ray_host.loss("raylet", "it was ended by SIGKILL")
    ray_host.tell_instead(run, lost)
    assert how_it_ended(run) == ("failed", f"ClusterLost: {lost}; Ray ended the command with it")
    said = capsys.readouterr().err
    assert said.startswith(f"error: ClusterLost: {lost}") and said.endswith(f"\nGo on: slipstream resume '{run}'\n")


async def test_where_nobody_waits_nothing_is_taken_over(tmp_path: Path) -> None:
    own = OwnRay(RunConfig(), RunFolder(tmp_path))
    assert not await own.take_over(Whereabouts(str(tmp_path / "gone"), 1 << 30))
    assert not own.is_taken_over
    await own.end()
