"""Checks a run against this machine and its files before Ray, an engine or a GPU is touched, or a folder is made.

    RunConfig --one function per subject--> a Fact each, or a problem each --> PreflightReport, or one PreflightError

Owns: checks of packages, model, adapter, tokenizer and run folder, and the order of all checks. Does not own: rules
between options (conf/checks/).
Invariant: nothing is written but what `datasets` downloads into its cache, and neither torch nor Ray is loaded. It
takes seconds, unless data is downloaded, or a large checkpoint is to be resumed, which is read whole. Every problem is
found in one go, so that nobody repairs one to meet the next.
"""

import math
import os
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from slipstream.conf.architecture.families import read_config
from slipstream.conf.architecture.model_spec import ModelSpec
from slipstream.conf.checks.model import check_architecture, of_base
from slipstream.conf.errors import ConfigError, SlipstreamError
from slipstream.conf.json_files import object_in
from slipstream.conf.options import did_you_mean
from slipstream.conf.plural import counted
from slipstream.conf.schema import Device, Init, Objective, RunConfig, TrainMode
from slipstream.conf.schema.rules import refuse_first
from slipstream.orchestrator.checkpoints.journal import waits_for
from slipstream.orchestrator.checkpoints.object_store import ENVIRONMENT, ObjectStore
from slipstream.orchestrator.checkpoints.run_checkpoint import has_nothing_left
from slipstream.orchestrator.environment import resolve_device
from slipstream.orchestrator.errors import ObjectStoreError, PreflightError
from slipstream.orchestrator.files.origin import check_weights
from slipstream.orchestrator.files.run_folder import RunFolder, changed_options, follow_latest, resumed_folder
from slipstream.orchestrator.inputs.character_tokenizer import CHARACTERS, check_character_vocabulary
from slipstream.orchestrator.inputs.environment_checks import check_engine_needs, check_loggers, check_packages
from slipstream.orchestrator.inputs.facts import Fact
from slipstream.orchestrator.inputs.given_code import CODE_CHECKS
from slipstream.orchestrator.inputs.machine_checks import MACHINE_CHECKS, MIN_FREE_BYTES
from slipstream.orchestrator.inputs.model_files import check_checkpoint_files, download_first
from slipstream.orchestrator.inputs.model_folder import engine_checkpoint, resolve_hf_config
from slipstream.orchestrator.inputs.resumed import resumable, with_its_warm_up
from slipstream.orchestrator.inputs.rows.prompt_rows import check_data
from slipstream.orchestrator.inputs.text_encoder import TextEncoder, check_holds_tokenizer, tokenizer_folder
from slipstream.orchestrator.machine import HERE, Machine, nearest_existing
from slipstream.orchestrator.metrics.held_out import choosing_metrics
from slipstream.trainer.weights.stored_adapter import check_adapter_fits, read_stored_adapter


@dataclass(frozen=True, slots=True)
class PreflightReport:
    """What a run will use; printed by --dry-run."""

    config: RunConfig
    """The run's options with cluster.device decided, and paths below <run.dir>/latest followed."""
    facts: tuple[Fact, ...]


def run_preflight(config: RunConfig, machine: Machine = HERE) -> PreflightReport:
    """Check the run against the machine and its files. Raises: PreflightError with every problem found."""
    device = Device(resolve_device(config.cluster.device, machine))
    config = with_its_warm_up(follow_latest(replace(config, cluster=replace(config.cluster, device=device))))
    facts: list[Fact] = []
    problems: list[str] = []
    # Processes that wait for a controller have their place on this machine.
    of_machine = (*(MACHINE_CHECKS if waits_for(config) is None else ()), check_run_folder)
    for check in (*OPTION_CHECKS, *(partial(check, machine=machine) for check in of_machine)):
        try:
            if (fact := check(config)) is not None:
                facts += [fact, *fact.also]
        except SlipstreamError as error:
            problems.append(str(error))
    if problems:
        raise PreflightError(_join(problems))
    return PreflightReport(config, tuple(facts))


def check_model(config: RunConfig) -> Fact:
    """config.json exists, describes an architecture we have, fits the run, and the weights are whole."""
    model = config.model
    if model.path is not None and Path(model.path).is_file():
        raise ConfigError(
            f"model.path={model.path} is a file; give the folder that holds config.json and *.safetensors"
        )
    hf_config = resolve_hf_config(model)
    spec = read_config(hf_config)
    if config.algorithm.objective is Objective.policy:
        refuse_first(of_base(config, hf_config))
        _check_cache_holds_a_sequence(config, spec)
        check_engine_needs(hf_config, config.cluster.device)
    check_architecture(config, hf_config)
    engine_checkpoint(hf_config, model.dtype)
    tensors = spec.checkpoint_tensors(model.dtype.value)
    origin = "random weights"
    if model.init is Init.checkpoint:
        num_bytes = check_checkpoint_files(Path(model.path or ""), tensors)
        origin = f"{num_bytes / 1e9:.1f} GB in {model.path}"
    num_parameters = sum(math.prod(tensor.shape) for tensor in tensors)
    experts = f", {spec.moe.num_experts} experts (top-{spec.moe.top_k})" if spec.moe is not None else ""
    return Fact(
        "model", f"{spec.family}: {spec.num_layers} layers{experts}, {_count(num_parameters)} parameters, {origin}"
    )


def check_initial_adapter(config: RunConfig) -> Fact:
    """The adapter to start from is plain LoRA of the model, with the ranks and the scale that are trained."""
    lora = config.trainer.lora
    if config.trainer.mode is TrainMode.full or lora.init_from is None:
        where = "the model as it is" if config.run.resume is None else f"a checkpoint of {config.run.resume}"
        return Fact("starts from", where)
    if not config.reads_initial_adapter:
        return Fact("starts from", f"a checkpoint; {lora.init_from} is not read again")
    option = "trainer.lora.init_from" if config.run.num_steps else "--adapter"  # of slipstream eval
    if not Path(lora.init_from).is_dir() and (cure := download_first(Path(lora.init_from))):
        raise ConfigError(f"{option}={lora.init_from}: no such folder; {cure}")
    stored = read_stored_adapter(Path(lora.init_from), option)
    if config.model.path is not None and not Path(config.model.path).is_dir():
        return Fact("starts from", lora.init_from)  # check_model reports that folder
    spec = read_config(resolve_hf_config(config.model))
    num_missing = check_adapter_fits(stored, spec, lora, option)
    rest = f"; {num_missing} matrices without factors in it start at zero" if num_missing else ""
    return Fact("starts from", f"{lora.init_from} ({len(stored.factors) // 2} matrices{rest})")


def _check_cache_holds_a_sequence(config: RunConfig, spec: ModelSpec) -> None:
    """An engine refuses a KV cache without room for its longest sequence. Where no size is given the device decides."""
    rollout = config.rollout
    if rollout.kv_cache_bytes is None:
        return
    needed = spec.sequence_cache_bytes(rollout.max_model_len, config.model.dtype.value, rollout.tp_size)
    if rollout.kv_cache_bytes < needed:
        raise ConfigError(
            f"rollout.kv_cache_bytes={rollout.kv_cache_bytes} holds no sequence of "
            f"rollout.max_model_len={rollout.max_model_len} tokens, which takes {needed} bytes; give a multiple of "
            "that, for as many at once, lower rollout.max_model_len, or set rollout.kv_cache_bytes=null"
        )


def check_tokenizer(config: RunConfig) -> Fact:
    if config.model.tokenizer == CHARACTERS:
        vocab_size = config.model.hf_config.get("vocab_size")
        if isinstance(vocab_size, int):  # else check_model reports it
            check_character_vocabulary(vocab_size)
        return Fact("tokenizer", "one token per character")
    folder = tokenizer_folder(config.model)
    if config.model.tokenizer is None and not (folder / "config.json").is_file():
        return Fact("tokenizer", "not looked for")  # it would be in model.path, and check_model reports that folder
    option = "model.path" if config.model.tokenizer is None else "model.tokenizer"
    if not folder.is_dir():
        cure = download_first(folder) or "give one that holds a tokenizer"
        raise ConfigError(f"{option}={folder}: no such folder; {cure}")
    check_holds_tokenizer(option, folder)
    TextEncoder(folder)
    return Fact("tokenizer", str(folder))


def check_sampling(config: RunConfig) -> Fact | None:
    if config.algorithm.objective is not Objective.policy:
        return None
    sampling = config.rollout.sampling
    folder = config.model.path
    if sampling.stop_token_ids and (folder is None or Path(folder).is_dir()):  # else check_model reports the folder
        vocab_size = int(resolve_hf_config(config.model)["vocab_size"])
        if max(sampling.stop_token_ids) >= vocab_size:
            raise ConfigError(
                f"rollout.sampling.stop_token_ids names token {max(sampling.stop_token_ids)}, and the model has "
                f"vocab_size={vocab_size}; give ids of its tokenizer"
            )
    stops = f", ended by {', '.join(map(repr, sampling.stop))}" if sampling.stop else ""
    most = counted(sampling.max_tokens, "token")
    return Fact("responses", f"temperature {sampling.temperature:g}, at most {most}{stops}")


def check_evaluation(config: RunConfig) -> Fact:
    """The figure that chooses the best checkpoint is one that evaluations have."""
    run, sets = config.run, config.data.held_out_sources
    if not sets:
        return Fact("evaluation", "none: data.eval_path=null")
    known = choosing_metrics(config)
    if run.keep_best is not None and run.keep_best not in known:
        hint = did_you_mean(run.keep_best, known)
        raise ConfigError(
            f"run.keep_best={run.keep_best} is no figure of this run's evaluations. {hint}{' ' if hint else ''}There "
            f"are {', '.join(known)}"
        )
    how = (
        f"beside training, {config.num_evaluated_groups} prompts at a time"
        if config.evaluates_beside
        else "training waits"
    )
    kept = f", best by {run.keep_best}" if run.keep_best is not None else ""
    named = f" ({', '.join(name for name in sets if name)})" if "" not in sets else ""
    return Fact("evaluation", f"{counted(len(sets), 'held-out set')}{named}, {how}{kept}")


def check_training(config: RunConfig) -> Fact:
    """What a step trains, and of how much."""
    run, trainer, algorithm = config.run, config.trainer, config.algorithm
    if run.num_steps == 0:
        return Fact("training", "none: run.num_steps=0")
    lora = trainer.lora
    what = "all weights" if trainer.mode is TrainMode.full else f"LoRA rank {lora.rank}, alpha {lora.alpha:g}"
    if algorithm.objective is Objective.policy:
        groups, size = algorithm.groups_per_step, algorithm.group_size
        step = f"{groups} prompts x {size} responses = {groups * size} responses a step"
    else:
        step = f"{counted(algorithm.sequences_per_step, 'row')} a step"
    num_updates, rate = run.num_steps * algorithm.updates_per_step, f"lr {trainer.optim.lr:g}"
    warm_up = trainer.optim.warmup_updates(num_updates)
    if 0 < trainer.optim.warmup_steps < 1:
        rate += f" after a warm-up of {warm_up} of {num_updates} updates"
    if warm_up >= num_updates:
        rate += f", which a warm-up of {warm_up} updates does not reach"
    return Fact("training", f"{what}, {rate}, {step}, {counted(run.num_steps, 'step')}")


def check_run_folder(config: RunConfig, machine: Machine) -> Fact:
    """The run folder can be made and has room; a run to resume has a checkpoint."""
    run = config.run
    resumed = ""
    root = resumed_folder(run)
    if root is not None and "://" not in str(run.resume) and not root.is_dir():
        raise ConfigError(f"run.resume={run.resume}: no such folder; give a run folder, for example {run.dir}/latest")
    if root is not None and (found := resumable(config)) is not None:
        began = object_in(RunFolder(root.resolve()).environment)
        if not began and "://" in str(run.resume):
            began = ObjectStore(str(run.resume)).document(ENVIRONMENT)
        check_weights(began, config, is_resumed=True)
        step = found.step
        if step >= run.num_steps and has_nothing_left(RunFolder(root), run.num_steps):
            raise ConfigError(
                f"run.resume={run.resume} has done {step} steps, and run.num_steps={run.num_steps}: nothing is left to "
                "train; raise run.num_steps to go on, or start again with slipstream train"
            )
        resumed = "".join(f"; {problem}" for problem in found.damaged) + f"; goes on from step {step}"
        resumed += "".join(f", with another {option}" for option in changed_options(RunFolder(root.resolve()), config))
    target = root or Path(run.dir)
    existing = nearest_existing(target)
    if not existing.is_dir():
        raise ConfigError(f"run.dir={run.dir} lies below {existing}, which is a file; choose another folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"run.dir={run.dir} cannot be written (no permission on {existing}); choose another folder")
    free = machine.free_bytes(target)
    if free < MIN_FREE_BYTES:
        raise ConfigError(
            f"run.dir={run.dir} has {free >> 20} MiB of free space, and a run wants {MIN_FREE_BYTES >> 20}; choose "
            "another folder"
        )
    return Fact("run folder", f"{target} ({free / 1e9:.0f} GB free){resumed}")


def check_checkpoint_dir(config: RunConfig) -> Fact | None:
    """The object store takes, lists and gives back what is written."""
    url = config.run.checkpoint_dir
    if url is None or config.run.num_steps == 0:
        return None
    began_s = time.monotonic()
    try:
        ObjectStore(url).check()
    except ObjectStoreError as error:
        raise ConfigError(f"run.checkpoint_dir={error}") from error
    return Fact("checkpoints", f"go to {url}, too (written and read back in {time.monotonic() - began_s:.1f} s)")


OPTION_CHECKS = (
    check_packages,
    check_model,
    check_initial_adapter,
    check_tokenizer,
    check_data,
    check_training,
    check_sampling,
    check_evaluation,
    *CODE_CHECKS,
    check_loggers,
    check_checkpoint_dir,
)


def _join(problems: list[str]) -> str:
    unique = list(dict.fromkeys(problems))
    if len(unique) == 1:
        return unique[0]
    listed = "".join(f"\n  {i}. {problem}" for i, problem in enumerate(unique, start=1))
    return f"{len(unique)} problems:{listed}"


def _count(number: int) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number / 1e3:.0f} k"
