"""Which options a checkpoint's content depends on. One that is of others is refused by a resume (run_checkpoint.py)."""

from dataclasses import asdict

from slipstream.conf.json_files import JsonObject
from slipstream.conf.schema import Order, RunConfig, TrainMode
from slipstream.orchestrator.environment import resolve_device
from slipstream.orchestrator.files.run_folder import to_plain


def fingerprint(config: RunConfig) -> JsonObject:
    """The options that a checkpoint's content depends on. Any other option may change between two parts of a run."""
    trainer = config.trainer
    algorithm = config.algorithm
    return to_plain(
        {
            "model": asdict(config.model),
            "mla_norm_eps": trainer.numerics.places.mla_norm_eps,
            "trainer.num_ranks": trainer.num_ranks,
            "trainer.ep_size": trainer.ep_size,
            "trainer.mode": trainer.mode,
            "trainer.lora": asdict(trainer.lora) if trainer.mode is TrainMode.lora else None,
            "trainer.train_router": trainer.train_router,
            "trainer.optim.state": trainer.optim.state,
            "device": resolve_device(config.cluster.device),
            "algorithm.objective": algorithm.objective,
            "algorithm.sequences_per_step": algorithm.sequences_per_step,
            "algorithm.group_size": algorithm.group_size,
            "algorithm.groups_per_step": algorithm.groups_per_step,
            "algorithm.distill_coef > 0": algorithm.distill_coef > 0,  # waiting groups have the teacher's word
            "data.path": config.data.path,
            "data.sources": list(config.data.sources),
            "data.weights": list(config.data.weights),
            "data.columns": dict(config.data.columns),
            "data.chat_template_kwargs": dict(config.data.chat_template_kwargs),
            "data.stream": config.data.stream,
            "data.drop_too_long": config.data.drop_too_long,
            "data.order=middling": config.data.order is Order.middling,
            "run.seed": config.run.seed,
            "parity.replay_routing": config.parity.replay_routing,
        }
    )
