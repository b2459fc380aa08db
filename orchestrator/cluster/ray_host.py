# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Ray has types for a part of what it offers.
"""The process that holds Ray's servers for one run, in a session of its own. Started by own_ray.py as a program.

    controller --stdin--> this process --> gcs_server, raylet, dashboard --> actors --> engines
               <-stdout--

A signal to the controller's process group (Ctrl-C, `timeout`, a batch system) does not reach what runs here, so that
the controller can save and end it in order. The end of the controller, whatever the reason, closes stdin. This process
then kills all that descends from it, keeps Ray's logs, and removes the run's private folder. When this process itself
is killed, the kernel ends Ray's servers with it (Ray asks for that), and actors and engines follow them.

While the run can be taken over (the controller has written HOLD, and no LET_GO since) a controller that is killed ends
nothing yet: another one may come to the socket `controller` of the private folder, which stands for stdin and stdout
from then on. If none comes within LEASE_S, all ends as above.

Beside Ray it starts the fork server of this machine's rollout workers (rollout/in_vllm/fork_server.py), whose imports
take longer than Ray's start.

Owns: Ray's servers, and everything that descends from them (it is their subreaper, so that no process gets away by
losing its parent, and asks for their ends where nobody else can). Does not own: who runs in the cluster.
Writes to stdout, a JSON object a line: {"address": ..., "dashboard": ...} (host and port each) once Ray is up, and
again to each controller that comes, {"failed": ...} where it does not start, and {"lost": "raylet", "how": "it was
ended by SIGKILL"} when a server that nothing can do without has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from slipstream.conf.failures import in_words, outcome_of
from slipstream.orchestrator.cluster.private_folder import (
    SHARED_MEMORY,
    PrivateFolder,
    end_processes,
    reap_orphans,
    shared_memory_of,
)
from slipstream.orchestrator.files.outputs import output_in
from slipstream.orchestrator.machine import count_cpus
from slipstream.orchestrator.socket_folder import HOLD, LET_GO
from slipstream.rollout import worker_process
from slipstream.rollout.crash_reports import COMMAND, death_in, drop_empty_reports, report_crashes
from slipstream.rollout.in_vllm import fork_server

_PR_SET_CHILD_SUBREAPER = 36
_LOOK_EVERY_S = 2.0
_END_TIMEOUT_S = 10.0
_VITAL = ("gcs_server", "raylet")
HOST = "ray-host"
"""Name of this process, in the run folder too."""
START_S = 360.0
"""Longest start of Ray. A controller that lives has ended it before (ray_cluster.RAY_TIMEOUT_S)."""
LEASE_S = 300.0
"""How long everything waits for another controller. GPUs are held meanwhile."""


@dataclass(frozen=True, slots=True)
class HostOptions:
    """What the program is told, as JSON, in its only argument."""

    folder: str
    """The run's private folder."""
    logs: str
    """Where Ray's logs are kept."""
    crashes: str
    """Where processes of the run report that they die of a signal (rollout/crash_reports.py)."""
    has_dashboard: bool
    object_store_bytes: int
    workers_import_under: dict[str, str] | None
    """What rollout workers' environment will hold of variables that imports read. None: the run has no workers."""


def main(options: HostOptions) -> None:
    """Start Ray, and end when the controller is gone or has had enough."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _ignore)  # the controller says when; SIG_IGN would be inherited by all that is started
    report_crashes(Path(options.crashes) / HOST)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    controller = _Controller(sys.stdin.fileno(), os.dup(sys.stdout.fileno()))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints is none of our lines
    threading.Thread(target=_end_with_stdin, args=(options, controller), daemon=True).start()
    if options.workers_import_under is not None:
        with output_in(PrivateFolder(Path(options.folder)).fork_server_log):
            fork_server.begin(options.workers_import_under, also=[worker_process.PRELOAD])
    # Where a raylet cannot start it hangs, and lets no thread run that would see the controller go.
    faulthandler.dump_traceback_later(START_S, exit=True)
    _start_ray(options, controller)
    faulthandler.cancel_dump_traceback_later()
    own = {child.pid for child in psutil.Process().children()}
    while True:  # the kernel ends Ray's servers when the thread that started them ends: this one must not
        reap_orphans(own)
        time.sleep(_LOOK_EVERY_S)


def _ignore(signum: int, frame: FrameType | None) -> None:
    """A handler that does nothing."""


def _start_ray(options: HostOptions, controller: _Controller) -> None:
    import ray
    from ray._private import worker as ray_worker

    joined = outcome_of(
        lambda: ray.init(
            address="local",
            num_cpus=count_cpus(),  # it starts as many idle workers, by itself for all cores of the machine
            include_dashboard=options.has_dashboard,
            dashboard_host="127.0.0.1",  # at Ray's own port, or the next free one
            object_store_memory=options.object_store_bytes,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(PrivateFolder(Path(options.folder)).ray),
        )
    )
    signal.signal(signal.SIGTERM, _ignore)  # Ray's own handlers, of Python and of C++, would end it
    if isinstance(joined, Exception):
        controller.say(failed=in_words(joined))
    else:
        # It reads all logs for drivers that show them, of which there is none, and holds each process's open for ever.
        node: Any = ray_worker.global_worker.node
        node.kill_log_monitor(check_alive=False)
        controller.greeting = {"address": ray.get_runtime_context().gcs_address, "dashboard": str(joined.dashboard_url)}
        controller.say(**controller.greeting)


class _Controller:
    """The controller as this process reaches it. `reads`, `writes`: descriptors; both stay open until another one
    comes."""

    def __init__(self, reads: int, writes: int) -> None:
        self.greeting: dict[str, str] = {}
        """Where Ray is, once it is up."""
        self.is_held = False
        """Whether another one may take its place."""
        self.has_let_go = False
        """Whether its last word was that it ends in order."""
        self._reads, self._writes = reads, writes

    def fileno(self) -> int:
        """Readable when it has written something, or is gone."""
        return self._reads

    def say(self, **facts: object) -> None:
        with contextlib.suppress(OSError):  # it is gone
            os.write(self._writes, (json.dumps(facts) + "\n").encode())

    def has_gone(self) -> bool:
        """Read what it wrote; whether that was the end."""
        try:
            word = os.read(self._reads, 1)
        except ConnectionResetError:  # it was killed before it read all that was said
            word = b""
        if word in (HOLD, LET_GO):
            self.is_held, self.has_let_go = word == HOLD, word == LET_GO
        return not word

    def comes(self, connection: socket.socket) -> None:
        """Another one, which is told where Ray is. If it is killed, too, a third one may come."""
        self._reads = self._writes = connection.detach()
        self.say(**self.greeting)


def _end_with_stdin(options: HostOptions, controller: _Controller) -> None:
    """Watch until the controller has gone, then leave nothing behind."""
    folder = PrivateFolder(Path(options.folder))
    try:
        lost = _watch(folder, controller)
        how = death_in(Path(options.crashes) / COMMAND)
        if how:
            sys.stderr.write(f"the command {how}\n")
        elif lost and not controller.has_let_go:
            tell_instead(Path(options.crashes).parent, lost)
        left = end_processes(_descendants, timeout_s=_END_TIMEOUT_S)
        if left:
            controller.say(left=left)
        reap_orphans(
            own=()
        )  # all end with this one: who looks after it finds none of them, also not in the process table
        if how:
            drop_empty_reports(Path(options.crashes))
        folder.keep_logs(Path(options.logs))
        folder.remove()
    finally:
        if sys.exception() is not None:
            traceback.print_exc()  # nobody comes back to it
        os._exit(int(sys.exception() is not None))  # Ray's own way out would wait for servers that are gone


def tell_instead(run: Path, lost: str) -> None:
    """Say why the run ended, where the controller cannot: Ray ends a driver that writes to a raylet which has just died
    on the spot, with a line in a log of its own, and that may be before the controller has heard of it."""
    from slipstream.orchestrator.control.control_folder import note_end_of
    from slipstream.orchestrator.files.run_folder import RunFolder

    error = f"ClusterLost: {lost}; Ray ended the command with it"
    sys.stderr.write(f"error: {error}\nGo on: {RunFolder(run).how_to_resume}\n")
    note_end_of(run, "failed", error)


def loss(server: str, how: str) -> str:
    return f"{server}, which holds the run's Ray cluster, is gone: {how}"


def _watch(folder: PrivateFolder, controller: _Controller) -> str:
    """Say which server ends, and note the shared memory of all processes, until the controller has gone and none comes
    in its place; none can where a server is lost. Returns what was lost first; nothing in most cases."""
    lost = ""
    names: set[str] = set()
    seen: set[str] = set()
    servers: dict[int, str] = {}
    known: set[str] = set()
    waits_until = None
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(folder.door))
        door.listen()
        while waits_until is None or time.monotonic() < waits_until:
            who = controller.fileno() if waits_until is None else door.fileno()
            ready, _, _ = select.select([who, *servers], [], [], _LOOK_EVERY_S)
            for pidfd in set(ready) & servers.keys():  # before the controller's end, which may come of theirs
                server, how = servers.pop(pidfd), _how_it_ended(pidfd)
                lost = lost or loss(server, how)
                if waits_until is not None:
                    return lost
                controller.say(lost=server, how=how)
                os.close(pidfd)
            if waits_until is None and who in ready and controller.has_gone():
                if lost or not controller.is_held:
                    return lost
                waits_until = time.monotonic() + LEASE_S
            elif waits_until is not None and who in ready:
                controller.comes(door.accept()[0])
                waits_until = None
            if len(known) < len(_VITAL):  # each once: those that have ended stay children until somebody asks how
                servers |= _vital_servers(known)
                known.update(servers.values())
            present = set(os.listdir(SHARED_MEMORY))
            if present - seen:
                seen = present
                names |= shared_memory_of(_descendants())
                folder.note_shared_memory(names)
    return lost


def _vital_servers(known: Collection[str]) -> dict[int, str]:
    """A descriptor of each server that nothing can do without, has started, and is not known yet, by name."""
    found: dict[int, str] = {}
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):  # Ray has helpers that end, or are ended
            if child.name() in _VITAL and child.name() not in known:
                found[os.pidfd_open(child.pid)] = child.name()
    return found


def _how_it_ended(pidfd: int) -> str:
    try:
        end = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:  # Ray has asked before
        end = None
    if end is None:
        return "it is not known how"
    if end.si_code == os.CLD_EXITED:
        return f"it exited with code {end.si_status}"
    return f"it was ended by {signal.Signals(end.si_status).name}"


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


if __name__ == "__main__":
    main(HostOptions(**json.loads(sys.argv[1])))
