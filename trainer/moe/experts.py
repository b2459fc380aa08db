"""The experts that one rank holds: base weights, an adapter per expert, and how they are computed.

Parameters (E local experts, H hidden, I expert width, r rank):

    gate_up_proj (E, 2I, H)    gate_up_lora_A (E, r, H)    gate_up_lora_B (E, 2I, r)    gate_up_bias (E, 2I)
    down_proj    (E, H, I)     down_lora_A    (E, r, I)    down_lora_B    (E, H, r)     down_bias    (E, H)

Gate rows come first, as in transformers 5 and in vLLM's w13; the loader separates interleaved ones.
Gate and up of an expert share one A, as PEFT's adapters of fused expert parameters do. Packed experts (int4, mxfp4)
have `packed` buffers in place of the two weights. The arithmetic is trainer.moe.routed's.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from slipstream.conf.architecture.activation import SWIGLU, ExpertActivation
from slipstream.conf.architecture.moe_spec import ExpertFormat
from slipstream.conf.schema import CombineMode, LoraConfig
from slipstream.trainer.lora import Adapted, adapter_dtype
from slipstream.trainer.moe.bank import PackedBank, UnpackBuffers
from slipstream.trainer.moe.dispatch import Dispatch
from slipstream.trainer.moe.gathered import Gathered
from slipstream.trainer.moe.grouped import GroupedBackend, choose_grouped_backend
from slipstream.trainer.moe.routed import ExpertCall, RoutedExperts


class Experts(Adapted):
    """The routed experts of a layer that this rank holds. One FSDP2 unit if experts are sharded."""

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
        combine_mode: CombineMode = CombineMode.fp32_once,
        expert_format: ExpertFormat = ExpertFormat.plain,
        unpacked: UnpackBuffers | None = None,
    ) -> None:
        """Args as in the module's docstring; `unpacked`, shared by all layers, is needed only for packed experts."""
        super().__init__()
        self.lora = lora
        self.first_expert = first_expert
        self.num_local_experts = num_local_experts
        self.intermediate_size = intermediate_size
        self.activation = activation
        self.combine_mode = combine_mode
        hidden, width = hidden_size, intermediate_size
        self.backend = choose_grouped_backend(device, compute_dtype, (hidden, width, 2 * width))
        self.reads_counts = self.backend is GroupedBackend.native
        """Whether the host waits for the device to learn how many rows each expert gets."""

        def stacked(*shape: int, dtype: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_local_experts, *shape, dtype=dtype))

        self.packed: PackedBank | None = None
        self.gate_up_proj: nn.Parameter | None = None
        self.down_proj: nn.Parameter | None = None
        if expert_format is ExpertFormat.plain:
            self.gate_up_proj = stacked(2 * width, hidden, dtype=weight_dtype)
            self.down_proj = stacked(hidden, width, dtype=weight_dtype)
        else:
            assert unpacked is not None, "packed experts share two pairs of buffers for unpacked weights"
            self.packed = PackedBank(expert_format, num_local_experts, hidden, width, unpacked)
        self.gate_up_bias = stacked(2 * width, dtype=weight_dtype) if has_bias else None
        self.down_bias = stacked(hidden, dtype=weight_dtype) if has_bias else None
        if lora is not None:
            dtype = adapter_dtype(lora)
            self.gate_up_lora_A = stacked(lora.rank, hidden, dtype=dtype)
            self.gate_up_lora_B = stacked(2 * width, lora.rank, dtype=dtype)
            self.down_lora_A = stacked(lora.rank, width, dtype=dtype)
            self.down_lora_B = stacked(hidden, lora.rank, dtype=dtype)

    def forward(
        self,
        x_TH: Tensor,
        weights_TK: Tensor,
        plan: Dispatch | Gathered,
        x_again: Callable[[], Tensor] | None = None,
        keep_gate_up: Callable[[Tensor], object] | None = None,
        *,
        adapted: bool = True,
        merged: tuple[Tensor, Tensor] | None = None,
        receive_x: Callable[[], tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:
        """[T, H] tokens, their routing weights and their way to the experts -> [T, H].

        A rank without rows still joins every exchange and gives every parameter a gradient.

        Args:
            x_TH: in the compute dtype.
            weights_TK: compute dtype or float32.
            x_again: computes x_TH in the backward pass, and the product of gate and up (2I numbers per row) is computed
                from it; None: both are saved.
            keep_gate_up: called with that product, which is saved then even if x is computed again.
            merged: weights with the adapters in them, to compute with instead of both.
            receive_x: what plan.sending(x_TH) returned; None: it was not called.
        """
        adapters: tuple[Tensor | None, ...] = (None, None, None, None)
        scale = 1.0
        if merged is None and adapted and self.lora is not None:
            adapters = (self.gate_up_lora_A, self.gate_up_lora_B, self.down_lora_A, self.down_lora_B)
            scale = self.lora.scale
        base = (*(merged or (self.gate_up_proj, self.down_proj)), self.gate_up_bias, self.down_bias)
        call = ExpertCall(self.activation, scale, self.backend, self.combine_mode, self.packed)
        return RoutedExperts.apply(x_TH, weights_TK, *base, *adapters, plan, call, x_again, keep_gate_up, receive_x)
