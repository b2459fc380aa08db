"""Who could be harmed, and when: the processes that a run has on this machine, by the files that they hold open, and
what it is doing right now, from the files that it writes.

    /proc/PID/fd --> RUN/crash/trainer-1.txt, which rank 1 alone has open --> Victim(Kind.trainer, "trainer-1", ...)
    run.log, metrics.jsonl, checkpoints/, control/starting.json --> RunWatch --> "the publish of version 7 is on"

Owns: kinds, names, the proof that a process is this run's; moments, and how they are seen. Does not own: what is done
then (harm.py).
Invariants: a process counts only if it is this user's and holds a report of this run's folder open to write
(rollout/crash_reports.py), or descends from one that does: no name or number that another run may have counts. The run
is asked nothing and is not slowed down, so a moment is seen some milliseconds late; whether it was met is looked at
again after the blow. Checks of bytes at a publish's end are not in any file while they go on: their time is taken from
the publishes before.
"""

import os
import re
import statistics
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

import psutil

from slipstream.conf.json_files import JsonObject
from slipstream.orchestrator.files.row_files import GrowingFile, figures
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


LOOK_EVERY_S = 0.002
_NUM_RECENT = 9
_FACTS = re.compile(
    r"publish of version (?P<begins>\d+) begins|publish of version (?P<ended>\d+) ended"
    r"|run_log: step (?P<step>\d+)/"
    r"|(?P<down>rollout-\d+)(?:\.\d+)? is out of service and is restarted"
    r"|(?P<up>rollout-\d+)(?:\.\d+)? (?:serves again|stays out of service|has gone)"
    r"|(?P<ranks_down>trainer ranks? are started again \(\d)|trainer ranks are (?P<ranks_up>up again)"
    r"|made again: (?P<again>.*)$"
    r"|(?P<anew>up: \d+ rollout workers;)"
)

_FIGURES = (
    "step", "sync/total_s", "sync/verify_s", "sync/commit_s", "rollout/groups_failed", "rollout/handed_over",
    "reward/failures", "rollout/replicas_serving", "rollout/replicas_wanted",
)  # fmt: skip
"""What is read of a row of metrics.jsonl."""


class Moment(StrEnum):
    now = "now"
    start = "start"
    sampling = "sampling"
    publish = "publish"
    verify = "verify"
    checkpoint = "checkpoint"
    recovery = "recovery"


@dataclass(frozen=True, slots=True)
class Publish:
    """The newest one. Example: Publish(7, 1767225600.2, None)."""

    version: int
    began_at: float
    """Seconds since 1970."""
    ended_at: float | None


class RunWatch:
    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._log, self._metrics = GrowingFile(folder.log), GrowingFile(folder.metrics)
        self.publish: Publish | None = None
        self.step, self.stepped_at = -1, 0.0
        """The newest row's, -1 before the first, and when it was written."""
        self.recovering: set[str] = set()
        """Workers, and "trainer", that are being started again."""
        self.made_again: list[str] = []
        """Calls that trainer ranks made once more."""
        self.rows: dict[int, JsonObject] = {}
        """The newest row of each step, _FIGURES of it."""
        self._stages: deque[JsonObject] = deque(maxlen=_NUM_RECENT)
        self.look()

    def look(self) -> None:
        for _, line in self._log.news().lines:
            text = line.decode(errors="replace").rstrip()
            for fact in _FACTS.finditer(text):
                self._take(fact.groupdict(), _time_of(text))
        for row in figures(self._metrics.news(), _FIGURES):
            self.rows[row["step"]] = row
            if row.get("sync/total_s") is not None:
                self._stages.append(row)

    def _take(self, fact: dict[str, str | None], at: float) -> None:
        if fact["begins"]:
            self.publish = Publish(int(fact["begins"]), at, None)
        elif fact["ended"] and self.publish is not None:
            self.publish = Publish(self.publish.version, self.publish.began_at, at)
        elif fact["step"]:
            self.step, self.stepped_at = int(fact["step"]), at
        elif fact["down"] or fact["ranks_down"]:
            self.recovering.add(fact["down"] or "trainer")
        elif fact["up"] or fact["ranks_up"]:
            self.recovering.discard(fact["up"] or "trainer")
        elif fact["anew"]:
            self.recovering.clear()  # whatever the controller before had begun
        elif fact["again"]:
            self.made_again += fact["again"].split(", ")

    def wait(self, moment: Moment, goes_on: Callable[[], bool], *, timeout_s: float) -> bool:
        """Until it has come; whether it did in time. `sampling` and `publish` wait for the next one to begin."""
        deadline, looked = time.monotonic() + timeout_s, 0
        before = self.stepped_at, self.publish
        while time.monotonic() < deadline:
            self.look()
            begun = moment is not Moment.sampling or self.stepped_at != before[0]
            new = self.publish if moment in (Moment.publish, Moment.verify) else None
            if begun and (new is None or new != before[1]) and self.is_on(moment, time.time()):
                return True
            looked += 1
            if looked % 500 == 0 and not goes_on():
                return False
            time.sleep(LOOK_EVERY_S)
        return False

    def is_on(self, moment: Moment, at: float) -> bool:
        """Whether the moment is, or by what is known now was, at the time `at`."""
        publish = self.publish
        match moment:
            case Moment.now:
                return True
            case Moment.start:
                return self.folder.starting.exists()
            case Moment.recovery:
                return bool(self.recovering)
            case Moment.checkpoint:
                with suppress(OSError):
                    return any(self.folder.checkpoints.glob(".step-*.partial"))
                return False
            case Moment.sampling:
                begins = publish is not None and publish.began_at > self.stepped_at
                return self.step > 0 and not begins and at >= self.stepped_at
            case Moment.publish | Moment.verify:
                if publish is None or at < publish.began_at or at > (publish.ended_at or at):
                    return False
                since_s = at - publish.began_at
                first_s, last_s = self._verify_s() if moment is Moment.verify else (0.0, since_s)
                return first_s <= since_s <= last_s

    def had_ended(self, at: float) -> bool:
        return self.publish is not None and self.publish.ended_at is not None and self.publish.ended_at < at

    def publish_s(self) -> float:
        return statistics.median(row["sync/total_s"] for row in self._stages) if self._stages else 0.0

    def _verify_s(self) -> tuple[float, float]:
        """From when to when publishes verify, in seconds after they began."""
        if not self._stages:
            return 0.0, float("inf")
        total_s, verify_s, commit_s = (
            statistics.median(row[f"sync/{name}"] for row in self._stages)
            for name in ("total_s", "verify_s", "commit_s")
        )
        return total_s - commit_s - verify_s, total_s - commit_s


def _time_of(line: str) -> float:
    try:
        return datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()
    except ValueError:  # the second line of a message
        return time.time()
