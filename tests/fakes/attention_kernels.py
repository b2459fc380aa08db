"""Stand-ins on a CPU for the kernels of attention that only GPUs have: what they are given, and what they return.

aten's flash attention over packed rows, aten's cuDNN attention over padded batches, and an engine's kernel. Each is a
softmax in float64; backwards start from the log sums that they are given, as the kernels do.
"""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.trainer.model.attention.flash_attention import AttentionCall


def use_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of aten's."""
    for name, stand_in in {
        "_flash_attention_forward": _flash,
        "_flash_attention_backward": _flash_backward,
        "_scaled_dot_product_cudnn_attention": _cudnn,
        "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    }.items():
        monkeypatch.setattr(torch.ops.aten, name, stand_in)


def engine_kernel(q_TND: Tensor, k_TGD: Tensor, v_TGV: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """EngineKernel."""
    return _by_sequence(q_TND, k_TGD, v_TGV, call.sequences.cu_seqlens, call.scale, call.window, call.sinks_N)


def _logits(q_LND: Tensor, k_LGD: Tensor, scale: float, window: int | None) -> Tensor:
    """[N, L, L] in float64, -inf where a query does not see a key."""
    k_LND = k_LGD.repeat_interleave(q_LND.shape[1] // k_LGD.shape[1], 1)
    length = len(q_LND)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (distance < 0) | (distance >= (length if window is None else window))
    return (torch.einsum("lnd,mnd->nlm", q_LND, k_LND).double() * scale).masked_fill(hidden, -torch.inf)


def _values(
    q_LND: Tensor, k_LGD: Tensor, v_LGV: Tensor, scale: float, window: int | None, sinks_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """[L, N, V], and the log of each softmax's sum, [N, L]."""
    logits = _logits(q_LND, k_LGD, scale, window)
    log_sums = logits.logsumexp(-1)
    if sinks_N is not None:
        log_sums = torch.logaddexp(log_sums, sinks_N.double()[:, None])
    v_LNV = v_LGV.repeat_interleave(q_LND.shape[1] // v_LGV.shape[1], 1).double()
    out = torch.einsum("nlm,mnd->lnd", (logits - log_sums[..., None]).exp(), v_LNV)
    return out.to(q_LND.dtype), log_sums.float()


def _gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, scale: float, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """What q, k and v of one sequence get, from the log sums that the forward gave."""
    repeats = q.shape[1] // k.shape[1]
    k_LND, v_LNV = k.repeat_interleave(repeats, 1).double(), v.repeat_interleave(repeats, 1).double()
    shares = (_logits(q, k, scale, window) - log_sums.double()[..., None]).exp()
    dvalues = torch.einsum("nlm,lnd->mnd", shares, dout.double())
    dshares = torch.einsum("lnd,mnd->nlm", dout.double(), v_LNV)
    ours = (dout.double() * out.double()).sum(-1).t()[..., None]
    dlogits = shares * (dshares - ours) * scale
    dkeys = torch.einsum("nlm,lnd->mnd", dlogits, q.double())
    dq = torch.einsum("nlm,mnd->lnd", dlogits, k_LND)
    dk, dv = (x.unflatten(1, (-1, repeats)).sum(2) for x in (dkeys, dvalues))
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def _by_sequence(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, window: int | None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    spans = [slice(*span) for span in itertools.pairwise(cu_seqlens.tolist())]
    parts = [_values(q[one], k[one], v[one], scale, window, sinks) for one in spans]
    return torch.cat([out for out, _ in parts]), torch.cat([sums for _, sums in parts], 1)


def _window(span: dict[str, Any]) -> int | None:
    left = span["window_size_left"]
    assert span["window_size_right"] == (None if left is None else 0)
    return None if left is None else left + 1


def _flash(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *where: Any, scale: float, **span: Any) -> tuple[Any, ...]:
    assert v.shape == k.shape, "values are as wide as keys"
    assert where[-2] is (_window(span) is None), "causal, or by a window"
    return *_by_sequence(q, k, v, starts, scale, _window(span)), None, None, None


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, starts: Tensor, *_: Any,
    scale: float, **span: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    window, parts = _window(span), []
    for first, stop in itertools.pairwise(starts.tolist()):
        one = slice(first, stop)
        parts.append(_gradients(dout[one], q[one], k[one], v[one], out[one], log_sums[:, one], scale, window))
    return tuple(torch.cat(each) for each in zip(*parts, strict=True))


def _cudnn(q: Tensor, k: Tensor, v: Tensor, *_: Any, scale: float) -> tuple[Any, ...]:
    rows = zip(*(x.transpose(1, 2) for x in (q, k, v)), strict=True)
    parts = [_values(q_LND, k_LGD, v_LGV, scale, None) for q_LND, k_LGD, v_LGV in rows]
    outs = torch.stack([out.transpose(0, 1) for out, _ in parts])
    return outs, torch.stack([sums for _, sums in parts])[..., None], *[None] * 7


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, *_: Any, scale: float
) -> tuple[Tensor, ...]:
    rows = zip(*(x.transpose(1, 2) for x in (dout, q, k, v, out)), log_sums[..., 0], strict=True)
    parts = [_gradients(d, q_LND, k_LGD, v_LGV, o, sums, scale, None) for d, q_LND, k_LGD, v_LGV, o, sums in rows]
    return tuple(torch.stack([x.transpose(0, 1) for x in each]) for each in zip(*parts, strict=True))
