"""The experts that one rank holds, and their arithmetic: one autograd.Function over rows sorted by expert.

Parameters (E local experts, H hidden, I expert width, r rank):

    gate_up_proj (E, 2I, H)    gate_up_lora_A (E, r, H)    gate_up_lora_B (E, 2I, r)    gate_up_bias (E, 2I)
    down_proj    (E, H, I)     down_lora_A    (E, r, I)    down_lora_B    (E, H, r)     down_bias    (E, H)

Gate rows come first, as in transformers 5 and in vLLM's w13; the loader separates interleaved ones. Gate and up of an
expert share one A, as PEFT's adapters of fused expert parameters do. Packed experts (int4, mxfp4) have `packed` buffers
in place of the two weights.

    forward     Xp, xa = gather x, s x Agu^T                      GU  = Xp Wgu^T + bias     (grouped product)
                h,  ha = activation(GU + xa Bgu^T), s h Ad^T      y   = h Wd^T + ha Bd^T + bias
                out[t] = sum_k w[t,k] y[t,k]                      (w in y's accumulator, where vLLM has it)
    saved       the routing and the plan, xa and ha (r numbers per row), the adapters in the compute dtype; x (not Xp)
                and GU, unless the layer computes x again; GU also if somebody keeps it
    backward    g,  db = gather grad_out, s g Bd                  dh' = g Wd                (unweighted)
                GU again from x, if it was not saved              dh' += db Ad;  dw = <h, dh'>;  dh = w dh'
                dgu, w h, dba = s dgu Bgu from the activation's backward
                dXp = dgu Wgu + dba Agu
                dBd = g^T w ha   dAd = db^T (w h)   dBgu = dgu^T xa   dAgu = dba^T Xp
                dx[t] = sum_k dXp[t,k]

Owns the order and what is kept. dw, the router's gradient, is <h, dh'> because <y, g> = <h, Wd^T g> + <ha, Bd^T g>
(+ <bias, g>), so the down output is neither saved nor computed again. Weights are never merged with their adapters (no
W + BA), and no gradient is computed for frozen weights. Experts of several ranks cost two exchanges forward and three
backward (x, g, dXp), of tokens or of rows (dispatch.py); that of x runs during the products of g. In a
checkpointed layer so little is kept that recomputing this function would save nothing.

Invariant: a token's output depends only on the token and its experts' weights, not on other tokens in the batch (except
that grouped products choose kernels by row count). Every sum has a fixed order. Where rows travel, the output does not
depend either on which rank holds an expert. Where tokens do, a rank sums its experts' rows before ranks are summed, all
in float32 forward: another order of the same numbers, rounded once as on one rank. In backward, a rank's part of dx is
rounded to the compute dtype before ranks are summed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from slipstream.conf.architecture.activation import SWIGLU, ExpertActivation
from slipstream.conf.architecture.moe_spec import ExpertFormat
from slipstream.conf.schema import CombineMode, LoraConfig
from slipstream.trainer.kernels.experts.gather import gather_project, gather_rows
from slipstream.trainer.kernels.experts.groups import RowGroups
from slipstream.trainer.kernels.experts.low_rank import low_rank_gradient
from slipstream.trainer.kernels.experts.swiglu import InnerAdapter, activate, activate_backward
from slipstream.trainer.lora import Adapted, adapter_dtype
from slipstream.trainer.moe.bank import PackedBank, UnpackBuffers
from slipstream.trainer.moe.dispatch import Dispatch, Gathered
from slipstream.trainer.moe.grouped import GroupedBackend, choose_grouped_backend, grouped_gradient, grouped_product

COPIED_ROWS = 128
"""Mean rows per expert. With more, adapters are copied into the compute dtype before kernels read them."""


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
        """Args: `unpacked`, shared by all layers, is needed only for packed experts."""
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
        if merged is None and adapted and self.lora is not None:
            adapters = (self.gate_up_lora_A, self.gate_up_lora_B, self.down_lora_A, self.down_lora_B)
        base = (*(merged or (self.gate_up_proj, self.down_proj)), self.gate_up_bias, self.down_bias)
        return _RoutedExperts.apply(x_TH, weights_TK, *base, *adapters, plan, self, x_again, keep_gate_up, receive_x)

    @property
    def scale(self) -> float:
        return 1.0 if self.lora is None else self.lora.scale

    @property
    def weighs_in_product(self) -> bool:
        """Whether routing weights multiply the accumulator of the down product, as in vLLM's kernel, not its sum."""
        return self.combine_mode is CombineMode.vllm_like and self.backend is GroupedBackend.triton

    def weights(
        self, gate_up: Tensor | None, down: Tensor | None, dtype: torch.dtype, towards: int
    ) -> tuple[Tensor, Tensor]:
        """gate_up (E, 2I, H) and down (E, H, I) in the compute dtype: these, or those that stay packed."""
        if self.packed is not None:
            return self.packed.weights(towards)
        assert gate_up is not None and down is not None
        return gate_up.to(dtype), down.to(dtype)


class _RoutedExperts(torch.autograd.Function):
    """Tokens through their experts; the arguments are those of Experts.forward. Returns out_TH in x's dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        weights_TK: Tensor,
        gate_up: Tensor | None,
        down: Tensor | None,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        a_gate_up: Tensor | None,
        b_gate_up: Tensor | None,
        a_down: Tensor | None,
        b_down: Tensor | None,
        plan: Dispatch | Gathered,
        bank: Experts,
        x_again: Callable[[], Tensor] | None,
        keep_gate_up: Callable[[Tensor], object] | None,
        receive_x: Callable[[], tuple[Tensor, Tensor]] | None,
    ) -> Tensor:
        groups = plan.groups
        stored = (a_gate_up, b_gate_up, a_down, b_down)
        a_gate_up, b_gate_up, a_down, b_down = (_narrowed(x, x_TH.dtype, groups) for x in stored)
        inner = _inner_adapter(a_down, b_gate_up, bank.scale)
        wgu, wd = bank.weights(gate_up, down, x_TH.dtype, towards=1)
        rows, source = (receive_x or plan.sending(x_TH))()
        if a_gate_up is None:
            rows, xa = gather_rows(rows, source, groups.ends_E), None
        else:
            rows, xa, _ = gather_project(rows, source, a_gate_up, groups, scale=bank.scale)
        gu = grouped_product(rows, wgu.transpose(1, 2), groups, bank.backend, bias_EN=gate_up_bias)
        del rows
        if keep_gate_up is not None:  # not kept itself: it may hold what it keeps
            keep_gate_up(gu)
        h, ha = activate(gu, xa, inner, groups, bank.activation)
        saved_x = x_TH if x_again is None else None
        saved_gu = gu if x_again is None or keep_gate_up is not None else None
        del gu
        more = {"low_SR": ha, "p_ENR": b_down, "bias_EN": down_bias}
        weights_left: Tensor | None = weights_TK.contiguous()
        if bank.weighs_in_product:
            more["weights_S"], weights_left = plan.weights_of_rows(weights_TK), None
        out_TH = plan.combining(  # no variable holds the product, so it is freed as soon as it was read
            grouped_product(h, wd.transpose(1, 2), groups, bank.backend, **more),
            weights_left,
            bank.combine_mode,
            torch.promote_types(x_TH.dtype, torch.float32),
        )()
        ctx.bank, ctx.x_again = bank, x_again
        ctx.adapter_dtypes = [None if factor is None else factor.dtype for factor in stored]
        of_plan, ctx.plan_of = plan.taken_apart()
        of_adapters = (a_gate_up, b_gate_up, a_down, b_down, xa, ha)
        base = (gate_up, down, gate_up_bias, down_bias)
        ctx.save_for_backward(saved_x, saved_gu, weights_TK, *base, *of_adapters, *of_plan)
        return out_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TH: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, gu, weights_TK, gate_up, down, gate_up_bias, down_bias, *rest = ctx.saved_tensors
        a_gate_up, b_gate_up, a_down, b_down, xa, ha, *of_plan = rest
        bank: Experts = ctx.bank
        plan: Dispatch | Gathered = ctx.plan_of(*of_plan)
        groups, dtype = plan.groups, dout_TH.dtype
        receive_g = plan.sending(dout_TH.contiguous())  # runs while x is computed again
        x_TH = ctx.x_again() if x_TH is None else x_TH
        _, _, does_gate_up, does_down, does_gate_up_bias, does_down_bias, *others = ctx.needs_input_grad
        does_adapt = any(others[: len(ctx.adapter_dtypes)])
        inner = _inner_adapter(a_down, b_gate_up, bank.scale)
        wgu, wd = bank.weights(gate_up, down, dtype, towards=-1)

        receive_x = plan.sending(x_TH)  # runs during the products of g
        w_R = plan.weights_of_rows(weights_TK)
        received_g, source = receive_g()
        del receive_g
        db = g_dot_bias = None
        if b_down is None and down_bias is None:
            g = gather_rows(received_g, source, groups.ends_E)
        else:  # with a bias but no adapter, the projection has rank 0
            project = (
                dout_TH.new_empty(groups.num_experts, 0, wd.shape[1]) if b_down is None else b_down.transpose(1, 2)
            )
            g, db, g_dot_bias = gather_project(received_g, source, project, groups, scale=bank.scale, v_EK=down_bias)
            db = db if b_down is not None else None
        dh = grouped_product(g, wd, groups, bank.backend)
        g = g if does_down else None

        received_x, _ = receive_x()
        del receive_x
        is_saved = gu is not None
        rows = gather_rows(received_x, source, groups.ends_E) if gu is None or does_gate_up else None
        if gu is None:
            assert rows is not None
            gu = grouped_product(rows, wgu.transpose(1, 2), groups, bank.backend, bias_EN=gate_up_bias)
        rows = rows if does_gate_up else None
        dgu, hw, dw_R, dba = activate_backward(
            gu, xa, inner, dh, db, w_R, groups, bank.activation,
            needs_h=does_adapt or does_down, may_overwrite_gu=not is_saved,
        )  # fmt: skip
        del gu, dh
        if g_dot_bias is not None:
            dw_R = dw_R + g_dot_bias
        receive_dw = plan.weights_gradient(dw_R)

        grads: dict[str, Tensor] = {}
        of_a_gate_up, of_b_gate_up, of_a_down, of_b_down = ctx.adapter_dtypes
        if does_adapt:
            assert db is not None and hw is not None
            grads["a_down"] = low_rank_gradient(db, hw, groups, torch.empty_like(a_down, dtype=of_a_down))
        hw = hw if does_down else None  # as large as dx, which is made next, and travels while gradients are made

        a_turned = None if a_gate_up is None else a_gate_up.transpose(1, 2)
        receive_dx = plan.combining(  # no variable holds the product, as in forward
            grouped_product(dgu, wgu, groups, bank.backend, low_SR=dba, p_ENR=a_turned), None
        )

        if does_adapt:
            assert dba is not None and a_gate_up is not None and b_down is not None
            grads["a_gate_up"] = torch.empty_like(a_gate_up, dtype=of_a_gate_up)
            grads["b_gate_up"] = torch.empty_like(b_gate_up, dtype=of_b_gate_up)
            grads["b_down"] = torch.empty_like(b_down, dtype=of_b_down)
            low_rank_gradient(dba, received_x, groups, grads["a_gate_up"], source_S=source)
            low_rank_gradient(xa, dgu, groups, grads["b_gate_up"].transpose(1, 2))
            low_rank_gradient(ha, received_g, groups, grads["b_down"].transpose(1, 2), source_S=source, weights_S=w_R)
        if rows is not None:
            grads["gate_up"] = grouped_gradient(dgu, rows, groups, bank.backend)
        if g is not None:
            assert hw is not None
            grads["down"] = grouped_gradient(g, hw, groups, bank.backend)
        if gate_up_bias is not None and does_gate_up_bias:
            ones_S1 = torch.ones_like(w_R, dtype=dtype)[:, None]
            grads["gate_up_bias"] = torch.empty_like(gate_up_bias)
            low_rank_gradient(ones_S1, dgu, groups, grads["gate_up_bias"][:, None])
        if down_bias is not None and does_down_bias:
            grads["down_bias"] = torch.empty_like(down_bias)
            low_rank_gradient(w_R.to(dtype)[:, None], received_g, groups, grads["down_bias"][:, None], source_S=source)
        names = ("gate_up", "down", "gate_up_bias", "down_bias", "a_gate_up", "b_gate_up", "a_down", "b_down")
        return receive_dx(), receive_dw(), *(grads.get(name) for name in names), *[None] * 5


def _narrowed(factor: Tensor | None, dtype: torch.dtype, groups: RowGroups) -> Tensor | None:
    """Copy an adapter's factors into the compute dtype if kernels will read them often enough to pay for the copy. The
    values are the same either way: kernels round what they read."""
    is_read_often = factor is not None and groups.expected_rows > COPIED_ROWS * factor.shape[0]
    return factor.to(dtype) if factor is not None and is_read_often else factor


def _inner_adapter(a_down: Tensor | None, b_gate_up: Tensor | None, scale: float) -> InnerAdapter | None:
    return None if a_down is None or b_gate_up is None else InnerAdapter(b_gate_up, a_down, scale)
