"""Commands that need no run: `plan`, `launch`, `push`, `parity`, `record`, `doctor`.

Owns: from words to the call that answers, and its printing. Does not own: flags (flags.py).
Invariant: importing this module loads neither torch, Ray nor vLLM.
"""

import argparse
import gc
import json
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from slipstream.conf.errors import ConfigError
from slipstream.orchestrator.cli.exit import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, tell
from slipstream.orchestrator.cli.flags import options_of
from slipstream.orchestrator.cli.working_folder import stand_where_it_began
from slipstream.orchestrator.files.outputs import write_output
from slipstream.orchestrator.files.run_folder import RunFolder
from slipstream.orchestrator.signals import wound_down_by_signals


def launch(flags: argparse.Namespace, overrides: list[str]) -> int:
    from slipstream.conf.load import load_run_config
    from slipstream.orchestrator.launch.command import LaunchOptions, Target, launch as launch_text

    if flags.target not in list(Target):
        raise ConfigError(f"slipstream launch needs a target, one of {', '.join(Target)}, got {flags.target!r}")
    options = options_of(LaunchOptions, flags, "output", "config_dir", target=Target(flags.target))
    text, what_to_do = launch_text(load_run_config(overrides, flags.config_dir), overrides, options)
    if flags.output is None:
        sys.stdout.write(text)
    else:
        try:
            write_output(flags.output, text)
        except OSError as error:
            raise ConfigError(f"--output {flags.output} cannot be written: {error.strerror}") from error
        what_to_do = what_to_do.replace("FILE", str(flags.output), 1)
    tell(what_to_do)
    return EXIT_OK


def plan(flags: argparse.Namespace, overrides: list[str]) -> int:
    from slipstream.conf.load import check_model_reads_overrides, load_run_config
    from slipstream.orchestrator.inputs.model_folder import resolve_hf_config
    from slipstream.orchestrator.offline import estimate_report as plan_report
    from slipstream.orchestrator.offline.estimate import plan_run
    from slipstream.orchestrator.offline.hardware import Hardware, parse_slow_ranks
    from slipstream.weight_sync.prediction.links import LinkRates

    config = load_run_config(overrides, flags.config_dir, reads_rows=False)
    check_model_reads_overrides(config, overrides, resolve_hf_config(config.model))
    given = {f"{name}_bytes_s": getattr(flags, f"{name}_gb_s") * 1e9 for name in ("nic", "nvlink", "hbm")}
    hardware = Hardware(
        rates=LinkRates(**given),
        changed=flags.changed,
        ranks_per_node=flags.ranks_per_node,
        slow_ranks=parse_slow_ranks(flags.slow_rank),
        layout_cache=flags.layout_cache,
    )
    began_s = time.monotonic()

    def say(phase: str) -> None:
        print(f"{time.monotonic() - began_s:5.1f} s  {phase}", file=sys.stderr, flush=True)

    gc.disable()  # nothing that a plan makes is in a cycle, and walking its million objects takes 3 of 20 s
    try:
        report = plan_run(config, hardware, say)
        if flags.json:
            print(json.dumps(plan_report.as_plain(report), indent=2))
        else:
            plan_report.print_report(report)
        picture = plan_report.write_picture(report, flags.output)  # last: should it fail, the figures are there
    finally:
        gc.enable()
    if not flags.json:
        print(f"timeline: {picture}\nNothing was started.")
    return EXIT_OK


def push(flags: argparse.Namespace, serve_words: list[str]) -> int:
    if flags.checkpoint is None:
        raise ConfigError(
            "push needs a CHECKPOINT: a Hugging Face folder with safetensors. See: slipstream push --help"
        )
    from slipstream.orchestrator.push.command import run_push
    from slipstream.orchestrator.push.push_options import PushOptions, addresses

    options = options_of(PushOptions, flags, "once", "json", to=addresses(flags.to), serve_words=tuple(serve_words))
    with wound_down_by_signals() as received:
        try:
            run_push(options, as_json=flags.json, stay=not flags.once)
        except KeyboardInterrupt:
            tell("\nstopped; engines that were started here have ended.")
            return 128 + received[0] if received else EXIT_INTERRUPTED
    return EXIT_OK


def parity(flags: argparse.Namespace, overrides: list[str]) -> int:
    from slipstream.orchestrator.parity import report as parity_report
    from slipstream.orchestrator.parity.command import ParityOptions, run_parity

    model = Path(overrides.pop(0)) if overrides and "=" not in overrides[0] else None
    options = options_of(ParityOptions, flags, "json", model=model)
    if model is not None and model.exists():
        paths = {name: path.absolute() for name, path in vars(flags).items() if isinstance(path, Path)}
        options = replace(options, **paths, model=model.absolute())
        overrides = stand_where_it_began(RunFolder(model), overrides)  # of a model alone nothing says where
    began_s = time.monotonic()

    terminal = os.fdopen(os.dup(2), "w")  # descriptor 2 is the engine's log while there is an engine

    def say(phase: str) -> None:
        print(f"{time.monotonic() - began_s:5.1f} s  {phase}", file=terminal, flush=True)

    with terminal:
        report = run_parity(options, overrides, say)
        figures, picture = parity_report.write_files(report, options.output)
    if flags.json:
        print(json.dumps(asdict(report), indent=2))
    else:
        parity_report.print_report(report)
        print(f"\nfigures: {figures}\npicture: {picture}")
    return EXIT_OK if report.agrees else EXIT_FAILED


def record(flags: argparse.Namespace, _: list[str]) -> int:
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
    print(json.dumps(asdict(report), indent=2) if flags.json else report.as_text())
    return EXIT_OK


def doctor(flags: argparse.Namespace, _: list[str]) -> int:
    tell("looking at this machine")
    from slipstream.orchestrator.cli.doctor import run_doctor

    return run_doctor(as_json=flags.json)
