"""What a program in a cell takes of time, processes, memory, disk and output is bounded, and over when the program is.
On a machine that cannot make a cell, each attack is refused before it starts (cases/attacks.py).
"""

import os
import secrets
import subprocess
import sys
import time

import pytest
from cases.attacks import attack, found, processes_with

from slipstream.rollout.sandbox.sandbox import ROOT


def test_a_fork_bomb_meets_the_limit_of_processes_and_leaves_none():
    mark = f"bomb-{secrets.token_hex(8)}"
    born = found(
        f"""
        import os, subprocess, sys, time
        born = 0
        while True:
            try:
                if os.fork() == 0:
                    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", "{mark}"])
                born += 1
            except BlockingIOError:
                break
        print(born)
        """,
        max_processes=8,
    )
    assert born is None or 4 <= born <= 10
    assert processes_with(mark) == []


def test_daemons_and_zombies_end_with_the_program():
    mark = f"daemon-{secrets.token_hex(8)}"
    ended = attack(
        f"""
        import os, sys, time
        for _ in range(5):
            if os.fork() == 0:
                os._exit(0)  # nobody waits for it
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", "{mark}"])
            os._exit(0)
        time.sleep(0.2)
        """
    )
    assert ended is None or ended.status == 0
    assert processes_with(mark) == []


FORKS = """
import os
while True:
    try:
        os.fork()
    except BlockingIOError:
        pass
"""
TAKES_MEMORY = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        block = bytearray(os.urandom(1 << 20) * 100)
        time.sleep(600)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("program", "limits", "limit"),
    [
        ("import time; print('before', flush=True); time.sleep(600)", {"wall_s": 0.5}, "time"),
        (FORKS, {"max_processes": 8, "wall_s": 1.0}, "time"),
        (TAKES_MEMORY, {"memory_bytes": 256 << 20}, "memory"),
        ("import os; os.fork()\nwhile True: pass", {"cpu_s": 0.5}, "cpu"),
    ],
    ids=["waiting", "forking", "memory of all its processes", "time of all its processes"],
)
def test_a_program_ends_at_its_limit(program: str, limits: dict[str, float], limit: str) -> None:
    ended = attack(program, **limits)
    assert ended is None or ended.limit == limit


def test_one_process_cannot_have_more_memory_than_it_may():
    ended = attack("x = bytearray(1 << 30)", memory_bytes=256 << 20)
    assert ended is None or (ended.status == 1 and b"MemoryError" in ended.stderr)


@pytest.mark.parametrize(
    "hoard",
    [
        "mmap.mmap(-1, 32 << 20).write(bytes(32 << 20))",  # shared memory that is no process's own
        "open(f'/dev/shm/{len(kept)}', 'wb').write(bytes(32 << 20))",
    ],
)
def test_shared_memory_and_files_in_memory_count(hoard: str):
    ended = attack(
        f"""
        import mmap
        kept = []
        while True:
            block = mmap.mmap(-1, 32 << 20) if "mmap" in {hoard!r} else None
            if block is None:
                kept.append({hoard})
            else:
                block.write(bytes(32 << 20))
                kept.append(block)
        """,
        memory_bytes=256 << 20,
        disk_bytes=64 << 20,
    )
    assert ended is None or ended.limit == "memory" or b"No space left on device" in ended.stderr


def test_disk_is_bounded_and_nothing_but_tmp_can_be_written():
    outcomes = found(
        """
        import os
        def outcome(act):
            try:
                act()
            except OSError as e:
                return e.strerror
            return "done"
        def fill():
            for number in range(100):
                open(f"/tmp/{number}", "wb").write(bytes(1 << 20))
        def many():
            for number in range(10_000):
                open(f"/tmp/empty-{number}", "w").close()
        made = {"big": outcome(lambda: open("/tmp/big", "wb").write(bytes(64 << 20))) }
        os.remove("/tmp/big")
        made["many"] = outcome(many)
        made["fill"] = outcome(fill)
        for path in ("/file", "/usr/file", "/etc/passwd", "/dev/file", "/proc/sys/kernel/hostname", os.__file__):
            made[path] = outcome(lambda: open(path, "a"))
        print(made)
        """,
        disk_bytes=8 << 20,
        max_files=1000,
    )
    if outcomes is not None:
        assert outcomes.pop("big") in ("File too large", "No space left on device")
        assert (outcomes.pop("many"), outcomes.pop("fill")) == ("No space left on device",) * 2
        assert set(outcomes.values()) <= {"Read-only file system", "Permission denied"}, outcomes


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output_is_cut_and_ends_the_program(stream: str):
    ended = attack(f"import sys\nwhile True: sys.{stream}.write('x' * (1 << 16))", output_bytes=1 << 20)
    assert ended is None or (ended.limit, len(getattr(ended, stream))) == ("output", 1 << 20)


def test_output_held_open_by_a_daemon_does_not_prolong_the_program():
    ended = attack("import os, time\nif os.fork() == 0:\n  os.setsid(); time.sleep(600)\nprint('done')")
    assert ended is None or (ended.status, ended.stdout) == (0, b"done\n")


def test_a_cell_ends_with_who_asked_for_it():
    mark = f"orphan-{secrets.token_hex(8)}"
    code = f"""
import sys
from slipstream.rollout.sandbox.sandbox import Limits, run
inner = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)', {mark!r}])"
run([sys.executable, "-c", inner], limits=Limits(wall_s=600))
"""
    asker = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=-3)
    try:
        while asker.poll() is None and len(processes_with(mark)) < 3:  # the asker's line has the mark, too
            time.sleep(0.01)
    finally:
        asker.kill()
        asker.wait()
    while processes_with(mark):
        time.sleep(0.01)
