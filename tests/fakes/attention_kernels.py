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

EVERY = -1
"""In the place of a window: every query sees every key."""


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
    starts = call.sequences.cu_seqlens
    return _by_sequence(q_TND, k_TGD, v_TGV, starts, starts, call.scale, call.window, call.sinks_N)


def _logits(q_LND: Tensor, k_MGD: Tensor, scale: float, window: int | None) -> Tensor:
    """[N, L, M] in float64, -inf where a query does not see a key. The last query sees the last key; EVERY: all do."""
    k_MND = k_MGD.repeat_interleave(q_LND.shape[1] // k_MGD.shape[1], 1)
    length = len(k_MND)
    distance = torch.arange(len(q_LND))[:, None] + length - len(q_LND) - torch.arange(length)
    hidden = (distance < 0) | (distance >= (length if window is None else window))
    logits = torch.einsum("lnd,mnd->nlm", q_LND, k_MND).double() * scale
    return logits if window == EVERY else logits.masked_fill(hidden, -torch.inf)


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
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, key_starts: Tensor, scale: float, window: int | None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    spans = zip(_spans(starts), _spans(key_starts), strict=True)
    parts = [_values(q[one], k[keys], v[keys], scale, window, sinks) for one, keys in spans]
    return torch.cat([out for out, _ in parts]), torch.cat([sums for _, sums in parts], 1)


def _spans(starts: Tensor) -> list[slice]:
    return [slice(*span) for span in itertools.pairwise(starts.tolist())]


def _window(span: dict[str, Any]) -> int | None:
    left = span["window_size_left"]
    assert span["window_size_right"] == (None if left is None else 0)
    return None if left is None else left + 1


def _flash(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, key_starts: Tensor, *where: Any, scale: float, **span: Any
) -> tuple[Any, ...]:
    assert v.shape == k.shape, "values are as wide as keys"
    assert where[-2] is (_window(span) is None), "causal, or by a window"
    return *_by_sequence(q, k, v, starts, key_starts, scale, _window(span)), None, None, None


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, starts: Tensor, key_starts: Tensor,
    *_: Any, scale: float, **span: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    window, parts = _window(span), []
    for one, keys in zip(_spans(starts), _spans(key_starts), strict=True):
        parts.append(_gradients(dout[one], q[one], k[keys], v[keys], out[one], log_sums[:, one], scale, window))
    return tuple(torch.cat(each) for each in zip(*parts, strict=True))


def _cudnn_window(is_causal: bool, num_queries: int, num_keys: int) -> int | None:
    assert not is_causal or num_queries == num_keys, "causal attention has its diagonal at the first key"
    return None if is_causal else EVERY


def _cudnn(
    q: Tensor, k: Tensor, v: Tensor, bias: None, sums: bool, dropout: float, is_causal: bool, *_: Any, scale: float
) -> tuple[Any, ...]:
    assert (bias, sums, dropout) == (None, True, 0.0)
    window = _cudnn_window(is_causal, q.shape[2], k.shape[2])
    rows = zip(*(x.transpose(1, 2) for x in (q, k, v)), strict=True)
    parts = [_values(q_LND, k_LGD, v_LGV, scale, window) for q_LND, k_LGD, v_LGV in rows]
    outs = torch.stack([out.transpose(0, 1) for out, _ in parts])
    return outs, torch.stack([sums for _, sums in parts])[..., None], *[None] * 7


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, *where: Any, scale: float
) -> tuple[Tensor, ...]:
    assert where[-4:-1] == (q.shape[2], k.shape[2], 0.0)
    window = _cudnn_window(where[-1], q.shape[2], k.shape[2])
    rows = zip(*(x.transpose(1, 2) for x in (dout, q, k, v, out)), log_sums[..., 0], strict=True)
    parts = [_gradients(d, q_LND, k_LGD, v_LGV, o, sums, scale, window) for d, q_LND, k_LGD, v_LGV, o, sums in rows]
    return tuple(torch.stack([x.transpose(0, 1) for x in each]) for each in zip(*parts, strict=True))
