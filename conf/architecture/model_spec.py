"""ModelSpec: what the decoder is built from. Pure data, no torch.

Owns the names and shapes of a checkpoint's tensors. Does not own how a Hugging Face config is read and what is refused
(families.py). Invariant: the decoder, the loader, the publisher and the planner read the same lists, so a projection is
named in one place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from slipstream.conf.architecture.activation import SWIGLU, ExpertActivation
from slipstream.conf.architecture.attention_spec import (
    DeltaNetSpec,
    GqaSpec,
    IndexerSpec,
    LinearShape,
    MlaSpec,
    RopeSpec,
)
from slipstream.conf.architecture.tensors import DTYPE_BYTES, TensorMeta
from slipstream.conf.errors import ConfigError


class RouterScore(StrEnum):
    """What the router makes of its logits."""

    softmax = "softmax"
    """Softmax over all experts, then the largest (Qwen3); gpt-oss's softmax over the largest logits alone gives the
    same weights, divided by their sum. Logits in the compute dtype."""
    sigmoid = "sigmoid"
    """One sigmoid per expert, choice by score + correction bias (DeepSeek-V3): everything in float32."""


class ExpertFormat(StrEnum):
    """How routed experts are stored in the checkpoint and held by the trainer."""

    plain = "plain"
    """One float tensor per projection, `weight`."""
    int4 = "int4"
    """compressed-tensors pack-quantized, symmetric, in groups of 32 (Kimi-K2-Thinking): eight weights to an int32 of
    `weight_packed`, one `weight_scale` per group, `weight_shape` the two sizes.
    """
    mxfp4 = "mxfp4"
    """OCP microscaling (gpt-oss): two e2m1 weights to a byte of `_blocks`, one e8m0 `_scales` byte per 32."""


CORRECTION_BIAS = "e_score_correction_bias"
"""Float32 leaf of a sigmoid router; the trainer never changes it."""


BESIDE_DENSE = "moe"
"""The trainer's module of experts beside a dense feed-forward, which is `mlp` there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointNames:
    """What a checkpoint calls the parts of a mixture of experts, where families differ."""

    block: str = "mlp"
    """The router's and the experts' module in a layer; the trainer's own is `mlp`, as transformers'. "": the layer."""
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Gate, up and down of an expert."""
    shared: str = "shared_experts"
    """The feed-forward that every token passes, beside its experts."""
    correction: str = f"gate.{CORRECTION_BIAS}"
    """A sigmoid router's correction bias, below `block`."""

    def of_block(self, module: str) -> str:
        """A module below a block, by its name in the trainer. Example, Mixtral: "model.layers.0.mlp.experts" ->
        "model.layers.0.block_sparse_moe.experts"."""
        layer, _, rest = module.rpartition(".mlp." if self.block else f".{BESIDE_DENSE}.")
        return f"{layer}.{self.block}.{rest}" if self.block else f"{layer}.{rest}"


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
    has_router_bias: bool = False
    engine_rounds_logits: bool = False
    """vLLM computes the logits of this sigmoid router in the model's dtype, not in float32."""
    num_groups: int = 1
    """Experts come in this many groups; a token's experts are chosen from its best `top_groups` groups."""
    top_groups: int = 1
    scaling_factor: float = 1.0
    """Multiplies the routing weights."""
    shared_intermediate_size: int = 0
    """Width of the feed-forward that every token passes in addition to its experts; 0: there is none."""
    has_shared_gate: bool = False
    """What that feed-forward gives is multiplied by a sigmoid of one more projection, `shared_expert_gate` (1, H)."""
    expert_format: ExpertFormat = ExpertFormat.plain
    activation: ExpertActivation = SWIGLU
    names: CheckpointNames = CheckpointNames()
    is_fused: bool = False
    """The checkpoint stores all experts of a layer in one tensor per projection, transposed, gate and up columns
    alternating, with biases (gpt-oss): gate_up_proj (E, H, 2I), gate_up_proj_bias (E, 2I), down_proj (E, I, H),
    down_proj_bias (E, H). The trainer holds them as it holds all experts; see trainer/weights/fused_experts.py.
    """

    is_beside_dense: bool = False
    """Layers with experts have a dense feed-forward, too, and norms before, after and around both. The router reads the
    stream in unit length times `scale` / sqrt(H), and multiplies weights by `per_expert_scale` (Gemma 4). The
    checkpoint stacks experts as the trainer does: gate_up_proj (E, 2I, H), down_proj (E, H, I)."""

    def router_leaf(self, leaf: str) -> str:
        """A parameter of the router, as a checkpoint names it in the block."""
        if self.is_beside_dense:
            return "router.proj.weight" if leaf == "weight" else f"router.{leaf}"
        return (
            self.names.correction
            if leaf == CORRECTION_BIAS
            else f"{'router' if self.has_router_bias else 'gate'}.{leaf}"
        )


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
    full_attention: GqaSpec | None = None
    """The attention in layers without a sliding window; None: as `attention`."""
    local_rope: RopeSpec | None = None
    """The rotation in layers with a sliding window; None: as `rope`."""
    moe: MoeSpec | None = None
    delta_net: DeltaNetSpec | None = None
    """The linear attention that some layers have instead."""
    norms_add_one: bool = False
    """Norms of the residual stream and of heads multiply by 1 + weight, and round once."""
    norms_halves: bool = False
    """What attention gives, and the feed-forward, is normed before the stream adds it (Gemma)."""
    embedding_scale: float = 1.0
    """Multiplies embeddings, rounded to the compute dtype."""
    scales_layers: bool = False
    """What a layer gives is multiplied by one number of the checkpoint, `layer_scalar`; and norms read sums after they
    were rounded, which vLLM adds in operations of their own (Gemma 4)."""
    logit_softcap: float | None = None
    """Logits x become softcap * tanh(x / softcap)."""
    has_gelu: bool = False
    """Gates of dense feed-forwards pass GELU's approximation by tanh instead of SiLU."""
    num_mtp_layers: int = 0
    """Multi-token prediction layers that a checkpoint holds behind the decoder's own; never loaded."""

    def is_moe_layer(self, layer: int) -> bool:
        """Whether the feed-forward of this layer is a mixture of experts."""
        return self.moe is not None and self.moe.layers[layer]

    def attention_of(self, layer: int) -> GqaSpec | MlaSpec:
        """The attention of a layer that has no linear one."""
        full = self.full_attention
        return self.attention if full is None or full.window(layer) is not None else full

    @property
    def indexer(self) -> IndexerSpec | None:
        """What chooses keys, the same in every layer."""
        return self.attention.indexer if isinstance(self.attention, MlaSpec) else None

    def is_delta_net(self, layer: int) -> bool:
        """Whether this layer's attention is the linear one."""
        return self.delta_net is not None and self.delta_net.layers[layer]

    def check_cp_size(self, cp_size: int) -> None:
        """Ranks can share the tokens of a sequence only if they can compute its attention apart."""
        has_sinks = isinstance(self.attention, GqaSpec) and self.attention.sinks
        what = "linear attention" if self.delta_net is not None else "attention sinks" if has_sinks else None
        what = "an indexer that chooses keys" if self.indexer is not None else what
        if cp_size > 1 and what is not None:
            raise ConfigError(
                f"trainer.cp_size={cp_size} is not for a model with {what}, and {self.family} has it; set "
                "trainer.cp_size=1"
            )

    def attention_name(self, layer: int) -> str:
        """A layer's attention in the checkpoint and in the trainer."""
        return "linear_attn" if self.is_delta_net(layer) else "self_attn"

    def attention_linears(self, layer: int) -> tuple[LinearShape, ...]:
        """Every projection of a layer's attention, in checkpoint order."""
        if self.delta_net is not None and self.delta_net.layers[layer]:
            return self.delta_net.linears(self.hidden_size)
        return self.attention_of(layer).linears(self.hidden_size)

    def sequence_cache_bytes(self, num_tokens: int, dtype: str, tp_size: int) -> int:
        """KV cache of one sequence on one rank of an engine, before it is rounded up to blocks. A layer with a sliding
        window keeps at most its window.

        Args:
            num_tokens: Prompt and response.
            dtype: Format of the activations, named as in DTYPE_BYTES.
            tp_size: Ranks of the engine.
        """
        cached = 0
        for layer in range(self.num_layers):
            if self.delta_net is not None and self.delta_net.layers[layer]:
                cached += self.delta_net.state_elements(tp_size) * DTYPE_BYTES["float32"]
                continue
            attention = self.attention_of(layer)
            window = attention.window(layer) if isinstance(attention, GqaSpec) else None
            cached += min(num_tokens, window or num_tokens) * attention.cached_elements(tp_size) * DTYPE_BYTES[dtype]
            cached += num_tokens * self.indexer.cached_bytes if self.indexer is not None else 0
        return cached

    def checkpoint_tensors(self, dtype: str) -> tuple[TensorMeta, ...]:
        """Every tensor of the Hugging Face checkpoint, in a fixed order; tied embeddings have no lm_head.weight.

        Args:
            dtype: name as in DTYPE_BYTES, e.g. "bfloat16". A router's correction bias is always
                float32, for bfloat16 would move tokens to other experts, and so are the decays of linear attention.
        """
        return _checkpoint_tensors(self, dtype)

    def checkpoint_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of `checkpoint_tensors`."""
        hidden, vocab = self.hidden_size, self.vocab_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            shapes[prefix + "input_layernorm.weight"] = (hidden,)
            name = self.attention_name(layer)
            shapes |= {f"{prefix}{name}.{leaf}": shape for leaf, shape in self._attention_shapes(layer).items()}
            outer = ("pre_feedforward", "post_feedforward") if self.norms_halves else ()
            shapes |= {f"{prefix}{name}_layernorm.weight": (hidden,) for name in ("post_attention", *outer)}
            shapes |= {prefix + name: shape for name, shape in self._feed_forward_shapes(layer).items()}
            if self.scales_layers:
                shapes[prefix + LAYER_SCALAR] = (1,)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_embeddings:
            shapes["lm_head.weight"] = (vocab, hidden)
        return shapes

    def unpacked(self) -> ModelSpec:
        """The same model with experts in the model's dtype: the matrices that adapters are added to."""
        if self.moe is None:
            return self
        return replace(self, moe=replace(self.moe, expert_format=ExpertFormat.plain))

    def _attention_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for linear in self.attention_linears(layer):
            shapes[f"{linear.name}.weight"] = (linear.out_features, linear.in_features)
            if linear.bias:
                shapes[f"{linear.name}.bias"] = (linear.out_features,)
        if self.delta_net is not None and self.delta_net.layers[layer]:
            return shapes | self.delta_net.others()
        attention = self.attention_of(layer)
        shapes |= {name: (size,) for name, size in attention.vectors().items()}
        if isinstance(attention, MlaSpec) and attention.indexer is not None:
            assert attention.q_lora_rank is not None, "families.py checks it"
            indexer = attention.indexer.shapes(self.hidden_size, attention.q_lora_rank)
            shapes |= {f"{INDEXER}.{name}": shape for name, shape in indexer.items()}
        return shapes

    def _feed_forward_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        dense = _swiglu_shapes("mlp.", self.hidden_size, self.intermediate_size)
        if self.moe is None or not self.moe.layers[layer]:
            return dense
        if self.moe.is_beside_dense:
            norms = {f"{name}.weight": (self.hidden_size,) for name in NORMS_BESIDE_DENSE}
            return dense | self._moe_shapes(self.moe) | norms
        block = self.moe.names.block
        return {f"{block}.{name}": shape for name, shape in self._moe_shapes(self.moe).items()}

    def _moe_shapes(self, moe: MoeSpec) -> dict[str, tuple[int, ...]]:
        num_experts, hidden, width = moe.num_experts, self.hidden_size, moe.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {moe.router_leaf("weight"): (num_experts, hidden)}
        if moe.is_beside_dense:
            shapes |= {moe.router_leaf("scale"): (hidden,), moe.router_leaf("per_expert_scale"): (num_experts,)}
            stacks = {"gate_up_proj": (num_experts, 2 * width, hidden), "down_proj": (num_experts, hidden, width)}
            return shapes | {f"experts.{name}": shape for name, shape in stacks.items()}
        if moe.has_router_bias:
            shapes[moe.router_leaf("bias")] = (num_experts,)
        if moe.is_fused:
            fused = _fused_shapes(moe.num_experts, self.hidden_size, moe.intermediate_size)
            return shapes | (_mxfp4_shapes(fused) if moe.expert_format is ExpertFormat.mxfp4 else fused)
        if moe.score is RouterScore.sigmoid:
            shapes[moe.names.correction] = (moe.num_experts,)
        for expert in range(moe.num_experts):
            prefix = f"experts.{expert}."
            weights = _swiglu_shapes(prefix, self.hidden_size, moe.intermediate_size, moe.names.projections)
            shapes |= weights if moe.expert_format is ExpertFormat.plain else _int4_shapes(weights)
        if moe.shared_intermediate_size:
            shapes |= _swiglu_shapes(f"{moe.names.shared}.", self.hidden_size, moe.shared_intermediate_size)
        if moe.has_shared_gate:
            shapes[f"{SHARED_GATE}.weight"] = (1, self.hidden_size)
        return shapes


SHARED_GATE = "shared_expert_gate"
"""Module of a shared expert's gate, in the checkpoint and in the trainer."""

NORMS_BESIDE_DENSE = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")
"""Norms of a layer with experts beside a dense feed-forward: before the experts, after the dense one, after them."""

LAYER_SCALAR = "layer_scalar"
"""A layer's factor, in the checkpoint, in the trainer and in vLLM. Not trained: transformers has it as a buffer."""

INDEXER = "indexer"
"""What chooses keys, in an attention, in the checkpoint and in the trainer."""


def stays_frozen(name: str) -> bool:
    """Whether a parameter is trained in no mode. No gradient passes an indexer's choice, and its own loss (DeepSeek's
    warm-up against the scores of attention) is not there; a router's bias is moved by pretraining alone."""
    return name.endswith((CORRECTION_BIAS, LAYER_SCALAR)) or f".{INDEXER}." in name


INT4_GROUP = 32
"""Weights that share a scale, in both packed formats."""

_FIXED_DTYPES = {
    **dict.fromkeys((CORRECTION_BIAS, "A_log"), "float32"),
    "weight_packed": "int32",
    "weight_shape": "int64",
    **dict.fromkeys(("gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_scales"), "uint8"),
}
"""Leaves whose dtype is not the model's."""
_WIDE_NORM = f".{INDEXER}.k_norm."
"""In float32, too, as engines hold it."""


@lru_cache(maxsize=4)
def _checkpoint_tensors(spec: ModelSpec, dtype: str) -> tuple[TensorMeta, ...]:
    """Kept, because a plan asks several times for a list that takes 0.1 s for the largest models."""
    return tuple(
        TensorMeta(name, shape, "float32" if _WIDE_NORM in name else _FIXED_DTYPES.get(name.rsplit(".", 1)[-1], dtype))
        for name, shape in spec.checkpoint_shapes().items()
    )


def _swiglu_shapes(
    prefix: str, hidden: int, intermediate: int, names: tuple[str, str, str] = CheckpointNames().projections
) -> dict[str, tuple[int, ...]]:
    gate, up, down = names
    return {
        f"{prefix}{gate}.weight": (intermediate, hidden),
        f"{prefix}{up}.weight": (intermediate, hidden),
        f"{prefix}{down}.weight": (hidden, intermediate),
    }


def _int4_shapes(weights: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The three tensors of each packed weight. Every row consists of whole groups (families.py checks it)."""
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
