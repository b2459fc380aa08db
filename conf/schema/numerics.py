"""Section `trainer.numerics`: whose numbers the forward pass computes, and where that rounds to model.dtype."""

from dataclasses import dataclass, field
from enum import StrEnum


class Rounding(StrEnum):
    """How often a chain of float32 steps is rounded to model.dtype."""

    once = "once"
    each = "each"


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


class CombineMode(StrEnum):
    """Where the weighted sum of a token's expert outputs is rounded, and in what order it runs."""

    fp32_once = "fp32_once"
    vllm_like = "vllm_like"
    hf_eager = "hf_eager"


class MlaNormEps(StrEnum):
    """Which eps the low-rank norms of latent attention take."""

    rollout = "rollout"
    hf = "hf"


class Match(StrEnum):
    """Whose numbers the forward pass computes."""

    engine = "engine"
    merged = "merged"
    transformers = "transformers"
    bitwise = "bitwise"


@dataclass(frozen=True, slots=True, kw_only=True)
class Roundings:
    """Where the forward pass rounds to model.dtype, operation by operation. In float32 all choices are equal. Defaults
    round where vLLM's engines do. docs/parity.md has what each changes and costs. No options: a run chooses all of them
    by `match`; benches and tests choose one at a time (NumericsByPlace)."""

    attention: AttentionValues = AttentionValues.auto
    """Attention's values. engine: by vLLM's FlashAttention 3, which rounds the softmax's probabilities in the blocks in
    which the engine rounds them; gradients by the trainer's own kernels. It needs a Hopper GPU, 16 bits and vLLM on the
    trainer's node. own: by the trainer's own kernels. auto: engine where that can be done, else own; the log says
    which, and why."""
    norm: Rounding = Rounding.once
    """RMSNorm and the residual stream. once: sums, norm and weight in float32, and the stream is rounded where a layer
    ends, as an engine with torch.compile; one with rollout.enforce_eager=true rounds each sum. each: each sum is
    rounded, and the norm before the weight is applied, as transformers does."""
    rotation: Rounding = Rounding.once
    """Norm of heads and RoPE. once: in float32, as an engine with torch.compile; one with rollout.enforce_eager=true
    rounds between the two. each: the norm, each product and each sum are rounded, as transformers does. Not for latent
    attention, whose rotation rounds each."""
    dense_activation: Rounding = Rounding.once
    """silu(gate) * up in dense feed-forwards and shared experts. once: in float32, as an engine with torch.compile.
    each: silu is rounded before the product, as an engine with rollout.enforce_eager=true, and transformers."""
    expert_activation: Rounding = Rounding.each
    """Gate and up with their adapters, silu, and the product of the two, in routed experts. each: all are rounded, as
    in vLLM's kernels, whose intermediate caches are in model.dtype. once: after the last. gpt-oss: gate and up alone.
    """
    router_weights: RouterFormat = RouterFormat.float32
    """Weights of a softmax router. float32: as vLLM's. model: in model.dtype, as transformers'. Sigmoid: float32."""
    router_logits: RouterLogits = RouterLogits.engine
    """Logits of a sigmoid router. float32: as transformers. model: rounded to model.dtype. engine: as vLLM has them,
    float32 for GLM-4 MoE, model.dtype for DeepSeek-V3 and Kimi-K2 unless config.json has moe_router_dtype=float32.
    A softmax router's are in model.dtype."""
    routed_scale: RoutedScale = RoutedScale.output
    """The factor routed_scaling_factor of a sigmoid router. output: multiplies the rounded sum of the routed experts,
    as vLLM. weights: multiplies the router's weights, as transformers."""
    combine: CombineMode = CombineMode.vllm_like
    """How a token's expert outputs are summed. vllm_like: products are rounded to model.dtype, and their sum in float32
    once more. fp32_once: products and sum in float32, rounded once. hf_eager: products and partial sums are rounded,
    and experts are summed in ascending order, as transformers' eager experts."""
    mla_norm_eps: MlaNormEps = MlaNormEps.rollout
    """eps of q_a_layernorm and kv_a_layernorm (DeepSeek-V3, Kimi-K2). rollout: rms_norm_eps of the config, as vLLM.
    hf: 1e-6, as transformers."""


AS_ENGINE = Roundings()
AS_TRANSFORMERS = Roundings(
    attention=AttentionValues.own,
    norm=Rounding.each,
    rotation=Rounding.each,
    dense_activation=Rounding.each,
    expert_activation=Rounding.once,
    router_weights=RouterFormat.model,
    router_logits=RouterLogits.float32,
    routed_scale=RoutedScale.weights,
    combine=CombineMode.hf_eager,
    mla_norm_eps=MlaNormEps.hf,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsConfig:
    """Whose numbers the forward pass computes (docs/parity.md)."""

    match: Match = Match.engine
    """engine: round where vLLM's engines with torch.compile round. Adapted layers are x W^T + scale (x A^T) B^T; what
    is added to the rounded x W^T is rounded by thresholds, so that it arrives in the mean; in linears with
    weight_sync.mode=adapter to nearest, as by such engines. merged: as engine, with x times the merged weight, rounded
    as a publish rounds it, what engines of weight_sync.mode=merged compute; gradients are the same formula's. It merges
    every layer in every forward, and runs each layer once more in backward. transformers: round where transformers
    does, for comparisons with it. bitwise: compute the policy's values by the engine's own kernels, with the weights
    that a publish writes, and gradients by the trainer's; engines take kernels whose results for a token do not depend
    on the batch that it is in, without torch.compile. Every log-ratio is then 0 at staleness 0: choose it by
    parity=bitwise. docs/parity.md says what it costs and which runs it is for; it needs GPUs, and vLLM on the trainer's
    node."""

    @property
    def places(self) -> Roundings:
        """Where the forward pass rounds, if it is the trainer's own."""
        return AS_TRANSFORMERS if self.match is Match.transformers else AS_ENGINE


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsByPlace(NumericsConfig):
    """For benches and tests: each place chosen by itself."""

    own: Roundings = field(default_factory=Roundings)

    @property
    def places(self) -> Roundings:
        return self.own
