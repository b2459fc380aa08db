"""Gated DeltaNet: what a linear attention is built from, and what engines ask of it. Pure data, no torch."""

from dataclasses import dataclass
from typing import ClassVar

from slipstream.conf.architecture.attention_spec import AttentionSpec, LinearShape
from slipstream.conf.architecture.family import EngineAttention
from slipstream.conf.architecture.tensors import DTYPE_BYTES, Parameter, Parameters, Start, norm_weight
from slipstream.conf.schema import DType

IN_ENGINES = EngineAttention(
    kind="linear",
    divided=("linear_num_key_heads", "linear_num_value_heads"),
    # The state as the trainer's, else it is rounded after every token. On Hopper vLLM's own choice of a kernel is
    # flashinfer's, without a look at whether flashinfer is installed.
    arguments={"mamba_ssm_cache_dtype": "float32", "gdn_prefill_backend": "triton"},
    cpu_dtype=DType.bfloat16,  # vLLM 0.32, `gdn_attention.py`, assertions
    cpu_widths=(("linear_key_head_dim", 128), ("linear_value_head_dim", 128)),
)
"""Qwen's configs. A run on a CPU was tried with heads of 128; vLLM's kernel refuses 32."""


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
