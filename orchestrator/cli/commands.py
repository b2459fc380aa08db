"""The commands. The first word after `slipstream` says what to do; for `train` and `plan`, the words after it are
Hydra overrides.

    words --COMMANDS--> argparse --> flags, others --> start_commands, run_commands, offline_commands

Owns: which function a command calls. Does not own: flags (flags.py), help (texts.py, option_help.py), how a run ends
(exit.py).
Invariant: importing this module loads neither torch, Ray nor vLLM, and `--help` answers at once.
"""

from __future__ import annotations

import argparse
import errno
import importlib.metadata
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NamedTuple

from slipstream.conf.errors import ConfigError, SlipstreamError
from slipstream.orchestrator.cli import flags as cli_flags, offline_commands, run_commands, start_commands, texts
from slipstream.orchestrator.cli.exit import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, say, tell
from slipstream.orchestrator.files.may_write import LOST, NUMBERS as FULL
from slipstream.orchestrator.signals import wound_down_by_signals
from slipstream.orchestrator.socket_folder import for_engines_alone

_OUT_OF_REACH = (errno.EACCES, errno.ENAMETOOLONG, *LOST)
"""What a path sets errno to that was given and cannot even be looked at."""


def carry_out(words: list[str]) -> int:
    """Do what the words after `slipstream` say. Returns the exit code (exit.py)."""
    received: list[int] = []
    # What the locale cannot write of a name or a response is escaped, as Python does on stderr. Not every stream can.
    if (set_up := getattr(sys.stdout, "reconfigure", None)) is not None:
        set_up(errors="backslashreplace")
    try:
        with wound_down_by_signals() as received:  # also while files are looked at: temporary ones are removed then
            code = _dispatch(words)
            _flush()
        return code
    except ConfigError as error:
        return say(error)
    except SlipstreamError as error:  # its message names the engine or rank, and where to read on
        tell(f"error: {error}")
        return EXIT_FAILED
    except KeyboardInterrupt:
        tell("\nstopped.")
        return 128 + received[0] if received else EXIT_INTERRUPTED
    except BrokenPipeError:
        _write_nothing_more()  # the reader of our output (a pager, head) has gone
        return EXIT_OK
    except OSError as error:
        if error.errno in _OUT_OF_REACH and error.filename is not None:
            return say(f"{error.filename} cannot be reached: {error.strerror}; name a path that this user may use")
        if error.errno not in FULL:
            raise
        output = error.filename or os.path.realpath("/proc/self/fd/1")
        _write_nothing_more()
        tell(f"error: {output} cannot be written: {error.strerror}; make room, or write to another disk")
        return EXIT_FAILED


def _flush() -> None:
    """Write out what was said. If the terminal has gone, the exit code says so later."""
    try:
        print(end="", flush=True)  # where there is an output
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        _write_nothing_more()


def _write_nothing_more() -> None:
    """Python would complain once more when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


OF_OTHERS = {
    "logs": "A run's log is RUN/run.log, those of its processes are in RUN/ray; slipstream status RUN shows warnings",
    "top": "slipstream status RUN says where a run stands, slipstream view RUN follows it",
}
"""Commands that others have -> what to take."""


def _version() -> str:
    try:
        return f"slipstream {importlib.metadata.version('slipstream-rl')}"
    except importlib.metadata.PackageNotFoundError:
        return "slipstream (not installed: run from its source)"


def _dispatch(words: list[str]) -> int:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError("the working folder has been removed; cd into one that is there") from error
    command, rest = (words[0], words[1:]) if words else ("--help", [])
    if command in ("--help", "-h", "help") and rest:  # `help train trainer.lora` is `train --help trainer.lora`
        command, rest = rest[0], ["--help", *rest[1:]]
    if command in ("--help", "-h", "help"):
        print(texts.TOP)
        return EXIT_OK
    if command == "--version":
        print(_version())
        return EXIT_OK
    if command not in COMMANDS:
        from slipstream.conf.options import did_you_mean

        hint = OF_OTHERS.get(command) or did_you_mean(command, [*COMMANDS, "--version"]) or "See: slipstream --help"
        if "=" in command:
            hint = f"Options follow a command: slipstream train {command}"
        raise ConfigError(f"unknown command {command!r}. {hint}")
    return _do(command, COMMANDS[command], rest)


def _do(name: str, command: Command, words: list[str]) -> int:
    """Read the words, and answer with help where that is asked for."""
    if command.starts_engines and (moved := for_engines_alone()) is not None:
        tell(moved)
    with _names_missing_packages():
        parser = command.parser()
    flags, others = command.read(parser, words)
    if getattr(flags, "help", False) or (command.needs_words and not words):
        print(parser.format_help(), end="")
        return EXIT_OK if words else EXIT_USAGE  # `slipstream merge $RUN && ...`, where RUN is not set
    if command.needs_run and (flags.run is None or cli_flags.is_option(str(flags.run))):
        raise ConfigError(f"slipstream {name} needs a run folder, e.g. {parser.example()}")
    with _names_missing_packages():
        return command.run(flags, others)


def _flags_alone(parser: cli_flags.Parser, words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    return parser.parse_args(words), []


def _until_dashes(parser: cli_flags.Parser, words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    at = words.index("--") if "--" in words else len(words)
    return parser.parse_args(words[:at]), words[at + 1 :]


class Command(NamedTuple):
    """One command. Example: Command(flags.merge, run_commands.merge, needs_words=True)."""

    parser: Callable[[], cli_flags.Parser]
    run: Callable[[argparse.Namespace, list[str]], int]
    """Gets the flags, and what else `read` found."""
    read: Callable[[cli_flags.Parser, list[str]], tuple[argparse.Namespace, list[str]]] = _flags_alone
    """Takes the words after the command apart."""
    needs_words: bool = False
    """Without any, it answers with its help."""
    needs_run: bool = False
    """It is about a run's folder, `flags.run`."""
    starts_engines: bool = False
    """It may start engines without a run, whose sockets would be in its folder."""


_OPTIONS = cli_flags.Parser.read_overrides
COMMANDS = {
    "train": Command(cli_flags.train, start_commands.train, _OPTIONS),
    "resume": Command(cli_flags.resume, start_commands.resume, _OPTIONS, needs_run=True),
    "eval": Command(cli_flags.evaluate, start_commands.evaluate, _OPTIONS, needs_words=True),
    "merge": Command(cli_flags.merge, run_commands.merge, needs_words=True, needs_run=True),
    "stop": Command(cli_flags.stop, run_commands.stop, needs_run=True),
    "launch": Command(cli_flags.launch, offline_commands.launch, _OPTIONS, needs_words=True),
    "plan": Command(cli_flags.plan, offline_commands.plan, _OPTIONS, starts_engines=True),
    "push": Command(cli_flags.push, offline_commands.push, _until_dashes, needs_words=True, starts_engines=True),
    "parity": Command(cli_flags.parity, offline_commands.parity, _OPTIONS, needs_words=True, starts_engines=True),
    "record": Command(cli_flags.record, offline_commands.record, needs_words=True, starts_engines=True),
    "doctor": Command(cli_flags.doctor, offline_commands.doctor),
    "status": Command(cli_flags.status, run_commands.status),
    "view": Command(cli_flags.view, run_commands.view),
    "recover": Command(cli_flags.recover, run_commands.recover, needs_run=True),
    "scale": Command(cli_flags.scale, run_commands.scale, needs_run=True),
    "drain": Command(cli_flags.drain, run_commands.drain, needs_run=True),
    "chaos": Command(cli_flags.chaos, run_commands.chaos, needs_words=True, needs_run=True),
}


@contextmanager
def _names_missing_packages() -> Generator[None]:
    """Turn a failed import of a run's packages into advice."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"this environment lacks {error.name}; run `make setup`, then see: slipstream doctor"
        ) from error
