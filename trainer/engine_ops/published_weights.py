"""Weights as engines hold them: what a publish would write there now, for the trainer's own use.

Keeps nothing: every call merges anew, into memory that is freed after use. Invariant: the bits are those of
`trainer.delivery.merged_source`, because both merge with `weight_sync.merging.merge` and round once, to the compute
dtype.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.trainer.lora import Linear
from slipstream.trainer.moe.experts import Experts
from slipstream.weight_sync.merging.merge import merger
from slipstream.weight_sync.merging.merge_operands import MergeOperands


def published_linears(
    linears: Sequence[Linear], dtype: torch.dtype, *, adapted: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Weights of linears of one input, one below the other, and their biases; None where they have none. Adapters are
    in the weights if `adapted`."""
    if not adapted or all(linear.lora is None for linear in linears):
        return base_linears(linears, dtype)
    rows = [linear.weight.shape[0] for linear in linears]
    weight = linears[0].weight.new_empty(sum(rows), linears[0].weight.shape[1], dtype=dtype)
    for linear, out in zip(linears, weight.split(rows), strict=True):
        if linear.lora is None:
            out.copy_(linear.weight)
        else:
            _write(linear, "weight", linear.weight, linear.lora_A, linear.lora_B, out)
    return weight.detach(), _biases(linears, dtype)


def base_linears(linears: Sequence[Linear], dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The same without adapters."""
    weights = [linear.base(dtype)[0] for linear in linears]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    return weight.detach(), _biases(linears, dtype)


def published_experts(bank: Experts, dtype: torch.dtype, *, adapted: bool = True) -> tuple[Tensor, Tensor]:
    """gate_up (E, 2I, H) and down (E, H, I) of all experts of a layer."""
    if not adapted or bank.lora is None:
        return base_experts(bank, dtype)
    gate_up, down = bank.gate_up_proj, bank.down_proj
    assert gate_up is not None and down is not None, "packed experts have no merged weights"
    outs = torch.empty_like(gate_up, dtype=dtype), torch.empty_like(down, dtype=dtype)
    _write(bank, "gate_up_proj", gate_up, bank.gate_up_lora_A, bank.gate_up_lora_B, outs[0])
    _write(bank, "down_proj", down, bank.down_lora_A, bank.down_lora_B, outs[1])
    return outs


def base_experts(bank: Experts, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same without adapters."""
    assert bank.gate_up_proj is not None and bank.down_proj is not None, "packed experts have weights of other shapes"
    return bank.gate_up_proj.detach().to(dtype), bank.down_proj.detach().to(dtype)


def _biases(linears: Sequence[Linear], dtype: torch.dtype) -> Tensor | None:
    biases = [linear.base(dtype)[1] for linear in linears]
    present = [bias for bias in biases if bias is not None]
    return torch.cat(present).detach() if present else None


@torch.no_grad()
def _write(module: Linear | Experts, leaf: str, base: Tensor, a: Tensor, b: Tensor, out: Tensor) -> None:
    """Merge the parameter `leaf`, a matrix or a stack of them, into `out`."""
    assert module.lora is not None
    rows, columns, rank = base.shape[-2], base.shape[-1], a.shape[-2]
    operands = MergeOperands(
        base.detach().view(1, -1, columns),
        b.detach().view(1, -1, rank),
        a.detach().view(-1, rank, columns),
        module.lora.scale,
        first_row=0,
        rows_a_factor=rows,
        key=module.rounding_keys.get(leaf),
    )
    merger(operands, out.view(1, -1, columns))()
