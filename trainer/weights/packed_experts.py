"""Packed experts in a checkpoint: which stored tensor is which rows of a bank's buffers, bit by bit.

    checkpoint, int4 (Kimi-K2-Thinking)                             bank (trainer.moe.bank), local expert i
    experts.E.gate_proj.weight_packed | _scale   (I, H/8 | H/32)    gate_up_packed | _scale [i, :I]
    experts.E.up_proj.weight_packed | _scale     (I, H/8 | H/32)    gate_up_packed | _scale [i, I:]
    experts.E.down_proj.weight_packed | _scale   (H, I/8 | I/32)    down_packed | _scale [i]
    experts.E.*.weight_shape                     (2)                held by nobody, compared at load

    checkpoint, mxfp4 (gpt-oss)                                     all local experts at once
    experts.gate_up_proj_blocks | _scales  (E, 2I, H/32[, 16])      gate_up_packed | _scale; rows gate0 up0 gate1 ..
    experts.down_proj_blocks | _scales     (E, H, I/32[, 16])       down_packed | _scale     become gate first

Bits go from file to device without a cast; a format other than the buffer's is refused. No adapter merges into packed
weights, so they are not among the rectangles of shards.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.conf.architecture.moe_spec import ExpertFormat
from slipstream.trainer.errors import CheckpointError
from slipstream.trainer.moe.experts import Experts
from slipstream.trainer.weights.fused_experts import deinterleave
from slipstream.weight_sync.layout import Region

if TYPE_CHECKING:
    from slipstream.trainer.model.decoder import Decoder


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """This rank's part of one stored tensor."""

    tensor: str
    region: Region
    into: Tensor
    """A live view of region.shape; for weight_shape the sizes that the file must hold."""
    takes_turns: bool = False
    """Rows alternate between gate and up."""
    is_fact: bool = False
    """Not held, only compared."""

    @property
    def num_bytes(self) -> int:
        return 0 if self.is_fact else self.into.numel() * self.into.element_size()

    def fill(self, values: Tensor) -> None:
        """Load the whole region. Raises CheckpointError for another format or another shape."""
        if self.is_fact:
            if values.tolist() != self.into.tolist():
                raise CheckpointError(f"{self.tensor} says {values.tolist()}, the model needs {self.into.tolist()}")
            return
        if values.dtype != self.into.dtype:
            raise CheckpointError(
                f"{self.tensor} is stored as {values.dtype}; packed experts are kept bit by bit, as {self.into.dtype}"
            )
        self.into.copy_(deinterleave(values) if self.takes_turns else values)


def packed_tensors(decoder: Decoder) -> Iterator[PackedTensor]:
    """Every rectangle of packed experts that this rank holds; none if experts are plain."""
    for name, module in decoder.named_modules():
        if not isinstance(module, Experts) or module.packed is None:
            continue
        yield from (_stacked if module.packed.format is ExpertFormat.mxfp4 else _one_by_one)(name, module)


def is_packed(decoder: Decoder) -> bool:
    return any(isinstance(module, Experts) and module.packed is not None for module in decoder.modules())


def _one_by_one(name: str, bank: Experts) -> Iterator[PackedTensor]:
    assert bank.packed is not None
    width = bank.intermediate_size
    parts = (
        ("gate_proj", "gate_up", slice(0, width)),
        ("up_proj", "gate_up", slice(width, None)),
        ("down_proj", "down", slice(None)),
    )
    for index in range(bank.num_local_experts):
        for leaf, stack, rows in parts:
            prefix = f"{name}.{bank.first_expert + index}.{leaf}.weight"
            for kind in ("packed", "scale"):
                into = bank.packed.get_buffer(f"{stack}_{kind}")[index, rows]
                yield PackedTensor(f"{prefix}_{kind}", Region((0, 0), tuple(into.shape)), into)
            shape = torch.tensor([into.shape[0], bank.packed.shapes[stack][2]])
            yield PackedTensor(f"{prefix}_shape", Region((0,), (2,)), shape, is_fact=True)


def _stacked(name: str, bank: Experts) -> Iterator[PackedTensor]:
    assert bank.packed is not None
    for stack in ("gate_up", "down"):
        for kind, leaf in (("packed", "blocks"), ("scale", "scales")):
            into = bank.packed.get_buffer(f"{stack}_{kind}")
            region = Region((bank.first_expert,) + (0,) * (into.dim() - 1), tuple(into.shape))
            yield PackedTensor(f"{name}.{stack}_proj_{leaf}", region, into, takes_turns=stack == "gate_up")
