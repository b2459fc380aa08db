"""What this rank holds, in checkpoint coordinates, and how an adapter merges into it.

The one translation between module parameters (stacked experts, FSDP2 row shards, adapters beside their base) and
checkpoint tensors: nothing else knows that rows 0..I-1 of `mlp.experts.gate_up_proj[3]` are
`mlp.experts.3.gate_proj.weight`. A parameter's rows are counted through its whole stack: the first of these is row
3 * 2I.

Invariant: over all ranks, the regions of one checkpoint tensor are disjoint and cover it, or every rank holds all of it
(model.build_decoder.replicated_parameters). No function here communicates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from slipstream.conf.architecture.moe_spec import CheckpointNames
from slipstream.trainer.lora import Linear
from slipstream.trainer.moe.experts import Experts
from slipstream.trainer.moe.router import Router
from slipstream.trainer.parallel import local_part
from slipstream.trainer.weights.fused_experts import FusedTensor, fused_experts
from slipstream.trainer.weights.row_runs import LoraDelta, RowRun, Rows, local_rows
from slipstream.weight_sync.layout import Region

if TYPE_CHECKING:
    from slipstream.trainer.model.decoder import Decoder


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A rectangle of a checkpoint tensor that this rank holds.

    Example: rows 64..127 of `model.layers.0.self_attn.q_proj.weight`.
    """

    tensor: str
    region: Region
    """Where the rectangle lies in that tensor. It is cut only in the first dim."""
    parameter: nn.Parameter
    """The parameter whose rows these are."""
    first_row: int
    """Index of its first row among this rank's rows of the parameter."""
    delta: LoraDelta | None = None
    """None if nothing merges into this tensor."""

    @property
    def base(self) -> Tensor:
        """Live values, of shape region.shape: the frozen base (LoRA) or the float32 weight (full training)."""
        rows = local_rows(self.parameter)[self.first_row : self.first_row + self.region.shape[0]]
        return rows.view(self.region.shape)

    def fill(self, values: Tensor) -> None:
        self.base.copy_(values)

    def run(self, region: Region) -> RowRun:
        """Where `region`, a part of self.region in coordinates of the checkpoint tensor, lies in the parameter."""
        start = self.first_row + region.start[0] - self.region.start[0]
        columns = slice(region.start[-1], region.stop[-1]) if region.shape[1:] else None
        return RowRun(self.parameter, self.delta, Rows(start, region.shape[0]), columns)


def local_shards(decoder: Decoder) -> list[HeldTensor | FusedTensor]:
    """Every non-empty rectangle that this rank holds, in the order of the module's parameters; packed experts are in
    packed_experts.py.

    Views are live: they see the optimizer's updates.
    """
    held: list[HeldTensor | FusedTensor] = []
    names = CheckpointNames() if decoder.spec.moe is None else decoder.spec.moe.names
    for name, module in decoder.named_modules():
        if isinstance(module, Experts):
            is_stacked = decoder.spec.moe is not None and decoder.spec.moe.is_beside_dense
            held.extend(_held_experts(names.of_block(name), module, names.projections, is_stacked=is_stacked))
        elif isinstance(module, Router):
            block = names.of_block(name).rpartition(".")[0]
            for leaf, p in module.named_parameters(recurse=False):
                held.append(_held_rows(f"{block}.{module.moe.router_leaf(leaf)}", p))
        elif isinstance(module, Linear):
            held.append(_held_rows(f"{name}.weight", module.weight, _linear_delta(name, module)))
            if module.bias is not None:
                held.append(_held_rows(f"{name}.bias", module.bias))
        else:
            held.extend(_held_rows(f"{name}.{leaf}", p) for leaf, p in module.named_parameters(recurse=False))
    return [one for one in held if one.region.num_elements > 0]


def sharded_lora_a(decoder: Decoder) -> dict[str, DTensor]:
    """Every A that is sharded over ranks, by LoraDelta.key; none on a single rank."""
    return {
        f"{name}.lora_A": module.lora_A
        for name, module in decoder.named_modules()
        if isinstance(module, Linear) and module.lora is not None and isinstance(module.lora_A, DTensor)
    }


def _held_rows(tensor: str, parameter: nn.Parameter, delta: LoraDelta | None = None) -> HeldTensor:
    local, start = local_part(parameter)
    region = Region((start,) + (0,) * (local.dim() - 1), tuple(local.shape))
    return HeldTensor(tensor, region, parameter, 0, delta)


def _linear_delta(name: str, module: Linear) -> LoraDelta | None:
    if module.lora is None:
        return None
    # W and B have the same number of rows, so FSDP2 gives this rank the same rows of both.
    first_row = local_part(module.weight)[1]
    return LoraDelta(
        f"{name}.lora_A", module.lora_A, module.lora_B, module.weight.shape[0], first_row, module.lora.scale,
        module.rounding_keys.get("weight"),
    )  # fmt: skip


def _held_experts(
    name: str, bank: Experts, projections: tuple[str, str, str], *, is_stacked: bool
) -> Iterator[HeldTensor | FusedTensor]:
    """Args: the bank's name in the checkpoint, the bank, the names there of gate, up and down; or all are stacked."""
    width = bank.intermediate_size
    gate, up, down = projections
    parts = ((gate, "gate_up", 0, width), (up, "gate_up", width, width), (down, "down", 0, None))
    # A rank holds an expert whole, with its A and B, so nothing is gathered.
    deltas = {stack: _stack_delta(name, bank, stack) for stack in ("gate_up", "down")}
    if is_stacked or bank.gate_up_bias is not None:  # every family whose experts have biases fuses them
        yield from fused_experts(name, bank, deltas, is_turned=not is_stacked)
        return
    if bank.down_proj is None:  # packed: see packed_experts.py
        return
    num_held, start = local_part(bank.down_proj)[0].shape[0], local_part(bank.down_proj)[1]
    for index in range(num_held):
        for leaf, stack, first_row, num_rows in parts:
            parameter: nn.Parameter = getattr(bank, f"{stack}_proj")
            rows_an_expert, columns = parameter.shape[1:]
            region = Region((0, 0), (rows_an_expert if num_rows is None else num_rows, columns))
            tensor = f"{name}.{bank.first_expert + start + index}.{leaf}.weight"
            yield HeldTensor(tensor, region, parameter, index * rows_an_expert + first_row, deltas[stack])


def _stack_delta(name: str, bank: Experts, stack: str) -> LoraDelta | None:
    if bank.lora is None:
        return None
    a, b = getattr(bank, f"{stack}_lora_A"), getattr(bank, f"{stack}_lora_B")
    stack_row = (bank.first_expert + local_part(b)[1]) * b.shape[1]
    key = bank.rounding_keys.get(f"{stack}_proj")
    return LoraDelta(f"{name}.{stack}_lora_A", a, b, b.shape[1], 0, bank.lora.scale, key, stack_row)
