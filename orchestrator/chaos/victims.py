"""Which processes a run has on this machine, by the files that they hold open: who could be harmed.

    /proc/PID/fd --> RUN/crash/trainer-1.txt, which rank 1 alone has open --> Victim(Kind.trainer, "trainer-1", ...)

Owns: kinds, names, and the proof that a process is this run's. Does not own: what is done to it (harm.py).
Invariant: a process counts only if it is this user's and holds a report of this run's folder open
to write (rollout/crash_reports.py), or descends from one that does: no name or number that another run may have counts.
"""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

import psutil

from slipstream.orchestrator.files.run_folder import RunFolder
from slipstream.rollout.crash_reports import COMMAND


class Kind(StrEnum):
    engine = "engine"
    worker = "worker"
    trainer = "trainer"
    keeper = "keeper"
    reward = "reward"
    agent = "agent"
    controller = "controller"
    raylet = "raylet"
    gcs = "gcs"
    node = "node"
    shm = "shm"
    disk = "disk"
    store = "store"


ROOMS = (Kind.shm, Kind.disk, Kind.store)
"""No processes, but room that these need."""
OUTLIVED = (Kind.engine, Kind.worker, Kind.trainer, Kind.reward, Kind.agent)
"""Deaths after which a run goes on by itself."""
RAY_HOST = "ray-host"
"""The process that started the run's own Ray. A Ray cluster that was there before is not the run's."""
_OF_REPORT = {
    r"rollout-(\d+)(?:\.\d+)?-EngineCore": Kind.engine,
    r"rollout-(\d+)(?:\.\d+)?": Kind.worker,
    r"trainer-(\d+)(?:\.\d+)?": Kind.trainer,
    r"keeper-of-(\w+)": Kind.keeper,
}
"""Name of a report -> whose it is. Processes that were started again have a further number."""
_OF_MODULE = {
    "slipstream.rollout.rewards.reward_process": Kind.reward,
    "slipstream.rollout.agents.agent_process": Kind.agent,
}
"""What a child of the controller runs -> what it is."""
_SERVERS = {"raylet": Kind.raylet, "gcs_server": Kind.gcs}


@dataclass(frozen=True, slots=True)
class Victim:
    """One that can be harmed. Example: Victim(Kind.engine, "engine-1", (psutil.Process(4711),))."""

    kind: Kind
    name: str
    """The same for the process that takes its place."""
    processes: tuple[psutil.Process, ...]
    """All that are harmed at once; of a node many."""

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]


def victims_of(folder: RunFolder) -> list[Victim]:
    """All that are there now, in the order of kinds and names."""
    holders = _holders(folder)
    found: list[Victim] = []
    for report, process in holders.items():
        for pattern, kind in _OF_REPORT.items():
            if (name := re.fullmatch(pattern, report)) is not None:
                found.append(Victim(kind, f"{kind}-{name[1]}", (process,)))
    if COMMAND in holders:
        found += _of_user(holders[COMMAND])
        found.append(Victim(Kind.controller, Kind.controller, (holders[COMMAND],)))
    if RAY_HOST in holders:
        found += _of_ray(holders[RAY_HOST])
    return sorted(found, key=lambda one: (list(Kind).index(one.kind), one.name))


def pids_of(folder: RunFolder) -> set[int]:
    """All processes of the run on this machine."""
    return {one.pid for holder in _holders(folder).values() for one in (holder, *_below(holder))}


def _holders(folder: RunFolder) -> dict[str, psutil.Process]:
    """Report's name -> the process that has it open to write. A fork that has not opened its own yet is younger."""
    reports = folder.crashes.resolve()
    found: dict[str, psutil.Process] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.uids().effective != os.geteuid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            for file in process.open_files():
                head, _, name = file.path.rpartition("/")
                if head == str(reports) and name.endswith(".txt") and file.mode != "r":
                    older = found.get(name[:-4], process)
                    found[name[:-4]] = min(older, process, key=psutil.Process.create_time)
    return found


def _of_user(controller: psutil.Process) -> list[Victim]:
    """Processes that run the user's rewards and agents, which the controller has started."""
    found: list[Victim] = []
    for process in _below(controller):
        with suppress(psutil.Error):
            words = process.cmdline()
            module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
            if module in _OF_MODULE and not any(word.endswith("keeper.py") for word in words):
                kind = _OF_MODULE[module]
                found.append(Victim(kind, f"{kind}-{sum(one.kind is kind for one in found)}", (process,)))
    return found


def _of_ray(host: psutil.Process) -> list[Victim]:
    """Servers of the run's own Ray, and the node: they and all that runs in it on this machine."""
    below = _below(host)
    servers = [(kind, one) for one in below if (kind := _SERVERS.get(_or_nothing(one.name))) is not None]
    found = [Victim(kind, kind, (one,)) for kind, one in servers]
    return [*found, Victim(Kind.node, Kind.node, tuple(below))] if found else []


def _below(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return sorted(process.children(recursive=True), key=lambda one: one.pid)
    return []


def _or_nothing(ask: Callable[[], str]) -> str:
    with suppress(psutil.Error):
        return ask()
    return ""
