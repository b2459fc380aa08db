"""Section `trainer.numerics`: where the forward pass rounds to model.dtype, operation by operation."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Rounding(StrEnum):
    """How often a chain of float32 steps is rounded to model.dtype."""

    once = "once"
    each = "each"


class AdapterValues(StrEnum):
    """What the forward pass computes adapted layers with."""

    separate = "separate"
    merged = "merged"


class AttentionValues(StrEnum):
    """Whose kernel computes the attention's values."""

    auto = "auto"
    engine = "engine"
    own = "own"


class RoutedScale(StrEnum):
    """What the factor of the routed experts multiplies."""

    output = "output"
    weights = "weights"


class RouterFormat(StrEnum):
    """Format of what a router computes."""

    float32 = "float32"
    model = "model"


class RouterLogits(StrEnum):
    """Format of a sigmoid router's logits."""

    engine = "engine"
    float32 = "float32"
    model = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsConfig:
    """Defaults round where vLLM's engines do; the other choice is transformers' way. In float32 all are equal.
    docs/parity.md has what each changes and costs.
    """

    adapters: AdapterValues = AdapterValues.separate
    """separate: x W^T + scale (x A^T) B^T, what an engine of weight_sync.mode=adapter computes. merged: x times the
    merged weight, rounded as a publish rounds it, what engines of weight_sync.mode=merged compute; gradients are the
    same formula's. It merges every layer in every forward, and runs each layer once more in backward.
    """
    attention: AttentionValues = AttentionValues.auto
    """Attention's values. engine: by vLLM's FlashAttention 3, which rounds the softmax's probabilities in the blocks in
    which the engine rounds them; gradients by the trainer's own kernels. It needs a Hopper GPU, a 16-bit model.dtype
    and vLLM on the trainer's node. own: by the trainer's own kernels. auto: engine where that can be done, else own;
    the log says which, and why.
    """
    norm: Rounding = Rounding.once
    """RMSNorm and the residual stream. once: sums, norm and weight in float32, and the stream is rounded where a layer
    ends, as an engine with torch.compile; one with rollout.enforce_eager=true rounds each sum. each: each sum is
    rounded, and the norm before the weight is applied, as transformers does.
    """
    rotation: Rounding = Rounding.once
    """Norm of heads and RoPE. once: in float32, as an engine with torch.compile; one with rollout.enforce_eager=true
    rounds between the two. each: the norm, each product and each sum are rounded, as transformers does. Not for latent
    attention, whose rotation rounds each.
    """
    dense_activation: Rounding = Rounding.once
    """silu(gate) * up in dense feed-forwards and shared experts. once: in float32, as an engine with torch.compile.
    each: silu is rounded before the product, as an engine with rollout.enforce_eager=true, and transformers.
    """
    expert_activation: Rounding = Rounding.each
    """Gate and up with their adapters, silu, and the product of the two, in routed experts. each: all are rounded, as
    in vLLM's kernels, whose intermediate caches are in model.dtype. once: after the last. gpt-oss: gate and up alone.
    """
    router_weights: RouterFormat = RouterFormat.float32
    """Weights of a softmax router. float32: as vLLM's. model: rounded to model.dtype, as transformers'. Ignored with a
    sigmoid router, whose weights are float32.
    """
    router_logits: RouterLogits = RouterLogits.engine
    """Logits of a sigmoid router. float32: as transformers. model: rounded to model.dtype. engine: as vLLM has them,
    float32 for GLM-4 MoE, model.dtype for DeepSeek-V3 and Kimi-K2 unless config.json has moe_router_dtype=float32.
    Ignored with a softmax router, whose logits are in model.dtype.
    """
    routed_scale: RoutedScale = RoutedScale.output
    """The factor routed_scaling_factor of a sigmoid router. output: multiplies the rounded sum of the routed experts,
    as vLLM. weights: multiplies the router's weights, as transformers. Ignored where config.json has none.
    """
