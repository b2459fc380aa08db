"""How a command ends: exit codes, and what a person reads then.

    exit code   0 done      1 Slipstream or a library failed; run.log has the traceback
                2 the user can repair it: one message, no traceback, nothing was trained
              130 Ctrl-C  143 SIGTERM  129 SIGHUP (the terminal is gone): the run was wound down

Owns: whose mistake an error was, and the words for it. Does not own: a run's own end, which saves and ends processes
(controller.py, run.py). Invariants: importing this loads neither torch, Ray nor vLLM; what is said of a run is said of
the folder that this process opened, whatever other runs do in the same run.dir.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING

from slipstream.conf.errors import ConfigError, SlipstreamError

if TYPE_CHECKING:
    from slipstream.conf.schema import RunConfig
    from slipstream.orchestrator.files.run_folder import RunFolder

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


def run_to_an_exit_code(
    config: RunConfig,
    overrides: list[str],
    received: list[int],
    ended: Callable[[RunFolder], None] = lambda folder: None,
) -> int:
    """Train, and turn every way in which that ends into an exit code. `received`: the signals so far; `ended` is called
    with the run's folder when the run has done what it should."""
    folder: RunFolder | None = None
    try:
        from slipstream.orchestrator.files.run_folder import open_run_folder
        from slipstream.orchestrator.run import run

        folder = open_run_folder(config.run, datetime.now())
        run(config, overrides, folder)
        ended(folder)
    except KeyboardInterrupt:
        where = _where(folder, config.run.num_steps)
        tell(f"\nstopped; processes of the run have ended.\n{where}")
        return 128 + received[0] if received else EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 - whatever ends a run becomes an exit code; others keep a traceback
        if isinstance(error, SlipstreamError) and _is_users(error):
            return say(error)
        if not isinstance(error, SlipstreamError):  # of ours, run.log has where it was raised
            tell("".join(traceback.format_exception(error)).rstrip())
        tell(f"error: {type(error).__name__}: {error}\n{_where(folder, config.run.num_steps)}")
        return EXIT_FAILED
    return EXIT_OK


def _is_users(error: SlipstreamError) -> bool:
    """Whether the user can repair it: a wrong option, a wrong line of data, a checkpoint that does not fit the
    options, a watermark below what the model's publishes need."""
    from slipstream.orchestrator.errors import CheckpointError, ObjectStoreError
    from slipstream.rollout.errors import DataError
    from slipstream.weight_sync.errors import WatermarkError

    return isinstance(error, (ConfigError, DataError, CheckpointError, ObjectStoreError, WatermarkError))


def say(error: SlipstreamError | str) -> int:
    print(f"error: {error}", file=sys.stderr)
    return EXIT_USAGE


def tell(text: str) -> None:
    """Print a text to the terminal, if there is one still. That it is gone may be why a run ends: then the exit code
    alone tells it."""
    with suppress(OSError):
        print(text, file=sys.stderr)


def _where(folder: RunFolder | None, num_steps: int) -> str:
    """Where to read on and, unless the run makes no step, how to go on, once the run has a folder of its own."""
    from slipstream.orchestrator.checkpoints.run_checkpoint import how_to_go_on

    if folder is None:
        return "The run had no folder yet."
    said = f"Log: {folder.log}" + (f", worker logs: {folder.ray_logs}" if folder.ray_logs.is_dir() else "")
    if num_steps == 0:
        return said
    then = how_to_go_on(folder, num_steps)
    return f"{said}\n{then[0].upper()}{then[1:]}"
