"""What this rank holds, in checkpoint coordinates, and how an adapter merges into it.

Owns the one translation between module parameters (stacked experts, FSDP2 row shards, adapters beside their base) and
checkpoint tensors. Loading, merged export and the weight source all go through `local_shards`; nobody else knows that
rows 0..I-1 of `mlp.experts.gate_up_proj[3]` are `mlp.experts.3.gate_proj.weight`.

Invariant: over all ranks, the regions of one checkpoint tensor are disjoint and cover it. No function here
communicates, except `gather_lora_a`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.lora import Linear
from trainer.merge import merge_region
from trainer.moe.experts import Experts
from trainer.parallel import local_part, whole
from weight_sync.layout import Region

if TYPE_CHECKING:
    from trainer.model.decoder import Decoder


@dataclass(frozen=True, slots=True)
class LocalView:
    """Part of a parameter's local rows, looked up when read: FSDP2 may move a shard's storage, never the parameter."""

    parameter: nn.Parameter
    index: tuple[slice | int, ...] = ()

    def tensor(self) -> Tensor:
        """A live view of the values, without a graph."""
        return local_part(self.parameter)[0][self.index]


@dataclass(frozen=True, slots=True)
class LoraDelta:
    """The factors that merge into one held rectangle: rows W[i] += scale * B[i] @ A."""

    key: str
    """Name of the parameter A; the key of its whole in `gather_lora_a`'s result."""
    a_view: LocalView | None
    """(r, in) where this rank holds all of A (experts; one rank), else None: A is sharded and must be gathered."""
    b_view: LocalView
    """(rows, r), the rows of B that belong to the held rows."""
    scale: float
    """alpha / rank."""

    @property
    def b(self) -> Tensor:
        """(rows, r) float32, live."""
        return self.b_view.tensor()

    def a(self, gathered_a: dict[str, Tensor]) -> Tensor:
        """(r, in) float32: this rank's own, else the gathered one."""
        return self.a_view.tensor() if self.a_view is not None else gathered_a[self.key]


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A rectangle of a checkpoint tensor that this rank holds.

    Example: rows 64..127 of `model.layers.0.self_attn.q_proj.weight`.
    """

    tensor: str
    """Name in the checkpoint."""
    region: Region
    """Where the rectangle lies in that tensor; all of it in every dim but the first."""
    base_view: LocalView
    delta: LoraDelta | None = None
    """None where nothing merges into this tensor."""

    @property
    def base(self) -> Tensor:
        """Live values, of shape region.shape: the frozen base (LoRA) or the float32 weight (full training)."""
        return self.base_view.tensor()

    def read(self, region: Region, out: Tensor, gathered_a: dict[str, Tensor]) -> None:
        """Write the merged values of `region` (inside self.region) into `out`, cast to out.dtype. No communication.

        Args:
            region: part of self.region, in coordinates of the checkpoint tensor.
            out: any strided view of shape region.shape, on the parameter's device.
            gathered_a: result of `gather_lora_a`; read only for adapters whose A is sharded.
        """
        window = tuple(
            slice(start - held, start - held + size)
            for start, held, size in zip(region.start, self.region.start, region.shape, strict=True)
        )
        base = self.base[window]
        if self.delta is None:
            out.copy_(base)
            return
        a, b = self.delta.a(gathered_a), self.delta.b[window[0]]
        merge_region(base, b, a, self.delta.scale, out, first_row=region.start[0], first_column=region.start[1])


def local_shards(decoder: Decoder) -> list[HeldTensor]:
    """Every non-empty rectangle that this rank holds, in the order of the module's parameters.

    Views are live: they follow the optimizer.
    """
    held: list[HeldTensor] = []
    for name, module in decoder.named_modules():
        if isinstance(module, Experts):
            held.extend(_held_experts(name, module))
        elif isinstance(module, Linear):
            held.append(_held_rows(f"{name}.weight", module.weight, _linear_delta(name, module)))
            if module.bias is not None:
                held.append(_held_rows(f"{name}.bias", module.bias))
        else:
            held.extend(_held_rows(f"{name}.{leaf}", p) for leaf, p in module.named_parameters(recurse=False))
    return [one for one in held if one.region.num_elements > 0]


def gather_lora_a(decoder: Decoder) -> dict[str, Tensor]:
    """Collective: the whole of every A that is sharded over ranks, float32, keyed by LoraDelta.key.

    All ranks call it at the same point; empty on a single rank. The caller owns the memory: the sum of numel * 4 bytes.
    """
    gathered: dict[str, Tensor] = {}
    for name, module in decoder.named_modules():
        if isinstance(module, Linear) and module.lora is not None and isinstance(module.lora_A, DTensor):
            gathered[f"{name}.lora_A"] = whole(module.lora_A)
    return gathered


def _held_rows(tensor: str, parameter: nn.Parameter, delta: LoraDelta | None = None) -> HeldTensor:
    local, start = local_part(parameter)
    region = Region((start,) + (0,) * (local.dim() - 1), tuple(local.shape))
    return HeldTensor(tensor, region, LocalView(parameter), delta)


def _linear_delta(name: str, module: Linear) -> LoraDelta | None:
    if module.lora is None:
        return None
    a_view = None if isinstance(module.lora_A, DTensor) else LocalView(module.lora_A)
    # W and B have the same number of rows, so FSDP2 gives this rank the same rows of both.
    return LoraDelta(f"{name}.lora_A", a_view, LocalView(module.lora_B), module.lora.scale)


def _held_experts(name: str, bank: Experts) -> Iterator[HeldTensor]:
    width = bank.intermediate_size
    parts = (
        ("gate_proj", "gate_up", slice(0, width)),
        ("up_proj", "gate_up", slice(width, 2 * width)),
        ("down_proj", "down", slice(None)),
    )
    num_held, start = local_part(bank.down_proj)[0].shape[0], local_part(bank.down_proj)[1]
    for index in range(num_held):
        expert = bank.first_expert + start + index
        for leaf, stack, rows in parts:
            base_view = LocalView(getattr(bank, f"{stack}_proj"), (index, rows))
            delta = None
            if bank.lora is not None:
                # An expert is held whole, with its own A and B: nothing to gather.
                a, b = getattr(bank, f"{stack}_lora_A"), getattr(bank, f"{stack}_lora_B")
                a_view, b_view = LocalView(a, (index,)), LocalView(b, (index, rows))
                delta = LoraDelta(f"{name}.{expert}.{stack}_lora_A", a_view, b_view, bank.lora.scale)
            shape = tuple(base_view.tensor().shape)
            yield HeldTensor(f"{name}.{expert}.{leaf}.weight", Region((0, 0), shape), base_view, delta)
