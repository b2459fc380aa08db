"""The folder of a run under /tmp, what killed processes leave in /dev/shm, and who reaps the children of those that
die."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest

from slipstream.orchestrator.cluster.private_folder import (
    SHARED_MEMORY,
    end_processes,
    make_private_folder,
    private_folders,
    reap_orphans,
    remove_folders_of_dead_runs,
)
from slipstream.orchestrator.cluster.ray_host import _PR_SET_CHILD_SUBREAPER

OWNER = """
import resource, sys
from slipstream.orchestrator.cluster.private_folder import make_private_folder
folder, lock = make_private_folder()
folder.note_shared_memory(set(sys.argv[1:]))
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # like a disk that is full from here on
folder.note_shared_memory({"psm_later", *sys.argv[1:]})
print(folder.root, flush=True)
sys.stdin.read()
"""
SHARER = """
from multiprocessing.shared_memory import SharedMemory
segment = SharedMemory(create=True, size=4096)
print(segment.name, flush=True)
input()
"""
MAPPER = """
import mmap, sys
opened = [open(path, "r+b") for path in sys.argv[1:]]
maps = [mmap.mmap(file.fileno(), 0) for file in opened]
print("mapped", flush=True)
input()
"""


@pytest.fixture(autouse=True)
def own_tmp(short_tmpdir: Path) -> Path:
    """No folder of another run is near."""
    return short_tmpdir


def start(program: str, *words: str) -> tuple[subprocess.Popen[str], str]:
    """A Python program in a process, and its first line."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_nobody_else_can_look_into_the_folder_or_read_the_token() -> None:
    folder, lock = make_private_folder()
    assert folder.root.stat().st_mode & 0o777 == 0o700
    assert folder.token.stat().st_mode & 0o777 == 0o600
    assert len(folder.token.read_text()) == 64
    os.close(lock)


def test_only_the_folder_of_a_dead_run_is_removed_and_its_shared_memory_with_it(own_tmp: Path) -> None:
    noted, kept = SharedMemory(create=True, size=4096), SharedMemory(create=True, size=4096)
    try:
        dead, dead_root = start(OWNER, noted.name)
        living, living_root = start(OWNER, kept.name)
        (own_tmp / "slipstream-link").symlink_to(living_root)
        assert {str(folder.root): is_held for folder, is_held in private_folders()} == {
            dead_root: True,
            living_root: True,
        }
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        assert [str(root) for root in remove_folders_of_dead_runs()] == [dead_root]
        assert not Path(dead_root).exists()
        assert not (SHARED_MEMORY / noted.name).exists()
        assert Path(living_root, "token").exists()
        assert (SHARED_MEMORY / kept.name).exists()
        living.communicate()
    finally:
        kept.unlink()
        resource_tracker.unregister(f"/{noted.name}", "shared_memory")


def test_logs_are_copied_without_following_links(tmp_path: Path) -> None:
    folder, lock = make_private_folder()
    logs = folder.ray / "session_2026" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.out").write_text("said")
    folder.fork_server_log.write_text("imported")
    (logs / "empty.err").touch()
    (logs / "events").mkdir()
    secret = tmp_path / "secret"
    secret.write_text("not for others")
    (logs / "planted.log").symlink_to(secret)
    os.mkfifo(logs / "pipe.log")
    target = tmp_path / "kept"
    target.mkdir()
    (target / "raylet.out").symlink_to(secret)
    folder.keep_logs(target)
    assert {file.name: file.read_text() for file in target.iterdir()} == {
        "raylet.out": "said",
        "fork_server.log": "imported",
    }
    assert (target / "raylet.out").stat().st_mode & 0o777 == 0o600
    assert secret.read_text() == "not for others"
    os.close(lock)


def test_killed_processes_leave_no_shared_memory_and_others_keep_theirs() -> None:
    """Python's tracker of the first process is killed before it could clean up."""
    killed, name = start(SHARER)
    other, other_name = start(SHARER)
    top = psutil.Process(killed.pid)
    for tracker in top.children():
        tracker.kill()
    left = end_processes(lambda: [top] if top.is_running() else [], timeout_s=10)
    assert left == []
    assert not (SHARED_MEMORY / name).exists()
    assert (SHARED_MEMORY / other_name).exists()
    killed.wait()
    other.communicate("\n")
    assert not (SHARED_MEMORY / other_name).exists()


def test_what_a_user_keeps_in_shared_memory_is_not_removed() -> None:
    """vLLM's segments on CPUs have names of their own, and nobody removes them after a kill."""
    engines = SHARED_MEMORY / f"vllm_dist_{os.getpid()}-tp:0-cpushm_0"
    model = SHARED_MEMORY / f"model-{os.getpid()}.safetensors"
    for file in (engines, model):
        file.write_bytes(bytes(4096))
    try:
        mapper, _ = start(MAPPER, str(engines), str(model))
        top = psutil.Process(mapper.pid)
        end_processes(lambda: [top] if top.is_running() else [], timeout_s=10)
        mapper.wait()
        assert not engines.exists()
        assert model.exists()
    finally:
        engines.unlink(missing_ok=True)
        model.unlink()


@pytest.fixture
def subreaper() -> Iterator[psutil.Process]:
    """This process inherits orphans, as the one that holds Ray does."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    yield psutil.Process()
    prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def test_a_dead_orphan_is_reaped_a_living_one_and_an_own_child_are_left(subreaper: psutil.Process) -> None:
    said = subprocess.check_output(["sh", "-c", "for _ in 1 2; do sleep 600 >&- & echo $!; done"], text=True)
    dead, living = (psutil.Process(int(pid)) for pid in said.split())
    dead.kill()
    own = subprocess.Popen(["sh", "-c", "exit 7"])
    started = psutil.Process(own.pid)
    for process in (dead, started):
        wait_until_dead(process)
    assert dead.ppid() == living.ppid() == subreaper.pid

    reap_orphans({own.pid})
    assert not psutil.pid_exists(dead.pid)
    assert started.status() == psutil.STATUS_ZOMBIE and own.wait() == 7, "who started it learns how it ended"
    assert living.status() != psutil.STATUS_ZOMBIE

    living.kill()
    wait_until_dead(living)
    reap_orphans({own.pid})
    assert not psutil.pid_exists(living.pid)


def wait_until_dead(process: psutil.Process) -> None:
    """It has ended, and nobody has asked how."""
    deadline = time.monotonic() + 20
    while process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.01)
