"""Rules between options of several sections: one function per rule, each raises one ConfigError.

Rules of one section are in conf/schema/, rules between options and the model's config.json in model.py, options that
have no effect because of others in ignored.py. Everything here is pure: it sees a RunConfig and no machine, no file.
orchestrator/inputs/preflight.py checks what needs a machine or a file.
"""

from slipstream.conf.checks.model import check_architecture
from slipstream.conf.errors import ConfigError
from slipstream.conf.schema import (
    ENGINE_LORA_RANKS,
    SHIPPED_ADVANTAGES,
    Correction,
    Device,
    DType,
    EngineFormat,
    Init,
    Match,
    Objective,
    Order,
    PauseMode,
    Relay,
    RunConfig,
    SyncMode,
    TrainMode,
    TransportKind,
)

MASKS_NOTHING = frozenset({Correction.none, Correction.tis, Correction.sequence_tis})
"""Corrections that leave no token out."""


def check_all(config: RunConfig) -> None:
    """Check every rule that needs no machine and no file, the most basic first."""
    check_data_is_given(config)
    check_success_rates_are_known(config)
    check_tokenizer_is_given(config)
    if config.algorithm.objective is Objective.policy:
        check_prompt_and_response_fit(config)
        check_some_responses_end_by_themselves(config)
        check_stop_texts_are_found(config)
        check_overlong_fits_the_response(config)
        check_rewards_are_given_where_they_count(config)
        check_transport_fits_device(config)
        check_processes_can_share_a_gpu(config)
        check_expert_parallel_engine_has_gpus(config)
        check_adapter_mode_has_an_adapter(config)
        check_relay_has_weights_to_pass_on(config)
        check_best_checkpoint_was_evaluated(config)
        check_tokens_are_masked_by_one_rule(config)
        check_bitwise_parity_is_possible(config)
        check_merged_values_are_the_engines(config)
    if config.model.init is Init.random and config.model.path is None:
        check_architecture(config, config.model.hf_config)


def check_data_is_given(config: RunConfig) -> None:
    if config.data.training_sources:
        return
    rows = {
        Objective.sft: 'conversations, one {"messages": [{"role": ..., "content": ...}, ...]} a row; to try it: '
        "experiment=sft_quickstart",
        Objective.dpo: 'pairs, one {"prompt": ..., "chosen": ..., "rejected": ...} a row',
        Objective.policy: "prompts, or choose data=letters, which ships with Slipstream",
    }[config.algorithm.objective]
    raise ConfigError(f"data.path is required: give a .jsonl or .parquet file of {rows}")


def check_success_rates_are_known(config: RunConfig) -> None:
    """Given answers have no rewards to draw rows by."""
    objective = config.algorithm.objective
    if config.data.order is Order.middling and objective is not Objective.policy:
        raise ConfigError(
            f"data.order=middling contradicts algorithm={objective}, whose rows have no success rates; set "
            "data.order=shuffled"
        )


def check_tokenizer_is_given(config: RunConfig) -> None:
    if config.model.tokenizer is None and config.model.path is None:
        raise ConfigError(
            "model.tokenizer is required when model.path is null; give a folder, or model.tokenizer=characters"
        )


def check_prompt_and_response_fit(config: RunConfig) -> None:
    prompt, response = config.max_prompt_tokens, config.rollout.sampling.max_tokens
    limit = config.rollout.max_model_len
    if prompt + response > limit:
        raise ConfigError(
            f"data.max_prompt_tokens={prompt} plus rollout.sampling.max_tokens={response} is {prompt + response} "
            "tokens, more than "
            f"rollout.max_model_len={limit}; set rollout.max_model_len={prompt + response}, or shorten one of the "
            "two; data.max_prompt_tokens=null is what is left"
        )


def check_overlong_fits_the_response(config: RunConfig) -> None:
    """The tokens that are punished are the last ones of a response."""
    overlong, longest = config.reward.overlong_tokens, config.max_response_tokens
    if overlong > longest:
        raise ConfigError(
            f"reward.overlong_tokens={overlong} exceeds the {longest} tokens of the longest response "
            "(rollout.sampling.max_tokens; with an agent rollout.episodes.max_tokens): it is how many of them are "
            "punished; lower it, or raise the other"
        )


def check_rewards_are_given_where_they_count(config: RunConfig) -> None:
    """Equal rewards teach nothing."""
    advantage, is_none = config.algorithm.advantage, all(one.kind == "none" for one in config.reward.by_name.values())
    if is_none and advantage in SHIPPED_ADVANTAGES and advantage != "none":
        raise ConfigError(
            f"reward.kind=none contradicts algorithm.advantage={advantage}, which compares rewards; give a reward, or "
            "choose algorithm=distill"
        )


def check_some_responses_end_by_themselves(config: RunConfig) -> None:
    """Masking truncated responses needs responses that end before max_tokens."""
    if config.algorithm.mask_truncated and not config.rollout.sampling.can_end_early:
        raise ConfigError(
            "algorithm.mask_truncated=true contradicts rollout.sampling.stop_at_eos=false, with which every response "
            "ends by length; set algorithm.mask_truncated=false, or rollout.sampling.stop_at_eos=true"
        )


def check_stop_texts_are_found(config: RunConfig) -> None:
    """vLLM looks for them outside of the engine's process, in the text of one request."""
    if not config.rollout.sampling.stop:
        return
    sync = config.weight_sync
    reason = None
    if config.parity.replay_routing:
        reason = "parity.replay_routing=true: a request that a text ends returns no routes; set it to false"
    elif sync.mode is SyncMode.adapter and sync.requests_in_flight is not PauseMode.wait:
        reason = (
            f"weight_sync.pause_mode={sync.pause_mode}: a response that goes on in another request could have the "
            "text half in each; set it to wait"
        )
    if reason is not None:
        raise ConfigError(
            f"rollout.sampling.stop contradicts {reason}, or give rollout.sampling.stop_token_ids instead"
        )


def check_transport_fits_device(config: RunConfig) -> None:
    if config.weight_sync.transport is TransportKind.nvlink and config.cluster.device is Device.cpu:
        raise ConfigError(
            "weight_sync.transport=nvlink contradicts cluster.device=cpu: NVLink joins GPUs; "
            "set weight_sync.transport=auto (or tcp), or cluster.device=cuda"
        )


def check_processes_can_share_a_gpu(config: RunConfig) -> None:
    """NCCL refuses two ranks of a group on one GPU, and an engine's measurement of free memory needs a GPU alone."""
    if not config.cluster.share_gpu:
        return
    num_ranks, rollout = config.trainer.num_ranks, config.rollout
    wrong = {
        f"trainer.num_ranks={num_ranks}, of which each needs a GPU; set it to 1": num_ranks > 1,
        f"rollout.tp_size={rollout.tp_size}, of which each rank needs a GPU; set it to 1": rollout.tp_size > 1,
        "rollout.kv_cache_bytes=null, for which an engine measures what others leave free; set the cache's size": (
            rollout.kv_cache_bytes is None
        ),
    }
    for reason, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigError(f"cluster.share_gpu=true contradicts {reason}, or cluster.share_gpu=false")


def check_expert_parallel_engine_has_gpus(config: RunConfig) -> None:
    """The CPU engine cannot split experts over its ranks."""
    if config.rollout.enable_expert_parallel and config.cluster.device is Device.cpu:
        raise ConfigError(
            "rollout.enable_expert_parallel=true contradicts cluster.device=cpu: the engine splits experts over GPUs "
            "only; "
            "set rollout.enable_expert_parallel=false (trainer.ep_size works on a CPU)"
        )


def check_adapter_mode_has_an_adapter(config: RunConfig) -> None:
    """Adapter mode needs an adapter, of a rank that engines have slots for."""
    if config.weight_sync.mode is not SyncMode.adapter:
        return
    if config.trainer.mode is TrainMode.full:
        raise ConfigError(
            "weight_sync.mode=adapter contradicts trainer.mode=full, which trains no adapter; set "
            "weight_sync.mode=merged, or trainer.mode=lora"
        )
    if config.trainer.lora.slot_rank == 0:
        raise ConfigError(
            f"weight_sync.mode=adapter: engines serve adapters of rank {ENGINE_LORA_RANKS[-1]} at most, got "
            f"trainer.lora.rank={config.trainer.lora.rank}; set weight_sync.mode=merged, or a lower rank"
        )


def check_best_checkpoint_was_evaluated(config: RunConfig) -> None:
    """Merged weights change under an evaluation beside training: its figure is of later versions than a checkpoint."""
    run = config.run
    if run.keep_best and run.eval_beside and config.weight_sync.mode is SyncMode.merged:
        raise ConfigError(
            f"run.keep_best={run.keep_best} contradicts run.eval_beside=true with weight_sync.mode=merged, where "
            "publishes overwrite the weights that are evaluated; set run.eval_beside=false, or weight_sync.mode=adapter"
        )


def check_tokens_are_masked_by_one_rule(config: RunConfig) -> None:
    """A second mask beside one of algorithm.correction would leave nobody sure which of the two acts."""
    correction = config.algorithm.correction
    if config.parity.mask_log_ratio > 0 and correction not in MASKS_NOTHING:
        raise ConfigError(
            f"parity.mask_log_ratio={config.parity.mask_log_ratio:g} contradicts algorithm.correction={correction}, "
            "which leaves tokens out by the same ratio; set parity.mask_log_ratio=0 and "
            "algorithm.correction_min and correction_max, or algorithm.correction=tis"
        )


def check_relay_has_weights_to_pass_on(config: RunConfig) -> None:
    """Relay needs merged weights: an adapter is too small to gain by a second transfer."""
    if config.weight_sync.relay is Relay.node and config.weight_sync.mode is SyncMode.adapter:
        raise ConfigError(
            "weight_sync.relay=node contradicts weight_sync.mode=adapter, whose publishes are too small to gain by a "
            "second transfer; set weight_sync.relay=none, or weight_sync.mode=merged"
        )


def check_bitwise_parity_is_possible(config: RunConfig) -> None:
    """The trainer computes an engine's bits where it can call the engine's kernels on equal inputs."""
    if not config.is_bitwise:
        return
    rollout, sampling = config.rollout, config.rollout.sampling
    broken = {
        "rollout.engine_options, which could choose other kernels; remove them": bool(rollout.engine_options),
        "cluster.device=cpu, which has no batch-invariant kernels; choose cluster.device=cuda": (
            config.cluster.device is Device.cpu
        ),
        f"rollout.tp_size={rollout.tp_size}: an all-reduce adds more than two products in an order of its own; set it "
        "to 1 or 2": rollout.tp_size > 2,
        f"rollout.tp_size={rollout.tp_size} with weight_sync.mode=adapter; set it to 1, or the mode to merged": (
            rollout.tp_size > 1 and config.weight_sync.mode is SyncMode.adapter
        ),
        f"rollout.sampling.temperature={sampling.temperature}; set it to 1": sampling.temperature != 1.0,
        f"model.dtype={config.model.dtype}; set it to bfloat16": config.model.dtype is not DType.bfloat16,
        "model.engine_format=block_fp8, in which engines compute and the trainer does not; set it to checkpoint": (
            config.model.engine_format is EngineFormat.block_fp8
        ),
        "parity.replay_routing=true: routers that compute an engine's bits choose its experts; set it to false": (
            config.parity.replay_routing
        ),
    }
    for reason, is_broken in broken.items():
        if is_broken:
            raise ConfigError(f"parity=bitwise (trainer.numerics.match) contradicts {reason}, or parity=standard")


def check_merged_values_are_the_engines(config: RunConfig) -> None:
    """Values from merged weights are for engines that hold merged weights."""
    if config.trainer.numerics.match is Match.merged and config.weight_sync.mode is SyncMode.adapter:
        raise ConfigError(
            "trainer.numerics.match=merged contradicts weight_sync.mode=adapter, whose engines add adapters to the "
            "base; set trainer.numerics.match=engine, or weight_sync.mode=merged"
        )
