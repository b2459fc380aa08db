"""Promises of trainer/model/attention/chunk_attention.py, with stand-ins for cuDNN's kernels."""

import pytest
import torch
from fakes.attention_kernels import use_stand_ins
from hypothesis import example, given, strategies as st
from torch import Tensor

from slipstream.trainer.model.attention import attend as attend_module
from slipstream.trainer.model.attention.attend import AttentionBackend, attend
from slipstream.trainer.model.attention.chunk_attention import chunk_attention, chunks_of
from slipstream.trainer.model.attention.flash_attention import AttentionCall, padded_length
from slipstream.trainer.model.context import Piece, _laid_out
from slipstream.trainer.model.packed_sequences import PackedSequences

CHUNKS = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=4)
"""Keys before a chunk, and its tokens."""


def laid_out(chunks: list[tuple[int, int]]) -> PackedSequences:
    """Chunks of sequences one after the other, of which no later token is here."""
    pieces, keys, first = [], [], 0
    for before, count in chunks:
        pieces.append(Piece(first, first + before, first + before + count))
        keys.append(Piece(first, first, first + before + count))
        first += before + count
    return _laid_out(pieces, keys, torch.device("cpu"))


def drawn(sequences: PackedSequences) -> list[Tensor]:
    """q, k and v: four heads with two of keys, values narrower than keys. Then a gradient of the output."""
    assert sequences.keys is not None
    (num_queries, num_keys), draw = (sequences.starts[-1], sequences.keys.starts[-1]), torch.Generator().manual_seed(1)
    shapes = ((num_queries, 4, 8), (num_keys, 2, 8), (num_keys, 2, 6), (num_queries, 4, 6))
    return [torch.randn(shape, generator=draw) for shape in shapes]


def results(call: AttentionCall, inputs: list[Tensor], backend: AttentionBackend | None) -> tuple[Tensor, ...]:
    """The output and the gradients of q, k and v; None: of chunk_attention."""
    *qkv, dout = (x.clone() for x in inputs)
    q, k, v = (x.requires_grad_() for x in qkv)
    out = chunk_attention(q, k, v, call) if backend is None else attend(q, k, v, call, backend)
    return out, *torch.autograd.grad(out, (q, k, v), dout)


@given(chunks=CHUNKS)
@example(chunks=[(0, 5)])
@example(chunks=[(128, 128), (0, 0), (255, 1), (129, 300)])
def test_values_and_gradients_are_those_of_padded_attention(chunks: list[tuple[int, int]]) -> None:
    if not sum(count for _, count in chunks):
        return
    call = AttentionCall(laid_out([one for one in chunks if one[1]]), 0.3)
    inputs = drawn(call.sequences)
    want = results(call, inputs, AttentionBackend.padded)
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_stand_ins(monkeypatch)
        for found, expected in zip(results(call, inputs, None), want, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@given(chunks=CHUNKS)
def test_a_rectangle_has_a_length_that_is_not_padded_and_leaves_few_keys_over(chunks: list[tuple[int, int]]) -> None:
    call = AttentionCall(laid_out([(40 * before, count) for before, count in chunks]), 1.0)
    for one in chunks_of(call):
        assert one.num_first == 0 or padded_length(one.num_first) == one.num_first
        assert 0 <= one.num_empty < max(128, one.num_first / 7)


@pytest.mark.parametrize("fault", [None, "refuses", "other values"])
def test_long_chunks_go_to_cudnn_where_it_gives_what_varlen_gives(
    fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_stand_ins(monkeypatch)
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention

    def faulty(q: Tensor, k: Tensor, v: Tensor, *others: object, scale: float) -> object:
        if fault == "refuses" and q.shape[2] != k.shape[2]:
            raise RuntimeError("no plan")
        return cudnn(q, k, v, *others, scale=scale * (2 if fault == "other values" else 1))

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", faulty)
    for name in ("LONG", "CHUNK_TOLERANCE"):
        monkeypatch.setattr(attend_module, name, {"LONG": 130, "CHUNK_TOLERANCE": 1e-4}[name])
    monkeypatch.setattr(PackedSequences, "is_long", True)
    attend_module._cudnn_takes_chunks.cache_clear()
    used: list[str] = []
    for name in ("chunk_attention", "varlen_attention"):
        kernel = getattr(attend_module, name)
        monkeypatch.setattr(attend_module, name, lambda *given, one=kernel, of=name: used.append(of) or one(*given))
    call = AttentionCall(laid_out([(200, 140)]), 0.3)
    inputs = drawn(call.sequences)
    try:
        found = results(call, inputs, AttentionBackend.cudnn)
    finally:
        attend_module._cudnn_takes_chunks.cache_clear()
    assert used[-1] == ("varlen_attention" if fault else "chunk_attention")
    for one, expected in zip(found, results(call, inputs, AttentionBackend.padded), strict=True):
        torch.testing.assert_close(one, expected, atol=1e-5, rtol=1e-5)
