"""Locks: whatever lasts is undone, also where the command is interrupted; a room that somebody else uses is not filled.
File systems are small ones of a mount namespace, which every user may have.
"""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.orchestrator.chaos.ways import slowed

IN_A_SMALL_FILE_SYSTEM = """
import json, os, subprocess, sys, threading, time
from contextlib import suppress
from pathlib import Path
from slipstream.conf.errors import ConfigError
from slipstream.orchestrator.chaos.harm import Blow, Harm
from slipstream.orchestrator.chaos.victims import Moment
from slipstream.orchestrator.chaos.ways import check_can_be_filled, filled
from slipstream.orchestrator.chaos.victims import Kind
from slipstream.orchestrator.chaos.ways import What
from slipstream.orchestrator.control.control_folder import alive
from slipstream.orchestrator.files.run_folder import RunFolder

place, seen = Path(sys.argv[1]), {}
folder = RunFolder(place / "run")
folder.crashes.mkdir(parents=True)
free = lambda: os.statvfs(place).f_bfree * os.statvfs(place).f_frsize

def refusal(of=folder):
    try:
        check_can_be_filled(Kind.disk, of, 0)
    except ConfigError as error:
        return str(error)
"""


def seen_there(place: Path, script: str, size: str = "8m") -> dict[str, Any]:
    """Run the script where `place` is a file system of its own. What it has noted in `seen`."""
    place.mkdir()
    words = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mounted = f'mount -t tmpfs -o size={size} tmpfs "$1" && exec "$0" -c "$2" "$1"'
    whole = IN_A_SMALL_FILE_SYSTEM + script + "\nprint(json.dumps(seen))"
    done = subprocess.run(
        [*words, mounted, sys.executable, str(place), whole], capture_output=True, text=True, timeout=120
    )
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


def wait_until(victim: psutil.Process, status: str) -> None:
    """Until it has been seen so."""
    deadline = time.monotonic() + 60
    while victim.status() != status:
        assert time.monotonic() < deadline, f"it is never {status}"
        time.sleep(0.002)


def test_a_slow_victim_stands_and_runs_by_turns_and_goes_on_afterwards() -> None:
    with subprocess.Popen(["sleep", "600"]) as started:
        victim = psutil.Process(started.pid)
        with pytest.raises(KeyboardInterrupt), slowed([victim]):
            for status in (psutil.STATUS_STOPPED, psutil.STATUS_SLEEPING) * 2:
                wait_until(victim, status)
            raise KeyboardInterrupt
        assert "slows the victim" not in [thread.name for thread in threading.enumerate()]
        wait_until(victim, psutil.STATUS_SLEEPING)
        started.kill()


@pytest.mark.parametrize("way", ["stopped", "slowed"])
def test_a_victim_goes_on_also_where_the_command_is_killed(way: str) -> None:
    script = (
        f"import psutil, sys, time\nfrom slipstream.orchestrator.chaos.ways import {way}\n"
        f"with {way}([psutil.Process(int(sys.argv[1]))]):\n    time.sleep(600)"
    )
    with (
        subprocess.Popen(["sleep", "600"]) as started,
        subprocess.Popen([sys.executable, "-c", script, str(started.pid)]) as command,
    ):
        try:
            wait_until(psutil.Process(started.pid), psutil.STATUS_STOPPED)
            command.kill()
            command.wait()
            wait_until(psutil.Process(started.pid), psutil.STATUS_SLEEPING)
        finally:
            command.kill()
            started.kill()


def test_all_but_the_rest_is_taken_by_a_file_without_a_name_and_given_back(tmp_path: Path) -> None:
    seen = seen_there(
        tmp_path / "disk",
        """
before, names = free(), os.listdir(place)
try:
    with filled(place, 1 << 20):
        seen["rest"], seen["same names"] = free(), os.listdir(place) == names
        raise KeyboardInterrupt
except KeyboardInterrupt:
    seen["given back"] = free() == before
""",
    )
    assert seen == {"rest": 1 << 20, "same names": True, "given back": True}


def test_room_is_given_back_as_soon_as_the_run_has_ended(tmp_path: Path) -> None:
    """So that a resume finds it. The run's disk is to be full for 1000 s."""
    seen = seen_there(
        tmp_path / "disk",
        """
def write_until_full():
    try:
        while True:
            with (folder.root / "rows").open("ab", buffering=0) as file:
                file.write(bytes(4096))
            time.sleep(0.001)
    except OSError as error:
        seen["full"] = error.strerror
        over.set()

over = threading.Event()
def run():
    with suppress(OSError), alive(folder.root):
        begun.set()
        over.wait()
        raise OSError("the disk is full")

begun = threading.Event()
runs = threading.Thread(target=run)
runs.start()
begun.wait()
harm = Harm(folder, seed=1, stop_s=1000, rest_bytes=8192, patience_s=10, resumes=False, say=lambda line: None)
writes = threading.Timer(0.1, write_until_full)
writes.start()
event = harm.do(Blow(Kind.disk, "disk", What.fill, Moment.now), 0)
seen["event"] = [event.outcome, event.why, event.stop_s, event.rest_bytes]
seen["free"] = free() > 1 << 20
""",
    )
    assert seen == {
        "full": "No space left on device",
        "event": ["ended", "OSError: the disk is full", 1000, 8192],
        "free": True,
    }


def test_a_file_system_that_others_use_is_not_filled(tmp_path: Path) -> None:
    seen = seen_there(
        tmp_path / "disk",
        """
report = (folder.crashes / "trainer-0.txt").open("a")
ours = subprocess.Popen(
    ["sh", "-c", "sleep 60 & wait"], pass_fds=[report.fileno()], stdout=report, start_new_session=True
)
report.close()
seen["the run's own"] = refusal()
seen["the machine's"] = refusal(of=RunFolder(Path("/")))
held = (place / "held").open("w")
stranger = subprocess.Popen(["sleep", "60"], stdout=held)
held.close()
seen["held open"] = refusal() or ""
stranger.kill()
stranger.wait()
maps = "import ctypes, sys, time; f = open(sys.argv[1], 'w+b'); f.truncate(4096);"
maps += "ctypes.CDLL(None).mmap(None, 4096, 3, 1, f.fileno(), 0);"  # Python's own keeps a descriptor
maps += "f.close(); print(flush=True); time.sleep(60)"
stranger = subprocess.Popen([sys.executable, "-c", maps, place / "mapped"], stdout=-1)
stranger.stdout.readline()
seen["mapped"], seen["pid"] = refusal() or "", str(stranger.pid)
stranger.kill()
os.killpg(ours.pid, 9)
""",
    )
    assert seen["the run's own"] is None
    assert "is on the disk of the whole machine" in seen["the machine's"]
    assert "(sleep), which is not the run's, uses, too" in seen["held open"]
    assert f"process {seen['pid']} (" in seen["mapped"]


def test_memory_that_the_machine_needs_is_not_taken(tmp_path: Path) -> None:
    seen = seen_there(tmp_path / "disk", 'seen["refused"] = refusal()', size="64T")
    assert "is memory, and its 70368.7 GB are more than half" in seen["refused"]
