"""Rules between options of several sections. What breaks one is told in a sentence: the options, why, and the cure.

Rules of one section are in conf/schema/, rules between options and the model's config.json in model.py, options that
have no effect because of others in ignored.py. Everything here is pure: it sees a RunConfig and no machine, no file.
orchestrator/inputs/preflight.py checks what needs a machine or a file.
"""

from collections.abc import Iterator

from slipstream.conf.checks.model import check_architecture
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
from slipstream.conf.schema.rules import refuse_first

MASKS_NOTHING = frozenset({Correction.none, Correction.tis, Correction.sequence_tis})
"""Corrections that leave no token out."""


def check_all(config: RunConfig) -> None:
    """Check every rule that needs no machine and no file, the most basic first."""
    is_policy = config.algorithm.objective is Objective.policy
    rules = (_of_rows, *((_of_responses, _of_engines, _of_publishes) if is_policy else ()))
    refuse_first(problem for rule in rules for problem in rule(config))
    if config.model.init is Init.random and config.model.path is None:
        check_architecture(config, config.model.hf_config)


def _of_rows(config: RunConfig) -> Iterator[str]:
    objective = config.algorithm.objective
    if not config.data.training_sources:
        rows = {
            Objective.sft: 'conversations, one {"messages": [{"role": ..., "content": ...}, ...]} a row; to try it: '
            "experiment=sft_quickstart",
            Objective.dpo: 'pairs, one {"prompt": ..., "chosen": ..., "rejected": ...} a row',
            Objective.policy: "prompts, or choose data=letters, which ships with Slipstream",
        }[objective]
        yield f"data.path is required: give a .jsonl or .parquet file of {rows}"
    if config.data.order is Order.middling and objective is not Objective.policy:
        yield (
            f"data.order=middling contradicts algorithm={objective}, whose rows have no success rates; set "
            "data.order=shuffled"
        )
    if config.is_bitwise and objective is not Objective.policy:
        yield (
            f"parity=bitwise (trainer.numerics.match) contradicts algorithm={objective}, which has no engine to agree "
            "with; set trainer.numerics.match=engine, or choose algorithm=grpo"
        )
    if config.model.tokenizer is None and config.model.path is None:
        yield "model.tokenizer is required when model.path is null; give a folder, or model.tokenizer=characters"


def _of_responses(config: RunConfig) -> Iterator[str]:
    """How long they are, how they end, and what they are worth."""
    sampling, reward, algorithm = config.rollout.sampling, config.reward, config.algorithm
    prompt, response, limit = config.max_prompt_tokens, sampling.max_tokens, config.rollout.max_model_len
    if prompt + response > limit:
        yield (
            f"data.max_prompt_tokens={prompt} plus rollout.sampling.max_tokens={response} is {prompt + response} "
            f"tokens, more than rollout.max_model_len={limit}; set rollout.max_model_len={prompt + response}, or "
            "shorten one of the two; data.max_prompt_tokens=null is what is left"
        )
    if algorithm.mask_truncated and not sampling.can_end_early:
        yield (
            "algorithm.mask_truncated=true contradicts rollout.sampling.stop_at_eos=false, with which every response "
            "ends by length; set algorithm.mask_truncated=false, or rollout.sampling.stop_at_eos=true"
        )
    if sampling.stop and (reason := _why_no_stop_texts(config)):
        yield f"rollout.sampling.stop contradicts {reason}, or give rollout.sampling.stop_token_ids instead"
    if reward.overlong_tokens > config.max_response_tokens:
        yield (
            f"reward.overlong_tokens={reward.overlong_tokens} exceeds the {config.max_response_tokens} tokens of the "
            "longest response (rollout.sampling.max_tokens; with an agent rollout.episodes.max_tokens): it is how many "
            "of them are punished; lower it, or raise the other"
        )
    has_rewards = any(one.kind != "none" for one in reward.by_name.values())
    if not has_rewards and algorithm.advantage in SHIPPED_ADVANTAGES and algorithm.advantage != "none":
        yield (
            f"reward.kind=none contradicts algorithm.advantage={algorithm.advantage}, which compares rewards; give a "
            "reward, or choose algorithm=distill"
        )


def _why_no_stop_texts(config: RunConfig) -> str:
    """vLLM looks for them outside of the engine's process, in the text of one request."""
    sync = config.weight_sync
    if config.parity.replay_routing:
        return "parity.replay_routing=true: a request that a text ends returns no routes; set it to false"
    if sync.mode is SyncMode.adapter and sync.requests_in_flight is not PauseMode.wait:
        return (
            f"weight_sync.pause_mode={sync.pause_mode}: a response that goes on in another request could have the "
            "text half in each; set it to wait"
        )
    return ""


def _of_engines(config: RunConfig) -> Iterator[str]:
    yield from why_not_on_device(config)
    if config.cluster.share_gpu:
        for reason in _why_no_shared_gpu(config):
            yield f"cluster.share_gpu=true contradicts {reason}, or cluster.share_gpu=false"


def why_not_on_device(config: RunConfig) -> Iterator[str]:
    """What CPU engines do not do; preflight asks again, once the device is known."""
    if config.cluster.device is not Device.cpu:
        return
    if config.weight_sync.transport is TransportKind.nvlink:
        yield (
            "weight_sync.transport=nvlink contradicts cluster.device=cpu: NVLink joins GPUs; "
            "set weight_sync.transport=auto (or tcp), or cluster.device=cuda"
        )
    if config.rollout.enable_expert_parallel:
        yield (
            "rollout.enable_expert_parallel=true contradicts cluster.device=cpu: the engine splits experts over GPUs "
            "only; set rollout.enable_expert_parallel=false (trainer.ep_size works on a CPU)"
        )


def _why_no_shared_gpu(config: RunConfig) -> Iterator[str]:
    """NCCL refuses two ranks of a group on one GPU, and an engine's measurement of free memory needs a GPU alone."""
    num_ranks, rollout = config.trainer.num_ranks, config.rollout
    if num_ranks > 1:
        yield f"trainer.num_ranks={num_ranks}, of which each needs a GPU; set it to 1"
    if rollout.tp_size > 1:
        yield f"rollout.tp_size={rollout.tp_size}, of which each rank needs a GPU; set it to 1"
    if rollout.kv_cache_bytes is None:
        yield "rollout.kv_cache_bytes=null, for which an engine measures what others leave free; set the cache's size"


def why_no_adapter(config: RunConfig) -> Iterator[str]:
    """Adapter mode needs an adapter, of a rank that engines have slots for."""
    if config.weight_sync.mode is not SyncMode.adapter:
        return
    if config.trainer.mode is TrainMode.full:
        yield (
            "weight_sync.mode=adapter contradicts trainer.mode=full, which trains no adapter; set "
            "weight_sync.mode=merged, or trainer.mode=lora"
        )
    if config.trainer.lora.slot_rank == 0:
        yield (
            f"weight_sync.mode=adapter: engines serve adapters of rank {ENGINE_LORA_RANKS[-1]} at most, got "
            f"trainer.lora.rank={config.trainer.lora.rank}; set weight_sync.mode=merged, or a lower rank"
        )


def _of_publishes(config: RunConfig) -> Iterator[str]:
    """What engines hold, and what is compared with it."""
    yield from why_no_adapter(config)
    run, correction, mask = config.run, config.algorithm.correction, config.parity.mask_log_ratio
    is_adapter = config.weight_sync.mode is SyncMode.adapter
    if config.weight_sync.relay is Relay.node and is_adapter:
        yield (
            "weight_sync.relay=node contradicts weight_sync.mode=adapter, whose publishes are too small to gain by a "
            "second transfer; set weight_sync.relay=none, or weight_sync.mode=merged"
        )
    if run.keep_best and run.eval_beside and not is_adapter:  # the figure would be of later versions
        yield (
            f"run.keep_best={run.keep_best} contradicts run.eval_beside=true with weight_sync.mode=merged, where "
            "publishes overwrite the weights that are evaluated; set run.eval_beside=false, or weight_sync.mode=adapter"
        )
    if mask > 0 and correction not in MASKS_NOTHING:
        yield (
            f"parity.mask_log_ratio={mask:g} contradicts algorithm.correction={correction}, which leaves tokens out by "
            "the same ratio; set parity.mask_log_ratio=0 and algorithm.correction_min and correction_max, or "
            "algorithm.correction=tis"
        )
    if config.is_bitwise:
        for reason in _why_not_bitwise(config):
            yield f"parity=bitwise (trainer.numerics.match) contradicts {reason}, or parity=standard"
    if config.trainer.numerics.match is Match.merged and is_adapter:
        yield (
            "trainer.numerics.match=merged contradicts weight_sync.mode=adapter, whose engines add adapters to the "
            "base; set trainer.numerics.match=engine, or weight_sync.mode=merged"
        )


def _why_not_bitwise(config: RunConfig) -> Iterator[str]:
    """The trainer computes an engine's bits where it can call the engine's kernels on equal inputs."""
    rollout, temperature, dtype = config.rollout, config.rollout.sampling.temperature, config.model.dtype
    if rollout.engine_options:
        yield "rollout.engine_options, which could choose other kernels; remove them"
    if config.cluster.device is Device.cpu:
        yield "cluster.device=cpu, which has no batch-invariant kernels; choose cluster.device=cuda"
    if rollout.tp_size > 2:
        added = "an all-reduce adds more than two products in an order of its own"
        yield f"rollout.tp_size={rollout.tp_size}: {added}; set it to 1 or 2"
    if rollout.tp_size > 1 and config.weight_sync.mode is SyncMode.adapter:
        yield f"rollout.tp_size={rollout.tp_size} with weight_sync.mode=adapter; set it to 1, or the mode to merged"
    if temperature != 1.0:
        yield f"rollout.sampling.temperature={temperature}; set it to 1"
    if dtype is not DType.bfloat16:
        yield f"model.dtype={dtype}; set it to bfloat16"
    if config.model.engine_format is EngineFormat.block_fp8:
        yield "model.engine_format=block_fp8, in which engines compute and the trainer does not; set it to checkpoint"
    if config.parity.replay_routing:
        yield "parity.replay_routing=true: routers that compute an engine's bits choose its experts; set it to false"
