"""`slipstream eval`: the options of an evaluation alone, and its table.

    RUN, MODEL, adapter, options --eval_config--> RunConfig of no step --as any run--> evaluations.jsonl --> a table

The trainer's ranks read base and adapter, and publish them to the engines over the same path as in training; no step is
made. A model alone is published with adapters that add nothing. So what is evaluated is what a run would train on, with
its rewards, sampling and engines.

Owns: which weights are evaluated, which options are of no use then, the table. Does not own: the evaluation
(loop/evaluations.py), the figures (metrics/held_out.py). Invariant: importing this loads neither torch nor Ray.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import JsonObject, object_in
from slipstream.conf.load import load_resolved_yaml, load_run_config
from slipstream.conf.schema import Init, Objective, RunConfig, TrainMode
from slipstream.orchestrator.checkpoints.run_checkpoint import complete_checkpoints, hold, named_checkpoints, step_of
from slipstream.orchestrator.cli.working_folder import stand_where_it_began
from slipstream.orchestrator.files.origin import check_weights
from slipstream.orchestrator.files.row_files import read_rows
from slipstream.orchestrator.files.run_folder import RunFolder, saved_yaml
from slipstream.orchestrator.inputs.model_files import download_first
from slipstream.orchestrator.metrics.held_out import choosing_metrics, eval_names
from slipstream.trainer.weights.stored_adapter import options_of, read_stored_adapter

NOTHING_HELD_OUT = "slipstream eval needs held-out prompts: set data.eval_path=FILE, or data.eval_sets.NAME=FILE"
NO_USE = (
    "run.num_steps",
    "run.resume",
    "run.checkpoint_dir",
    "run.keep_best",
    "run.eval_beside",
    "trainer.lora.init_from",
)
"""Options that an evaluation sets itself."""
EVERY_SAMPLE = 1 << 30


def eval_config(
    run: Path | None, adapter: Path | None, checkpoint: str | None, overrides: Sequence[str]
) -> tuple[RunConfig, str]:
    """The options of an evaluation, and the folder of the weights that it is of.

    Args:
        run: A run's folder or a model's; None: all options are in `overrides`.
        adapter: An adapter in PEFT's format; None: the one of `checkpoint`, or of a model none.
        checkpoint: newest, best, or a step of `run`; None: newest.
    """
    for word in overrides:
        if (name := word.partition("=")[0].lstrip("+")) in NO_USE:
            raise ConfigError(f"{name} has no effect with slipstream eval, which makes no step; remove it")
    if adapter is not None and checkpoint is not None:
        raise ConfigError(f"--checkpoint {checkpoint} has no effect with --adapter, which is evaluated; remove one")
    is_model = run is not None and (run / "config.json").is_file() and not RunFolder(run).config.exists()
    if run is None or is_model:
        model = [] if run is None else ["model=checkpoint", f"model.path={run}"]
        words = [*model, *_data_of(overrides), *overrides, *([] if adapter is None else _shape_of(adapter))]
        return _of_model(load_run_config(words), adapter, checkpoint)
    folder = RunFolder(run.resolve())
    if not folder.config.exists():
        cure = f"; {found}" if (found := download_first(run)) else ""
        raise ConfigError(f"{run} is neither a run folder (runs/latest) nor a model's (config.json){cure}")
    saved = saved_yaml(run)
    if adapter is not None:
        adapter = adapter.absolute()
    overrides = stand_where_it_began(folder, overrides)
    config = load_resolved_yaml(saved, overrides, subject=f"{folder.config}: ")
    config = replace(config, run=replace(config.run, dir=str(folder.root)))
    if config.trainer.mode is TrainMode.full:
        if adapter is not None or checkpoint not in (None, "newest"):
            raise ConfigError(
                f"{run} trains all weights (trainer.mode=full): only what it has exported is evaluated; for a "
                f"checkpoint evaluate the folder that slipstream merge {run} --checkpoint {checkpoint or 'newest'} "
                "--output DIR writes"
            )
        if not folder.merged.is_dir():
            raise ConfigError(
                f"{run} has no {folder.merged.name}/, which a run with trainer.mode=full writes at its end, and "
                "slipstream merge of a checkpoint"
            )
        model = replace(config.model, path=str(folder.merged), init=Init.checkpoint, hf_config={})
        return _evaluated(replace(config, model=model), None, folder.run_id, str(folder.merged))
    if adapter is None:
        check_weights(object_in(folder.environment), config)
    else:
        config = replace(
            load_resolved_yaml(saved, [*overrides, *_shape_of(adapter)], subject=f"{folder.config}: "), run=config.run
        )
    return _evaluated(config, adapter or adapter_of(folder, checkpoint or "newest"), folder.run_id)


def _data_of(overrides: Sequence[str]) -> list[str]:
    """Options of data that an evaluation does not need and a run does, where they are not given: a held-out file stands
    in for the training rows."""
    given = {name: value for name, _, value in (word.lstrip("+").partition("=") for word in overrides)}
    words = [] if {"data", "experiment"} & set(given) else ["data=files"]
    if given.get("data", "files") != "files" or {"experiment", "data.path", "data.sources"} & set(given):
        return words
    names = [name for name in given if name == "data.eval_path" or name.startswith("data.eval_sets.")]
    held_out = [given[name] for name in names if given[name] not in ("", "null")]
    if not held_out:
        raise ConfigError(NOTHING_HELD_OUT)
    return [*words, *(f"data.path={path}" for path in held_out[:1])]


def _of_model(config: RunConfig, adapter: Path | None, checkpoint: str | None) -> tuple[RunConfig, str]:
    if checkpoint is not None:
        raise ConfigError(f"--checkpoint {checkpoint} is of a run; give its folder")
    if adapter is not None:
        return _evaluated(config, adapter, "adapter")
    if config.model.init is Init.random or config.model.path is None:
        raise ConfigError(
            "slipstream eval needs a run's folder or a model's, or model.path=FOLDER, beside which --adapter DIR may "
            f"stand: random weights (model.init={config.model.init}) are not evaluated"
        )
    return _evaluated(config, None, Path(config.model.path).name, config.model.path)


def _evaluated(config: RunConfig, adapter: Path | None, name: str, weights: str = "") -> tuple[RunConfig, str]:
    """The options of an evaluation of an adapter; None: of the model, which `weights` names."""
    if config.algorithm.objective is not Objective.policy:
        raise ConfigError(
            f"slipstream eval samples responses, and algorithm.objective={config.algorithm.objective} judges none; its "
            f"held-out figures are in metrics.jsonl ({', '.join(choosing_metrics(config))})"
        )
    if not config.data.held_out_sources:
        raise ConfigError(NOTHING_HELD_OUT)
    trainer = config.trainer
    if adapter is not None:
        if not (adapter / "adapter_config.json").is_file():
            raise ConfigError(
                f"--adapter={adapter} holds no adapter in PEFT's format (no adapter_config.json is there); give a "
                "folder such as runs/NAME/adapter"
            )
        trainer = replace(trainer, lora=replace(trainer.lora, init_from=str(adapter.resolve())))
    run = replace(
        config.run,
        name=f"eval-{name}",
        dir=str(Path(config.run.dir) / "evals"),
        resume=None,
        checkpoint_dir=None,
        num_steps=0,
        keep_best=None,
        eval_beside=False,
        samples_per_step=EVERY_SAMPLE,
    )
    return replace(config, run=run, trainer=trainer), weights or str(adapter)


def adapter_of(folder: RunFolder, checkpoint: str) -> Path:
    """The adapter of a checkpoint, as checkpoint_of; of a run that kept none, the one that its end wrote."""
    if checkpoint == "newest" and folder.adapter.is_dir() and not named_checkpoints(folder.checkpoints):
        return folder.adapter
    return checkpoint_of(folder, checkpoint) / "adapter"


def checkpoint_of(folder: RunFolder, checkpoint: str) -> Path:
    """A checkpoint (newest, best or a step), which the run does not remove while this process lives."""
    named = {step_of(path): path for path in named_checkpoints(folder.checkpoints)}
    if not named and not folder.adapter.is_dir():
        raise ConfigError(
            f"{folder.root} has saved nothing: no checkpoint (run.checkpoint_every_steps), and no adapter"
        )
    steps = ", ".join(str(step_of(path)) for path in complete_checkpoints(folder.checkpoints)) or "none"
    if checkpoint == "best":
        path = named.get(object_in(folder.checkpoints / "best.json").get("step", -1))  # not every disk has the link
        if path is None:
            raise ConfigError(f"{folder.root} has no best checkpoint (run.keep_best); its steps are {steps}")
    else:
        path = named.get(max(named) if checkpoint == "newest" else int(checkpoint) if checkpoint.isdecimal() else -1)
    if path is None:
        raise ConfigError(f"--checkpoint {checkpoint}: give newest, best, or one of the steps {steps}")
    if hold(path):
        return path
    if not path.is_dir():
        return checkpoint_of(folder, checkpoint)  # the run has removed it meanwhile: choose from what is there now
    raise ConfigError(
        f"--checkpoint {checkpoint}: {path} lacks manifest.json, without which nothing says that it is whole; give one "
        f"of the steps {steps}"
    )


def _shape_of(adapter: Path) -> list[str]:
    options = options_of(read_stored_adapter(adapter, "--adapter"), "--adapter")
    return [f"trainer.lora.{name}={'null' if value is None else value}" for name, value in options._asdict().items()]


def report_of(config: RunConfig, weights: str, folder: RunFolder) -> JsonObject:
    """What the evaluation found, from the folder that it wrote; also written there, as evaluation.json."""
    (row,) = read_rows(folder.evaluations)
    names = eval_names(config)
    figures = ["reward", *(f"pass_at_{k}" for k in names.ks), "majority"]
    sets: JsonObject = {}
    for name in (*names.sets, ""):
        prefix = f"eval/{name}/" if name else "eval/"
        sets[name or "all"] = {one: {"mean": row[prefix + one], "se": row[f"{prefix}{one}_se"]} for one in figures}
    report = {
        "weights": weights,
        "sets": sets,
        "samples_per_prompt": config.run.eval_samples_per_prompt,
        "temperature": config.rollout.eval_sampling.temperature,
        "failures": row["eval/failures"],
        "seconds": row["eval/total_s"],
        "samples": str(folder.samples),
    }
    (folder.root / "evaluation.json").write_text(json.dumps(report, indent=2) + "\n")
    return report | {"json": str(folder.root / "evaluation.json")}


def table_of(report: JsonObject) -> str:
    sets: dict[str, dict[str, dict[str, float | None]]] = report["sets"]
    names = list(next(iter(sets.values())))
    rows = [["set", *(name.replace("pass_at_", "pass@") for name in names)]]
    rows += [[name, *(_cell(figures[one]) for one in names)] for name, figures in sets.items()]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    num = report["samples_per_prompt"]
    told = (
        f"{num} response{'s' if num > 1 else ''} to each prompt at temperature {report['temperature']:g}, "
        f"{report['failures']} without a reward"
    )
    files = [f"json:    {report['json']}", f"samples: {report['samples']}"]
    return "\n".join([*table, "", f"weights: {report['weights']}", told, *files])


def _cell(figure: dict[str, float | None]) -> str:
    mean, error = figure["mean"], figure["se"]
    if mean is None or not math.isfinite(mean):
        return "-"
    return f"{mean:.3f}" if error is None else f"{mean:.3f} +- {error:.3f}"
