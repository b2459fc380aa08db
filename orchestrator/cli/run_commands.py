"""Commands about a run that is there: what it does (`status`, `view`), what it is asked to do (`stop`, `recover`,
`scale`, `drain`, `chaos`), and what it has made (`merge`).

Owns: from words to the call that answers. Does not own: flags (flags.py), what is asked and answered (control, chaos).
Invariant: importing this module loads neither torch, Ray nor vLLM.
"""

import argparse
import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

from slipstream.conf.errors import ConfigError
from slipstream.orchestrator.cli.exit import EXIT_FAILED, EXIT_OK, tell
from slipstream.orchestrator.cli.flags import options_of


def merge(flags: argparse.Namespace, _: list[str]) -> int:
    from slipstream.orchestrator.cli.merge import merge as merge_run

    print(f"model: {merge_run(flags.run, flags.checkpoint, flags.output)}")
    return EXIT_OK


def stop(flags: argparse.Namespace, _: list[str]) -> int:
    from slipstream.orchestrator.control.stop_request import stop as stop_run

    print("\n".join(stop_run(flags.run, timeout_s=flags.timeout_s, say=tell)))
    return EXIT_OK


def status(flags: argparse.Namespace, _: list[str]) -> int:
    from slipstream.orchestrator.cli import status as status_command

    status = status_command.status_of(flags.run)
    print(json.dumps(asdict(status), indent=2) if flags.json else status.as_text())
    if flags.curves:
        print(f"curves: {status_command.draw(Path(status.run))}", file=sys.stderr)
    return EXIT_OK


def view(flags: argparse.Namespace, _: list[str]) -> int:
    from slipstream.orchestrator.view.command import run_view

    say = partial(print, flush=True)
    run_view(flags.runs or [Path("runs/latest")], say, port=flags.port, export=flags.export)
    return EXIT_OK


def _ask(run: Path, what: str, **facts: object) -> int:
    from slipstream.orchestrator.control.control_folder import ask

    print("\n".join(ask(run, {"ask": what, **facts})))
    return EXIT_OK


def recover(flags: argparse.Namespace, _: list[str]) -> int:
    return _ask(flags.run, "recover", worker=flags.worker)


def scale(flags: argparse.Namespace, _: list[str]) -> int:
    wanted: str | None = flags.wanted
    name, *_, number = (wanted or "").partition("=")
    if name != "rollout" or not number.removeprefix("-").isdecimal():
        given = "nothing" if wanted is None else repr(wanted)
        raise ConfigError(f"slipstream scale needs rollout=N after the run folder, e.g. rollout=3, got {given}")
    return _ask(flags.run, "scale", rollout=int(number))


def drain(flags: argparse.Namespace, _: list[str]) -> int:
    number = (flags.worker or "").removeprefix("rollout-")
    if not number.isdecimal():
        given = "nothing" if flags.worker is None else repr(flags.worker)
        raise ConfigError(f"slipstream drain needs a rollout worker after the run folder, e.g. rollout-1, got {given}")
    return _ask(flags.run, "drain", worker=int(number))


def chaos(flags: argparse.Namespace, _: list[str]) -> int:
    from slipstream.orchestrator.chaos import command as chaos_command
    from slipstream.orchestrator.chaos.harm import AS_BEFORE

    if flags.list:
        found = chaos_command.listed(flags.run)
        print(json.dumps(found, indent=2) if flags.json else chaos_command.list_text(found))
        return EXIT_OK
    words = {name: (getattr(flags, name) or "").split(",") for name in ("victims", "what", "when")}
    lists = {name: tuple(filter(None, given)) for name, given in words.items()}
    events = chaos_command.chaos(options_of(chaos_command.ChaosOptions, flags, "json", "list", **lists), tell)
    print(chaos_command.report(flags.run, events, as_json=flags.json))
    return EXIT_OK if all(event.outcome == AS_BEFORE for event in events) else EXIT_FAILED
