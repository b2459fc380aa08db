"""How somebody is harmed, and how that is undone.

    kill, term   a signal
    stop         SIGSTOP, then SIGCONT
    slow         the same over and over: the victim runs a tenth of the time
    cut          rules of nft in the network namespace that the victim's process is in, which drop whatever comes and
                 goes but on loopback; addresses and routes stay, as where a cable is pulled further on
    fill         a file without a name, which takes what is free in a folder's file system (room.py)

Owns: these ways, and whether one of them can harm a process. Does not own: whom, when and for how long (harm.py).
Invariant: what lasts is undone at the end of its block, however that ends. A cut ends in time and a file is gone also
where this command is killed: the kernel sees to both. So does who was stopped go on: a shell that outlives this command
waits for the end of its input. A slow victim is not given to a cgroup with a quota: that needs root, and would take it
out of the group in which a container or a batch system counts it.
"""

import os
import signal
import subprocess
import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum

import psutil

from slipstream.conf.errors import ConfigError

SLOW_SHARE, _PERIOD_S = 0.1, 0.2
_TABLE = "inet slipstream_chaos"
_RULES = """\
table {table}
delete table {table}
table {table} {{
  set cut {{ type nf_proto; flags timeout; elements = {{ ipv4 timeout {ms}ms, ipv6 timeout {ms}ms }}; }}
  chain arriving {{ type filter hook prerouting priority raw; iifname != "lo" meta nfproto @cut drop; }}
  chain leaving {{ type filter hook postrouting priority raw; oifname != "lo" meta nfproto @cut drop; }}
}}
"""
_NFT_TIMEOUT_S = 10.0


class What(StrEnum):
    kill = "kill"
    stop = "stop"
    term = "term"
    slow = "slow"
    cut = "cut"
    fill = "fill"


LASTING = (What.stop, What.slow, What.cut, What.fill)
"""They last some seconds, and are undone."""


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.Error):  # psutil refuses where another process has the number by now
            process.send_signal(number)


@contextmanager
def _going_on_afterwards(processes: Sequence[psutil.Process]) -> Generator[None]:
    words = ["sh", "-c", 'read _; kill -CONT "$@"', "sh", *(str(process.pid) for process in processes)]
    shell = subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        shell.communicate()


@contextmanager
def stopped(processes: Sequence[psutil.Process]) -> Generator[None]:
    with _going_on_afterwards(processes):
        send(processes, signal.SIGSTOP)
        yield


@contextmanager
def slowed(processes: Sequence[psutil.Process]) -> Generator[None]:
    over = threading.Event()

    def brake() -> None:
        while not over.is_set():
            send(processes, signal.SIGSTOP)
            over.wait(_PERIOD_S * (1 - SLOW_SHARE))
            send(processes, signal.SIGCONT)
            over.wait(_PERIOD_S * SLOW_SHARE)

    thread = threading.Thread(target=brake, name="slows the victim")
    with _going_on_afterwards(processes):
        try:
            thread.start()
            yield
        finally:
            over.set()
            thread.join()


@contextmanager
def cut_off(name: str, process: psutil.Process, lasts_s: float) -> Generator[None]:
    """The node in which the process is: nobody in it reaches anybody outside."""
    namespace = _own_network(name, process)
    try:
        _nft(namespace, _RULES.format(table=_TABLE, ms=round(lasts_s * 1e3)))
        yield
    finally:
        _nft(namespace, f"table {_TABLE}\ndelete table {_TABLE}\n")
        os.close(namespace)


def check_can_be_cut(name: str, process: psutil.Process) -> None:
    """Raises ConfigError where the process has no network of its own, or this user may not cut it."""
    namespace = _own_network(name, process)
    try:
        _nft(namespace, "list tables")
    finally:
        os.close(namespace)


def _own_network(name: str, process: psutil.Process) -> int:
    """A descriptor of its network namespace, which is there even when its last process has ended."""
    try:
        namespace = os.open(f"/proc/{process.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"--what cut: process {process.pid} ({name}) has ended, or is out of reach") from error
    if os.path.samestat(os.fstat(namespace), os.stat("/proc/self/ns/net")):
        os.close(namespace)
        raise ConfigError(
            f"--what cut: {name} (process {process.pid}) uses the same network as this command, and so do others;"
            " it can cut off a node that is a network namespace (ip netns) or a container, called from outside of it"
        )
    return namespace


def _nft(namespace: int, rules: str) -> None:
    words = ["nsenter", f"--net=/proc/{os.getpid()}/fd/{namespace}", "nft", "-f", "-"]
    try:
        done = subprocess.run(words, input=rules, capture_output=True, text=True, timeout=_NFT_TIMEOUT_S, check=False)
    except FileNotFoundError as error:
        raise ConfigError("--what cut needs nsenter (package util-linux) and nft (package nftables)") from error
    if done.returncode:
        raise ConfigError(f"--what cut needs nft (package nftables), and root; {done.stderr.strip().splitlines()[0]}")
