"""A table of options that have no effect in a run: one row per reason.

Presets may set what a run does not use; a user may not. Pure: it sees a RunConfig, the names that a user typed, and
config.json. While config.json is not read yet, rows about an architecture are not checked.
Does not own options that contradict each other (`conf/checks.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from conf.errors import ConfigError
from conf.options import options_by_name
from conf.schema import (
    READ_AN_ANSWER,
    SHIPPED_LOSSES,
    AdapterValues,
    AlgorithmConfig,
    Correction,
    Curriculum,
    Device,
    Init,
    Objective,
    RewardPart,
    RunConfig,
    SyncMode,
    TrainMode,
)
from conf.tensor_parallel import num_experts_of

EVALUATED_WITH = (
    "run.eval_samples_per_prompt",
    "run.eval_pass_at",
    "run.eval_right_from",
    "run.eval_beside",
)
"""Options of evaluations that sample."""
READ_BY_POLICY_ALONE = (
    "rollout.",
    "weight_sync.",
    "parity.",
    "reward.",
    "data.max_prompt_tokens",
    "data.curriculum",
    *EVALUATED_WITH,
    "run.samples_per_step",
    "algorithm.teacher.",
    *(
        f"algorithm.{item.name}"
        for item in fields(AlgorithmConfig)
        if item.name not in ("objective", "sequences_per_step", "normalization", "dpo_beta")
    ),
)
"""Options and sections that learning from given answers, sft or dpo, does not read."""


class Ignored(NamedTuple):
    """One reason. Example: Ignored("trainer.lora.", True, "trainer.mode=full", "remove it")."""

    subject: str | Sequence[str]
    """Options, and sections with a dot at the end."""
    applies: bool
    """Whether the reason applies to this run."""
    by_what: str
    """The user's choice that makes the run ignore them, as text for a message."""
    cure: str


def check_no_override_is_ignored(
    config: RunConfig, names: Iterable[str], hf_config: Mapping[str, Any] | None = None
) -> None:
    """Refuse an option that the user typed and that has no effect in this run.

    Args:
        config: The composed run.
        names: Dotted names from the command line, groups included.
        hf_config: config.json of the model; None: not read yet.

    Raises:
        ConfigError: An option has no effect.
    """
    reasons = [reason for reason in reasons_of(config, hf_config) if reason.applies]
    for name in names:
        if name not in options_by_name():
            continue
        for reason in reasons:
            if _is_about(name, reason.subject):
                raise ConfigError(f"{name} has no effect with {reason.by_what}; {reason.cure}")


def reasons_of(config: RunConfig, hf_config: Mapping[str, Any] | None) -> tuple[Ignored, ...]:
    """Every reason, whether it applies to this run or not."""
    return (
        *_reasons_of_training(config),
        *_reasons_of_objective(config),
        *_reasons_of_rewards(config),
        *_reasons_of_data_and_algorithm(config),
        *_reasons_of_sampling(config),
        *_reasons_of_model(hf_config or {}, is_known=hf_config is not None),
    )


def _reasons_of_training(config: RunConfig) -> tuple[Ignored, ...]:
    """Reasons about the trainer, what it starts from, and loggers."""
    return (
        *(
            Ignored(
                f"run.{name}.",
                name not in config.run.loggers,
                f"run.loggers=[{','.join(config.run.loggers)}]",
                f"remove it, or add {name} to run.loggers",
            )
            for name in ("wandb", "mlflow")
        ),
        Ignored(
            "trainer.lora.",
            config.trainer.mode is TrainMode.full,
            "trainer.mode=full",
            "remove it, or set trainer.mode=lora",
        ),
        Ignored(
            "trainer.lora.attention_rank",
            not config.trainer.lora.attention,
            "trainer.lora.attention=false",
            "remove one of the two",
        ),
        Ignored(
            "trainer.lora.expert_rank",
            not config.trainer.lora.experts,
            "trainer.lora.experts=false",
            "remove one of the two",
        ),
        Ignored(
            "trainer.numerics.adapters",
            config.trainer.mode is TrainMode.full,
            "trainer.mode=full, which has no adapters",
            "remove it, or set trainer.mode=lora",
        ),
        Ignored(
            "trainer.numerics.adapters",
            config.is_bitwise,
            "trainer.numerics.match=bitwise, whose values come from the engine's kernels",
            "remove it, or choose parity=standard",
        ),
        Ignored(
            ("trainer.activation_checkpointing", "trainer.activations_on_host", "trainer.gate_up_kept"),
            config.is_bitwise,
            "trainer.numerics.match=bitwise, with which each layer keeps its input alone",
            "remove it, or choose parity=standard",
        ),
        Ignored(
            "trainer.gate_up_kept",
            not config.trainer.activation_checkpointing,
            "trainer.activation_checkpointing=false, with which every layer keeps it",
            "remove it, or set trainer.activation_checkpointing=true",
        ),
        Ignored(
            ("trainer.activations_on_host", "trainer.gate_up_kept"),
            config.trainer.numerics.adapters is AdapterValues.merged,
            "trainer.numerics.adapters=merged, with which each layer keeps its input alone",
            "remove it, or set trainer.numerics.adapters=separate",
        ),
        Ignored(
            "model.init_std",
            config.model.init is Init.checkpoint,
            "model.init=checkpoint",
            "remove it, or set model.init=random",
        ),
    )


def _reasons_of_objective(config: RunConfig) -> tuple[Ignored, ...]:
    """Reasons about what is learned from: samples that engines draw, or given responses and pairs."""
    objective = config.algorithm.objective
    is_given = objective is not Objective.policy
    return (
        Ignored(
            READ_BY_POLICY_ALONE,
            is_given,
            f"algorithm={objective}, which starts no engines and judges no rollouts",
            "remove it, or choose algorithm=grpo",
        ),
        Ignored(
            ("algorithm.sequences_per_step", "data.max_sequence_tokens"),
            not is_given,
            "algorithm.objective=policy",
            "remove it, or choose algorithm=sft or algorithm=dpo",
        ),
        Ignored(
            ("data.response_key", "data.messages_key"),
            objective is not Objective.sft,
            f"algorithm.objective={objective}",
            "remove it, or choose algorithm=sft",
        ),
        Ignored(
            "algorithm.dpo_beta",
            objective is not Objective.dpo,
            f"algorithm.objective={objective}",
            "remove it, or choose algorithm=dpo",
        ),
        Ignored(
            "algorithm.normalization",
            objective is Objective.dpo,
            "algorithm=dpo, whose loss is the mean over pairs",
            "remove it, or choose algorithm=sft",
        ),
        Ignored(
            "trainer.numerics.match",
            is_given and config.is_bitwise,
            f"algorithm={objective}, which has no engine to agree with",
            "remove it, or choose algorithm=grpo",
        ),
    )


def _reasons_of_rewards(config: RunConfig) -> tuple[Ignored, ...]:
    """Reasons about rewards."""
    reward = config.reward
    return (
        Ignored(
            ["reward.judge.", "reward.code.", *(f"reward.{item.name}" for item in fields(RewardPart))],
            bool(reward.parts),
            "reward.parts, each of which has its own",
            "set it in reward.parts.NAME, or remove reward.parts",
        ),
        Ignored(
            "reward.judge.", reward.kind != "judge", f"reward.kind={reward.kind}", "remove it, or choose reward=judge"
        ),
        Ignored(
            "reward.code.", reward.kind != "code", f"reward.kind={reward.kind}", "remove it, or choose reward=code"
        ),
        Ignored(
            "reward.overlong_penalty",
            reward.overlong_tokens == 0,
            "reward.overlong_tokens=0",
            "remove it, or set reward.overlong_tokens",
        ),
        Ignored(
            "reward.max_concurrent",
            ":" not in reward.kind and reward.kind != "judge",
            f"reward.kind={reward.kind}",
            "remove it: set reward.num_processes",
        ),
        Ignored(
            "reward.pattern", reward.kind != "regex", f"reward.kind={reward.kind}", "remove it, or choose reward=regex"
        ),
        Ignored(
            "reward.answer_key",
            reward.kind not in READ_AN_ANSWER,
            f"reward.kind={reward.kind}",
            "remove it: it is for " + ", ".join(READ_AN_ANSWER),
        ),
        Ignored(
            "reward.env",
            ":" not in reward.kind,
            f"reward.kind={reward.kind}",
            "remove it: only functions read the environment",
        ),
    )


def _reasons_of_data_and_algorithm(config: RunConfig) -> tuple[Ignored, ...]:
    """Reasons about rows, evaluation, advantages and the loss."""
    algorithm = config.algorithm
    return (
        Ignored(
            "algorithm.max_uninformative_batches",
            not algorithm.drop_zero_variance_groups,
            "algorithm.drop_zero_variance_groups=false, which drops none",
            "remove it, or choose algorithm=dapo",
        ),
        Ignored(
            "algorithm.teacher.",
            algorithm.distill_coef == 0,
            "algorithm.distill_coef=0, which asks no teacher",
            "remove it, or choose algorithm=distill",
        ),
        Ignored("data.weights", not config.data.sources, "data.sources=[]", "give data.sources, or remove it"),
        Ignored(
            "data.shuffle",
            config.data.curriculum is Curriculum.middling,
            "data.curriculum=middling, which draws prompts at random",
            "remove one of the two",
        ),
        Ignored(
            (*EVALUATED_WITH, "run.keep_best", "rollout.eval."),
            not config.data.held_out_sources,
            "data.eval_path=null and data.eval_sets={}",
            "give data.eval_path",
        ),
        Ignored(
            [f"rollout.eval.{name}" for name in ("top_p", "top_k", "min_p", "seed")],
            config.rollout.eval.temperature == 0,
            "rollout.eval.temperature=0, which takes the likeliest token",
            "remove one of the two",
        ),
        *_reasons_of_loss(algorithm),
        Ignored(
            ("algorithm.correction_min", "algorithm.correction_max"),
            algorithm.correction is Correction.none,
            "algorithm.correction=none",
            "remove it, or set algorithm.correction",
        ),
        Ignored(
            "algorithm.correction_min",
            algorithm.correction in (Correction.tis, Correction.sequence_tis),
            f"algorithm.correction={algorithm.correction}, which cuts weights above alone",
            "remove it, or set algorithm.correction=icepop",
        ),
    )


def _reasons_of_loss(algorithm: AlgorithmConfig) -> tuple[Ignored, ...]:
    """Reasons about the loss of a token. A function of the user's own may read every option."""
    is_shipped = algorithm.loss in SHIPPED_LOSSES
    return (
        Ignored(
            (
                "algorithm.loss",
                "algorithm.clip_low",
                "algorithm.clip_high",
                "algorithm.dual_clip",
            ),
            algorithm.ratio_is_one and is_shipped,
            "algorithm.ratio_baseline=trainer, whose ratio is 1 in the one update of a step",
            "remove it, or set algorithm.ratio_baseline=rollout algorithm.correction=none, or "
            "algorithm.minibatches_per_step",
        ),
        Ignored(
            ("algorithm.clip_low", "algorithm.clip_high"),
            algorithm.loss == "sapo",
            "algorithm.loss=sapo, which has a gate and no bounds",
            "remove it",
        ),
        Ignored(
            "algorithm.dual_clip",
            algorithm.loss != "clip" and is_shipped,
            f"algorithm.loss={algorithm.loss}",
            "remove it, or set algorithm.loss=clip",
        ),
        Ignored(
            ("algorithm.kl_estimator", "algorithm.kl_in"),
            algorithm.kl_coef == 0,
            "algorithm.kl_coef=0",
            "remove it, or set algorithm.kl_coef",
        ),
    )


def _reasons_of_sampling(config: RunConfig) -> tuple[Ignored, ...]:
    """Reasons about engines, publishes and machines."""
    cluster = config.cluster
    return (
        Ignored("cluster.share_gpu", cluster.device is Device.cpu, "cluster.device=cpu", "remove one of the two"),
        Ignored(
            "rollout.workers_per_gpu",
            cluster.device is Device.cpu or cluster.share_gpu,
            "cluster.device=cpu"
            if cluster.device is Device.cpu
            else "cluster.share_gpu=true: all engines share one GPU",
            "remove it; rollout.num_workers is how many there are",
        ),
        Ignored("cluster.dashboard_port", not cluster.dashboard, "cluster.dashboard=false", "remove one of the two"),
        Ignored(
            ("cluster.dashboard", "cluster.dashboard_port", "cluster.object_store_bytes"),
            cluster.ray_address is not None,
            f"cluster.ray_address={cluster.ray_address}",
            "remove it: that cluster is not ours to configure",
        ),
        Ignored(
            "weight_sync.pause_mode",
            config.weight_sync.mode is SyncMode.adapter,
            "weight_sync.mode=adapter, which never pauses an engine",
            "remove it, or set weight_sync.mode=merged",
        ),
        Ignored(
            "weight_sync.rounding",
            config.weight_sync.mode is SyncMode.adapter or config.trainer.mode is TrainMode.full,
            "weight_sync.mode=adapter or trainer.mode=full: no adapter is merged",
            "remove it",
        ),
        Ignored(
            "weight_sync.on_busy_slot",
            config.weight_sync.mode is SyncMode.merged,
            "weight_sync.mode=merged, which has no slots",
            "remove it, or set weight_sync.mode=adapter",
        ),
        Ignored(
            "parity.floor_every_steps",
            config.rollout.sampling.temperature != 1,
            f"rollout.sampling.temperature={config.rollout.sampling.temperature:g}: an engine's prefill gives "
            "log-probabilities without it",
            "remove it, or set the temperature to 1",
        ),
        Ignored(
            "weight_sync.relay",
            config.rollout.num_workers == 1,
            "rollout.num_workers=1",
            "remove it, or start more workers",
        ),
        Ignored(
            "rollout.enable_expert_parallel",
            config.rollout.tp_size == 1 and cluster.device is not Device.cpu,
            "rollout.tp_size=1: one rank holds all experts",
            "remove it, or set rollout.tp_size",
        ),
        Ignored(
            "rollout.episodes.",
            config.rollout.agent is None,
            "rollout.agent=null, which samples one response to each prompt",
            "remove it, or name an agent",
        ),
        Ignored(
            "rollout.gpu_memory_utilization",
            cluster.device is Device.cpu,
            "cluster.device=cpu",
            "remove it, or set rollout.kv_cache_bytes",
        ),
    )


def _reasons_of_model(hf_config: Mapping[str, Any], *, is_known: bool) -> tuple[Ignored, ...]:
    kind = hf_config.get("model_type")
    return (
        Ignored(
            (
                "trainer.lora.expert_rank",
                "trainer.train_router",
                "trainer.gate_up_kept",
            ),
            is_known and not num_experts_of(hf_config),
            f"model_type={kind}, which has no experts",
            "remove it",
        ),
    )


def _is_about(name: str, subject: str | Sequence[str]) -> bool:
    subjects = (subject,) if isinstance(subject, str) else subject
    return any(name.startswith(one) if one.endswith(".") else name == one for one in subjects)
