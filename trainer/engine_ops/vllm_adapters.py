"""The operations that a batch-invariant vLLM engine adds adapters with, as functions of tensors.

    linear    x -> shrink: x A^T, float32 -> expand: rounded, times B^T, rounded, added to x W^T, rounded
    experts   gate_up: the same, added before the activation; down: times the router's weight, rounded, added to the
              weighted down product, rounded, before a token's experts are summed. x A^T is rounded once, as above.

Every row has the adapter of slot 0. Owns the calls of vLLM's adapter kernels (`lora/punica_wrapper`), and the order of
an expert block with adapters, which is that of `TritonExperts.apply`. vLLM is imported inside functions.
Invariant: a row has the bits of an engine with VLLM_BATCH_INVARIANT=1, and they depend on that row alone. For few rows
vLLM adds experts' adapters by another kernel; `rollout.in_vllm.vllm_patches` keeps engines from it, and here few rows
are padded to MIN_ROWS.

Shapes: T packed tokens, H hidden, E experts, K experts of a token, I width of an expert.
"""

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.trainer.engine_ops.published import Factors
from slipstream.trainer.engine_ops.vllm_operations import imports_batch_invariant

MODULES = (
    "vllm._custom_ops",
    "vllm.config.lora",
    "vllm.lora.punica_wrapper.punica_gpu",
    "vllm.model_executor.layers.fused_moe.fused_moe",
    "vllm.triton_utils",
)
"""Where both releases of vLLM have what is called here."""
MIN_ROWS = 128
"""Enough for vLLM's kernel of many rows, with up to 1,024 experts per expert of a token."""
NOT_QUANTIZED = dict.fromkeys(
    ("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "per_channel_quant"), False
)


class VllmAdapters:
    """See the module's docstring. Made once per process, after VllmOperations.

    Args:
        rank: Of the engine's slots.

    Raises:
        TrainerError: vLLM is missing on this node.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        with imports_batch_invariant():
            self._ops, config, self._punica, self._moe, self._triton = map(import_module, MODULES)
        self._config, self._device = config.LoRAConfig(max_lora_rank=rank, max_loras=1), device
        self._enabled = torch.ones(2, dtype=torch.int32, device=device)
        self._wrapper: Any = None
        self._capacity = self._num_rows = 0

    def add(self, out_TO: Tensor, x_TI: Tensor, factors: Factors) -> Tensor:
        """Add to `out`, in place, the products of adapters of linears side by side, in their order."""
        widths = tuple(b.shape[-2] for b in factors.b)
        self._over(len(x_TI)).add_lora_linear(out_TO, x_TI, factors.a, factors.b, 1.0, widths)
        return out_TO

    def experts(
        self,
        x_TH: Tensor,
        weights: tuple[Tensor, Tensor],
        adapters: tuple[Factors, Factors],
        weights_TK: Tensor,
        experts_TK: Tensor,
    ) -> Tensor:
        """The weighted sum of each token's experts.

        Args:
            weights: gate_up (E, 2I, H) and down (E, H, I).
            adapters: Of gate and up, and of down.
            weights_TK: The router's weights, float32.
            experts_TK: Experts of each token, int32.
        """
        num_rows = len(x_TH)
        x_TH, weights_TK, experts_TK = (_at_least(x, MIN_ROWS) for x in (x_TH, weights_TK, experts_TK))
        (gate_up, down), (of_gate_up, of_down) = weights, adapters
        T, K = experts_TK.shape
        E, width, H = gate_up.shape
        config = self._moe.try_get_optimal_moe_config(gate_up.shape, down.shape, K, None, T)
        sorted_rows = self._moe._prepare_expert_assignment(experts_TK, config, T, K, E, None)
        compute_type = self._triton.tl.bfloat16

        def product(x: Tensor, weight: Tensor, out: Tensor, by: Tensor | None, rows_per_token: int) -> None:
            self._moe.invoke_fused_moe_triton_kernel(
                x, weight, out, None, None, by, *sorted_rows, by is not None, rows_per_token, config,
                compute_type=compute_type, **NOT_QUANTIZED,
            )  # fmt: skip

        wrapper = self._over(T)
        gate_up_TKI = x_TH.new_empty(T, K, width)
        product(x_TH, gate_up, gate_up_TKI, None, K)
        rows_of_slots = wrapper.add_lora_w13(
            gate_up_TKI, x_TH, *of_gate_up, experts_TK, weights_TK, None, gate_up, down, T, K, 1, self._enabled, E, K,
            len(of_gate_up.b), False, False,
        )  # fmt: skip
        hidden = x_TH.new_empty(T * K, width // 2)
        torch.ops._C.silu_and_mul(hidden, gate_up_TKI.view(T * K, width))
        del gate_up_TKI
        out_TKH = x_TH.new_empty(T, K, H)
        product(hidden, down, out_TKH, weights_TK, 1)
        wrapper.add_lora_w2(
            out_TKH, hidden, *of_down, weights_TK, *rows_of_slots, T, gate_up, down, K, 1, self._enabled, K,
            False, 0, False,
        )  # fmt: skip
        out_TH = torch.empty_like(x_TH)
        self._ops.moe_sum(out_TKH, out_TH)
        return out_TH[:num_rows]

    def _over(self, num_rows: int) -> Any:
        """vLLM's wrapper of the kernels, told that each of so many rows has the adapter of slot 0."""
        if num_rows > self._capacity:
            self._capacity, self._num_rows = 1 << (num_rows - 1).bit_length(), 0
            self._wrapper = self._punica.PunicaWrapperGPU(
                self._capacity, max_batches=1, device=self._device, lora_config=self._config
            )
        if num_rows != self._num_rows:
            self._num_rows = num_rows
            slots = torch.zeros(num_rows, dtype=torch.int32, device=self._device)
            self._wrapper.token_mapping_meta.prepare_tensors(slots)
        return self._wrapper


def _at_least(x: Tensor, num_rows: int) -> Tensor:
    """x, below it as many rows of zeros as are missing."""
    return x if len(x) >= num_rows else F.pad(x, (0, 0, 0, num_rows - len(x)))
