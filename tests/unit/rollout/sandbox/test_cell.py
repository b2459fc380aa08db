"""Attacks on the sandbox: each is refused, or bounded and over when the program is. On a machine that cannot make a
cell, each attack is refused before it starts, and that is what these tests check there.
"""

import ast
import os
import re
import secrets
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from slipstream.rollout.sandbox.sandbox import ROOT, Ended, Limits, SandboxUnavailable, check_available, run

PATIENT = {"wall_s": 60.0, "cpu_s": 60.0}


def attack(code: str, *, stdin: str = "", **limits: Any) -> Ended | None:
    """How the program ended; None where the machine has no cells, after a look at the refusal."""
    argv = [sys.executable, "-c", textwrap.dedent(code)]
    try:
        check_available()
    except SandboxUnavailable as e:
        with pytest.raises(SandboxUnavailable, match=re.escape(str(e).partition(":")[0])):
            run(argv, stdin=stdin, limits=Limits(**(PATIENT | limits)))
        return None
    return run(argv, stdin=stdin, limits=Limits(**(PATIENT | limits)))


def found(code: str, **limits: Any) -> Any:
    """The value that the program prints with repr; None where the machine has no cells."""
    ended = attack(code, **limits)
    if ended is None:
        return None
    assert (ended.status, ended.limit) == (0, ""), ended.stderr.decode()[-1000:]
    return ast.literal_eval(ended.stdout.decode())


def processes_with(mark: str) -> list[str]:
    """Command lines of this machine's processes that have a word in them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().decode(errors="replace")
            if mark in line and b") Z " not in (folder / "stat").read_bytes():
                found.append(line)
        except OSError:
            continue
    return found


def test_a_program_gets_its_input_and_files_and_gives_its_output_and_status():
    try:
        check_available()
    except SandboxUnavailable:
        return  # the attacks below look at the refusal
    code = "import sys; print(input() + open('note').read()); print('!', file=sys.stderr); sys.exit(3)"
    ended = run([sys.executable, "-c", code], files={"note": "two"}, stdin="one\n")
    assert ended == Ended(3, "", b"onetwo\n", b"!\n")


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


def test_a_bomb_that_never_stops_forking_ends_at_its_time():
    ended = attack(
        """
        import os
        while True:
            try:
                os.fork()
            except BlockingIOError:
                pass
        """,
        max_processes=8,
        wall_s=1.0,
    )
    assert ended is None or ended.limit == "time"


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


def test_one_process_cannot_have_more_memory_than_it_may():
    ended = attack("x = bytearray(1 << 30)", memory_bytes=256 << 20)
    assert ended is None or (ended.status == 1 and b"MemoryError" in ended.stderr)


def test_processes_together_cannot_have_more_memory_than_they_may():
    ended = attack(
        """
        import os, time
        for _ in range(8):
            if os.fork() == 0:
                block = bytearray(os.urandom(1 << 20) * 100)
                time.sleep(600)
        time.sleep(600)
        """,
        memory_bytes=256 << 20,
    )
    assert ended is None or ended.limit == "memory"


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


REFUSED = """
    import ctypes, os, socket
    libc = ctypes.CDLL(None, use_errno=True)
    def refused(call, *arguments):
        ctypes.set_errno(0)
        try:
            result = call(*arguments)
        except OSError as e:
            return os.strerror(e.errno)
        return os.strerror(ctypes.get_errno()) if result == -1 else "done"
"""


def test_ways_around_the_namespaces_and_the_count_of_memory_are_refused():
    outcomes = found(
        REFUSED
        + """
    print({
        "memory without a file": refused(os.memfd_create, "hidden"),
        "System V segment": refused(libc.shmget, 0, 1 << 20, 0o1600),
        "another namespace": refused(libc.unshare, 0x10000000),
        "mount": refused(libc.mount, b"tmpfs", b"/tmp", b"tmpfs", 0, None),
        "chroot": refused(os.chroot, "/tmp"),
        "trace": refused(libc.ptrace, 16, 1, 0, 0),
        "kernel's keys": refused(libc.syscall, 250, 0, -3, 0),
        "vsock": refused(socket.socket, 40, socket.SOCK_STREAM),
        "netlink": refused(socket.socket, socket.AF_NETLINK, socket.SOCK_RAW),
        "packets": refused(socket.socket, socket.AF_PACKET, socket.SOCK_RAW),
        "become root": refused(os.setuid, 0),
    })
    """
    )
    assert outcomes is None or set(outcomes.values()) == {"Operation not permitted"}, outcomes


def test_the_program_has_no_rights_and_cannot_gain_any():
    status = found("print(open('/proc/self/status').read().split('\\n'))")
    if status is not None:
        has = dict(line.split(":\t", 1) for line in status if ":\t" in line)
        assert {has[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
        assert (has["NoNewPrivs"], has["Seccomp"]) == ("1", "2")


def test_where_memory_is_short_the_program_goes_first():
    assert found("print(int(open('/proc/self/oom_score_adj').read()))") in (1000, None)


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


def test_there_is_no_network_and_no_way_to_a_server_of_this_machine():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        name = f"\0{secrets.token_hex(8)}"
        abstract.bind(name)
        abstract.listen()
        outcomes = found(
            f"""
            import socket
            def outcome(family, address):
                try:
                    socket.socket(family).connect(address)
                except OSError as e:
                    return e.strerror
                return "connected"
            print([
                outcome(socket.AF_INET, ("127.0.0.1", {server.getsockname()[1]})),
                outcome(socket.AF_INET, ("169.254.169.254", 80)),
                outcome(socket.AF_INET6, ("::1", 80)),
                outcome(socket.AF_UNIX, {name!r}),
                [line.partition(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]],
            ])
            """
        )
    if outcomes is not None:
        assert outcomes[:2] == ["Network is unreachable"] * 2
        assert outcomes[2] in ("Cannot assign requested address", "Network is unreachable")
        assert outcomes[3:] == ["Connection refused", ["lo"]]


def test_signals_reach_nobody_outside():
    outcomes = found(
        f"""
        import os, signal
        def outcome(pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError as e:
                return e.strerror
            return "sent"
        print([outcome(os.getppid()), outcome({os.getpid()}), len([n for n in os.listdir("/proc") if n.isdigit()])])
        """
    )
    if outcomes is not None:
        to_init, to_us, num_seen = outcomes
        assert to_init in ("Operation not permitted", "sent")  # the kernel drops what process 1 did not ask for
        assert to_us == "No such process"
        assert num_seen == 2


def test_everything_that_it_may_signal_is_its_own():
    ended = attack("import os, signal; os.kill(-1, signal.SIGKILL); print('alive')")
    assert ended is None or ended.limit == ""


def test_secrets_of_the_run_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    secret = secrets.token_hex(16)
    monkeypatch.setenv("RUN_KEY", secret)
    key = tmp_path / "key"
    key.write_text(secret)
    read, write = os.pipe()
    os.write(write, secret.encode())
    os.set_inheritable(read, True)
    code = f"""
        import os
        seen = [str(dict(os.environ))]
        links = {{"/tmp/link": {str(key)!r}, "/tmp/root": "/proc/1/root{key}", "/tmp/up": "/../..{key}"}}
        for link, target in links.items():
            os.symlink(target, link)
        paths = [{str(key)!r}, *links, "/proc/self/root{key}", "/proc/1/cwd/key", "/proc/1/mem", "/proc/kcore"]
        for pid in [name for name in os.listdir("/proc") if name.isdigit()]:
            paths += [f"/proc/{{pid}}/{{name}}" for name in ("environ", "cmdline", "maps", "fd/{read}")]
        for path in paths:
            try:
                seen.append(open(path, "rb").read(1 << 20).decode(errors="replace"))
            except OSError as e:
                pass
        for fd in range(64):
            try:
                os.set_blocking(fd, False)
                seen.append(os.read(fd, 1 << 10).decode(errors="replace") if fd > 2 else "")
            except OSError:
                pass
        print(repr(seen))
        """
    ended = attack(code)
    os.close(read)
    os.close(write)
    if ended is not None:
        assert ended.status == 0, ended.stderr
        # The program's own text holds names, never the secret itself.
        assert secret not in ended.stdout.decode()


def test_descriptors_are_not_inherited():
    names = found("import os; print(sorted(int(name) for name in os.listdir('/proc/self/fd')))")
    assert names is None or names == [0, 1, 2, 3]  # the last one lists the folder


def test_endless_output_is_cut_and_ends_the_program():
    ended = attack("while True: print('x' * (1 << 16))", output_bytes=1 << 20)
    if ended is not None:
        assert ended.limit == "output"
        assert len(ended.stdout) == 1 << 20


def test_a_gigabyte_on_standard_error_is_cut_as_well():
    ended = attack("import sys\nfor _ in range(1 << 14): sys.stderr.write('x' * (1 << 16))", output_bytes=1 << 16)
    assert ended is None or (ended.limit, len(ended.stderr)) == ("output", 1 << 16)


def test_waiting_ends_at_the_time():
    ended = attack("import time; print('before', flush=True); time.sleep(600)", wall_s=0.5)
    assert ended is None or ended.limit == "time"


def test_output_held_open_by_a_daemon_does_not_prolong_the_program():
    ended = attack("import os, time\nif os.fork() == 0:\n  os.setsid(); time.sleep(600)\nprint('done')")
    assert ended is None or (ended.status, ended.stdout) == (0, b"done\n")


def test_time_of_the_cpu_is_that_of_all_processes():
    ended = attack(
        """
        import os
        os.fork()
        while True:
            pass
        """,
        cpu_s=0.5,
    )
    assert ended is None or ended.limit == "cpu"


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


def test_a_machine_without_namespaces_is_told_why():
    """A filter such as a container's refuses them to this program and to all that it starts."""
    code = """
import ctypes
from slipstream.rollout.sandbox import syscalls
from slipstream.rollout.sandbox.sandbox import SandboxUnavailable, check_available
syscalls.install(ctypes.CDLL(None, use_errno=True), syscalls.program())
try:
    check_available()
except SandboxUnavailable as e:
    print(e)
"""
    told = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, check=True
    ).stdout.decode()
    assert told.startswith("unshare: Operation not permitted; a seccomp filter is on, as in a container: start it with")


AS_ANOTHER = """
import sys
from slipstream.rollout.sandbox.sandbox import Limits, SandboxUnavailable, run
bomb = '''
import os
born = 0
try:
    while os.fork() or os.execv("/bin/sleep", ["sleep", "600"]):
        born += 1
except BlockingIOError:
    print(os.getuid(), born)
'''
try:
    ended = run([sys.executable, "-c", bomb], limits=Limits(wall_s=60, max_processes=8))
    print(ended.status, ended.stdout.decode())
except SandboxUnavailable as e:
    print("refused:", e)
"""


def test_a_user_without_rights_can_make_a_cell():
    """Where root runs the tests, another user does it, with a Python that it may read: root's own is often private."""
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    user = {"user": 12345, "group": 12345, "extra_groups": []} if os.geteuid() == 0 else {}
    pythons = [path for path in (sys.executable, "/usr/local/bin/python3", "/usr/bin/python3") if os.path.exists(path)]
    for python in pythons:
        try:
            made = subprocess.run([python, "-c", AS_ANOTHER], env=environment, stdout=-1, text=True, cwd="/", **user)
        except PermissionError:
            continue
        if made.returncode == 0:
            break
    else:
        return  # no Python on this machine that another user may run
    if made.stdout.startswith("refused: "):
        assert re.match("refused: (unshare|name the users|mount)", made.stdout), made.stdout
    else:
        status, seen_user, num_born = made.stdout.split()
        assert (status, seen_user) == ("0", "1000")
        assert 4 <= int(num_born) <= 10
