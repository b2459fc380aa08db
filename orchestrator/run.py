"""One run from its first line to its last: its lock, its log, its description, its Ray, and how it is told to end.

    run --lock, log--> beside its Ray --> training.py --> RunResult

Owns: the way in and out of a run, whatever it trains. Does not own: what is started, in which order
(training.py), where processes live (cluster/placement.py), the run folder's shape (run_folder).
Invariant: a mistake in a file ends the run before any process exists, and on the way out no process of it is left.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from slipstream.conf.failures import undone_by
from slipstream.conf.schema import Objective, RunConfig
from slipstream.orchestrator.checkpoints.journal import Journal, read_journal
from slipstream.orchestrator.checkpoints.object_store import CONFIG, ENVIRONMENT, ObjectStore
from slipstream.orchestrator.checkpoints.run_checkpoint import complete_checkpoints, step_of
from slipstream.orchestrator.cluster.own_ray import OwnRay, starting_ray
from slipstream.orchestrator.control.control_folder import alive, note_end, note_start, note_started
from slipstream.orchestrator.control.stop_request import end_when_asked
from slipstream.orchestrator.errors import DiskFull
from slipstream.orchestrator.files.kept_code import keep_sources
from slipstream.orchestrator.files.may_write import is_own, naming_a_full_disk
from slipstream.orchestrator.files.run_folder import (
    RunFolder,
    changed_options,
    changed_packages,
    keep_description,
    point_latest,
    write_description,
)
from slipstream.orchestrator.files.run_log import RunLog
from slipstream.orchestrator.files.startup import FIRST_PHASE, clock_of_this_process
from slipstream.orchestrator.signals import second_interrupt_ends_at_once
from slipstream.orchestrator.training import Ray, RunResult, finetune, reinforce
from slipstream.rollout.crash_reports import command_reports_crashes

logger = logging.getLogger(__name__)

TOLD_TO_END = "told to end: a step under way is finished and saved; a second Ctrl-C ends the run at once"


def run(config: RunConfig, overrides: list[str], folder: RunFolder) -> RunResult:
    """Train, by reinforcement or on given answers, by checked options. `overrides`: the words of the command line."""
    train = reinforce if config.algorithm.objective is Objective.policy else finetune
    with alive(folder.root), RunLog(folder.log) as log, command_reports_crashes(folder.crashes):
        point_latest(folder.root)
        if "://" in (url := config.run.resume or "") and not folder.config.is_file():
            ObjectStore(url).take_files((ENVIRONMENT, CONFIG), folder.root)  # of the part before
        note_start(folder, clock_of_this_process()(), FIRST_PHASE)
        log.say(f"run folder: {folder.root}")
        left = read_journal(folder)
        if any(word.lstrip("+").startswith("rollout.num_workers=") for word in overrides):
            folder.workers_asked.unlink(missing_ok=True)
        for option in (changes := changed_options(folder, config)):
            log.say(f"resumed with another {option}")
        for package in changed_packages(folder):
            logger.info("resumed with another %s", package)
        try:
            with undone_by(_log_early_end), naming_a_full_disk(folder.root), undone_by(_putting_back(folder)):
                write_description(folder, config, overrides)  # under the lock: they may be another process's
                keep_sources(folder, config)
                result = asyncio.run(_beside_ray(train, config, folder, log, left, must_end=bool(changes)))
        except DiskFull as error:
            raise DiskFull(f"{error}; {_what_is_saved(folder)}") from error
        log.say(result.summary())
    return result


def _putting_back(folder: RunFolder) -> Callable[[BaseException], None]:
    """Keep the folder's description of the part before. Returns what is called with whatever ends the run. If that ends
    a resume before its start is over, the folder describes the run as it did before: options that were refused are not
    those of the next resume."""
    kept = keep_description(folder)

    def put_back(_: BaseException) -> None:
        if folder.starting.exists() and is_own(folder):
            for file, copy in kept.items():
                copy.replace(file)
        note_started(folder)

    return put_back


def _log_early_end(error: BaseException) -> None:
    is_told = isinstance(error, KeyboardInterrupt)
    logger.debug("the run %s", "was told to end" if is_told else "has ended early", exc_info=not is_told)


async def _beside_ray(
    train: Callable[[RunConfig, RunFolder, RunLog, Ray], Coroutine[Any, Any, RunResult]],
    config: RunConfig,
    folder: RunFolder,
    log: RunLog,
    left: Journal | None,
    *,
    must_end: bool,
) -> RunResult:
    """The run, which Ctrl-C, SIGTERM and `slipstream stop` wind down. The servers of its own Ray begin to start before
    anything else, which imports Ray, too; or they are those that another controller left. `left`: what that controller
    wrote down. `must_end`: whether its processes cannot be used: they have other options."""
    clusters: list[OwnRay] = []
    loop = asyncio.get_running_loop()

    def at_first() -> None:
        note_end(folder.root, "stopped")  # should a second one end it before it can say so itself
        for own in clusters:
            own.hold(False)
        # A handler must not print: it may have interrupted a print.
        loop.call_soon_threadsafe(lambda: log.say(_told_to_end(folder)))

    with second_interrupt_ends_at_once(at_first):
        listening = asyncio.create_task(end_when_asked(folder.root))
        try:
            if left is not None and must_end:
                log.say("the run's processes have the options from before: they are ended, and all is started again")
                own = OwnRay(config, folder)
                await own.take_over(left.ray)
                await own.end()
                left = None
            async with starting_ray(config, folder, None if left is None else left.ray) as own:
                if left is not None and (own is None or not own.is_taken_over):
                    log.say("no process of the run is alive any more: everything is started")
                    left = None
                clusters += [] if own is None else [own]
                return await train(config, folder, log, Ray(own, left))
        finally:
            listening.cancel()


def _told_to_end(folder: RunFolder) -> str:
    """What a first Ctrl-C is answered with. A second one leaves nobody to say how to go on."""
    is_saved = bool(complete_checkpoints(folder.checkpoints))
    return f"{TOLD_TO_END}. Go on with: {folder.how_to_resume}" if is_saved else TOLD_TO_END


def _what_is_saved(folder: RunFolder) -> str:
    """Say which step a run that met a full disk has saved, and how to go on."""
    if not (complete := complete_checkpoints(folder.checkpoints)):
        return "no checkpoint is saved. Make room, and start it again"
    newest = complete[-1]
    return f"step {step_of(newest)} is saved in {newest}. Make room, and go on with slipstream resume"
