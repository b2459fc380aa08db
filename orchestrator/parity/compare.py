"""Where two computations of the same model part: differences of named activations, and which of them rounding explains.

    reference {name: tensor} --+
                               +--> difference per tensor --limits--> Parting: operation, layers, how far beyond
    other     {name: tensor} --+

Owns: what a difference is, and when it is more than rounding. Does not own: who computed the tensors. Both sides
computed each operation from the same inputs, so that a difference belongs to that operation alone.

Four limits, any of which a difference may pass:

    relative   root mean square of the difference over that of the reference: ROUNDING of the coarser format. Two
               correct results that round at other places differ by less
    gain       of norms: the mean over tokens of the factor that is common to a token's vector (a wrong eps, a wrong
               scale). Rounding has no direction, so that it is 1 within a few standard errors
    others     OTHERS times the median of the same operation in other layers, where there are three of them or more
    usual      where an earlier comparison of the same model, tokens and machine is given: USUAL times what it found

Invariant: pure. The same tensors give the same answer, on any machine.
"""

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

ROUNDING = {torch.float32: 2.0**-16, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Two units in the last place of 16-bit formats. In float32, whose sums are as coarse as its results, 128 units: sums
of a few thousand terms in another order differ by a few."""
STANDARD_ERRORS = 6.0
OTHERS = 4.0
USUAL = 1.03
"""The same computation on the same tokens differs as before, to the last digit."""
SEEN = 1 / 256
"""Part of ROUNDING below which a difference is no finding, whatever other layers or earlier comparisons had."""
COMMON = 1 / 64
"""Part of ROUNDING below which a factor common to all tokens of a norm is no finding. The largest that was seen without
a fault is 0.0044 (gpt-oss on an H200)."""
FLIPPED = 0.02
"""Share of a router's choices that may be others for the same input: experts of nearly equal scores."""
LAYER = re.compile(r"^layers\.(\d+)\.(.+)$")

CAUSES = {
    "norm": "eps, or the norm's weight",
    "proj": "this layer's weights (stale, or an adapter that one side lacks)",
    "rotary_emb": "positions, theta or scaling of the rotation",
    "attn": "softmax scale, window, sinks or which keys are seen",
    "gate": "the router's dtype, bias or weights",
    "experts": "the experts' weights, or dtype and order of their weighted sum",
    "mlp": "this layer's weights (stale, or an adapter that one side lacks)",
    "embed_tokens": "the embedding's weights",
}
"""By the end of an operation's name: what makes it differ."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor of one operation. Example: operation "layers.3.input_layernorm", tensor "layers.3.input_layernorm"."""

    operation: str
    tensor: str
    relative: float
    differing: float
    """Share of the elements that are not equal, bit for bit."""
    largest: float
    gain: float
    """Mean over tokens of (the common factor - 1)."""
    flipped: float
    """Share of a router's choices that are others; 0 for other operations."""
    limit: float
    excess: float
    """How many times the nearest of its limits it is. Above 1: more than rounding."""

    @property
    def layer(self) -> int | None:
        found = LAYER.match(self.operation)
        return int(found[1]) if found else None

    @property
    def kind(self) -> str:
        """The operation without its layer."""
        return LAYER.sub(r"\2", self.operation)

    @property
    def tensor_kind(self) -> str:
        return LAYER.sub(r"\2", self.tensor)


def grouped(differences: Iterable[Difference], kind: Callable[[Difference], str]) -> dict[str, list[Difference]]:
    """The differences of each kind; kinds in the order in which they first come."""
    groups: dict[str, list[Difference]] = {}
    for found in differences:
        groups.setdefault(kind(found), []).append(found)
    return groups


@dataclass(frozen=True, slots=True)
class Parting:
    """One kind of operation that differs by more than rounding."""

    kind: str
    layers: tuple[int, ...]
    num_layers: int
    worst: Difference

    @property
    def place(self) -> str:
        """Example: "layer 3, input_layernorm"."""
        if not self.layers:
            return self.kind
        if len(self.layers) == self.num_layers > 1:
            return f"every layer, {self.kind}"
        many = len(self.layers) > 1
        return f"layer{'s' if many else ''} {', '.join(map(str, self.layers))}, {self.kind}"

    @property
    def cause(self) -> str:
        return next((text for end, text in CAUSES.items() if self.kind.endswith(end)), "its weights or its numerics")


def difference(operation: str, tensor: str, reference: Tensor, other: Tensor) -> Difference:
    """Compare one tensor [tokens, width] of both sides; the coarser of their formats decides what rounding may do."""
    wide, mine = reference.double(), other.double()
    delta = mine - wide
    size = float(wide.square().mean().sqrt())
    relative = float(delta.square().mean().sqrt()) / size if size else float(delta.abs().max() > 0)
    energy = wide.square().sum(-1)
    gains = ((mine * wide).sum(-1) / energy.clamp_min(1e-300) - 1)[energy > 0]
    gain = float(gains.mean()) if gains.numel() else 0.0
    limit = max(ROUNDING.get(x.dtype, 2.0**-16) for x in (reference, other))
    error = max(
        relative / math.sqrt(wide.numel()), float(gains.std()) / math.sqrt(len(gains)) if len(gains) > 1 else abs(gain)
    )
    excesses = [relative / limit]
    if operation.endswith("norm"):
        excesses.append(abs(gain) / max(STANDARD_ERRORS * error, COMMON * limit))
    return Difference(
        operation, tensor, relative, float((reference.to(other.dtype) != other).double().mean()),
        float(delta.abs().max()), gain, 0.0, limit, max(excesses) if math.isfinite(relative) else math.inf,
    )  # fmt: skip


def routing_difference(operation: str, reference: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Difference:
    """Compare a router's weights and ids, [tokens, K] each, whatever order each side names them in."""
    num_experts = 1 + int(max(ids.max() for _, ids in (reference, other)))
    dense = [
        weights.new_zeros(ids.shape[0], num_experts, dtype=torch.float64).scatter(1, ids.long(), weights.double())
        for weights, ids in (reference, other)
    ]
    chosen = [rows > 0 for rows in dense]
    is_same = (chosen[0] == chosen[1]).all(-1)
    flipped = float((chosen[1] & ~chosen[0]).double().sum() / max(int(chosen[0].sum()), 1))
    if not bool(is_same.any()):
        return Difference(operation, operation, math.inf, 1.0, math.inf, 0.0, flipped, 1.0, math.inf)
    first, second = (rows[is_same].to(weights.dtype) for rows, (weights, _) in zip(dense, (reference, other)))
    found = difference(operation, operation, first, second)
    excess = max(found.relative / found.limit, flipped / FLIPPED)  # weights that are normalized have no common factor
    return replace(found, flipped=flipped, gain=0.0, excess=excess)


def against(differences: Sequence[Difference], usual: Mapping[str, float] | None = None) -> list[Difference]:
    """The same differences of one comparison, held against those of other layers and, where given, of an earlier
    comparison: `relative` by tensor."""
    by_kind = grouped(differences, lambda found: found.tensor_kind)
    held: list[Difference] = []
    for found in differences:
        floor, excess = SEEN * found.limit, found.excess
        others = [one.relative for one in by_kind[found.tensor_kind] if one.layer != found.layer]
        if len(others) >= 3:
            excess = max(excess, found.relative / max(OTHERS * statistics.median(others), floor))
        if usual is not None and found.tensor in usual:
            excess = max(excess, found.relative / max(USUAL * usual[found.tensor], floor))
        held.append(replace(found, excess=excess))
    return held


def partings(differences: Sequence[Difference]) -> list[Parting]:
    """The kinds of operations with a difference beyond rounding, the furthest beyond first."""
    parted: list[Parting] = []
    for kind, members in grouped(differences, lambda found: found.kind).items():
        beyond = [found for found in members if found.excess > 1]
        if beyond:
            layers = sorted({found.layer for found in beyond if found.layer is not None})
            count = len({found.layer for found in members if found.layer is not None})
            parted.append(Parting(kind, tuple(layers), count, max(beyond, key=lambda found: found.excess)))
    return sorted(parted, key=lambda one: -one.worst.excess)


def verdict(
    differences: Sequence[Difference], differences_without_adapters: Sequence[Difference] = ()
) -> tuple[str, bool]:
    """One plain sentence, where the two part or that they do not; and whether they do not.

    Args:
        differences_without_adapters: The same with the other side's adapters switched off; empty where it has none.
    """
    parted = partings(differences)
    if not parted:
        worst = max(differences, key=lambda found: found.relative)
        return (
            f"No operation differs by more than rounding; the largest difference is that of {worst.operation}: "
            f"{worst.relative:.1e} of its size, {worst.differing:.0%} of its elements.",
            True,
        )
    if differences_without_adapters and not partings(differences_without_adapters):
        kinds = ", ".join(sorted({one.kind for one in parted}))
        return (
            f"The engine computes without the adapter: {kinds} differ by up to {parted[0].worst.relative:.1e} of their "
            "size, and by rounding alone once the trainer leaves its adapter out.",
            False,
        )
    first, *others = parted
    told = f"They part at {first.place}: its output differs by {first.worst.relative:.1e} of its size"
    if first.worst.flipped > FLIPPED:
        told += f", {first.worst.flipped:.1%} of its choices are others"
    quiet = [found.relative for found in differences if found.kind == first.kind and found.excess <= 1]
    if quiet:
        told += f", where other layers differ by {max(quiet):.1e}"
    told += f" ({first.cause})."
    if others:
        told += f" Also {'; '.join(f'{one.place} ({one.worst.relative:.1e})' for one in others[:4])}."
    return told, False


def k3(log_ratios: Tensor) -> Tensor:
    """exp(d) - d - 1 of each token, d = other - sampler (Schulman 2020, http://joschu.net/blog/kl-approx.html)."""
    return torch.expm1(log_ratios.double()) - log_ratios.double()


def agreement(sampler: Tensor, other: Tensor) -> dict[str, float]:
    """Figures of one pair: k3 (mean, 99th percentile, largest), and the largest |log-ratio|.

    Args:
        sampler: log-probabilities of the sampled tokens by the side that is taken for the sampler.
        other: those of the other side.
    """
    log_ratios = other.double() - sampler.double()
    each = k3(log_ratios)
    return {
        "k3_mean": float(each.mean()),
        "k3_p99": float(each.kthvalue(max(1, math.ceil(0.99 * len(each)))).values),
        "k3_max": float(each.max()),
        "max_abs_log_ratio": float(log_ratios.abs().max()),
        "probability_difference": float((other.double().exp() - sampler.double().exp()).abs().mean()),
        "tokens": float(each.numel()),
    }
