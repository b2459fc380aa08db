"""`slipstream parity`: from the words of the command to a question, and from the answer to files.

    MODEL, overrides --> RunConfig, sized for one device --measure--> ParityReport --report--> tables, files

Owns: what a MODEL may be, which options are set for a comparison, where prompts come from. Does not own: the figures
(measure.py), their words (report.py). Importing this module loads neither torch nor vLLM.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.conf.checks.model import of_trainer
from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import object_or_empty
from slipstream.conf.load import load_resolved_yaml, load_run_config
from slipstream.conf.schema import Device, Init, ModelConfig, RunConfig, TrainMode
from slipstream.conf.schema.rules import refuse_first
from slipstream.orchestrator.files.run_folder import RunFolder, saved_yaml
from slipstream.orchestrator.inputs.model_folder import resolve_hf_config
from slipstream.orchestrator.inputs.preflight import check_initial_adapter
from slipstream.orchestrator.inputs.rows.prompt_rows import PromptRows, RowEncoder
from slipstream.rollout.errors import DataError

if TYPE_CHECKING:
    from slipstream.orchestrator.parity.measure import ParityReport
    from slipstream.orchestrator.parity.progress import Say


@dataclass(frozen=True, slots=True)
class ParityOptions:
    model: Path | None = None
    """A checkpoint's folder or a run's; None: the overrides name the model."""
    num_prompts: int = 16
    prompt_tokens: int = 32
    """Length of random prompts, and the longest that a prompt of a file may be."""
    max_tokens: int = 64
    num_layer_prompts: int = 4
    """Sequences whose operations are compared one by one."""
    transformers: bool = False
    usual: Path | None = None
    output: Path = Path("parity")
    config_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.num_layer_prompts > self.num_prompts:
            raise ConfigError(
                f"--layer-prompts must be <= --prompts, got {self.num_layer_prompts} and {self.num_prompts}"
            )


def run_parity(options: ParityOptions, overrides: Sequence[str], say: Say) -> ParityReport:
    """Measure, and write parity.json and parity.png.

    Raises:
        ConfigError: the model, an option, the prompts or a file is wrong.
        EngineError: vLLM refused the model.
    """
    config, has_prompts = load_config(options, overrides)
    check_initial_adapter(config)
    refuse_first(of_trainer(config, resolve_hf_config(config.model)))
    usual = None if options.usual is None else _relatives(options.usual)
    prompts = _prompts(config, options) if has_prompts else _random_prompts(config, options)
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output={options.output} cannot be written: {error}") from error
    from torch import OutOfMemoryError
    from torch.cuda import is_available

    from slipstream.orchestrator.parity.measure import Question, measure

    device = config.cluster.device
    if device is Device.auto:
        device = Device.cuda if is_available() else Device.cpu
    question = Question(prompts, options.max_tokens, options.num_layer_prompts, options.transformers, usual)
    try:
        return measure(config, device, question, options.output / "engine.log", say)
    except OutOfMemoryError as error:
        raise ConfigError(
            "the model does not fit one device, where slipstream parity computes everything: compare fewer layers "
            f"(model.init=random model.hf_config.num_hidden_layers=4), or lower --max-tokens and --prompts ({error})"
        ) from error


def load_config(options: ParityOptions, overrides: Sequence[str]) -> tuple[RunConfig, bool]:
    """The options of a run, for one trainer rank and one engine; and whether they name a prompt file."""
    length = options.prompt_tokens + options.max_tokens + 1
    if options.model is not None and (options.model / "config.yaml").is_file():
        config, has_prompts = _of_run(options.model, overrides), False
    else:
        named = {word.lstrip("+").partition("=")[0] for word in overrides}
        has_prompts = any(name == "data" or name.startswith("data.") for name in named)
        words = [] if has_prompts else ["data=files", "data.path=pkg://letters_train.jsonl"]  # a run needs some
        if options.model is not None:
            words += ["model=checkpoint", f"model.path={options.model}"]
        for name, value in (("rollout.max_model_len", length), ("rollout.sampling.max_tokens", options.max_tokens)):
            words += [] if name in named else [f"{name}={value}"]
        config = load_run_config([*words, *overrides], options.config_dir)
    return replace(
        config,
        trainer=replace(config.trainer, num_ranks=1, ep_size=1, cp_size=1),
        rollout=replace(config.rollout, num_workers=1, workers_per_gpu=1, tp_size=1, enable_expert_parallel=False),
    ), has_prompts


def _of_run(run: Path, overrides: Sequence[str]) -> RunConfig:
    """A run's options, its trained weights in place of those that it began with."""
    folder = RunFolder(run.resolve())
    config = load_resolved_yaml(saved_yaml(run), overrides, subject=f"{folder.config}: ")
    config = replace(config, run=replace(config.run, resume=None))  # what is compared is an adapter, not a checkpoint
    if config.trainer.mode is TrainMode.full:
        merged = folder.root / "merged"
        if not merged.is_dir():
            raise ConfigError(f"{run} has no trained weights: {merged} is missing; has the run ended?")
        model = ModelConfig(path=str(merged), init=Init.checkpoint, dtype=config.model.dtype)
        return replace(config, model=model)
    adapter = folder.root / "adapter"
    if not adapter.is_dir():
        raise ConfigError(f"{run} has no trained adapter: {adapter} is missing; has the run ended?")
    return replace(config, trainer=replace(config.trainer, lora=replace(config.trainer.lora, init_from=str(adapter))))


def _prompts(config: RunConfig, options: ParityOptions) -> tuple[tuple[int, ...], ...]:
    encoder = RowEncoder(config)  # it keeps the folder that `exact` reads
    try:
        prompts = PromptRows(config, encoder.exact).training()
    except DataError as error:
        raise ConfigError(str(error)) from error
    return tuple(prompt.token_ids for prompt in prompts[: options.num_prompts])


def _random_prompts(config: RunConfig, options: ParityOptions) -> tuple[tuple[int, ...], ...]:
    """Token ids drawn from run.seed; no tokenizer is needed."""
    vocab_size = int(resolve_hf_config(config.model)["vocab_size"])
    draw = random.Random(config.run.seed)
    return tuple(
        tuple(draw.randrange(vocab_size) for _ in range(options.prompt_tokens)) for _ in range(options.num_prompts)
    )


def _relatives(file: Path) -> dict[str, float]:
    """`relative` by tensor, of a parity.json."""
    try:
        found = object_or_empty(json.loads(file.read_text(encoding="utf-8")))
        return {one["tensor"]: float(one["relative"]) for one in found["differences"]}
    except OSError as error:
        raise ConfigError(f"--usual={file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--usual={file} is no report of slipstream parity; give a parity.json") from error
