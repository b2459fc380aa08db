"""What an attention and its rotation are built from. Pure data, no torch."""

import math
from dataclasses import dataclass


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
class LinearScaling:
    """Every position is divided by `factor` (Chen et al. 2023, https://arxiv.org/abs/2306.15595)."""

    factor: float

    @property
    def cos_sin_factor(self) -> float:
        """What cos and sin are multiplied by."""
        return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProportionalScaling:
    """Gemma 4: pairs are those of the whole head, the first ones turn and the others stand still."""

    share: float
    """The part of the pairs that turns."""

    @property
    def cos_sin_factor(self) -> float:
        """What cos and sin are multiplied by."""
        return 1.0


RopeScaling = YarnScaling | Llama3Scaling | LinearScaling | ProportionalScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding: which dims turn, how fast, and how they pair."""

    dim: int
    """Dims of a head that turn; the first ones where the head has more."""
    theta: float
    interleaved: bool = False
    """Dims 2i and 2i + 1 make a pair (DeepSeek); else dims i and i + dim / 2."""
    scaling: RopeScaling | None = None
    is_wide: bool = False
    """vLLM keeps cosines and sines in float32; one with torch.compile fuses the cast away, so that they are never
    rounded (gpt-oss)."""


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
        return (self.score_dim or self.head_dim) ** -0.5

    def cached_elements(self, tp_size: int) -> int:
        """Elements that a layer on one rank of an engine caches per token: keys and values of at least one head."""
        return 2 * max(1, self.num_kv_heads // tp_size) * self.head_dim

    def linears(self, hidden: int) -> tuple[LinearShape, ...]:
        """Every projection, in checkpoint order."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        values = () if self.keys_are_values else (LinearShape("v_proj", kv_size, hidden, self.qkv_bias),)
        return (
            LinearShape("q_proj", q_size * (2 if self.gated else 1), hidden, self.qkv_bias),
            LinearShape("k_proj", kv_size, hidden, self.qkv_bias),
            *values,
            LinearShape("o_proj", hidden, q_size, self.output_bias),
        )

    def vectors(self) -> dict[str, int]:
        """Other parameters: name -> size."""
        sinks = {"sinks": self.num_heads} if self.sinks else {}
        if not self.qk_norm:
            return sinks
        q_heads, kv_heads = (self.num_heads, self.num_kv_heads) if self.norms_all_heads else (1, 1)
        return sinks | {"q_norm.weight": q_heads * self.head_dim, "k_norm.weight": kv_heads * self.head_dim}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetSpec:
    """Gated DeltaNet (Yang et al. 2024, https://arxiv.org/abs/2412.06464): linear attention with a state per head."""

    num_key_heads: int
    num_value_heads: int
    """A multiple of num_key_heads: value heads share keys and queries in groups."""
    key_head_dim: int
    value_head_dim: int
    conv_width: int
    """Tokens, itself among them, that the convolution over q, k and v sees."""
    layers: tuple[bool, ...]
    """One entry per decoder layer: True where it has this attention."""
    has_fused_inputs: bool = True
    """One projection gives q, k, v and z of each key head, another b and a (Qwen3-Next); else q, k and v, z, b, and a
    come from four (Qwen3.5)."""

    @property
    def key_size(self) -> int:
        """Elements of all key heads."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Elements of all value heads."""
        return self.num_value_heads * self.value_head_dim

    @property
    def group(self) -> int:
        """Value heads of a key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def conv_size(self) -> int:
        """Channels of the convolution."""
        return 2 * self.key_size + self.value_size

    def state_elements(self, tp_size: int) -> int:
        """Elements that a layer on one rank of an engine keeps per sequence: state and convolution inputs."""
        state = self.num_value_heads * self.key_head_dim * self.value_head_dim
        return (state + (self.conv_width - 1) * self.conv_size) // tp_size

    def linears(self, hidden: int) -> tuple[LinearShape, ...]:
        """Every projection, in checkpoint order: first those of the layer's input."""
        if self.has_fused_inputs:
            sizes = {"qkvz": self.conv_size + self.value_size, "ba": 2 * self.num_value_heads}
        else:
            heads = self.num_value_heads
            sizes = {"qkv": self.conv_size, "z": self.value_size, "b": heads, "a": heads}
        inputs = (LinearShape(f"in_proj_{name}", size, hidden) for name, size in sizes.items())
        return (*inputs, LinearShape("out_proj", hidden, self.value_size))

    def others(self) -> dict[str, tuple[int, ...]]:
        """Other parameters: name -> shape."""
        return {
            "conv1d.weight": (self.conv_size, 1, self.conv_width),
            "dt_bias": (self.num_value_heads,),
            "A_log": (self.num_value_heads,),
            "norm.weight": (self.value_head_dim,),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSpec:
    """What chooses the keys that each query of a latent attention sees (DeepSeek Sparse Attention,
    https://arxiv.org/abs/2512.02556)."""

    num_heads: int
    head_dim: int
    top_k: int
    """Keys that a query sees. In sequences of at most as many tokens that is every key before it."""
    interleaved: bool
    """As RopeSpec.interleaved, of the first dims of its heads, which turn as the attention's."""

    def shapes(self, hidden: int, q_lora_rank: int) -> dict[str, tuple[int, ...]]:
        """Every parameter below its module, in checkpoint order."""
        return {
            "wq_b.weight": (self.num_heads * self.head_dim, q_lora_rank),
            "wk.weight": (self.head_dim, hidden),
            "k_norm.weight": (self.head_dim,),
            "k_norm.bias": (self.head_dim,),
            "weights_proj.weight": (self.num_heads, hidden),
        }

    @property
    def cached_bytes(self) -> int:
        """What a layer of an engine caches per token: a key in FP8, and a scale of each 128 elements."""
        return self.head_dim + 4 * -(-self.head_dim // 128)


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
    """eps of q_a_layernorm and kv_a_layernorm; see conf.schema.Roundings.mla_norm_eps."""
    softmax_scale: float
    """Factor of q . k."""
    indexer: IndexerSpec | None = None
    """None: a query sees every key before it."""

    @property
    def qk_head_dim(self) -> int:
        """Elements of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def cached_elements(self, tp_size: int) -> int:
        """Elements that a layer on one rank of an engine caches per token: latent and turned dims, on every rank."""
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
