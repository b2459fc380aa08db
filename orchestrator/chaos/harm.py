"""One event: hit a process at a moment, wait until the run is as before or has ended, and say what it cost.

    RunWatch.wait --> the blow --> steps go on --> everybody is there again, and serves --> a row of chaos.jsonl

Owns: when the blow falls and what lasts is undone, the wait after it, and the figures of a row. Does not own: how one
is harmed (ways.py), who is and when (command.py), the table (command.py). Invariant: what lasts is undone in
any case, also where this command is interrupted.
"""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass

import psutil

from slipstream.conf.errors import ConfigError
from slipstream.conf.whole_files import append_line
from slipstream.orchestrator.chaos.victims import ROOMS, Kind, Moment, RunWatch, Victim, victims_of
from slipstream.orchestrator.chaos.ways import LASTING, What, cut_off, filled, folder_of, send, slowed, stopped
from slipstream.orchestrator.checkpoints.journal import door_of
from slipstream.orchestrator.control.control_folder import ask, how_it_ended, is_alive, start_of
from slipstream.orchestrator.files.row_files import GrowingFile, rows_by
from slipstream.orchestrator.files.run_folder import RunFolder
from slipstream.orchestrator.files.timeline import read_step

LOOK_EVERY_S = 0.5
_DEATH_S = 10.0
"""How long a process is watched that may outlive its signal."""
AS_BEFORE, ENDED, NOT_YET, NOT_MET = "as before", "ended", "not as before", "not met"


@dataclass(frozen=True, slots=True)
class Blow:
    """What is to be done. Example: Blow(Kind.engine, "engine-1", What.kill, Moment.publish, 0.02, "")."""

    kind: Kind
    name: str
    what: What
    moment: Moment
    after_s: float = 0.0
    """Seconds after the moment was seen."""
    first: str = ""
    """With Moment.recovery: whose engine is killed beforehand, if nobody is being started again."""


@dataclass(slots=True)
class Event:
    """A row of chaos.jsonl."""

    time: float
    """When the blow fell, in seconds since 1970."""
    seed: int
    number: int
    """Its number among the events drawn from this seed."""
    victim: str
    pids: list[int]
    what: str
    stop_s: float | None
    """How long it lasted, unless the run ended first."""
    rest_bytes: int | None
    """What was left free."""
    asked: str
    """The moment."""
    met: bool
    """Whether it was that moment still when the blow had fallen."""
    first: str
    step: int
    """Finished before."""
    outcome: str = NOT_MET
    why: str | None = None
    """How the run ended."""
    resumed: bool = False
    """Whether the run ended, or its controller died, and it was resumed."""
    longest_s: float | None = None
    """Longest time from the blow, or from the end of a step after it, to the end of the next step."""
    all_after_s: float | None = None
    """From the blow to the end of the next step that began with everybody there, and serving."""
    steps_again: int = 0
    """Finished steps that were computed again."""
    groups_again: int = 0
    """Groups sampled again because their worker failed."""
    handed_over: int = 0
    """Responses that another worker went on with."""
    rewards_failed: int = 0
    """Rollouts whose reward failed; they are left out of their step."""


class Harm:
    """See the module's docstring.

    Args:
        stop_s: how long ways last that are undone.
        patience_s: longest wait for the moment, and for the run to be as before.
        resumes: resume the run by `slipstream resume` where it ends or its controller dies.
    """

    def __init__(
        self, folder: RunFolder, *, seed: int, stop_s: float, rest_bytes: int, patience_s: float, resumes: bool,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._folder, self._seed, self._stop_s, self._patience_s = folder, seed, stop_s, patience_s
        self._rest_bytes, self._resumes, self._say = rest_bytes, resumes, say
        self._watch = RunWatch(folder)
        self._timeline = GrowingFile(folder.timeline)
        self._stepped_at = 0.0
        """When the blow fell, and then when the newest step after it ended, in seconds since 1970."""
        self._finished = -1
        """That step."""

    @property
    def publish_s(self) -> float:
        self._watch.look()
        return self._watch.publish_s()

    def do(self, blow: Blow, number: int) -> Event:
        event = Event(
            time.time(), self._seed, number, blow.name, [], blow.what,
            self._stop_s if blow.what in LASTING else None, self._rest_bytes if blow.what is What.fill else None,
            blow.moment, met=False, first="", step=self._watch.step,
        )  # fmt: skip
        victim = self._find(blow)
        before = Counter(one.kind for one in victims_of(self._folder) if one.kind is not Kind.node)
        if victim is not None:
            if blow.moment is Moment.recovery:
                event.first = self._strike_first(blow)
            if self._watch.wait(blow.moment, self._goes_on, timeout_s=self._patience_s):
                time.sleep(blow.after_s)
                self._strike(blow, victim, event)
                self._wait(blow, event, before)
        append_line(self._folder.chaos, json.dumps(asdict(event)))
        return event

    def _goes_on(self) -> bool:
        return bool(is_alive(self._folder.root))

    def _find(self, blow: Blow) -> Victim | None:
        """The victim; in a start it may not be there yet."""
        if blow.kind in ROOMS:
            return Victim(blow.kind, blow.name, ())
        deadline = time.monotonic() + self._patience_s
        while time.monotonic() < deadline and self._goes_on():
            for victim in victims_of(self._folder):
                if victim.name == blow.name:
                    return victim
            time.sleep(LOOK_EVERY_S)
        return None

    def _strike_first(self, blow: Blow) -> str:
        """Let there be a recovery. Whose engine was killed for it."""
        self._watch.look()
        if self._watch.recovering:
            return ""
        for victim in victims_of(self._folder):
            if victim.name == blow.first:
                send(victim.processes, signal.SIGKILL)
                self._say(f"{victim.name} killed first, so that there is a recovery")
                return victim.name
        return ""

    def _strike(self, blow: Blow, victim: Victim, event: Event) -> None:
        event.step, event.pids, event.time = self._watch.step, victim.pids, time.time()
        self._stepped_at, self._finished = event.time, event.step
        with self._harmed(blow.what, victim):
            at = time.time()
            was_on = self._watch.is_on(blow.moment, at)
            pids = victim.pids
            shown = "" if not pids else f" (process {pids[0]})" if len(pids) == 1 else f" ({len(pids)} processes)"
            self._say(f"step {event.step}, {blow.moment}: {blow.what} {victim.name}{shown}")
            self._let_last(blow.what, victim)
        self._watch.look()  # it may have been over, and the log was read before
        is_timed = blow.moment in (Moment.publish, Moment.verify)
        event.met = was_on and (not is_timed or not self._watch.had_ended(at))

    def _harmed(self, what: What, victim: Victim) -> AbstractContextManager[None]:
        match what:
            case What.stop:
                return stopped(victim.processes)
            case What.slow:
                return slowed(victim.processes)
            case What.cut:
                return cut_off(victim.name, victim.processes[0], self._stop_s)
            case What.fill:
                return filled(folder_of(victim.kind, self._folder), self._rest_bytes)
            case What.kill | What.term:
                send(victim.processes, signal.SIGKILL if what is What.kill else signal.SIGTERM)
                return nullcontext()

    def _let_last(self, what: What, victim: Victim) -> None:
        """Until its time is up, or the run has ended: a resume is to find what it had before."""
        if what not in LASTING:
            psutil.wait_procs(victim.processes, timeout=_DEATH_S)
            return
        ends = time.monotonic() + self._stop_s
        while (left_s := ends - time.monotonic()) > 0 and self._goes_on():
            time.sleep(min(left_s, LOOK_EVERY_S))

    def _wait(self, blow: Blow, event: Event, wanted: Counter[Kind]) -> None:
        """Until the run is as before, has ended, or patience has."""
        began, asked_at, all_since, resumed = time.monotonic(), 0.0, None, None
        num_calls = len(self._watch.made_again)
        event.outcome = NOT_YET
        while time.monotonic() - began < self._patience_s:
            time.sleep(LOOK_EVERY_S)
            if not self._goes_on():
                if resumed is not None and resumed.poll() is None:
                    continue  # it looks at options and files still
                state, error = how_it_ended(self._folder.root)
                event.why = error or state
                if self._resumes and resumed is None and state != "finished":
                    resumed, event.resumed = self._resume(), True
                    self._watch.recovering.clear()
                elif resumed is not None or door_of(self._folder) is None:
                    event.outcome = ENDED
                    break
                continue  # until somebody resumes it
            self._watch.look()
            missing = wanted - Counter(one.kind for one in victims_of(self._folder))
            all_since = None if missing or self._watch.recovering else all_since or time.time()
            if self._count(event, all_since) and start_of(self._folder) is None:
                event.outcome = AS_BEFORE
                break
            is_told = blow.what is What.term and blow.kind is Kind.worker
            if is_told and missing[Kind.worker] and time.monotonic() - asked_at > _DEATH_S:
                asked_at = time.monotonic()
                self._ask_for(wanted[Kind.worker])
        self._count(event, None)
        event.steps_again += self._watch.made_again[num_calls:].count("optimizer_step")

    def _count(self, event: Event, all_since: float | None) -> bool:
        """Add up new rows. Whether a step has gone by that began after everybody was there again, and all served."""
        timeline = [row for _, row in rows_by(self._timeline.news(), read_step) if row["to"] > event.time]
        self._watch.look()
        is_all = False
        for row in timeline:
            figures = self._watch.rows.get(row["step"], {})
            event.groups_again += int(figures.get("rollout/groups_failed") or 0)
            event.handed_over += int(figures.get("rollout/handed_over") or 0)
            event.rewards_failed += int(figures.get("reward/failures") or 0)
            event.steps_again += max(0, self._finished - row["step"] + 1)
            self._finished = row["step"]
            event.longest_s = round(max(event.longest_s or 0.0, row["to"] - self._stepped_at), 2)
            self._stepped_at = row["to"]
            ends = event.time + (event.stop_s or 0.0)
            if all_since is None or row["from"] < max(all_since, ends):
                continue
            if figures.get("rollout/replicas_serving") == figures.get("rollout/replicas_wanted"):
                event.all_after_s = event.all_after_s or round(row["to"] - event.time, 2)
                is_all = True
        return is_all

    def _resume(self) -> subprocess.Popen[bytes]:
        """`slipstream resume`, as whatever watches over the run would call it."""
        self._say("the run is resumed")
        words = [sys.executable, "-m", "slipstream.orchestrator.cli.main", "resume", str(self._folder.root)]
        with (self._folder.root / "chaos-resume.log").open("a") as said:
            return subprocess.Popen(words, stdout=said, stderr=said, start_new_session=True)

    def _ask_for(self, num_workers: int) -> None:
        """A worker that was told to go is wanted still, and waits for somebody to ask for it."""
        with suppress(ConfigError):  # it goes still
            for line in ask(self._folder.root, {"ask": "scale", "rollout": num_workers}):
                self._say(f"slipstream scale: {line}")
