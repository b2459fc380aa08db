"""The `slipstream` command. The first word says what to do; for `train`, the words after it are Hydra overrides.

    words --argparse--> flags, overrides --conf.load--> RunConfig --preflight--> --environment--> controller.run

Owns: words, exit codes, signals, and what a person sees when something is wrong. Does not own: anything about a run.

    exit code   0 done      1 Slipstream or a library failed; traceback and log are kept
                2 the user can repair it: one message, no traceback, nothing was started
              130 Ctrl-C  143 SIGTERM: the run was wound down

Invariant: importing this module loads neither torch, Ray nor vLLM, and `--help` answers at once.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from conf.errors import ConfigError, SlipstreamError

if TYPE_CHECKING:
    from conf.schema import RunConfig

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_TERMINATED = 0, 1, 2, 130, 143


class _Parser(argparse.ArgumentParser):
    """argparse whose mistakes are ConfigErrors, so that they look like every other mistake."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `slipstream` command.

    Args:
        argv: Words after `slipstream`; None: those of this process.

    Returns:
        The exit code, see the module's docstring.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        return _say(error)
    except BrokenPipeError:
        # The reader of our output (a pager, head) has gone. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


def _dispatch(words: list[str]) -> int:
    from orchestrator import cli_help

    command, rest = (words[0], words[1:]) if words else ("--help", [])
    if command in ("--help", "-h", "help"):
        print(cli_help.top())
        return EXIT_OK
    if command == "--version":
        print(cli_help.version())
        return EXIT_OK
    commands: dict[str, Callable[[list[str]], int]] = {"train": _train, "doctor": _doctor}
    if command not in commands:
        from conf.options import did_you_mean

        hint = did_you_mean(command, commands) or "See: slipstream --help"
        if "=" in command:
            hint = f"Options follow a command: slipstream train {command}"
        raise ConfigError(f"unknown command {command!r}. {hint}")
    return commands[command](rest)


def _train(words: list[str]) -> int:
    parser = _Parser(prog="slipstream train", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", nargs="?", const="", dest="help_topic")
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--config-dir", type=Path)
    flags, overrides = parser.parse_known_args(words)
    if flags.help_topic is not None:
        from orchestrator import cli_help

        # `train experiment=x --help` and `train --help experiment=x`: the overrides are not a topic.
        topic = "" if "=" in flags.help_topic else flags.help_topic
        print(cli_help.train(topic, flags.config_dir))
        return EXIT_OK

    try:
        from conf.load import load_run_config, resolved_yaml
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"this environment lacks {error.name}; run `make setup`, then see: slipstream doctor"
        ) from error

    config = load_run_config(overrides, flags.config_dir)
    if flags.cfg == "job":
        sys.stdout.write(resolved_yaml(config))
        return EXIT_OK

    from orchestrator import environment
    from orchestrator.preflight import run_preflight

    report = run_preflight(config)
    if flags.dry_run:
        width = max(len(fact.subject) for fact in report.facts)
        for fact in report.facts:
            print(f"{fact.subject:<{width}}  {fact.finding}")
        print("\nReady to train. Nothing was started (--dry-run).")
        return EXIT_OK
    for note in environment.apply(environment.variables_of(report.config)):
        print(note, file=sys.stderr)
    with _signals() as received:
        return _run(report.config, overrides, received)


def _run(config: RunConfig, overrides: list[str], received: list[int]) -> int:
    """Train, and turn every way in which that ends into an exit code."""
    latest = Path(config.run.resume or Path(config.run.dir) / "latest")
    before = None if config.run.resume else latest.resolve()
    try:
        from orchestrator.controller import run

        run(config, overrides)
    except KeyboardInterrupt:
        print("\nstopped; processes of the run have ended.", _where(latest, before), file=sys.stderr)
        return EXIT_TERMINATED if signal.SIGTERM in received else EXIT_INTERRUPTED
    except SlipstreamError as error:
        if _is_users(error):
            return _say(error)
        return _fail(error, _where(latest, before))
    except Exception as error:
        return _fail(error, _where(latest, before))
    return EXIT_OK


def _doctor(words: list[str]) -> int:
    parser = _Parser(prog="slipstream doctor", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args(words)
    if flags.help:
        from orchestrator import cli_help

        print(cli_help.doctor())
        return EXIT_OK
    from orchestrator.doctor import run_doctor

    return run_doctor(as_json=flags.json)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """SIGTERM winds the run down as Ctrl-C does; a second signal of either kind ends the process at once.

    SIGTERM is passed on as SIGINT because asyncio turns only that one into a cancellation, which lets `finally` blocks
    run.

    Yields:
        The signals received so far.
    """
    received: list[int] = []

    def on_terminate(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        if len(received) > 1:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)

    previous = signal.signal(signal.SIGTERM, on_terminate)
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, previous)


def _is_users(error: SlipstreamError) -> bool:
    """Whether the user can repair it: a wrong option, a wrong line of data, a checkpoint that does not fit the
    options.
    """
    from orchestrator.errors import CheckpointError
    from rollout.errors import DataError

    return isinstance(error, (ConfigError, DataError, CheckpointError))


def _say(error: SlipstreamError) -> int:
    print(f"error: {error}", file=sys.stderr)
    return EXIT_USAGE


def _fail(error: BaseException, where: str) -> int:
    traceback.print_exception(error)
    print(f"error: {type(error).__name__}: {error}\n{where}", file=sys.stderr)
    return EXIT_FAILED


def _where(latest: Path, before: Path | None) -> str:
    """Where to read on, once the run has a folder of its own."""
    folder = latest.resolve()
    if not latest.exists() or folder == before:
        return "The run had no folder yet."
    return f"Log: {folder / 'run.log'}, worker logs: {folder / 'ray'}"


if __name__ == "__main__":
    sys.exit(main())
