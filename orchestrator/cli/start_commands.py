"""Commands that start a run: `train`, `resume`, `eval`.

    flags, overrides --conf.load--> RunConfig --preflight--> --environment--> run.run

Owns: from words to a checked RunConfig. Does not own: flags (flags.py), the run (run.py), how it ends (exit.py).
Invariant: importing this module loads neither torch, Ray nor vLLM.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.conf.errors import ConfigError
from slipstream.orchestrator.cli import flags as cli_flags, option_help
from slipstream.orchestrator.cli.exit import EXIT_OK, run_to_an_exit_code, tell
from slipstream.orchestrator.cli.flags import is_option
from slipstream.orchestrator.signals import wound_down_by_signals

if TYPE_CHECKING:
    from slipstream.conf.schema import RunConfig
    from slipstream.orchestrator.files.run_folder import RunFolder


AT_ONCE = "checking options and files"
"""Said first: reading them takes seconds where the machine has much else to do."""


def train(flags: argparse.Namespace, overrides: list[str]) -> int:
    if flags.help_topic is not None:
        # `train experiment=x --help` and `train --help experiment=x`: the overrides are not a topic.
        if flags.help_topic and "=" not in flags.help_topic:
            print(option_help.topic(flags.help_topic, flags.config_dir))
        else:
            print(f"{cli_flags.train().format_help()}\n{option_help.options(flags.config_dir)}")
        return EXIT_OK

    tell(AT_ONCE)
    from slipstream.conf.load import load_run_config

    return _start(load_run_config(overrides, flags.config_dir), overrides, flags)


def resume(flags: argparse.Namespace, overrides: list[str]) -> int:
    is_url = "://" in flags.run
    for word in overrides:
        name = word.partition("=")[0].lstrip("+")
        if name in ("run.resume", "run.name", "run.checkpoint_dir" if is_url else "run.dir"):
            raise ConfigError(f"{name} has no effect with slipstream resume, which goes on in {flags.run}; remove it")
    tell(AT_ONCE)
    from slipstream.conf.load import load_resolved_yaml
    from slipstream.orchestrator.cli.working_folder import stand_where_it_began
    from slipstream.orchestrator.files.kept_code import check_code_is_there
    from slipstream.orchestrator.files.run_folder import RunFolder, saved_yaml

    if is_url:
        return _resume_from_store(flags.run.rstrip("/"), overrides, flags)
    folder = RunFolder(Path(flags.run).resolve())
    saved = saved_yaml(Path(flags.run))
    overrides = stand_where_it_began(folder, overrides)
    config = load_resolved_yaml(saved, overrides, subject=f"{folder.config}: ")
    check_code_is_there(folder, config)
    return _start(replace(config, run=replace(config.run, resume=str(folder.root))), overrides, flags)


def _resume_from_store(url: str, overrides: list[str], flags: argparse.Namespace) -> int:
    """Go on with a run of which an object store has options and checkpoints (run.checkpoint_dir)."""
    from slipstream.conf.load import load_resolved_yaml
    from slipstream.orchestrator.checkpoints.object_store import CONFIG, ObjectStore
    from slipstream.orchestrator.errors import ObjectStoreError

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


def evaluate(flags: argparse.Namespace, overrides: list[str]) -> int:
    tell(AT_ONCE)
    from slipstream.orchestrator.cli import evaluate as evaluation

    run = None
    if overrides and not is_option(overrides[0]):
        run = Path(overrides.pop(0))
    config, weights = evaluation.eval_config(run, flags.adapter, flags.checkpoint, overrides)

    def show(folder: RunFolder) -> None:
        report = evaluation.report_of(config, weights, folder)
        print(json.dumps(report, indent=2) if flags.json else evaluation.table_of(report))

    return _start(config, overrides, flags, show)


def _start(
    config: RunConfig,
    overrides: list[str],
    flags: argparse.Namespace,
    ended: Callable[[RunFolder], None] = lambda folder: None,
) -> int:
    """Check the run against this machine and train, unless --cfg or --dry-run ask for less. `ended` gets the folder of
    a run that has done what it should."""
    from slipstream.conf.load import check_model_reads_overrides, resolved_yaml

    if flags.cfg == "job":
        sys.stdout.write(resolved_yaml(config))
        return EXIT_OK

    from slipstream.orchestrator import environment
    from slipstream.orchestrator.inputs.given_code import unchosen_reward
    from slipstream.orchestrator.inputs.model_folder import resolve_hf_config
    from slipstream.orchestrator.inputs.preflight import run_preflight

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
