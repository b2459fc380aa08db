"""What an attention is built from: one class per kind, which says all that is known of it without torch. Pure data.

    GqaSpec       grouped queries                       trainer/model/attention/grouped_queries.py
    MlaSpec       latent, perhaps with an indexer       trainer/model/attention/latent.py, indexer.py
    DeltaNetSpec  linear                                trainer/model/attention/delta_net.py

Owns the names and shapes of its parameters. Does not own where in a checkpoint it lies (ModelSpec).
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from slipstream.conf.architecture.rope_spec import RopeSpec
from slipstream.conf.architecture.tensors import DTYPE_BYTES, Parameter, Parameters, Start, below, norm_weight


@dataclass(frozen=True, slots=True)
class LinearShape:
    """One projection of an attention: y = x W^T (+ bias)."""

    name: str
    out_features: int
    in_features: int
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """One kind of attention. Layers that are alike share one."""

    name: ClassVar[str] = "self_attn"
    """Its module in a layer, in the checkpoint and in the trainer; every kind's ends with _attn."""
    uncaptured: ClassVar[str | None] = None
    """Why CUDA graphs of the trainer leave it out; None: they do not."""
    unquantized: ClassVar[str | None] = None
    """Why checkpoints with it are not read quantized; None: they are."""

    rope: RopeSpec
    """The rotation of its heads, if they turn."""

    @property
    def unshared(self) -> str | None:
        """The part of this attention that ranks which share a sequence's tokens (trainer.cp_size) cannot compute, or
        None."""
        return None

    @property
    def longest_captured(self) -> int | None:
        """Tokens of the longest sequence that CUDA graphs of the trainer serve; None: of any."""
        return None

    @abstractmethod
    def linears(self, hidden: int) -> tuple[LinearShape, ...]:
        """Every projection, in checkpoint order."""

    @abstractmethod
    def others(self, hidden: int) -> Parameters:
        """Every other parameter."""

    @abstractmethod
    def cached_bytes(self, num_tokens: int, dtype: str, tp_size: int) -> int:
        """What a layer on one rank of an engine of `tp_size` ranks keeps of one sequence, prompt and response, with
        activations in `dtype` (DTYPE_BYTES)."""

    def parameters(self, hidden: int) -> Parameters:
        """All of them, in checkpoint order."""
        parameters: Parameters = {}
        for linear in self.linears(hidden):
            parameters[f"{linear.name}.weight"] = Parameter((linear.out_features, linear.in_features))
            if linear.bias:
                parameters[f"{linear.name}.bias"] = Parameter((linear.out_features,), start=Start.zeros)
        return parameters | self.others(hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class GqaSpec(AttentionSpec):
    """Grouped-query attention, or a layer of it: layers may differ in their windows."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over head_dim on queries and keys, before RoPE."""
    norms_all_heads: bool = False
    """That norm is one over all heads of q, and one over all of k (OLMoE)."""
    gated: bool = False
    """q_proj gives each head a query and a gate; what the head attends to is multiplied by the gate's sigmoid."""
    keys_are_values: bool = False
    """There is no v_proj: values are what k_proj gives, before the norm of keys."""
    norms_values: bool = False
    """RMSNorm over head_dim on values, too, without a weight."""
    sinks: bool = False
    """Every head has a logit of its own in the softmax that attends to nothing: the parameter `sinks`."""
    score_dim: int | None = None
    """Scores are divided by the square root of this; None: of head_dim."""
    norms_add_one: bool = False
    """Norms of heads multiply by 1 + weight."""
    window: int | None = None
    """A query sees this many keys, itself among them; None: all before it."""

    @property
    def unshared(self) -> str | None:
        return "attention sinks" if self.sinks else None

    @property
    def qk_head_dim(self) -> int:
        return self.head_dim

    @property
    def v_head_dim(self) -> int:
        return self.head_dim

    @property
    def softmax_scale(self) -> float:
        return (self.score_dim or self.head_dim) ** -0.5

    def cached_bytes(self, num_tokens: int, dtype: str, tp_size: int) -> int:
        """Keys and values of at least one head; with a window, of at most its tokens."""
        heads = max(1, self.num_kv_heads // tp_size)
        return min(num_tokens, self.window or num_tokens) * 2 * heads * self.head_dim * DTYPE_BYTES[dtype]

    def linears(self, hidden: int) -> tuple[LinearShape, ...]:
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        values = () if self.keys_are_values else (LinearShape("v_proj", kv_size, hidden, self.qkv_bias),)
        return (
            LinearShape("q_proj", q_size * (2 if self.gated else 1), hidden, self.qkv_bias),
            LinearShape("k_proj", kv_size, hidden, self.qkv_bias),
            *values,
            LinearShape("o_proj", hidden, q_size, self.output_bias),
        )

    def others(self, hidden: int) -> Parameters:
        sinks = {"sinks": Parameter((self.num_heads,))} if self.sinks else {}
        if not self.qk_norm:
            return sinks
        sizes = (self.num_heads, self.num_kv_heads) if self.norms_all_heads else (1, 1)
        return sinks | {
            f"{name}_norm.weight": norm_weight(heads * self.head_dim, adds_one=self.norms_add_one)
            for name, heads in zip("qk", sizes, strict=True)
        }


INDEXER = "indexer"
"""What chooses keys, in an attention, in the checkpoint and in the trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSpec:
    """What chooses the keys of each query of a latent attention (DeepSeek Sparse Attention, arXiv:2512.02556)."""

    num_heads: int
    head_dim: int
    top_k: int
    """Keys that a query sees. In sequences of at most as many tokens that is every key before it."""
    interleaved: bool
    """As RopeSpec.interleaved, of the first dims of its heads, which turn as the attention's."""

    def parameters(self, hidden: int, q_lora_rank: int) -> Parameters:
        """Every parameter below its module, in checkpoint order. The norm is float32, as engines hold it."""
        return {
            "wq_b.weight": Parameter((self.num_heads * self.head_dim, q_lora_rank)),
            "wk.weight": Parameter((self.head_dim, hidden)),
            "k_norm.weight": Parameter((self.head_dim,), "float32", Start.ones),
            "k_norm.bias": Parameter((self.head_dim,), "float32", Start.zeros),
            "weights_proj.weight": Parameter((self.num_heads, hidden)),
        }

    @property
    def cached_bytes(self) -> int:
        """What a layer of an engine caches per token: a key in FP8, and a scale of each 128 elements."""
        return self.head_dim + 4 * -(-self.head_dim // 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaSpec(AttentionSpec):
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
    """eps of q_a_layernorm and kv_a_layernorm; see conf.schema.Roundings.mla_norm_eps."""
    softmax_scale: float
    indexer: IndexerSpec | None = None
    """None: a query sees every key before it."""

    sinks: ClassVar[bool] = False

    @property
    def unshared(self) -> str | None:
        return "an indexer that chooses keys" if self.indexer is not None else None

    @property
    def longest_captured(self) -> int | None:
        return None if self.indexer is None else self.indexer.top_k

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def cached_bytes(self, num_tokens: int, dtype: str, tp_size: int) -> int:
        """The latent and the dims that turn, on every rank; and what the indexer keeps."""
        latent = (self.kv_lora_rank + self.qk_rope_head_dim) * DTYPE_BYTES[dtype]
        return num_tokens * (latent + (0 if self.indexer is None else self.indexer.cached_bytes))

    def linears(self, hidden: int) -> tuple[LinearShape, ...]:
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

    def others(self, hidden: int) -> Parameters:
        latents = {"q_a_layernorm": self.q_lora_rank, "kv_a_layernorm": self.kv_lora_rank}
        norms = {f"{name}.weight": norm_weight(size) for name, size in latents.items() if size is not None}
        if self.indexer is None:
            return norms
        assert self.q_lora_rank is not None, "deepseek_like.py checks it"
        return norms | below(INDEXER, self.indexer.parameters(hidden, self.q_lora_rank))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetSpec(AttentionSpec):
    """Gated DeltaNet (Yang et al. 2024, https://arxiv.org/abs/2412.06464): linear attention with a state per head."""

    name: ClassVar[str] = "linear_attn"
    uncaptured: ClassVar[str | None] = "some layers have linear attention, which was not captured yet"
    unquantized: ClassVar[str | None] = "engines keep some projections of its linear attention as they are"

    num_key_heads: int
    num_value_heads: int
    """A multiple of num_key_heads: value heads share keys and queries in groups."""
    key_head_dim: int
    value_head_dim: int
    conv_width: int
    """Tokens, itself among them, that the convolution over q, k and v sees."""
    has_fused_inputs: bool = True
    """One projection gives q, k, v and z of each key head, another b and a (Qwen3-Next); else q, k and v, z, b, and a
    come from four (Qwen3.5)."""

    @property
    def unshared(self) -> str | None:
        return "linear attention"

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def group(self) -> int:
        return self.num_value_heads // self.num_key_heads

    @property
    def conv_size(self) -> int:
        """Channels of the convolution."""
        return 2 * self.key_size + self.value_size

    def cached_bytes(self, num_tokens: int, dtype: str, tp_size: int) -> int:
        """State and convolution inputs, in float32, of any number of tokens."""
        state = self.num_value_heads * self.key_head_dim * self.value_head_dim
        return (state + (self.conv_width - 1) * self.conv_size) // tp_size * DTYPE_BYTES["float32"]

    def linears(self, hidden: int) -> tuple[LinearShape, ...]:
        """Every projection, in checkpoint order: first those of the layer's input."""
        if self.has_fused_inputs:
            sizes = {"qkvz": self.conv_size + self.value_size, "ba": 2 * self.num_value_heads}
        else:
            heads = self.num_value_heads
            sizes = {"qkv": self.conv_size, "z": self.value_size, "b": heads, "a": heads}
        inputs = (LinearShape(f"in_proj_{name}", size, hidden) for name, size in sizes.items())
        return (*inputs, LinearShape("out_proj", hidden, self.value_size))

    def others(self, hidden: int) -> Parameters:
        return {
            "conv1d.weight": Parameter((self.conv_size, 1, self.conv_width)),
            "dt_bias": Parameter((self.num_value_heads,), start=Start.zeros),
            "A_log": Parameter((self.num_value_heads,), "float32", Start.zeros),
            "norm.weight": norm_weight(self.value_head_dim),
        }
