"""What a mixture of experts is built from, and what a checkpoint calls its parts. Pure data, no torch."""

from dataclasses import dataclass
from enum import StrEnum

from slipstream.conf.architecture.activation import SWIGLU, ExpertActivation
from slipstream.conf.architecture.tensors import Parameter, Parameters, Start, below


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
    `weight_packed`, one `weight_scale` per group, `weight_shape` the two sizes."""
    mxfp4 = "mxfp4"
    """OCP microscaling (gpt-oss): two e2m1 weights to a byte of `_blocks`, one e8m0 `_scales` byte per 32."""


INT4_GROUP = 32
"""Weights that share a scale, in both packed formats."""

SHARED_GATE = "shared_expert_gate"
"""Module of a shared expert's gate, in the checkpoint and in the trainer."""

CORRECTION_BIAS = "e_score_correction_bias"
"""Float32 leaf of a sigmoid router; the trainer never changes it."""


NORMS_BESIDE_DENSE = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")
"""Norms of a layer with experts beside a dense feed-forward: before the experts, after the dense one, after them."""
BESIDE_DENSE = "moe"
"""The trainer's module of experts beside a dense feed-forward, which is `mlp` there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointNames:
    """What a checkpoint calls the parts of a mixture of experts, where families differ."""

    block: str = "mlp"
    """The router's and the experts' module in a layer; the trainer's own is `mlp`, as transformers'. "": the layer."""
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
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
    down_proj_bias (E, H). The trainer holds them as it holds all experts; see trainer/weights/fused_experts.py."""

    is_beside_dense: bool = False
    """Layers with experts have a dense feed-forward, too, and norms before, after and around both. The router reads the
    stream in unit length times `scale` / sqrt(H), and multiplies weights by `per_expert_scale` (Gemma 4). The
    checkpoint stacks experts as the trainer does: gate_up_proj (E, 2I, H), down_proj (E, H, I)."""

    def router_leaf(self, leaf: str) -> str:
        """A parameter of the router, as a checkpoint names it in the block."""
        if self.is_beside_dense:
            return "router.proj.weight" if leaf == "weight" else f"router.{leaf}"
        if leaf == CORRECTION_BIAS:
            return self.names.correction
        return f"{'router' if self.has_router_bias else 'gate'}.{leaf}"

    @property
    def unquantized(self) -> str | None:
        """Why checkpoints with it are not read quantized; None: they are."""
        return "its checkpoints stack experts in one tensor" if self.is_beside_dense else None

    @property
    def bank(self) -> str:
        """The experts' module in a layer of transformers' model."""
        return "experts" if self.is_beside_dense else "mlp.experts"

    def dense_mlps(self, width: int) -> dict[str, int]:
        """Feed-forwards that every token of a layer with experts passes: module -> width. `width` is that of others."""
        if self.is_beside_dense:
            return {"mlp": width}
        return {f"mlp.{self.names.shared}": self.shared_intermediate_size} if self.shared_intermediate_size else {}

    def of_layer(self, hidden: int, dense: Parameters, norm: Parameter) -> Parameters:
        """The feed-forward of a layer with experts, in checkpoint order. `dense`: the parameters of one without."""
        if self.is_beside_dense:
            return dense | self.parameters(hidden) | {f"{name}.weight": norm for name in NORMS_BESIDE_DENSE}
        return below(self.names.block, self.parameters(hidden))

    def parameters(self, hidden: int) -> Parameters:
        """The router and the experts of one layer, below their block."""
        num_experts, width = self.num_experts, self.intermediate_size
        router = {self.router_leaf("weight"): Parameter((num_experts, hidden))}
        if self.is_beside_dense:
            router |= {
                self.router_leaf("scale"): Parameter((hidden,), start=Start.ones),
                self.router_leaf("per_expert_scale"): Parameter((num_experts,), start=Start.ones),
            }
            stacks = {"gate_up_proj": (num_experts, 2 * width, hidden), "down_proj": (num_experts, hidden, width)}
            return router | {f"experts.{name}": Parameter(shape) for name, shape in stacks.items()}
        if self.has_router_bias:
            router[self.router_leaf("bias")] = Parameter((num_experts,), start=Start.zeros)
        if self.is_fused:
            return router | self._fused(hidden)
        if self.score is RouterScore.sigmoid:
            router[self.names.correction] = Parameter((num_experts,), "float32", Start.zeros)
        parameters = router
        for expert in range(num_experts):
            weights = swiglu(f"experts.{expert}", hidden, width, self.names.projections)
            parameters |= weights if self.expert_format is ExpertFormat.plain else _int4(weights)
        if self.shared_intermediate_size:
            parameters |= swiglu(self.names.shared, hidden, self.shared_intermediate_size)
        if self.has_shared_gate:
            parameters[f"{SHARED_GATE}.weight"] = Parameter((1, hidden))
        return parameters

    def _fused(self, hidden: int) -> Parameters:
        """All experts in one tensor per projection; packed, rows are output features again."""
        num_experts, width, parameters = self.num_experts, self.intermediate_size, Parameters()
        for name, rows, columns in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
            weight, groups = f"experts.{name}", columns // INT4_GROUP
            if self.expert_format is ExpertFormat.mxfp4:
                blocks = (num_experts, rows, groups, INT4_GROUP // 2)
                parameters[f"{weight}_blocks"] = Parameter(blocks, "uint8", Start.mxfp4_blocks)
                parameters[f"{weight}_scales"] = Parameter((num_experts, rows, groups), "uint8", Start.mxfp4_scales)
            else:
                parameters[weight] = Parameter((num_experts, columns, rows))
            parameters[f"{weight}_bias"] = Parameter((num_experts, rows), start=Start.zeros)
        return parameters


def swiglu(
    module: str, hidden: int, width: int, names: tuple[str, str, str] = CheckpointNames().projections
) -> Parameters:
    """The parameters of a gated feed-forward of this width."""
    shapes = zip(names, ((width, hidden), (width, hidden), (hidden, width)), strict=True)
    return {f"{module}.{name}.weight": Parameter(shape) for name, shape in shapes}


def _int4(weights: Parameters) -> Parameters:
    """The three tensors of each packed weight. Rows consist of whole groups (quantized_checkpoints.py checks it)."""
    parameters: Parameters = {}
    for name, weight in weights.items():
        rows, columns = weight.shape
        parameters[f"{name}_packed"] = Parameter((rows, columns // 8), "int32", Start.int4_words)
        parameters[f"{name}_scale"] = Parameter((rows, columns // INT4_GROUP), start=Start.int4_scales)
        parameters[f"{name}_shape"] = Parameter((2,), "int64", Start.int4_shape)
    return parameters
