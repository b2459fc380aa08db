"""Tiny models for the trainer's tests: our decoder and the transformers model with the same weights."""

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.conf.architecture.families import read_config
from slipstream.conf.architecture.model_spec import ModelSpec
from slipstream.conf.schema import (
    LoraConfig,
    Match,
    MlaNormEps,
    NumericsByPlace,
    NumericsConfig,
    Roundings,
    TrainerConfig,
    TrainMode,
)
from slipstream.trainer.model.build_decoder import build_decoder
from slipstream.trainer.model.decoder import Decoder
from slipstream.trainer.model.forward import Forward
from slipstream.trainer.model.logprobs import soft_capped, token_logprobs
from slipstream.trainer.moe.replay import RecordedRoutes
from slipstream.trainer.parallel import ParallelLayout, local_part
from slipstream.trainer.weights.fused_experts import interleave
from slipstream.trainer.weights.loading import RandomReader, TensorReader, load_weights, named_generator
from slipstream.weight_sync.layout import Region

COMMON = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
DENSE = {**COMMON, "model_type": "qwen3"}
MOE = {
    **COMMON,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
MIXED = {**MOE, "num_hidden_layers": 3, "mlp_only_layers": [1]}
"""A Qwen3-MoE whose middle layer is dense."""

QWEN2 = {**COMMON, "model_type": "qwen2", "rms_norm_eps": 1e-5}
MISTRAL = {**COMMON, "model_type": "mistral", "head_dim": 20, "sliding_window": 4, "rms_norm_eps": 1e-5}
"""A window shorter than most sequences, and heads that are not hidden_size / num_attention_heads."""
MIXTRAL = {
    **{key: value for key, value in COMMON.items() if key != "rope_theta"},
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "rms_norm_eps": 3e-5,
}
"""A checkpoint with names of its own. The base of RoPE is the family's."""
QWEN2_MOE = {
    **COMMON,
    "model_type": "qwen2_moe",
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "norm_topk_prob": False,
}
"""A dense layer, and a shared expert with a gate."""
OLMOE = {
    **COMMON,
    "model_type": "olmoe",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 32,
    "norm_topk_prob": False,
    "rms_norm_eps": 1e-5,
}
"""Norms over all heads of q and of k."""

LLAMA = {
    **{key: value for key, value in COMMON.items() if key != "rope_theta"},
    "model_type": "llama",
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
GLM = {
    **COMMON,
    "model_type": "glm4_moe",
    "num_hidden_layers": 3,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "attention_bias": True,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
}
"""Grouped-query attention of which half of each head turns, with DeepSeek's feed-forward."""

GPT_OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 24,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 4,
    "swiglu_limit": 0.5,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
    "tie_word_embeddings": False,
}
"""Windows shorter than most sequences, and a bound of the activation that many elements reach."""

DEEPSEEK = {
    "model_type": "deepseek_v3",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
    "tie_word_embeddings": False,
}
"""Latent attention with YaRN, a dense first layer, groups of experts, a shared expert."""

GLM_LITE = {
    **{key: value for key, value in DEEPSEEK.items() if key not in ("scoring_func", "rope_scaling")},
    "model_type": "glm4_moe_lite",
    "q_lora_rank": 20,
    "v_head_dim": 22,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
    "rope_theta": 1000000.0,
    "partial_rotary_factor": 1.0,
}
"""DeepSeek's latent attention without scaled positions, values wider than keys, and GLM's routing."""

DEEPSEEK_V32 = {**DEEPSEEK, "model_type": "deepseek_v32", "index_topk": 5, "index_n_heads": 12, "index_head_dim": 14}
"""Some sequences are longer than the keys that an indexer chooses, some are not."""

GLM_DSA = {
    **{key: value for key, value in DEEPSEEK_V32.items() if key != "rope_scaling"},
    "model_type": "glm_moe_dsa",
    "q_lora_rank": 20,
    "v_head_dim": 22,
    "n_group": 1,
    "topk_group": 1,
    "rope_theta": 1000000.0,
    "indexer_rope_interleave": True,
}

QWEN3_NEXT = {
    **COMMON,
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "head_dim": 24,
    "partial_rotary_factor": 0.25,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "norm_topk_prob": True,
    "mlp_only_layers": [2],
    "rms_norm_eps": 3e-5,
}
"""Linear attention in three of four layers, a gate on the heads of the other, norms of 1 + weight, a dense layer."""

QWEN3_5_MOE = {
    **{key: value for key, value in QWEN3_NEXT.items() if key not in ("mlp_only_layers", "intermediate_size")},
    "model_type": "qwen3_5_moe_text",
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 6,
    "rope_parameters": {"rope_theta": 3e4, "mrope_section": [1, 1, 1], "mrope_interleaved": True},
}
"""Qwen3-Next's layers with more projections, experts in every layer, and positions of images."""
_OF_EXPERTS = {"moe_intermediate_size", "norm_topk_prob", "mlp_only_layers"}
QWEN3_5 = {
    **{key: value for key, value in QWEN3_NEXT.items() if "expert" not in key and key not in _OF_EXPERTS},
    "model_type": "qwen3_5_text",
    "tie_word_embeddings": True,
    "linear_num_key_heads": 4,
}

GEMMA3 = {
    **{key: value for key, value in COMMON.items() if key != "rope_theta"},
    "model_type": "gemma3_text",
    "num_hidden_layers": 3,
    "head_dim": 20,
    "query_pre_attn_scalar": 12,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    "rope_local_base_freq": 3000.0,
    "pad_token_id": None,  # transformers gives the embedding of token 0 no gradient else
    "tie_word_embeddings": True,
    "rms_norm_eps": 3e-5,
}
"""Windows with a RoPE of their own, norms before and after, GELU, scaled embeddings."""

GEMMA4 = {
    **{key: value for key, value in COMMON.items() if key != "rope_theta"},
    "model_type": "gemma4_text",
    "num_hidden_layers": 4,
    "head_dim": 20,
    "global_head_dim": 24,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 5e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
    },
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 2.0,
    "pad_token_id": None,
    "tie_word_embeddings": True,
    "rms_norm_eps": 3e-5,
}
GEMMA4_MOE = {
    **GEMMA4,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 24,
}
"""Heads, RoPE and values of layers without a window are their own; layers' factors; a soft cap that bends logits."""

MINIMAX = {
    **{key: value for key, value in COMMON.items() if key != "rope_theta"},
    "model_type": "minimax_m2",
    "head_dim": 20,
    "rotary_dim": 12,
    "intermediate_size": 24,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "rms_norm_eps": 3e-5,
}
"""Norms over all heads of q and of k, three of five dims turn, experts by sigmoid. The base of RoPE is the family's."""

PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
}
KIMI_INT4 = {**DEEPSEEK, "model_type": "kimi_k2", "moe_intermediate_size": 32, "quantization_config": PACKED}
"""Kimi-K2-Thinking: DeepSeek-V3 with routed experts of four bits."""

GPT_OSS_MXFP4 = {**GPT_OSS, "intermediate_size": 32, "quantization_config": {"quant_method": "mxfp4"}}

LENGTHS = (7, 1, 12, 4)
"""Sequences of one packed microbatch."""


def by_place(**places: Any) -> NumericsConfig:
    """Roundings as an engine's, but for these."""
    return NumericsByPlace(own=Roundings(**places))


AS_TRANSFORMERS = NumericsConfig(match=Match.transformers)
"""Rounds where transformers does, for comparisons in bfloat16."""


def trainer_config(mode: TrainMode = TrainMode.lora, **changes: Any) -> TrainerConfig:
    """Rank-4 adapters everywhere, checkpointing on."""
    return TrainerConfig(mode=mode, lora=changes.pop("lora", LoraConfig(rank=4, alpha=8.0)), **changes)


PACKED_LEAVES = ("weight_packed", "weight_scale", "weight_shape", "_blocks", "_scales")


class SpreadReader:
    """Seeded values with enough spread to route unevenly and to show every norm weight.

    Seeded by name, so layouts agree.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._shapes = {meta.name: meta.shape for meta in spec.checkpoint_tensors("float32")}
        self._adds_one = spec.norms_add_one
        self._bits = RandomReader(spec, seed=7, std=0.15, device="cpu")

    def names(self) -> set[str]:
        """All of the model's tensors."""
        return set(self._shapes)

    def read(self, tensor: str, region: Region) -> Tensor:
        """A slice of the whole; packed experts bit by bit."""
        if tensor.endswith(PACKED_LEAVES):
            return self._bits.read(tensor, region)
        whole = torch.randn(self._shapes[tensor], generator=named_generator(7, tensor, torch.device("cpu"))) * 0.15
        ones = ("norm.weight", "norm_1.weight", "norm_2.weight", "layer_scalar", "router.scale", "per_expert_scale")
        if tensor.endswith(ones) and not (self._adds_one and ".linear_attn." not in tensor):
            whole += 1.0
        return whole[tuple(slice(a, b) for a, b in zip(region.start, region.stop, strict=True))]


def make_decoder(
    hf_config: dict[str, Any],
    trainer: TrainerConfig | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    layout: ParallelLayout | None = None,
    device: torch.device | str = "cpu",
    nonzero_b: bool = True,
    mla_norm_eps: MlaNormEps = MlaNormEps.rollout,
    reader: TensorReader | None = None,
    by: Forward | None = None,
    may_be_whole: bool = False,
) -> Decoder:
    """A decoder with a reader's weights, by default SpreadReader's; B is drawn from (name, expert) alone."""
    spec = read_config(hf_config, mla_norm_eps)
    trainer = trainer or trainer_config()
    decoder = build_decoder(
        spec, dtype=dtype, device=device, trainer=trainer, layout=layout, by=by, may_be_whole=may_be_whole
    )
    load_weights(decoder, reader or SpreadReader(spec), seed=3)
    if nonzero_b:
        draw_b(decoder)
    return decoder


@torch.no_grad()
def draw_b(decoder: Decoder) -> None:
    """Adapters that do something."""
    for name, module in decoder.named_modules():
        first = getattr(module, "first_expert", None)
        for leaf, parameter in module.named_parameters(recurse=False):
            if not leaf.endswith("lora_B"):
                continue
            rows, start = local_part(parameter)
            if first is None:
                whole = torch.randn(parameter.shape, generator=named_generator(5, name + leaf, torch.device("cpu")))
                rows.copy_(whole[start : start + rows.shape[0]] * 0.2)
                continue
            for index, b in enumerate(rows):
                key = f"{name}.{first + start + index}.{leaf}"
                b.copy_(torch.randn(b.shape, generator=named_generator(5, key, torch.device("cpu"))) * 0.2)


def packed(lengths: tuple[int, ...] = LENGTHS, *, seed: int = 0, vocab_size: int = 96) -> tuple[Tensor, Tensor, Tensor]:
    """token_ids_T, positions_T, cu_seqlens."""
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(0, vocab_size, (sum(lengths),), generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths] or [torch.arange(0)])
    return token_ids, positions, torch.tensor([0, *lengths]).cumsum(0)


def logits_of(
    decoder: Decoder,
    batch: tuple[Tensor, Tensor, Tensor],
    routes: RecordedRoutes | None = None,
    by: Forward | None = None,
) -> Tensor:
    """[T, V]."""
    softcap = decoder.spec.logit_softcap
    return decoder.apply_head(
        lambda hidden, weight: soft_capped(F.linear(hidden, weight), softcap), decoder(*batch, routes, by=by)
    )


def base_logits_of(decoder: Decoder, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """[T, V] without adapters."""
    with torch.no_grad():
        return logits_of(decoder, batch, by=decoder.by.without_adapters())


def logprob_gradients(
    decoder: Decoder, batch: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Log-probabilities of the batch's own tokens by the decoder's head, and gradients of a weighted sum of them."""
    decoder.zero_grad()
    hidden, head = decoder(*batch), decoder.by.head
    logprobs, _ = decoder.apply_head(
        lambda rows, weight: token_logprobs(
            rows, weight, batch[0], temperature=1.0, chunk_tokens=5, head=head, softcap=decoder.spec.logit_softcap
        ),
        hidden,
    )
    (logprobs * (1 + batch[0] % 5)).sum().backward()
    return logprobs.detach(), {name: p.grad for name, p in decoder.named_parameters() if p.requires_grad}


def probe_loss(logits_TV: Tensor, token_ids_T: Tensor) -> Tensor:
    """A scalar whose gradient touches every logit, unevenly."""
    logprobs_TV = logits_TV.float().log_softmax(-1)
    weights_T = 1.0 + 0.1 * (token_ids_T % 7)
    return -(logprobs_TV.gather(1, token_ids_T[:, None])[:, 0] * weights_T).sum()


def hf_model(hf_config: dict[str, Any], *, attention: str = "eager", reader: TensorReader | None = None) -> nn.Module:
    """The transformers model with a reader's weights, by default SpreadReader's, float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {key: value for key, value in hf_config.items() if key != "model_type"}
    config = AutoConfig.for_model(hf_config["model_type"], **fields)
    config._attn_implementation = attention
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    spec = read_config(hf_config)
    reader = reader or SpreadReader(spec)
    whole = {
        m.name: reader.read(m.name, Region((0,) * len(m.shape), m.shape)) for m in spec.checkpoint_tensors("float32")
    }
    missing = model.load_state_dict(stack_experts(whole), strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()


MIXTRAL_NAMES = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def stack_experts(whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """Per-expert checkpoint tensors -> the stacked names that transformers 5 and our decoder use."""
    stacked: dict[str, Any] = {}
    for checkpoint_name, tensor in whole.items():
        name = ".".join(MIXTRAL_NAMES.get(part, part) for part in checkpoint_name.split("."))
        head, found, tail = name.partition(".mlp.experts.")
        if not found or "." not in tail:
            stacked[name] = tensor
            continue
        expert, leaf, _ = tail.split(".")
        kind = "down_proj" if leaf == "down_proj" else "gate_up_proj"
        slots = stacked.setdefault(f"{head}.mlp.experts.{kind}", {})
        slots.setdefault(int(expert), []).append(tensor)
    return {
        name: value if isinstance(value, Tensor) else torch.stack([torch.cat(value[e]) for e in sorted(value)])
        for name, value in stacked.items()
    }


def hf_logits(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """One sequence at a time, without padding: [T, V]."""
    token_ids, _, cu_seqlens = batch
    parts = [model(token_ids[None, a:b]).logits[0] for a, b in itertools.pairwise(cu_seqlens)]
    return torch.cat(parts)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected|, Frobenius."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))


def gradients_under_checkpoint_names(decoder: Decoder) -> dict[str, Any]:
    """As transformers names them: Gemma 4's and gpt-oss's routers; and gpt-oss's experts lie as there."""
    grads = {name: p.grad for name, p in decoder.named_parameters() if p.requires_grad}
    if decoder.spec.moe is not None and decoder.spec.moe.is_beside_dense:
        renamed = {".moe.gate.weight": ".router.proj.weight", ".moe.gate.": ".router.", ".moe.": "."}
        for ours, theirs in renamed.items():
            grads = {name.replace(ours, theirs): grad for name, grad in grads.items()}
        return grads
    if decoder.spec.moe is None or not decoder.spec.moe.is_fused:
        return grads
    fused = {}
    for name, grad in grads.items():
        if ".mlp.experts." in name:
            grad = interleave(grad) if "gate_up" in name else grad
            grad = grad.transpose(1, 2) if grad.dim() == 3 else grad
        name = name.replace(".mlp.gate.", ".mlp.router.")
        fused[name.replace("up_bias", "up_proj_bias").replace("down_bias", "down_proj_bias")] = grad
    return fused
