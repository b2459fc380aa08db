"""The experts that one rank holds: stacked SwiGLU weights, and an adapter per expert.

Owns the arithmetic on rows that are already sorted by expert. Parameters (E local experts, H hidden, I expert width, r
rank):

    gate_up_proj (E, 2I, H)    gate_up_lora_A (E, r, H)    gate_up_lora_B (E, 2I, r)
    down_proj    (E, H, I)     down_lora_A    (E, r, I)    down_lora_B    (E, H, r)

Gate rows come first, as in transformers 5 and in vLLM's w13. Gate and up of an expert share one A, as PEFT's adapters
of fused expert parameters do. Does not know where rows come from.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.schema import LoraConfig
from trainer.lora import Adapted, adapter_dtype
from trainer.moe.activation import SWIGLU, ExpertActivation
from trainer.moe.grouped import choose_grouped_backend, grouped_linear


class Experts(Adapted):
    """down(silu(gate(x)) * up(x)) for every local expert. Its forward is one FSDP2 unit where experts are sharded."""

    def __init__(
        self,
        *,
        hidden_size: int,
        intermediate_size: int,
        first_expert: int,
        num_local_experts: int,
        compute_dtype: torch.dtype,
        weight_dtype: torch.dtype,
        lora: LoraConfig | None,
        device: torch.device,
        activation: ExpertActivation = SWIGLU,
        has_bias: bool = False,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.lora = lora
        self.first_expert = first_expert
        self.num_local_experts = num_local_experts
        self.intermediate_size = intermediate_size

        def stacked(rows: int, columns: int, dtype: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_local_experts, rows, columns, dtype=dtype))

        hidden, width = hidden_size, intermediate_size
        self.gate_up_proj = stacked(2 * width, hidden, weight_dtype)
        self.down_proj = stacked(hidden, width, weight_dtype)
        self.gate_up_bias = self.down_bias = None
        if has_bias:
            self.gate_up_bias = nn.Parameter(torch.empty(num_local_experts, 2 * width, dtype=weight_dtype))
            self.down_bias = nn.Parameter(torch.empty(num_local_experts, hidden, dtype=weight_dtype))
        self.backend = choose_grouped_backend(device, compute_dtype, (hidden, width, 2 * width))
        if lora is not None:
            dtype = adapter_dtype(lora)
            self.gate_up_lora_A = stacked(lora.rank, hidden, dtype)
            self.gate_up_lora_B = stacked(2 * width, lora.rank, dtype)
            self.down_lora_A = stacked(lora.rank, width, dtype)
            self.down_lora_B = stacked(hidden, lora.rank, dtype)
            self.lora_backend = choose_grouped_backend(device, compute_dtype, (hidden, width, 2 * width, lora.rank))

    def forward(self, rows_SH: Tensor, counts_E: Tensor) -> Tensor:
        """[S, H] rows sorted by local expert, counts_E of each -> [S, H].

        S = 0 still touches every parameter's gradient.
        """
        gate_up = self._project(rows_SH, counts_E, "gate_up")
        gate, up = gate_up.chunk(2, dim=-1)
        return self._project(self._activate(gate, up), counts_E, "down")

    def _activate(self, gate: Tensor, up: Tensor) -> Tensor:
        how = self.activation
        if how == SWIGLU:
            return F.silu(gate) * up
        gate, up = gate.clamp(max=how.limit), up.clamp(min=None if how.limit is None else -how.limit, max=how.limit)
        return (up + how.up_offset) * (gate * torch.sigmoid(gate * how.alpha))

    def _project(self, x: Tensor, counts_E: Tensor, name: str) -> Tensor:
        weight = getattr(self, f"{name}_proj").to(x.dtype)
        y = grouped_linear(x, weight, counts_E, self.backend)
        bias = self.gate_up_bias if name == "gate_up" else self.down_bias
        if bias is not None:
            y = y + bias.to(x.dtype).repeat_interleave(counts_E, dim=0)
        if self.lora is None or not self.adapters_enabled:
            return y
        a, b = getattr(self, f"{name}_lora_A").to(x.dtype), getattr(self, f"{name}_lora_B").to(x.dtype)
        low_rank = grouped_linear(grouped_linear(x, a, counts_E, self.lora_backend), b, counts_E, self.lora_backend)
        return torch.add(y, low_rank, alpha=self.lora.scale)
