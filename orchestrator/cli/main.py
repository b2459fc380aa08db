"""The `slipstream` command. The first word says what to do; for `train` and `plan`, the words after it are Hydra
overrides.

    words --argparse--> flags, overrides --conf.load--> RunConfig --preflight--> --environment--> run.run

Owns: which function a command calls. Does not own: flags (flags.py), help (texts.py, option_help.py), how a command
ends (exit.py).
Invariant: importing this module loads neither torch, Ray nor vLLM, and `--help` answers at once.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from slipstream.conf.errors import ConfigError, SlipstreamError
from slipstream.orchestrator.cli import flags as cli_flags
from slipstream.orchestrator.cli import option_help, texts
from slipstream.orchestrator.cli.exit import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, run_to_an_exit_code, say, tell
from slipstream.orchestrator.signals import wound_down_by_signals
from slipstream.orchestrator.socket_folder import for_engines_alone

if TYPE_CHECKING:
    from slipstream.conf.schema import RunConfig
    from slipstream.orchestrator.files.run_folder import RunFolder


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `slipstream` command.

    Args:
        argv: Words after `slipstream`; None: those of this process.

    Returns:
        The exit code, see the module's docstring.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    received: list[int] = []
    try:
        with wound_down_by_signals() as received:  # also while files are looked at: temporary ones are removed then
            code = _dispatch(words)
            sys.stdout.flush()
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
        # The reader of our output (a pager, head) has gone. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


def _dispatch(words: list[str]) -> int:
    command, rest = (words[0], words[1:]) if words else ("--help", [])
    if command in ("--help", "-h", "help"):
        print(texts.TOP)
        return EXIT_OK
    if command == "--version":
        print(texts.version())
        return EXIT_OK
    if command not in COMMANDS:
        from slipstream.conf.options import did_you_mean

        hint = did_you_mean(command, COMMANDS) or "See: slipstream --help"
        if "=" in command:
            hint = f"Options follow a command: slipstream train {command}"
        raise ConfigError(f"unknown command {command!r}. {hint}")
    return _carry_out(command, COMMANDS[command], rest)


def _carry_out(name: str, command: Command, words: list[str]) -> int:
    """Read the words, and answer with help where that is asked for."""
    if command.starts_engines and (moved := for_engines_alone()) is not None:
        tell(moved)
    with _names_missing_packages():
        parser = command.parser()
    flags, others = command.read(parser, words)
    if getattr(flags, "help", False) or (command.needs_words and not words):
        print(parser.format_help(), end="")
        return EXIT_OK
    if command.needs_run and (flags.run is None or _is_option(str(flags.run))):
        raise ConfigError(f"slipstream {name} needs a run folder, e.g. slipstream {name} runs/latest")
    with _names_missing_packages():
        return command.run(flags, others)


def _is_option(word: str) -> bool:
    """Whether a word sets an option. A folder's path may have an equals sign, too."""
    return "=" in word and not Path(word).is_dir()


def _train(flags: argparse.Namespace, overrides: list[str]) -> int:
    if flags.help_topic is not None:
        # `train experiment=x --help` and `train --help experiment=x`: the overrides are not a topic.
        if flags.help_topic and "=" not in flags.help_topic:
            print(option_help.topic(flags.help_topic, flags.config_dir))
        else:
            print(f"{cli_flags.train().format_help()}\n{option_help.options(flags.config_dir)}")
        return EXIT_OK

    from slipstream.conf.load import load_run_config

    return _start(load_run_config(overrides, flags.config_dir), overrides, flags)


def _resume(flags: argparse.Namespace, overrides: list[str]) -> int:
    is_url = "://" in flags.run
    for word in overrides:
        name = word.partition("=")[0].lstrip("+")
        if name in ("run.resume", "run.name", "run.checkpoint_dir" if is_url else "run.dir"):
            raise ConfigError(f"{name} has no effect with slipstream resume, which goes on in {flags.run}; remove it")
    from slipstream.conf.load import load_resolved_yaml
    from slipstream.orchestrator.cli.working_folder import stand_where_it_began
    from slipstream.orchestrator.files.run_folder import RunFolder, no_run_folder

    if is_url:
        return _resume_from_store(flags.run.rstrip("/"), overrides, flags)
    folder = RunFolder(Path(flags.run).resolve())
    try:
        saved = folder.config.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise no_run_folder(Path(flags.run)) from error
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"{folder.config} cannot be read: {why}; give all options again, and run.resume={folder.root}"
        ) from error
    overrides = stand_where_it_began(folder, overrides)
    config = load_resolved_yaml(saved, overrides, subject=f"{folder.config}: ")
    return _start(replace(config, run=replace(config.run, resume=str(folder.root))), overrides, flags)


def _resume_from_store(url: str, overrides: list[str], flags: argparse.Namespace) -> int:
    """Go on with a run of which an object store has options and checkpoints (run.checkpoint_dir)."""
    from slipstream.conf.load import load_resolved_yaml
    from slipstream.orchestrator.errors import ObjectStoreError
    from slipstream.orchestrator.files.object_store import CONFIG, ObjectStore

    store = ObjectStore(url)
    try:
        saved = store.text(CONFIG)
        if saved is None:
            raise ConfigError(f"{url} holds no {CONFIG} of a run; it has: {', '.join(store.folders()) or 'nothing'}")
    except ObjectStoreError as error:
        raise ConfigError(str(error)) from error
    config = load_resolved_yaml(saved, overrides, subject=f"{url}/{CONFIG}: ")
    run = replace(config.run, resume=url, checkpoint_dir=url.rpartition("/")[0])
    return _start(replace(config, run=run), overrides, flags)


def _eval(flags: argparse.Namespace, overrides: list[str]) -> int:
    from slipstream.orchestrator.cli import evaluate

    run = None
    if overrides and not _is_option(overrides[0]):
        run = Path(overrides.pop(0))
    config, weights = evaluate.eval_config(run, flags.adapter, flags.checkpoint, overrides)

    def show(folder: RunFolder) -> None:
        report = evaluate.report_of(config, weights, folder)
        print(json.dumps(report, indent=2) if flags.json else evaluate.table_of(report))

    return _start(config, overrides, flags, show)


def _merge(flags: argparse.Namespace, _: list[str]) -> int:
    from slipstream.orchestrator.cli.merge import merge

    print(f"model: {merge(flags.run, flags.checkpoint, flags.output)}")
    return EXIT_OK


def _start(
    config: RunConfig,
    overrides: list[str],
    flags: argparse.Namespace,
    ended: Callable[[RunFolder], None] = lambda folder: None,
) -> int:
    """Check the run against this machine and train, unless --cfg or --dry-run ask for less. `ended` gets the folder of
    a run that has done what it should.
    """
    from slipstream.conf.load import check_model_reads_overrides, resolved_yaml

    if flags.cfg == "job":
        sys.stdout.write(resolved_yaml(config))
        return EXIT_OK

    from slipstream.orchestrator import environment
    from slipstream.orchestrator.inputs.model_folder import resolve_hf_config
    from slipstream.orchestrator.inputs.preflight import run_preflight
    from slipstream.orchestrator.inputs.reward_facts import unchosen_reward

    with _telling("slipstream.orchestrator.data"):
        report = run_preflight(config)
    check_model_reads_overrides(config, overrides, resolve_hf_config(config.model))
    if flags.dry_run:
        width = max(len(fact.subject) for fact in report.facts)
        for fact in report.facts:
            print(f"{fact.subject:<{width}}  {fact.finding}")
        print(f"\nReady to {'train' if config.run.num_steps else 'evaluate'}. Nothing was started (--dry-run).")
        return EXIT_OK
    for note in environment.apply(environment.variables_of(report.config)):
        tell(note)
    if note := unchosen_reward(config, overrides):
        tell(note)
    for fact in report.facts:
        if fact.is_warning:
            tell(f"warning: {fact.subject}: {fact.finding}")
    with wound_down_by_signals() as received:
        return run_to_an_exit_code(report.config, overrides, received, ended)


@contextmanager
def _telling(name: str) -> Generator[None]:
    """What this logger and those below it say reaches people, before there is a run whose log has it."""

    class _Teller(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            tell(record.getMessage())

    logger, teller = logging.getLogger(name), _Teller(logging.INFO)
    logger.addHandler(teller)
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(teller)


def _launch(flags: argparse.Namespace, overrides: list[str]) -> int:
    from slipstream.conf.load import load_run_config
    from slipstream.orchestrator.launch.command import launch
    from slipstream.orchestrator.launch.launch_options import LaunchOptions, Target

    given: dict[str, Any] = dict(vars(flags))
    output, config_dir, target, _ = (given.pop(name) for name in ("output", "config_dir", "target", "help"))
    if target not in list(Target):
        raise ConfigError(f"slipstream launch needs a target, one of {', '.join(Target)}, got {target!r}")
    options = LaunchOptions(target=Target(target), **given)
    text, what_to_do = launch(load_run_config(overrides, config_dir), overrides, options)
    if output is None:
        sys.stdout.write(text)
    else:
        try:
            output.write_text(text)
        except OSError as error:
            raise ConfigError(f"--output {output} cannot be written: {error.strerror}") from error
        what_to_do = what_to_do.replace("FILE", str(output), 1)
    tell(what_to_do)
    return EXIT_OK


def _plan(flags: argparse.Namespace, overrides: list[str]) -> int:
    from slipstream.conf.load import check_model_reads_overrides, load_run_config
    from slipstream.orchestrator.inputs.model_folder import resolve_hf_config
    from slipstream.orchestrator.offline import estimate as plan_command
    from slipstream.orchestrator.offline import estimate_report as plan_report
    from slipstream.orchestrator.offline import hardware as hardware_of
    from slipstream.weight_sync.gc_freeze import allow_collections, hold_collections

    config = load_run_config(overrides, flags.config_dir, reads_rows=False)
    check_model_reads_overrides(config, overrides, resolve_hf_config(config.model))
    hardware = hardware_of.Hardware(
        rates=hardware_of.link_rates(nic_gb_s=flags.nic_gb_s, nvlink_gb_s=flags.nvlink_gb_s, hbm_gb_s=flags.hbm_gb_s),
        changed=flags.changed,
        ranks_per_node=flags.ranks_per_node,
        slow_ranks=hardware_of.parse_slow_ranks(flags.slow_rank),
        layout_cache=flags.layout_cache,
    )
    began_s = time.monotonic()

    def say(phase: str) -> None:
        print(f"{time.monotonic() - began_s:5.1f} s  {phase}", file=sys.stderr, flush=True)

    hold_collections()  # nothing that a plan makes is in a cycle, and walking its million objects takes 3 of 20 s
    try:
        report = plan_command.plan_run(config, hardware, say)
        picture = plan_report.write_picture(report, flags.output)
    finally:
        allow_collections()
    if flags.json:
        print(json.dumps(plan_report.as_plain(report), indent=2))
        return EXIT_OK
    plan_report.print_report(report)
    print(f"timeline: {picture}\nNothing was started.")
    return EXIT_OK


def _push(flags: argparse.Namespace, serve_words: list[str]) -> int:
    if flags.checkpoint is None:
        raise ConfigError(
            "push needs a CHECKPOINT: a Hugging Face folder with safetensors. See: slipstream push --help"
        )
    from slipstream.orchestrator.push.command import run_push
    from slipstream.orchestrator.push.push_options import PushOptions

    given: dict[str, Any] = dict(vars(flags))
    is_once, as_json, _ = (given.pop(name) for name in ("once", "json", "help"))
    given["to"] = tuple(url for word in flags.to for url in word.split(",") if url)
    given["serve_words"] = tuple(serve_words)
    options = PushOptions(**given)
    with wound_down_by_signals() as received:
        try:
            run_push(options, as_json=as_json, stay=not is_once)
        except KeyboardInterrupt:
            tell("\nstopped; engines that were started here have ended.")
            return 128 + received[0] if received else EXIT_INTERRUPTED
    return EXIT_OK


def _parity(flags: argparse.Namespace, overrides: list[str]) -> int:
    from slipstream.orchestrator.parity import report as parity_report
    from slipstream.orchestrator.parity.command import ParityOptions, run_parity

    given: dict[str, Any] = dict(vars(flags))
    as_json, _ = (given.pop(name) for name in ("json", "help"))
    if overrides and "=" not in overrides[0]:
        given["model"] = Path(overrides.pop(0))
    options = ParityOptions(**given)
    began_s = time.monotonic()

    terminal = os.fdopen(os.dup(2), "w")  # descriptor 2 is the engine's log while there is an engine

    def say(phase: str) -> None:
        print(f"{time.monotonic() - began_s:5.1f} s  {phase}", file=terminal, flush=True)

    with terminal:
        report = run_parity(options, overrides, say)
        figures, picture = parity_report.write_files(report, options.output)
    if as_json:
        print(json.dumps(report.as_plain(), indent=2))
    else:
        parity_report.print_report(report)
        print(f"\nfigures: {figures}\npicture: {picture}")
    return EXIT_OK if report.agrees else EXIT_FAILED


def _record(flags: argparse.Namespace, _: list[str]) -> int:
    if flags.model is None:
        raise ConfigError("record needs a MODEL: a folder with config.json. See: slipstream record --help")
    from slipstream.orchestrator.offline import record as record_command

    report = record_command.record(
        flags.model,
        tp_size=flags.tp,
        enable_expert_parallel=flags.expert_parallel,
        dtype=flags.dtype,
        device=flags.device,
        cache=flags.layout_cache,
        out=flags.out,
    )
    print(json.dumps(report.as_plain(), indent=2) if flags.json else report.as_text())
    return EXIT_OK


def _doctor(flags: argparse.Namespace, _: list[str]) -> int:
    from slipstream.orchestrator.cli.doctor import run_doctor

    return run_doctor(as_json=flags.json)


def _status(flags: argparse.Namespace, _: list[str]) -> int:
    from slipstream.orchestrator.cli import status as status_command

    status = status_command.status_of(flags.run)
    print(json.dumps(status.as_plain(), indent=2) if flags.json else status.as_text())
    if flags.curves:
        print(f"curves: {status_command.draw(Path(status.run))}", file=sys.stderr)
    return EXIT_OK


def _view(flags: argparse.Namespace, _: list[str]) -> int:
    from slipstream.orchestrator.view.command import ViewOptions, run_view

    options = ViewOptions(runs=flags.runs or [Path("runs/latest")], port=flags.port, export=flags.export)
    run_view(options, lambda line: print(line, flush=True))
    return EXIT_OK


def _stop(flags: argparse.Namespace, _: list[str]) -> int:
    if not flags.timeout_s > 0:
        raise ConfigError(f"--timeout-s must be > 0, got {flags.timeout_s:g}")
    from slipstream.orchestrator.control.stop_request import stop

    print("\n".join(stop(flags.run, timeout_s=flags.timeout_s, say=tell)))
    return EXIT_OK


def _recover(flags: argparse.Namespace, _: list[str]) -> int:
    from slipstream.orchestrator.control.control_folder import ask

    print("\n".join(ask(flags.run, {"ask": "recover", "worker": flags.worker})))
    return EXIT_OK


def _scale(flags: argparse.Namespace, _: list[str]) -> int:
    from slipstream.orchestrator.control.control_folder import ask

    wanted: str | None = flags.wanted
    name, *_, number = (wanted or "").partition("=")
    if name != "rollout" or not number.removeprefix("-").isdecimal():
        given = "nothing" if wanted is None else repr(wanted)
        raise ConfigError(f"slipstream scale needs rollout=N after the run folder, e.g. rollout=3, got {given}")
    print("\n".join(ask(flags.run, {"ask": "scale", "rollout": int(number)})))
    return EXIT_OK


def _drain(flags: argparse.Namespace, _: list[str]) -> int:
    from slipstream.orchestrator.control.control_folder import ask

    number = (flags.worker or "").removeprefix("rollout-")
    if not number.isdecimal():
        given = "nothing" if flags.worker is None else repr(flags.worker)
        raise ConfigError(f"slipstream drain needs a rollout worker after the run folder, e.g. rollout-1, got {given}")
    print("\n".join(ask(flags.run, {"ask": "drain", "worker": int(number)})))
    return EXIT_OK


def _chaos(flags: argparse.Namespace, _: list[str]) -> int:
    from slipstream.orchestrator.chaos import command as chaos_command
    from slipstream.orchestrator.chaos.harm import AS_BEFORE

    if flags.list:
        found = chaos_command.listed(flags.run)
        print(json.dumps(found, indent=2) if flags.json else chaos_command.list_text(found))
        return EXIT_OK
    given: dict[str, Any] = dict(vars(flags))
    as_json, *_ = (given.pop(name) for name in ("json", "list", "help"))
    for name in ("victims", "what", "when"):
        given[name] = tuple(word for word in (given[name] or "").split(",") if word)
    events = chaos_command.chaos(chaos_command.ChaosOptions(**given), tell)
    print(chaos_command.report(flags.run, events, as_json=as_json))
    return EXIT_OK if all(event.outcome == AS_BEFORE for event in events) else EXIT_FAILED


def _flags_alone(parser: cli_flags.Parser, words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    return parser.parse_args(words), []


def _until_dashes(parser: cli_flags.Parser, words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Flags, and the words after the first `--`."""
    at = words.index("--") if "--" in words else len(words)
    return parser.parse_args(words[:at]), words[at + 1 :]


class Command(NamedTuple):
    """One command. Example: Command(flags.merge, _merge, needs_words=True)."""

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
    "train": Command(cli_flags.train, _train, _OPTIONS),
    "resume": Command(cli_flags.resume, _resume, _OPTIONS, needs_run=True),
    "eval": Command(cli_flags.evaluate, _eval, _OPTIONS, needs_words=True),
    "merge": Command(cli_flags.merge, _merge, needs_words=True, needs_run=True),
    "stop": Command(cli_flags.stop, _stop, needs_run=True),
    "launch": Command(cli_flags.launch, _launch, _OPTIONS, needs_words=True),
    "plan": Command(cli_flags.plan, _plan, _OPTIONS, starts_engines=True),
    "push": Command(cli_flags.push, _push, _until_dashes, needs_words=True, starts_engines=True),
    "parity": Command(cli_flags.parity, _parity, _OPTIONS, needs_words=True, starts_engines=True),
    "record": Command(cli_flags.record, _record, needs_words=True, starts_engines=True),
    "doctor": Command(cli_flags.doctor, _doctor),
    "status": Command(cli_flags.status, _status),
    "view": Command(cli_flags.view, _view),
    "recover": Command(cli_flags.recover, _recover, needs_run=True),
    "scale": Command(cli_flags.scale, _scale, needs_run=True),
    "drain": Command(cli_flags.drain, _drain, needs_run=True),
    "chaos": Command(cli_flags.chaos, _chaos, needs_words=True, needs_run=True),
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


if __name__ == "__main__":
    sys.exit(main())
