"""`slipstream stop`: asks a run that goes on to end, and waits until it has.

    slipstream stop --writes--> runs/NAME/control/stop.json --read by--> the controller, which sends itself SIGTERM
                    <--the lock of runs/NAME/control/alive is free: every process of the run has ended--

Owns: both ends of the request. Does not own: what SIGTERM does (signals.py, the loops: finish the step, save, end), the
lock (control_folder.py). A file is used rather than a signal, so that a run can be stopped from any machine that mounts
its folder. Invariant: a run hears the request from its first moment on, whatever it is doing.
"""

import asyncio
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

from slipstream.conf.errors import ConfigError
from slipstream.conf.whole_files import write_whole
from slipstream.orchestrator.checkpoints.journal import end_what_waits
from slipstream.orchestrator.checkpoints.run_checkpoint import how_to_go_on
from slipstream.orchestrator.control.control_folder import is_alive
from slipstream.orchestrator.errors import RunTakenOver
from slipstream.orchestrator.files.may_write import check_own
from slipstream.orchestrator.files.run_folder import RunFolder, saved_options

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
STOP_TIMEOUT_S = 300.0
"""The present step may go on for a minute; then the state is saved and processes end."""
_SAY_EVERY_S = 30.0


def stop(run: Path, *, timeout_s: float = STOP_TIMEOUT_S, say: Callable[[str], None] = logger.info) -> list[str]:
    """Ask the run to end and wait until it has. A run that has ended already is left as it is. Returns what is left of
    it, line by line: how it ended, and how to go on. Raises ConfigError: this is no run folder, the run is another
    user's, or it still goes on after timeout_s."""
    folder = RunFolder(run.resolve())
    num_steps = saved_options(folder.root).get("run", {}).get("num_steps")
    is_running = is_alive(folder.root)
    if is_running is None:
        raise ConfigError(f"the run in {folder.root} belongs to another user, who alone may stop it; ask as that user")
    if not is_running:
        ended = ["its trainer ranks and engines, which were alive, are ended"] if end_what_waits(folder) else []
        return [f"the run in {folder.root} had ended already", *ended, how_to_go_on(folder, num_steps)]
    request = _request(folder.root)
    began_s = said_s = time.monotonic()
    say(f"waiting for {folder.root.name} to finish its step and to save its state")
    while is_alive(folder.root):
        if not request.exists():  # a run that has just started removes what was asked of the one before it
            write_whole(request, json.dumps({"who": f"process {os.getpid()} on {socket.gethostname()}"}))
        now_s = time.monotonic()
        if now_s - began_s > timeout_s:
            raise ConfigError(
                f"the run in {folder.root} still goes on {timeout_s:.0f} s after it was asked to end; it ends as soon "
                f"as it can. Wait longer with --timeout-s, or see {folder.log}"
            )
        if now_s - said_s > _SAY_EVERY_S:
            said_s = now_s
            say(f"waited {now_s - began_s:.0f} s for {folder.root.name} to end")
        time.sleep(0.1)
    request.unlink(missing_ok=True)
    return [f"the run in {folder.root} has ended", how_to_go_on(folder, num_steps)]


async def end_when_asked(run: Path) -> None:
    """Send this process SIGTERM when `slipstream stop` asks for it, or another process goes on with the run."""
    request = _request(run)
    try:
        while not _is_there(request):
            check_own(RunFolder(run))
            await asyncio.sleep(LOOK_EVERY_S)
        who = json.loads(request.read_text())["who"]
    except RunTakenOver as error:
        logger.error("%s", error)
        os.kill(os.getpid(), signal.SIGTERM)
        return
    except (OSError, ValueError, KeyError, TypeError):  # whoever could write it may stop the run, whatever it says
        who = "somebody"
    logger.warning("%s asks the run to end (slipstream stop): it finishes its step and saves its state", who)
    os.kill(os.getpid(), signal.SIGTERM)


def _is_there(request: Path) -> bool:
    """A folder that is out of reach for a moment asks nobody to end."""
    try:
        return request.exists()
    except OSError:
        return False


def _request(run: Path) -> Path:
    return run / "control" / "stop.json"
