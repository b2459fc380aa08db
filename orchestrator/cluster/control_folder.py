"""Requests to a run that goes on, as files in its folder: `slipstream recover`.

    runs/NAME/control/alive              locked by the controller for as long as it lives, however it ends
    runs/NAME/control/ID.request.json    {"worker": 0}, written by the command
    runs/NAME/control/ID.answer.json     {"done": true, "lines": [...]}, written by the controller

Owns: both ends, and the lock that says whether a run is alive (the kernel drops it with the process, so that it cannot
be left behind). Does not own: what a restart does (supervisor.py). Files rather than a port or Ray: whoever may write
into the run folder may ask, nothing listens, and a cluster whose dashboard or head is busy does not matter.
Invariant: a request is answered once; one that nobody waits for any more is not carried out.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import yaml

from conf.errors import ConfigError
from conf.schema import Objective
from orchestrator.cluster.replicas import ReplicaState
from orchestrator.cluster.supervisor import Supervisor

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
LOOK_LASTS_S = 0.2
"""is_alive() holds a shared lock for the time of a look; a run that starts just then must not take that for a run."""
ANSWER_TIMEOUT_S = 30.0


@contextlib.contextmanager
def alive(run: Path) -> Iterator[None]:
    """Hold the run's lock. Raises ConfigError when another process runs in this folder."""
    folder = run / "control"
    folder.mkdir(exist_ok=True)
    with (folder / "alive").open("w") as file:
        deadline = time.monotonic() + LOOK_LASTS_S
        while not _lock(file, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise ConfigError(f"{run} is being run by another process; stop that one first")
            time.sleep(0.01)
        for stale in folder.glob("*.json"):
            stale.unlink(missing_ok=True)
        yield


def is_alive(run: Path) -> bool:
    """Whether a controller runs in this folder."""
    lock = run / "control" / "alive"
    if not lock.is_file():
        return False
    with lock.open() as file:
        return not _lock(file, fcntl.LOCK_SH)


def _lock(file: IO[str], kind: int) -> bool:
    """Whether the lock could be had at once; it goes with the file."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ConfigError(
            f"{file.name} cannot be locked ({error.strerror}), and a lock keeps a second process out of a run; "
            "put run.dir on a file system with locks (flock)"
        ) from error
    return True


def ask(run: Path, worker: int | None, *, timeout_s: float = ANSWER_TIMEOUT_S) -> list[str]:
    """Ask a run to restart a rollout worker, or (None) every one that is out of service.

    Returns:
        What will happen, line by line.

    Raises:
        ConfigError: This is no run folder, its run is over or does not answer, or there is no such worker.
    """
    run = run.resolve()
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{run} is not a run folder; give one like runs/latest")
    if not is_alive(run):
        raise ConfigError(
            f"the run in {run} is not alive; to go on with it, give `slipstream train` the options that it had, and "
            f"run.resume={run}"
        )
    if yaml.safe_load((run / "config.yaml").read_text())["algorithm"]["objective"] == Objective.sft:
        raise ConfigError(f"the run in {run} is fine-tuning (algorithm=sft): it has no rollout workers to restart")
    name = secrets.token_hex(8)
    request, answer = (run / "control" / f"{name}.{kind}.json" for kind in ("request", "answer"))
    _write(request, {"worker": worker})
    deadline = time.monotonic() + timeout_s
    try:
        while not answer.is_file():
            if time.monotonic() > deadline or not is_alive(run):
                why = f"did not answer within {timeout_s:.0f} s" if is_alive(run) else "has just ended"
                raise ConfigError(f"the run in {run} {why}; nothing was done. See {run / 'run.log'}")
            time.sleep(0.1)
        said = json.loads(answer.read_text())
    finally:
        request.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)
    if not said["done"]:
        raise ConfigError("; ".join(said["lines"]))
    return said["lines"]


async def answer_requests(run: Path, supervisor: Supervisor) -> None:
    """Carry out requests until cancelled."""
    while True:
        for request in sorted((run / "control").glob("*.request.json")):
            try:
                worker = json.loads(request.read_text())["worker"]
                request.unlink()  # from here on it counts; gone already: whoever asked has given up
                done, lines = await _restart(supervisor, worker)
            except FileNotFoundError:
                continue
            except Exception as error:  # a file that anyone may have put there; the run goes on
                logger.exception("the request %s cannot be carried out", request.name)
                request.unlink(missing_ok=True)
                done, lines = False, [f"{type(error).__name__}: {error}"]
            _write(request.with_name(request.name.replace(".request.", ".answer.")), {"done": done, "lines": lines})
        await asyncio.sleep(LOOK_EVERY_S)


async def _restart(supervisor: Supervisor, worker: int | None) -> tuple[bool, list[str]]:
    """Whether the request can be carried out, and what it means."""
    num_workers = len(supervisor.replicas)
    if worker is not None and worker not in range(num_workers):
        return False, [f"--worker {worker}: this run has {num_workers} rollout workers, 0 to {num_workers - 1}"]
    chosen = supervisor.out_of_service if worker is None else [worker]
    if not chosen:
        starting = [replica.worker.name for replica in supervisor.replicas if replica.state is ReplicaState.starting]
        if starting:
            return True, [f"{name} is being restarted already" for name in starting]
        return True, ["no rollout worker is out of service; --worker N restarts one all the same"]
    in_service = {r.index for r in supervisor.replicas if r.state in (ReplicaState.serving, ReplicaState.updating)}
    lines = [await supervisor.restart_now(index) for index in chosen]
    are_taken = all(supervisor.replicas[index].state is ReplicaState.starting for index in chosen)
    if are_taken and in_service and in_service <= set(chosen):
        lines.append("no other rollout worker serves: sampling stands still until one is back")
    return True, lines


def _write(path: Path, content: dict[str, Any]) -> None:
    """Whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content))
    partial.replace(path)
