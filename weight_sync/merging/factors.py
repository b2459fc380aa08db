"""Which matrices an engine merges for itself, and what it must know of each beside W, A and B. Plain data, no torch.

Factors are named after their matrix, and have the trainer's own format and rank, because a merge's bits depend on both:

    model.layers.0.self_attn.q_proj.weight           (out, in)    in the engine: W + scale * B @ A
    model.layers.0.self_attn.q_proj.weight.lora_A    (r, in)      one for gate and up of an expert, under gate's name
    model.layers.0.self_attn.q_proj.weight.lora_B    (out, r)

Owns: names, and what is said of a merge. trainer/weights/factors.py finds it, weight_sync/replica/own_merge.py does it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from slipstream.weight_sync.layout import TensorMeta

A_SUFFIX, B_SUFFIX = ".lora_A", ".lora_B"


@dataclass(frozen=True, slots=True)
class Merge:
    """How one matrix of the checkpoint is merged; MergeOperands has the meanings."""

    tensor: str
    a: TensorMeta
    b: TensorMeta
    scale: float
    first_row: int
    """Row under its A that row 0 of the matrix is: that of gate or up in a stack of experts."""
    rows_a_factor: int
    stack_row: int
    key: int | None


@dataclass(frozen=True, slots=True)
class OwnMergeSpec:
    """What an engine that merges for itself is told at its start."""

    folder: str
    """The checkpoint on the engine's machine that holds the base."""
    on_device: bool
    """Whether the base is kept beside the parameters, or else in host memory."""
    merges: tuple[Merge, ...]


def is_factor(name: str) -> bool:
    """Whether a parameter of an engine is a factor of an adapter that it merges."""
    return name.endswith((A_SUFFIX, B_SUFFIX))


def factor_tensors(merges: Iterable[Merge]) -> tuple[TensorMeta, ...]:
    """Every factor once."""
    return tuple({meta.name: meta for merge in merges for meta in (merge.a, merge.b)}.values())
