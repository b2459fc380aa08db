"""What a process does that inherits the children of others when those die."""

import ctypes
import subprocess
import time
from collections.abc import Iterator

import psutil
import pytest

from slipstream.orchestrator.cluster.private_folder import reap_orphans
from slipstream.orchestrator.cluster.ray_host import _PR_SET_CHILD_SUBREAPER


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
