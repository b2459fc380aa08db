"""The operations that a batch-invariant vLLM engine computes a model with, as functions of tensors; and vLLM's
FlashAttention 3 as the kernel of the trainer's own attention (Roundings.attention).

Owns imports of vLLM, all inside functions, and where FlashAttention 3 can be called (a Hopper GPU, 16 bits, head widths
that it takes, vLLM on this node). Does not own the operations' order (engine_forward.py), nor gradients: nothing here
is differentiable.
Invariant: a row's result depends on that row alone, hence not on how many rows a call has, and it has the bits that the
engine computes with VLLM_BATCH_INVARIANT=1 (vLLM 0.25.1 and 0.32, `batch_invariant.py`).

Shapes: T packed tokens, H hidden, N query heads, G key/value heads, D head_dim, E experts, K experts of a token,
I width of a feed-forward, V vocabulary.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.conf.architecture.attention_spec import GqaSpec, MlaSpec
from slipstream.conf.architecture.model_spec import ModelSpec
from slipstream.trainer.errors import TrainerError
from slipstream.trainer.model.attention.flash_attention import AttentionCall
from slipstream.trainer.model.packed_sequences import PackedSequences

MODULES = (
    "vllm._custom_ops",
    "vllm.model_executor.layers.fused_moe.fused_moe",
    "vllm.model_executor.layers.fused_moe.router.fused_topk_router",
    "vllm.v1.attention.backends.fa_utils",
    "vllm.v1.worker.gpu.sample.logprob",
)
"""Where both releases of vLLM have what is called here."""
BATCH_INVARIANT = "vllm.model_executor.determinism.batch_invariant", "vllm.model_executor.layers.batch_invariant"
"""The kernels of VLLM_BATCH_INVARIANT: in 0.32, in 0.25.1."""
VOCAB_PADDING = 64
"""An engine's head has a multiple of so many rows."""
FIRST_POSITIONS = 4096
"""Rows of the first table of cosines and sines; it doubles as sequences grow."""
MAX_HEAD_DIM = 256
"""The widest head whose gradients torch computes; vLLM's FlashAttention 3 has the same bound."""


class VllmOperations:
    """See the module's docstring. Made once per process, before anything else in it imports vLLM."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        """Load vLLM's kernels. Raises TrainerError: vLLM is missing on this node."""
        with imports_batch_invariant():
            custom_ops, experts, router, attention, self._sampler = map(import_module, MODULES)
            batch_invariant = batch_invariant_kernels()
        attention_spec = spec.attentions[0]
        assert isinstance(attention_spec, GqaSpec)
        self._custom_ops, self._batch_invariant = custom_ops, batch_invariant
        self._fused_experts, self._fused_topk = experts.fused_experts, router.fused_topk
        self._flash_attention = attention.flash_attn_varlen_func
        self._flash_version = attention.get_flash_attn_version(head_size=attention_spec.head_dim)
        self._head_dim, self._theta = attention_spec.head_dim, attention_spec.rope.theta
        self._dtype, self._device = dtype, device
        self._cos_sin = self._rotation_table(FIRST_POSITIONS)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm over the last dim, also of the rounded sum of the residual stream and a block's output. For sums vLLM
        has another kernel, whose bits depend on the number of rows; engines are told to use this one
        (rollout.in_vllm.vllm_patches)."""
        return self._batch_invariant.rms_norm_batch_invariant(x, weight, eps)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._batch_invariant.linear_batch_invariant(x, weight, bias)

    def rotate(self, q_TND: Tensor, k_TGD: Tensor, sequences: PackedSequences) -> tuple[Tensor, Tensor]:
        if sequences.max_length > len(self._cos_sin):
            self._cos_sin = self._rotation_table(1 << (sequences.max_length - 1).bit_length())
        q_TND, k_TGD = (x.clone(memory_format=torch.contiguous_format) for x in (q_TND, k_TGD))  # written over
        self._custom_ops.rotary_embedding(
            sequences.positions_T, q_TND.flatten(1), k_TGD.flatten(1), self._head_dim, self._cos_sin, True
        )
        return q_TND, k_TGD

    def attend(self, q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor, sequences: PackedSequences, scale: float) -> Tensor:
        """Causal attention, each sequence alone: [T, N, D]."""
        prefill = _prefill(sequences, scale, self._flash_version)
        return self._flash_attention(q=q_TND, k=k_TGD, v=v_TGD, **prefill)

    def silu_and_mul(self, gate_up_TI: Tensor) -> Tensor:
        """silu(gate) * up of [T, 2I], gate first."""
        out_TI = gate_up_TI.new_empty(*gate_up_TI.shape[:-1], gate_up_TI.shape[-1] // 2)
        torch.ops._C.silu_and_mul(out_TI, gate_up_TI)
        return out_TI

    def route(self, x_TH: Tensor, logits_TE: Tensor, top_k: int, does_normalize: bool) -> tuple[Tensor, Tensor]:
        """Weights (float32) and ids (int32) of the K best experts by softmax."""
        weights_TK, experts_TK, _ = self._fused_topk(x_TH, logits_TE, top_k, does_normalize)
        return weights_TK, experts_TK

    def experts(self, x_TH: Tensor, gate_up: Tensor, down: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """The weighted sum of each token's experts: gate_up (E, 2I, H), down (E, H, I)."""
        return self._fused_experts(x_TH, gate_up, down, weights_TK, experts_TK)

    def token_logprobs(self, logits_TV: Tensor, targets_T: Tensor) -> Tensor:
        """The sampler's log-probabilities of the targets at temperature 1, float32."""
        logits_TV = as_sampled(logits_TV, self._batch_invariant)
        return self._sampler.compute_token_logprobs(logits_TV, targets_T[:, None])[:, 0]

    def _rotation_table(self, num_positions: int) -> Tensor:
        """Cosines beside sines, by the engine's own code on its own device: powers differ by an ulp between devices."""
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.rotary_embedding import get_rope

        turning = {"rope_theta": self._theta, "rope_type": "default"}
        with set_current_vllm_config(VllmConfig()), self._device:
            rope = get_rope(self._head_dim, num_positions, rope_parameters=turning, dtype=self._dtype)
        return rope.cos_sin_cache.to(self._device, self._dtype)


@contextmanager
def imports_batch_invariant() -> Generator[None]:
    """The block imports modules of vLLM, which take batch-invariant kernels then.

    Raises:
        TrainerError: vLLM is missing on this node.
    """
    os.environ["VLLM_BATCH_INVARIANT"] = "1"  # vLLM's C++ and Triton wrappers read it once, at their first use
    try:
        yield
    except ImportError as error:
        raise TrainerError(
            f"trainer.numerics.match=bitwise needs vLLM where the trainer runs: {error}; install it there, or choose "
            "parity=standard"
        ) from error


def batch_invariant_kernels() -> ModuleType:
    newer, older = BATCH_INVARIANT
    try:
        return import_module(newer)
    except ModuleNotFoundError:
        return import_module(older)


def as_sampled(logits_TV: Tensor, kernels: ModuleType) -> Tensor:
    """Logits as the engine's sampler hands them to its kernel, which adds a row's exponentials in another order for
    another dtype, and for rows that begin at no multiple of 16. 0.25.1 copies them to float32. 0.32 takes them as they
    are at temperature 1: in the model's dtype, in rows that are padded as the engine's head is."""
    if kernels.__name__ != BATCH_INVARIANT[0]:
        return logits_TV.float()
    vocab_size = logits_TV.shape[1]
    padding = -vocab_size % VOCAB_PADDING
    return F.pad(logits_TV, (0, padding))[:, :vocab_size] if padding else logits_TV


def refusal_of_engine_attention(
    capability: tuple[int, int] | None, dtype: torch.dtype, attention: GqaSpec | MlaSpec
) -> str | None:
    """Why this attention cannot be computed by vLLM's kernel here; None if it can. Imports vLLM last.

    Args:
        capability: Compute capability of the trainer's GPU; None: it has none.
    """
    if capability is None:
        return "the trainer has no GPU"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"model.dtype={str(dtype).removeprefix('torch.')} is not one of bfloat16, float16"
    if capability[0] != 9:
        return f"FlashAttention 3 is for Hopper GPUs, this one has compute capability {capability[0]}.{capability[1]}"
    if not _takes_widths(attention):
        return f"heads of width {attention.qk_head_dim} are not ones that vLLM's FlashAttention 3 takes"
    try:
        from vllm.vllm_flash_attn import fa_version_unsupported_reason, is_fa_version_supported
    except ImportError as error:
        return f"vLLM's attention cannot be imported where the trainer runs: {error}"
    if not is_fa_version_supported(3):
        return f"vLLM has no FlashAttention 3 here: {fa_version_unsupported_reason(3)}"
    return None


def _takes_widths(attention: GqaSpec | MlaSpec) -> bool:
    """The kernel takes equal widths, and those of DeepSeek's latent attention (vLLM's `hopper/flash_api.cpp`)."""
    width = attention.qk_head_dim
    if width % 8 or width > MAX_HEAD_DIM:
        return False
    value_width = attention.v_head_dim
    return value_width == width or (128 < width <= 192 and 96 < value_width <= 128 and value_width % 8 == 0)


class VllmAttention:
    """An EngineKernel. Make one where `refusal_of_engine_attention` has nothing to say."""

    def __init__(self) -> None:
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        self._run = flash_attn_varlen_func

    def __call__(self, q_TND: Tensor, k_TGD: Tensor, v_TGV: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """As EngineKernel."""
        window, sinks_N = call.window, call.sinks_N
        out_TNV, log_sums_NT = self._run(
            q=q_TND, k=k_TGD, v=v_TGV, window_size=None if window is None else [window - 1, 0],
            s_aux=None if sinks_N is None else sinks_N.detach().to(torch.bfloat16), return_softmax_lse=True,
            **_prefill(call.sequences, call.scale, 3),
        )  # fmt: skip
        return out_TNV, log_sums_NT


def _prefill(sequences: PackedSequences, scale: float, version: int) -> dict[str, Any]:
    """Causal attention of whole sequences, as arguments of vLLM's kernel. Keys are not split among thread blocks: an
    engine's prefill does not split them either."""
    starts, longest = sequences.cu_seqlens, sequences.max_length
    return {
        "cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest,
        "softmax_scale": scale, "causal": True, "num_splits": 1, "fa_version": version,
    }  # fmt: skip
