"""Attacks on the sandbox: each is refused, or bounded and over when the program is. On a machine that cannot make a
cell, each attack is refused before it starts, and that is what these tests check there.
"""

import os
import re
import secrets
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from cases.attacks import attack, found

from slipstream.rollout.sandbox.sandbox import ROOT, Ended, SandboxUnavailable, check_available, run


def test_a_program_gets_its_input_and_files_and_gives_its_output_and_status():
    try:
        check_available()
    except SandboxUnavailable:
        return  # the attacks below look at the refusal
    code = "import sys; print(input() + open('note').read()); print('!', file=sys.stderr); sys.exit(3)"
    ended = run([sys.executable, "-c", code], files={"note": "two"}, stdin="one\n")
    assert ended == Ended(3, "", b"onetwo\n", b"!\n")


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


def test_the_program_has_no_rights_and_no_way_to_processes_and_descriptors_outside():
    """Where memory is short, it goes first."""
    seen = found(
        f"""
        import os, signal
        def outcome(pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError as e:
                return e.strerror
            return "sent"
        print({{
            "to init": outcome(os.getppid()), "to us": outcome({os.getpid()}), "to all": outcome(-1),
            "processes": len([name for name in os.listdir("/proc") if name.isdigit()]),
            "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd")),
            "badness": int(open("/proc/self/oom_score_adj").read()),
            "status": open("/proc/self/status").read().split("\\n"),
        }})
        """
    )
    if seen is not None:
        has = dict(line.split(":\t", 1) for line in seen.pop("status") if ":\t" in line)
        assert {has[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
        assert (has["NoNewPrivs"], has["Seccomp"]) == ("1", "2")
        # The kernel drops what process 1 did not ask for. All that it may signal is itself, whom -1 leaves out.
        assert seen.pop("to init") in ("Operation not permitted", "sent")
        assert seen.pop("to all") in ("sent", "No such process", "Operation not permitted")
        assert seen == {"to us": "No such process", "processes": 2, "descriptors": [0, 1, 2, 3], "badness": 1000}


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
