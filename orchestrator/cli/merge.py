"""`slipstream merge`: the model of a run's checkpoint as a Hugging Face folder.

    RUN, checkpoint --adapter of it--------------> base + adapter in one process --as an export of--> folder
                    --or all weights (mode=full)-> these                           trainer.mode=full

Owns: which checkpoint is merged, and what is refused before weights are read. Does not own: the arithmetic and the
files (trainer.adapter_io.save_merged). Invariant: the folder is there once it is whole. Importing this loads no torch.
"""

import shutil
from dataclasses import replace
from pathlib import Path

from slipstream.conf.architecture.families import read_config
from slipstream.conf.architecture.model_spec import ModelSpec
from slipstream.conf.architecture.moe_spec import ExpertFormat
from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import object_in
from slipstream.conf.load import load_resolved_yaml
from slipstream.conf.schema import Device, Init, RunConfig, TrainerConfig, TrainMode
from slipstream.conf.whole_files import write_whole
from slipstream.orchestrator.checkpoints.run_checkpoint import step_of
from slipstream.orchestrator.cli.evaluate import adapter_of, checkpoint_of
from slipstream.orchestrator.cli.exit import tell
from slipstream.orchestrator.cli.working_folder import stand_where_it_began
from slipstream.orchestrator.environment import resolve_device
from slipstream.orchestrator.errors import DiskFull
from slipstream.orchestrator.files.may_write import naming_a_full_disk
from slipstream.orchestrator.files.origin import check_weights
from slipstream.orchestrator.files.outputs import check_can_write
from slipstream.orchestrator.files.run_folder import RunFolder, saved_yaml
from slipstream.orchestrator.inputs.model_files import check_checkpoint_files, read_hf_config
from slipstream.orchestrator.inputs.model_folder import complete_export
from slipstream.trainer.weights.stored_adapter import check_adapter_fits, read_stored_adapter


def merge(run: Path, checkpoint: str, output: Path | None) -> Path:
    """Write the merged model into a folder that is not there yet, or merged/ in the run's. Returns it.

    Raises:
        ConfigError: there is no such checkpoint, its base is not there, or the folder is.
    """
    folder = RunFolder(run.resolve())
    config = load_resolved_yaml(saved_yaml(run), subject=f"{folder.config}: ")
    target = (output or folder.merged).absolute()
    stand_where_it_began(folder, [])
    is_full = config.trainer.mode is TrainMode.full
    trained = checkpoint_of(folder, checkpoint) / "trainer" if is_full else adapter_of(folder, checkpoint)
    if target.exists():
        raise ConfigError(f"{target} is there already; give another folder with --output, or remove it")
    check_can_write(target, f"{target}", is_folder=True)
    check_weights(object_in(folder.environment), config)
    hf_config = read_hf_config(folder.model, "RUN/model")
    spec = read_config(hf_config, config.trainer.numerics.places.mla_norm_eps)
    _check_sources(config, spec, None if is_full else trained)
    base = "a base of random weights" if config.model.init is Init.random else config.model.path
    tell(f"merging {trained} into {base}: reads both, and writes {target}")
    lora = replace(config.trainer.lora, init_from=None if is_full else str(trained))
    # Other devices draw other random values.
    device = Device.cpu if config.model.init is Init.checkpoint else Device(resolve_device(config.cluster.device))
    trainer = TrainerConfig(mode=config.trainer.mode, train_router=config.trainer.train_router, lora=lora)

    from slipstream.trainer.checkpoint.rank_state import load_trained  # imports torch
    from slipstream.trainer.scoring import Scorer

    partial = target.with_name(f".{target.name}.partial")
    try:
        with naming_a_full_disk(target):
            scorer = Scorer(
                config.model, trainer, hf_config, seed=config.run.seed, device=device.value,
                rounding_seed=config.rounding_seed,
            )  # fmt: skip
            if is_full:
                load_trained(scorer.decoder, trained, config.trainer.num_ranks, config.trainer.ep_size)
            tell("both are read; merging and writing")
            scorer.save(partial)
            complete_export(folder.model, partial)
            write_whole(partial / "README.md", _card(config, folder, trained, base))
            partial.rename(target)
    except DiskFull as error:
        raise ConfigError(f"{error}; give another folder with --output") from error
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _card(config: RunConfig, folder: RunFolder, trained: Path, base: str | None) -> str:
    """What the model's folder says of itself, as a model card of the Hub's."""
    when = "the end" if trained == folder.adapter else f"step {step_of(trained.parent)}"
    what = "All weights" if config.trainer.mode is TrainMode.full else f"The adapter, merged into {base},"
    return (
        "---\nlibrary_name: transformers\ntags: [slipstream]\n---\n"
        f"{what} of {when} of the Slipstream run {folder.root.name} ({config.run.num_steps} steps).\n\n"
        f"Written by `slipstream merge` from {trained}\n"
    )


def _check_sources(config: RunConfig, spec: ModelSpec, adapter: Path | None) -> None:
    """Raise ConfigError where base and adapter, if there is one, cannot be merged. Reads headers alone."""
    if spec.moe is not None and spec.moe.expert_format is not ExpertFormat.plain:
        raise ConfigError(
            f"a model of packed experts ({spec.moe.expert_format}) is not written merged; serve {adapter} beside it, "
            "or merge it into a float copy of the model with PEFT"
        )
    if config.model.init is Init.checkpoint:
        check_checkpoint_files(Path(config.model.path or ""), spec.checkpoint_tensors(config.model.dtype.value))
    if adapter is not None:
        check_adapter_fits(read_stored_adapter(adapter, "adapter"), spec, config.trainer.lora, "adapter")
