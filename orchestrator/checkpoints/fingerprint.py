"""Which options a checkpoint's content depends on. One that is of others is refused by a resume (run_checkpoint.py)."""

from dataclasses import asdict

from slipstream.conf.json_files import JsonObject
from slipstream.conf.schema import LORA_TARGETS, LoraConfig, Order, RunConfig, TrainMode
from slipstream.orchestrator.environment import resolve_device
from slipstream.orchestrator.files.run_folder import to_plain


def fingerprint(config: RunConfig) -> JsonObject:
    """The options that a checkpoint's content depends on. Any other option may change between two parts of a run."""
    trainer = config.trainer
    algorithm = config.algorithm
    return to_plain(
        {
            # Names of the first release, so that its checkpoints are read.
            "model": {**_model_of(config), "mla_norm_eps": trainer.numerics.places.mla_norm_eps},
            "trainer.num_ranks": trainer.num_ranks,
            "trainer.ep_size": trainer.ep_size,
            "trainer.mode": trainer.mode,
            "trainer.lora": _adapters_of(trainer.lora) if trainer.mode is TrainMode.lora else None,
            "trainer.train_router": trainer.train_router,
            "trainer.optim.state": trainer.optim.state,
            "device": resolve_device(config.cluster.device),
            "algorithm.objective": algorithm.objective,
            "algorithm.sequences_per_step": algorithm.sequences_per_step,
            "algorithm.group_size": algorithm.group_size,
            "algorithm.groups_per_step": algorithm.groups_per_step,
            # None is what a checkpoint of a release without the option has.
            "algorithm.distill_coef > 0": algorithm.distill_coef > 0 or None,  # waiting groups have the teacher's word
            "data.path": config.data.path,
            "data.sources": list(config.data.sources) or None,
            "data.weights": list(config.data.weights) or None,
            "data.columns": dict(config.data.columns) or None,
            "data.chat_template_kwargs": dict(config.data.chat_template_kwargs) or None,
            "data.stream": config.data.stream or None,
            "data.drop_too_long": config.data.drop_too_long or None,
            "data.curriculum": config.data.order if config.data.order is Order.middling else None,
            "run.seed": config.run.seed,
            "weight_sync.enabled": True,  # as in every checkpoint of a release that had the option
            "parity.replay_routing": config.parity.replay_routing,
        }
    )


def _adapters_of(lora: LoraConfig) -> JsonObject:
    """The section `trainer.lora`, with a flag for each target, as the first release had them."""
    options = asdict(lora)
    return {name: value for name, value in options.items() if name != "targets"} | {
        name: name in lora.targets for name in LORA_TARGETS
    }


def _model_of(config: RunConfig) -> JsonObject:
    """The section `model`, with the spread of random weights where the first release had it."""
    model = asdict(config.model)
    fields = {name: value for name, value in model["hf_config"].items() if name != "initializer_range"}
    return {**model, "hf_config": fields, "init_std": config.model.init_std}
