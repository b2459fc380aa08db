"""Arguments of vLLM that `rollout.engine_options` must not set: those that Slipstream sets, or that would break it.

Owns: their names, and what to do instead. Every other argument is handed on as it is.
"""

import re
from collections.abc import Mapping

from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import JsonMapping

_OPTIONS = {
    "dtype": "model.dtype",
    "enable_expert_parallel": "rollout.enable_expert_parallel",
    "enable_return_routed_experts": "parity.replay_routing",
    "enforce_eager": "rollout.enforce_eager",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "kv_cache_memory_bytes|num_gpu_blocks_override": "rollout.kv_cache_bytes",
    "max_model_len": "rollout.max_model_len",
    "max_num_batched_tokens": "rollout.max_num_batched_tokens",
    "max_num_seqs": "rollout.max_num_seqs",
    "seed": "run.seed",
    "tensor_parallel_size": "rollout.tp_size",
    r"enable_lora|fully_sharded_loras|max_.*lora.*|lora_.*": "weight_sync.mode=adapter",
    r"quantization.*": "model.engine_format",
    r"model|model_weights|tokenizer.*|hf_.*|.*revision|config_format": "model.path",
}
"""Arguments that an option of a run sets."""
_REASONS = {
    r"load_format|safetensors_.*|model_loader_.*|ignore_patterns|download_dir|pt_load_.*|skip_tokenizer_init": (
        "engines begin with dummy weights, and get version 0 by a publish"
    ),
    r"model_class_overrides|model_impl|trust_remote_code": "the trainer computes the model that vLLM's own class does",
    r"(pipeline|prefill_context|decode_context|data)_parallel_.*|nnodes|node_rank|master_.*|device_ids": (
        "an engine is one group of tensor-parallel ranks on one node"
    ),
    r"moe_backend|linear_backend|kernel_config|.*eplb.*|expert_placement_.*|.*elastic_ep.*|distributed_executor_.*": (
        "a publish writes into the layout that these kernels read"
    ),
    r".*offload_.*|offload_.*|enable_sleep_mode|sleep_.*|enable_cumem_allocator": (
        "a publish writes into weights where they lie, so they must stay"
    ),
    r"logprobs_mode|logits_processors|.*generation_config|spec(ulative)?_.*|diffusion_config|kv_cache_dtype.*": (
        "log-probabilities must be those of the policy that the trainer computes"
    ),
    r"worker_cls|worker_extension_cls|scheduler_cls|weight_transfer_config": "Slipstream's own runs there",
}
"""Arguments that would break a layout, exactness or memory."""


def check_engine_options(options: JsonMapping) -> None:
    """Refuse arguments that are not the user's to set."""
    compilation = options.get("compilation_config", {})
    if not isinstance(compilation, Mapping):
        raise ConfigError(
            f"rollout.engine_options.compilation_config must be a mapping, got {compilation!r}; a level is {{mode: 3}}"
        )
    for name in options:
        for pattern, option in _OPTIONS.items():
            if re.fullmatch(pattern, name):
                raise ConfigError(f"rollout.engine_options.{name} is what {option} is for; set that instead")
        for pattern, reason in _REASONS.items():
            if re.fullmatch(pattern, name):
                raise ConfigError(f"rollout.engine_options.{name} cannot be set: {reason}; remove it")
