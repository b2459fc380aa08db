"""vLLM's FlashAttention 3 as the kernel of the trainer's attention (Roundings.attention).

Owns: where that kernel can be called (a Hopper GPU, 16 bits, head widths that it takes, vLLM on this node), and the
call. Does not own gradients (trainer/model/attention/flash_attention.py).
"""

import torch
from torch import Tensor

from slipstream.conf.architecture.attention_spec import GqaSpec, MlaSpec
from slipstream.trainer.model.attention.flash_attention import AttentionCall

MAX_HEAD_DIM = 256
"""The widest head whose gradients torch computes; vLLM's kernel has the same bound."""


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
        """As EngineKernel. Keys are not split among thread blocks: an engine's prefill does not split them either."""
        sequences, window, sinks_N = call.sequences, call.window, call.sinks_N
        out_TNV, log_sums_NT = self._run(
            q=q_TND,
            k=k_TGD,
            v=v_TGV,
            cu_seqlens_q=sequences.cu_seqlens,
            cu_seqlens_k=sequences.cu_seqlens,
            max_seqlen_q=sequences.max_length,
            max_seqlen_k=sequences.max_length,
            softmax_scale=call.scale,
            causal=True,
            window_size=None if window is None else [window - 1, 0],
            num_splits=1,
            fa_version=3,
            s_aux=None if sinks_N is None else sinks_N.detach().to(torch.bfloat16),
            return_softmax_lse=True,
        )
        return out_TNV, log_sums_NT
