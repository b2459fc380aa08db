"""Requests to a run that goes on, as files in its folder: `slipstream recover`, `scale` and `drain`; and whether it
goes on, what its start waits for, and where its page of Ray is, from its folder alone.

    runs/NAME/control/                   0700: only the run's owner may ask
    runs/NAME/control/alive              0600: locked by the controller for as long as it lives, however it ends; its
                                         name is in it (files/may_write.py)
    runs/NAME/control/ID.request.json    written by the command:
                                         {"ask": "recover", "worker": 0}   restart worker 0, or (null) all that are out
                                         {"ask": "scale", "rollout": 3}    have three workers
                                         {"ask": "drain", "worker": 0}     hand its requests over, and end it
    runs/NAME/control/ID.answer.json     {"done": true, "lines": [...]}, written by the controller
    runs/NAME/control/workers_asked      how many workers were asked for last, for a resume
    runs/NAME/control/end.json           {"state": "failed", "error": "..."}, written by the controller when it ends;
                                         blanks until then, so that there is room for it on a disk that is full
    runs/NAME/control/starting.json, dashboard.json

Owns: both ends, what a request means, the lock that says whether a run is alive, and the words for its state. The
kernel drops the lock with the process, so none is left behind. Files are used rather than a port or Ray: nothing
listens, and it does not matter whether the cluster's head is busy. Does not own: how workers come and go
(fleet/scaling.py) or are started again (fleet/supervisor.py), nor the phases of a start (files/startup.py).
Invariant: a request is answered once; a request that nobody waits for any more is not carried out.
"""

import asyncio
import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import struct
import time
from collections.abc import Generator
from pathlib import Path

from slipstream.conf.errors import ConfigError, SlipstreamError
from slipstream.conf.failures import in_words, undone_by
from slipstream.conf.json_files import JsonObject
from slipstream.conf.schema import Objective
from slipstream.conf.whole_files import write_whole
from slipstream.fleet.errors import FleetRefusal
from slipstream.fleet.replicas import ReplicaState
from slipstream.fleet.supervisor import Supervisor
from slipstream.orchestrator.checkpoints.journal import door_of
from slipstream.orchestrator.checkpoints.run_checkpoint import how_to_go_on
from slipstream.orchestrator.files.may_write import THIS_PROCESS, is_own
from slipstream.orchestrator.files.run_folder import RunFolder, saved_options
from slipstream.rollout.crash_reports import COMMAND, death_in

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
ANSWER_TIMEOUT_S, START_ANSWER_TIMEOUT_S = 30.0, 2.0
"""A run that starts answers at once or, before its engines are up, not at all."""
KILLED = "its process ended without a word: it was killed, or the machine went down"
WAITS = "; its trainer ranks and engines are alive, and wait some minutes for slipstream resume, or for slipstream stop"
_FLOCK = "@hhqqi4x"
"""struct flock of <fcntl.h>: type, whence, start, length (0: the whole file), pid."""
_ROOM_BYTES = 4096
"""How much of the disk end.json has from the start on."""


@contextlib.contextmanager
def alive(run: Path) -> Generator[None]:
    """Hold the run's lock, a write lock of the open file (fcntl(2), F_OFD_SETLK), which only a process that may write
    it can take: flock(2) would let everyone who may read it. Raises ConfigError if another process runs in this folder.
    """
    folder = run / "control"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
        file = os.open(folder / "alive", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        is_in_the_way = error.errno in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
        cure = f"remove {folder}" if is_in_the_way else f"a run writes there: allow it, or go on with a copy of {run}"
        raise ConfigError(f"{error.filename} cannot be opened ({error.strerror}); {cure}") from error
    try:
        os.fchmod(file, 0o600)
        try:
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        except (BlockingIOError, PermissionError) as error:
            raise ConfigError(f"{run} is being run by another process; stop that one first") from error
        except OSError as error:
            raise _no_locks(folder / "alive", error) from error
        with contextlib.suppress(OSError):  # on a full disk it has no name
            os.ftruncate(file, 0)
            os.pwrite(file, THIS_PROCESS.encode(), 0)
        for stale in folder.glob("*.json"):
            stale.unlink(missing_ok=True)
        _write_end(run, "")
        with undone_by(lambda error: _note_early_end(run, error)):
            yield
        note_end(run, "finished")
    finally:
        os.close(file)


def _note_early_end(run: Path, error: BaseException) -> None:
    if isinstance(error, (KeyboardInterrupt, asyncio.CancelledError)):
        note_end(run, "stopped")
    else:
        note_end(run, "failed", in_words(error))


def note_end(run: Path, state: str, error: str | None = None) -> None:
    """Write down how it ended, for `how_it_ended`, unless another process goes on with it."""
    if is_own(RunFolder(run)):
        note_end_of(run, state, error)


def note_end_of(run: Path, state: str, error: str | None) -> None:
    """Write down how a controller ended that cannot do it itself."""
    _write_end(run, json.dumps({"state": state, "error": error}))


def _write_end(run: Path, text: str) -> None:
    """Over what is there: on a full disk there is no room for another file."""
    with contextlib.suppress(OSError):  # why the run ends is what is to be reported
        file = os.open(run / "control" / "end.json", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with open(file, "wb") as end:
            end.write(text.encode().ljust(_ROOM_BYTES))
            end.truncate()  # after a longer text


def how_it_ended(run: Path) -> tuple[str, str | None]:
    """(finished, stopped or failed, and the error) of a run that does not go on; ("", None) where nothing says so: it
    was never started, is another user's, or of a release that did not write it down.
    """
    folder = run / "control"
    try:
        if said := (folder / "end.json").read_text().strip():
            end = json.loads(said)
            return str(end["state"]), end["error"]
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError):
        return "", None
    if not (folder / "alive").is_file():
        return "", None
    how = death_in(RunFolder(run).crashes / COMMAND)
    waits = WAITS if door_of(RunFolder(run)) is not None else ""
    return "failed", (f"its process {how}" if how else KILLED) + waits


def is_alive(run: Path) -> bool | None:
    """Whether a controller runs in this folder; None when only the folder's owner may know. Asks for the lock
    (F_OFD_GETLK) without taking it, so that a run that starts at the same time is not disturbed. Raises ConfigError:
    nobody can say: the lock is out of reach, or its file system has none."""
    lock = run / "control" / "alive"
    try:
        file = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except PermissionError:
        return None
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise ConfigError(
            f"{lock} cannot be reached ({error.strerror}), so nobody can say whether the run goes on; try again when "
            "its file system answers"
        ) from error
    try:
        question = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(file, fcntl.F_OFD_GETLK, question)
    except OSError as error:
        raise _no_locks(lock, error) from error
    finally:
        os.close(file)
    return struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK


def _no_locks(file: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{file} cannot be locked ({error.strerror}), and a lock keeps a second process out of a run; "
        "put run.dir on a file system with locks"
    )


def ask(run: Path, request: JsonObject, *, timeout_s: float = ANSWER_TIMEOUT_S) -> list[str]:
    """Ask something of a run's rollout workers (carry_out). Returns what will happen, line by line. Raises ConfigError:
    this is no run folder, its run is over or does not answer, or it cannot do that."""
    run = run.resolve()
    options = saved_options(run)
    is_running = is_alive(run)
    if is_running is None:
        raise ConfigError(f"the run in {run} belongs to another user, who alone may ask it; ask as that user")
    if not is_running:
        folder, num_steps = RunFolder(run), options.get("run", {}).get("num_steps")
        waits = door_of(folder) is not None
        left = f"its processes wait for {folder.how_to_resume}" if waits else how_to_go_on(folder, num_steps)
        raise ConfigError(f"the run in {run} is not alive; {left}")
    objective = options.get("algorithm", {}).get("objective", Objective.policy)
    if objective != Objective.policy:
        raise ConfigError(f"the run in {run} is of algorithm={objective}: it has no rollout workers")
    name = secrets.token_hex(8)
    asked, answer = (run / "control" / f"{name}.{kind}.json" for kind in ("request", "answer"))
    is_starting = RunFolder(run).starting.exists()
    timeout_s = min(timeout_s, START_ANSWER_TIMEOUT_S) if is_starting else timeout_s
    write_whole(asked, json.dumps(request))
    deadline = time.monotonic() + timeout_s
    try:
        while not answer.is_file():
            if time.monotonic() > deadline or not is_alive(run):
                why = f"did not answer within {timeout_s:.0f} s" if is_alive(run) else "has just ended"
                why = "is starting, and answers when its engines are up" if is_starting and is_alive(run) else why
                done = "nothing was done" if _taken_back(asked) else "it had begun to do what was asked"
                raise ConfigError(f"the run in {run} {why}; {done}. See {run / 'run.log'}")
            time.sleep(0.1)
        said = json.loads(answer.read_text())
    finally:
        asked.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)
    if not said["done"]:
        raise ConfigError("; ".join(said["lines"]))
    return said["lines"]


def _taken_back(request: Path) -> bool:
    try:
        request.unlink()
    except FileNotFoundError:
        return False
    return True


async def answer_requests(run: Path, supervisor: Supervisor) -> None:
    """Carry out requests until cancelled, or the run is another process's."""
    while is_own(RunFolder(run)):
        for request in _requests(run):
            try:
                asked = json.loads(request.read_text())
                request.unlink()  # from here on it counts; gone already: whoever asked has given up
                done, lines = True, await carry_out(supervisor, asked)
                if asked["ask"] != "recover":
                    _note_workers(run, supervisor.scaling.num_asked)
            except FileNotFoundError:
                continue
            except SlipstreamError as error:
                done, lines = False, [str(error)]
            except Exception as error:  # a file that anyone may have put there; the run goes on
                logger.exception("the request %s cannot be carried out", request.name)
                done, lines = False, [f"{type(error).__name__}: {error}"]
            answer = request.with_name(request.name.replace(".request.", ".answer."))
            try:
                request.unlink(missing_ok=True)
                write_whole(answer, json.dumps({"done": done, "lines": lines}))
            except OSError as error:  # a full disk, or one out of reach: whoever asks next may be heard
                logger.warning("the request %s cannot be answered: %s", request.name, error)
        await asyncio.sleep(LOOK_EVERY_S)


def _requests(run: Path) -> list[Path]:
    """The requests in a run's folder; none while the folder is out of reach."""
    with contextlib.suppress(OSError):
        return sorted((run / "control").glob("*.request.json"))
    return []


def _note_workers(run: Path, number: int) -> None:
    try:
        write_whole(RunFolder(run).workers_asked, str(number))
    except OSError as error:  # what was asked is being done
        logger.warning("a resume will not know that %d workers were asked for: %s", number, error)


def workers_asked(folder: RunFolder) -> int | None:
    """How many workers were asked for last by `slipstream scale` or `drain`; None: nobody asked."""
    try:
        return int(folder.workers_asked.read_text())
    except (FileNotFoundError, ValueError):
        return None


async def carry_out(supervisor: Supervisor, request: JsonObject) -> list[str]:
    """Do what a request asks. Returns what that means, for people. Raises SlipstreamError: it cannot be; nothing was
    done."""
    match request["ask"]:
        case "scale":
            return await supervisor.scaling.scale(int(request["rollout"]))
        case "drain":
            return [await supervisor.scaling.drain(_named(supervisor, "rollout-", request["worker"]))]
        case _:
            return await _recover(supervisor, request["worker"])


def _named(supervisor: Supervisor, option: str, worker: int) -> str:
    replicas = supervisor.roster.replicas
    if worker not in range(len(replicas)):
        there = [one.process for one in replicas.values() if one.state is not ReplicaState.gone]
        raise FleetRefusal(f"{option}{worker}: the rollout workers of this run are {', '.join(there)}")
    return list(replicas)[worker]


async def _recover(supervisor: Supervisor, worker: int | None) -> list[str]:
    chosen = supervisor.roster.out_of_service if worker is None else [_named(supervisor, "--worker ", worker)]
    if not chosen:
        starting = [one.process for one in supervisor.roster.replicas.values() if one.state is ReplicaState.starting]
        if starting:
            return [f"{name} is being restarted already" for name in starting]
        return ["no rollout worker is out of service; --worker N restarts one all the same"]
    states = (ReplicaState.serving, ReplicaState.updating)
    in_service = {name for name, replica in supervisor.roster.replicas.items() if replica.state in states}
    lines = [await supervisor.restart_now(name) for name in chosen]
    are_taken = all(supervisor.roster.replicas[name].state is ReplicaState.starting for name in chosen)
    if are_taken and in_service and in_service <= set(chosen):
        lines.append("no other rollout worker serves: sampling stands still until one is back")
    return lines


def state_of(folder: RunFolder, step: int | None, num_steps: int) -> tuple[str, str | None]:
    """(running, finished, stopped, failed, "moved or removed": the folder is not there any more, or unknown: the run is
    another user's, who alone may read its lock; and the error of a run that failed). `step`: of the newest row of
    metrics; None before the first."""
    if not folder.root.is_dir():
        return "moved or removed", None
    is_running = is_alive(folder.root)
    if is_running:
        return "running", None
    state, error = how_it_ended(folder.root)
    if state:
        return state, error
    is_done = step is not None and step >= num_steps and (folder.adapter.is_dir() or folder.merged.is_dir())
    return ("finished" if is_done else "stopped" if is_running is False else "unknown"), None


def note_start(folder: RunFolder, seconds: float, waits_for: str) -> None:
    """Write down what a start waits for, `seconds` after the command. The next start removes it, too."""
    with contextlib.suppress(OSError):  # the log has it, too
        write_whole(folder.starting, json.dumps({"began_at": time.time() - seconds, "waits_for": waits_for}))


def note_started(folder: RunFolder) -> None:
    with contextlib.suppress(OSError):
        folder.starting.unlink()


def start_of(folder: RunFolder) -> str | None:
    """What the start of a run that goes on waits for, for people: "34 s: engines 1 of 2 up"; None: it is over."""
    try:
        found = json.loads(folder.starting.read_text()) if is_alive(folder.root) else None
        return None if found is None else f"{time.time() - found['began_at']:.0f} s: {found['waits_for']}"
    except (OSError, ValueError):  # none, or another user's
        return None


def note_dashboard(folder: RunFolder, where: str) -> None:
    """Write down where the run's page of Ray is. The next start of the run removes it (control_folder.alive)."""
    with contextlib.suppress(OSError):  # the log has it, too
        folder.dashboard.write_text(json.dumps(where))


def dashboard_of(folder: RunFolder) -> str | None:
    """Where the page of a run that goes on is, with the file of its token; None where it has none."""
    try:
        return str(json.loads(folder.dashboard.read_text())) if is_alive(folder.root) else None
    except (OSError, ValueError):  # none, or another user's
        return None
