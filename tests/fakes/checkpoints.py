"""Tiny random checkpoints of several architectures, as transformers writes them, and a trainer that holds one whole.

No code of the product takes part in making them: tensor names, shapes and formats are those of the model hub. (In
those in shards, of save_checkpoint(), names and shapes are the product's, so that transformers is not imported.)
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from slipstream.conf.architecture.families import read_config
from slipstream.weight_sync.disk.safetensors_files import INDEX_NAME
from slipstream.weight_sync.layout import Region, SourceLayout, SourceShard, TensorMeta

COMMON: dict[str, Any] = {
    "vocab_size": 500,  # no multiple of 64: vLLM pads the vocabulary
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "initializer_range": 0.1,  # far from zero, so that two versions differ in what they sample
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MIXTURE = {"moe_intermediate_size": 64, "num_experts_per_tok": 2, "norm_topk_prob": True}
_GROUPED = {
    **_MIXTURE, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
    "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {**COMMON, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "qwen3_tied": {
        **COMMON, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        **COMMON, **_MIXTURE, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "qwen2": {  # vLLM's model of it knows no other head_dim than hidden_size / num_attention_heads
        **COMMON, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "head_dim": 32, "hidden_size": 128,
    },
    "mistral": {
        **COMMON, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 6,
    },
    "mixtral": {
        **COMMON, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 8,
        "num_experts_per_tok": 3,
    },
    "qwen2_moe": {
        **COMMON, **_MIXTURE, "model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "hidden_size": 128,
        "num_experts": 8, "norm_topk_prob": False, "shared_expert_intermediate_size": 96, "mlp_only_layers": [1],
    },
    "olmoe": {
        **COMMON, "model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], "hidden_size": 128, "num_experts": 8,
        "num_experts_per_tok": 3, "norm_topk_prob": False, "rms_norm_eps": 1e-5,
    },
    "llama": {**COMMON, "model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "glm4_moe": {
        **COMMON, **_GROUPED, "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
    },
    # The CPU engine's MLA kernel has one size of latent: 512, and 64 of rotary dims. head_dim is the rotary part.
    "deepseek_v3": {
        **COMMON, **_GROUPED, "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"],
        "num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 512, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64, "v_head_dim": 32, "head_dim": 64, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    },
}  # fmt: skip
CONFIGS["deepseek_v32"] = {
    **CONFIGS["deepseek_v3"], "model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"],
    "index_topk": 64, "index_n_heads": 4, "index_head_dim": 128,
}  # fmt: skip
CONFIGS["glm_moe_dsa"] = {
    **CONFIGS["deepseek_v32"], "model_type": "glm_moe_dsa", "architectures": ["GlmMoeDsaForCausalLM"], "v_head_dim": 48,
    "n_group": 1, "indexer_rope_interleave": True,
}  # fmt: skip
CONFIGS["glm4_moe_lite"] = {
    **{key: value for key, value in CONFIGS["deepseek_v3"].items() if key != "scoring_func"},
    "model_type": "glm4_moe_lite", "architectures": ["Glm4MoeLiteForCausalLM"], "v_head_dim": 48,
    "routed_scaling_factor": 1.8, "n_group": 1, "partial_rotary_factor": 1.0,
}  # fmt: skip
CONFIGS["qwen3_next"] = {
    **COMMON, **_MIXTURE, "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "num_experts": 8,
    "num_hidden_layers": 4, "shared_expert_intermediate_size": 96, "partial_rotary_factor": 0.25, "head_dim": 64,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
CONFIGS["qwen3_5_moe"] = {
    **{key: value for key, value in CONFIGS["qwen3_next"].items() if key != "intermediate_size"},
    "model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"], "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
CONFIGS["qwen3_5"] = {
    **COMMON, **{key: value for key, value in CONFIGS["qwen3_5_moe"].items() if "linear" in key or "layer" in key},
    "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "head_dim": 64,
    "partial_rotary_factor": 0.25,
}  # fmt: skip
CONFIGS["gemma3"] = {
    **{key: value for key, value in COMMON.items() if key != "hidden_act"},
    "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 24,
    "rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_local_base_freq": 3000.0,
    "tie_word_embeddings": True,
}  # fmt: skip
CONFIGS["gemma4"] = {
    **{key: value for key, value in COMMON.items() if key not in ("hidden_act", "rope_theta")},
    "model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"], "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 64,
    "num_global_key_value_heads": 1, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 5.0, "tie_word_embeddings": True,
}  # fmt: skip
CONFIGS["gemma4_moe"] = {
    **CONFIGS["gemma4"], "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64,
}  # fmt: skip
CONFIGS["minimax_m2"] = {
    **COMMON, "model_type": "minimax_m2", "architectures": ["MiniMaxM2ForCausalLM"], "rotary_dim": 16,
    "num_local_experts": 8, "num_experts_per_tok": 3, "scoring_func": "sigmoid", "use_routing_bias": True,
}  # fmt: skip
"""Architecture -> config.json. DeepSeek-V3 and GLM-4 MoE have a shared expert and a float32 correction bias."""


GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "vocab_size": 512, "hidden_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 256, "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 4,
    "max_position_embeddings": 512, "rope_theta": 150000.0, "tie_word_embeddings": False,
}  # fmt: skip
"""Fused experts with biases, sinks, sliding windows."""


def write_checkpoint(config: dict[str, Any], folder: Path, *, seed: int, dtype: str = "bfloat16") -> Path:
    """A folder with config.json and model.safetensors of random weights; correction biases and the norm of an
    indexer's keys are random and float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    described = dict(config)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(described.pop("model_type"), **described))
    folder.mkdir(parents=True, exist_ok=True)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("e_score_correction_bias", "indexer.k_norm.weight", "indexer.k_norm.bias")):
            tensors[name] = torch.randn(tensor.shape) * 0.1
        elif tensor.dim() == 1 or not tensor.any():
            tensors[name] = torch.randn(tensor.shape).mul(0.1).add(1.0).to(tensor.dtype)  # norms and biases differ, too
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "dtype": dtype, "torch_dtype": dtype}))
    return folder


FOR_GPUS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "head_dim": 128},
    "deepseek_v3": {
        "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "num_attention_heads": 16,
        "num_key_value_heads": 16, "q_lora_rank": 128, "qk_nope_head_dim": 128, "v_head_dim": 128,
    },
}  # fmt: skip
"""Changes to CONFIGS: sizes that GPU kernels take. Two ranks still cut at multiples of 128; DeepSeek's 576 latent rows
are none, as in the real one.
"""
FOR_GPUS["deepseek_v32"] = FOR_GPUS["glm_moe_dsa"] = FOR_GPUS["deepseek_v3"]


def quantize_checkpoint(folder: Path) -> None:
    """Turn a checkpoint into block-FP8, in place, with vLLM's own quantizer and none of the product's code."""
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    tensors: dict[str, torch.Tensor] = {}
    kept: list[str] = []
    for name, tensor in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if tensor.dim() != 2 or module.endswith(
            ("embed_tokens", "lm_head", ".mlp.gate", ".indexer.wk", ".indexer.weights_proj")
        ):
            kept += [module] if tensor.dim() == 2 else []
            tensors[name] = tensor
            continue
        with torch.compiler.set_stance("force_eager"):  # for a CPU it would be compiled anew for every shape
            weight, scales = per_block_cast_to_fp8(tensor)
        tensors[name], tensors[f"{name}_scale_inv"] = weight.contiguous(), scales.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": kept,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


class CheckpointSource:
    """WeightSource of one trainer rank that holds a whole checkpoint."""

    temporary_bytes = 0

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def layout(self) -> SourceLayout:
        ordered = sorted(self.tensors.items())
        return SourceLayout(
            0,
            tuple(TensorMeta(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in ordered),
            tuple(SourceShard(name, Region((0,) * t.dim(), tuple(t.shape))) for name, t in ordered),
        )

    def begin(self, version: int) -> int:
        return 0

    def read(self, tensor: str, region: Region, out: torch.Tensor) -> None:
        out.copy_(self.tensors[tensor][tuple(slice(a, b) for a, b in zip(region.start, region.stop, strict=True))])

    def end(self) -> None:
        """Nothing to drop."""


TINY: dict[str, Any] = {**CONFIGS["qwen3_moe"], "num_experts": 4, "torch_dtype": "bfloat16"}


def save_checkpoint(folder: Path, config: dict[str, Any], *, seed: int, num_files: int = 2) -> None:
    """Random weights in several shards. Norms are float32, so that a publish must cast."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        meta.name: (torch.randn(meta.shape, generator=generator) * 0.1).to(
            torch.float32 if "norm" in meta.name else torch.bfloat16
        )
        for meta in read_config(config).checkpoint_tensors("bfloat16")
    }
    weight_map: dict[str, str] = {}
    names = list(tensors)
    for number in range(num_files):
        file = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        mine = names[number * len(names) // num_files : (number + 1) * len(names) // num_files]
        save_file({name: tensors[name] for name in mine}, folder / file)
        weight_map |= dict.fromkeys(mine, file)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
