"""ModelSpec: what the decoder is built from. Pure data, no torch.

Owns the names and shapes of a checkpoint's tensors. Does not own how a Hugging Face config is read, nor what is
refused (families.py). Invariant: the decoder, the loader, the publisher and the planner all read the same lists, so a
projection is named in one place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from conf.schema import MlaNormEps
from trainer.architecture.activation import SWIGLU, ExpertActivation
from weight_sync.layout import DTYPE_BYTES, TensorMeta


@dataclass(frozen=True, slots=True)
class LinearShape:
    """One projection of an attention: y = x W^T (+ bias)."""

    name: str
    out_features: int
    in_features: int
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, https://arxiv.org/abs/2309.00071), with DeepSeek's two mscale factors."""

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    """Multiplies cos and sin; None: from the other fields."""
    truncate: bool = True
    """Round the ends of the ramp to whole dims."""

    def mscale_of(self, mscale: float = 1.0) -> float:
        """0.1 * mscale * ln(factor) + 1."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    @property
    def cos_sin_factor(self) -> float:
        """What cos and sin are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.mscale_of(self.mscale) / self.mscale_of(self.mscale_all_dim)
        return self.mscale_of()


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1: slow dims are divided by `factor`, fast ones stay, with a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    @property
    def cos_sin_factor(self) -> float:
        """What cos and sin are multiplied by."""
        return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding: which dims turn, how fast, and how they pair."""

    dim: int
    """Dims of a head that turn; the first ones where the head has more."""
    theta: float
    interleaved: bool = False
    """Dims 2i and 2i + 1 make a pair (DeepSeek); else dims i and i + dim / 2."""
    scaling: YarnScaling | Llama3Scaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GqaSpec:
    """Grouped-query attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool
    """q, k and v projections have a bias."""
    output_bias: bool
    """o_proj has a bias."""
    qk_norm: bool
    """RMSNorm over head_dim on queries and keys, before RoPE."""
    sinks: bool = False
    """Every head has a logit of its own in the softmax that attends to nothing: the parameter `sinks`."""
    windows: tuple[int | None, ...] = ()
    """One entry per layer: a query sees this many keys, itself among them; None, or no entries: all before it."""

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer."""
        return self.windows[layer] if self.windows else None

    @property
    def qk_head_dim(self) -> int:
        """Elements of a query or key head."""
        return self.head_dim

    @property
    def softmax_scale(self) -> float:
        """Factor of q . k."""
        return self.head_dim**-0.5

    def cached_elements(self, tp_size: int) -> int:
        """What a layer on one rank of an engine caches of a token: keys and values; of one head at least."""
        return 2 * max(1, self.num_kv_heads // tp_size) * self.head_dim

    def linears(self, hidden: int) -> tuple[LinearShape, ...]:
        """Every projection, in checkpoint order."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return (
            LinearShape("q_proj", q_size, hidden, self.qkv_bias),
            LinearShape("k_proj", kv_size, hidden, self.qkv_bias),
            LinearShape("v_proj", kv_size, hidden, self.qkv_bias),
            LinearShape("o_proj", hidden, q_size, self.output_bias),
        )

    def vectors(self) -> dict[str, int]:
        """Other parameters: name -> size."""
        sinks = {"sinks": self.num_heads} if self.sinks else {}
        norms = {"q_norm.weight": self.head_dim, "k_norm.weight": self.head_dim} if self.qk_norm else {}
        return sinks | norms


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaSpec:
    """Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434): low-rank q, k and v."""

    num_heads: int
    q_lora_rank: int | None
    """None: q_proj in one matrix."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    bias: bool
    """q_a, kv_a and o projections have a bias."""
    norm_eps: float
    """Of q_a_layernorm and kv_a_layernorm; see the option model.mla_norm_eps."""
    softmax_scale: float
    """Factor of q . k."""

    @property
    def qk_head_dim(self) -> int:
        """Elements of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def cached_elements(self, tp_size: int) -> int:
        """What a layer on one rank of an engine caches of a token: latent and turned dims, the same on all ranks."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def linears(self, hidden: int) -> tuple[LinearShape, ...]:
        """Every projection, in checkpoint order."""
        q_size, kv_size = self.num_heads * self.qk_head_dim, self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        if self.q_lora_rank is None:
            queries = (LinearShape("q_proj", q_size, hidden),)
        else:
            queries = (
                LinearShape("q_a_proj", self.q_lora_rank, hidden, self.bias),
                LinearShape("q_b_proj", q_size, self.q_lora_rank),
            )
        return (
            *queries,
            LinearShape("kv_a_proj_with_mqa", self.kv_lora_rank + self.qk_rope_head_dim, hidden, self.bias),
            LinearShape("kv_b_proj", kv_size, self.kv_lora_rank),
            LinearShape("o_proj", hidden, self.num_heads * self.v_head_dim, self.bias),
        )

    def vectors(self) -> dict[str, int]:
        """Other parameters: name -> size."""
        queries = {} if self.q_lora_rank is None else {"q_a_layernorm.weight": self.q_lora_rank}
        return queries | {"kv_a_layernorm.weight": self.kv_lora_rank}


class RouterScore(StrEnum):
    """What the router makes of its logits."""

    softmax = "softmax"
    """Softmax over all experts, then the largest (Qwen3): logits and weights in the compute dtype."""
    sigmoid = "sigmoid"
    """One sigmoid an expert, choice by score + correction bias (DeepSeek-V3): everything in float32."""
    softmax_of_top = "softmax_of_top"
    """The largest logits, then softmax over those alone (gpt-oss): in the compute dtype. The router has a bias."""


class ExpertFormat(StrEnum):
    """How routed experts are stored in the checkpoint and held by the trainer."""

    plain = "plain"
    """One float tensor a projection, `weight`."""
    int4 = "int4"
    """compressed-tensors pack-quantized, symmetric, in groups of 32 (Kimi-K2-Thinking): eight weights to an int32 of
    `weight_packed`, one `weight_scale` a group, `weight_shape` the two sizes.
    """
    mxfp4 = "mxfp4"
    """OCP microscaling (gpt-oss): two e2m1 weights to a byte of `_blocks`, one e8m0 `_scales` byte per 32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """The mixture-of-experts layers."""

    num_experts: int
    top_k: int
    intermediate_size: int
    """Width of one expert."""
    norm_topk_prob: bool
    """Divide the top-k scores by their sum."""
    layers: tuple[bool, ...]
    """One entry per decoder layer: True where the feed-forward is a mixture of experts."""
    score: RouterScore = RouterScore.softmax
    num_groups: int = 1
    """Experts come in this many groups; a token's are all from its best `top_groups`."""
    top_groups: int = 1
    scaling_factor: float = 1.0
    """Multiplies the routing weights."""
    shared_intermediate_size: int = 0
    """Width of the feed-forward that every token passes beside its experts; 0: there is none."""
    expert_format: ExpertFormat = ExpertFormat.plain
    activation: ExpertActivation = SWIGLU
    is_fused: bool = False
    """The checkpoint stores all experts of a layer in one tensor a projection, transposed, gate and up columns in
    turns, with biases (gpt-oss): gate_up_proj (E, H, 2I), gate_up_proj_bias (E, 2I), down_proj (E, I, H),
    down_proj_bias (E, H). The trainer holds them as it holds all experts; see trainer/weights/fused_experts.py.
    """

    @property
    def router_name(self) -> str:
        """The router's module in the checkpoint."""
        return "router" if self.score is RouterScore.softmax_of_top else "gate"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One decoder-only architecture. Sizes are element counts."""

    family: str
    """model_type of the Hugging Face config."""
    hf_architecture: str
    """Class that transformers and vLLM build from an exported checkpoint."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    intermediate_size: int
    """Width of a dense feed-forward."""
    rms_norm_eps: float
    tie_embeddings: bool
    attention: GqaSpec | MlaSpec
    rope: RopeSpec
    moe: MoeSpec | None = None
    num_mtp_layers: int = 0
    """Multi-token prediction layers that a checkpoint holds behind the decoder's own; never loaded."""

    @staticmethod
    def from_hf_config(config: dict[str, Any], mla_norm_eps: MlaNormEps = MlaNormEps.rollout) -> ModelSpec:
        """Read a config.json's dict. Missing optional fields take transformers' defaults.

        Args:
            config: as in config.json.
            mla_norm_eps: which eps the low-rank norms of latent attention take.

        Raises:
            ConfigError: unknown model_type, a missing size, or a feature that the decoder lacks.
        """
        from trainer.architecture.families import read_config

        return read_config(config, mla_norm_eps)

    def is_moe_layer(self, layer: int) -> bool:
        """Whether the feed-forward of this layer is a mixture of experts."""
        return self.moe is not None and self.moe.layers[layer]

    def sequence_cache_bytes(self, num_tokens: int, dtype: str, tp_size: int) -> int:
        """KV cache of one sequence on one rank of an engine, before it is rounded up to blocks. A layer with a sliding
        window keeps no more than that.

        Args:
            num_tokens: Prompt and response.
            dtype: Of activations, name as in weight_sync.layout.DTYPE_BYTES.
            tp_size: Ranks of the engine.
        """
        windows = self.attention.windows if isinstance(self.attention, GqaSpec) else ()
        kept = [min(num_tokens, window or num_tokens) for window in windows or (None,) * self.num_layers]
        return sum(kept) * self.attention.cached_elements(tp_size) * DTYPE_BYTES[dtype]

    def checkpoint_tensors(self, dtype: str) -> list[TensorMeta]:
        """Every tensor of the Hugging Face checkpoint, in a fixed order; tied embeddings have no lm_head.weight.

        Args:
            dtype: name as in weight_sync.layout.DTYPE_BYTES, e.g. "bfloat16". A router's correction bias is float32
                whatever the rest is: bfloat16 would move tokens to other experts.
        """
        hidden, vocab = self.hidden_size, self.vocab_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            shapes[prefix + "input_layernorm.weight"] = (hidden,)
            shapes |= {prefix + "self_attn." + name: shape for name, shape in self._attention_shapes().items()}
            shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
            shapes |= {prefix + "mlp." + name: shape for name, shape in self._mlp_shapes(layer).items()}
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_embeddings:
            shapes["lm_head.weight"] = (vocab, hidden)
        return [
            TensorMeta(name, shape, _FIXED_DTYPES.get(name.rsplit(".", 1)[-1], dtype)) for name, shape in shapes.items()
        ]

    def unpacked(self) -> ModelSpec:
        """The same model with experts in the model's dtype: the matrices that adapters lie beside."""
        if self.moe is None:
            return self
        return replace(self, moe=replace(self.moe, expert_format=ExpertFormat.plain))

    def _attention_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for linear in self.attention.linears(self.hidden_size):
            shapes[f"{linear.name}.weight"] = (linear.out_features, linear.in_features)
            if linear.bias:
                shapes[f"{linear.name}.bias"] = (linear.out_features,)
        return shapes | {name: (size,) for name, size in self.attention.vectors().items()}

    def _mlp_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        if self.moe is None or not self.moe.layers[layer]:
            return _swiglu_shapes("", self.hidden_size, self.intermediate_size)
        router = self.moe.router_name
        shapes: dict[str, tuple[int, ...]] = {f"{router}.weight": (self.moe.num_experts, self.hidden_size)}
        if self.moe.score is RouterScore.softmax_of_top:
            shapes[f"{router}.bias"] = (self.moe.num_experts,)
        if self.moe.is_fused:
            fused = _fused_shapes(self.moe.num_experts, self.hidden_size, self.moe.intermediate_size)
            return shapes | (_mxfp4_shapes(fused) if self.moe.expert_format is ExpertFormat.mxfp4 else fused)
        if self.moe.score is RouterScore.sigmoid:
            shapes[f"gate.{CORRECTION_BIAS}"] = (self.moe.num_experts,)
        for expert in range(self.moe.num_experts):
            weights = _swiglu_shapes(f"experts.{expert}.", self.hidden_size, self.moe.intermediate_size)
            shapes |= weights if self.moe.expert_format is ExpertFormat.plain else _int4_shapes(weights)
        if self.moe.shared_intermediate_size:
            shapes |= _swiglu_shapes("shared_experts.", self.hidden_size, self.moe.shared_intermediate_size)
        return shapes


CORRECTION_BIAS = "e_score_correction_bias"
"""Float32 leaf of a sigmoid router; the trainer never changes it."""

INT4_GROUP = 32
"""Weights that share a scale, in both packed formats."""

_FIXED_DTYPES = {CORRECTION_BIAS: "float32", "weight_packed": "int32", "weight_shape": "int64"} | dict.fromkeys(
    ("gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_scales"), "uint8"
)
"""Leaves whose dtype is not the model's."""


def _swiglu_shapes(prefix: str, hidden: int, intermediate: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (intermediate, hidden),
        f"{prefix}up_proj.weight": (intermediate, hidden),
        f"{prefix}down_proj.weight": (hidden, intermediate),
    }


def _int4_shapes(weights: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The three tensors of each packed weight; every row is whole groups (checked by families.py)."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns) in weights.items():
        shapes[f"{name}_packed"] = (rows, columns // 8)
        shapes[f"{name}_scale"] = (rows, columns // INT4_GROUP)
        shapes[f"{name}_shape"] = (2,)
    return shapes


def _fused_shapes(num_experts: int, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        "experts.gate_up_proj": (num_experts, hidden, 2 * width),
        "experts.gate_up_proj_bias": (num_experts, 2 * width),
        "experts.down_proj": (num_experts, width, hidden),
        "experts.down_proj_bias": (num_experts, hidden),
    }


def _mxfp4_shapes(fused: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Blocks and scales of each fused weight; rows are output features again."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in fused.items():
        if name.endswith("_bias"):
            shapes[name] = shape
            continue
        num_experts, columns, rows = shape
        shapes[f"{name}_blocks"] = (num_experts, rows, columns // INT4_GROUP, INT4_GROUP // 2)
        shapes[f"{name}_scales"] = (num_experts, rows, columns // INT4_GROUP)
    return shapes
