"""Promises of trainer/model/attention/{attend,flash_attention,chunk_attention}.py: how long sequences are cut out and
put back, and what kernels are given, with stand-ins for them. Kernels run in tests/gpu.
"""

import itertools
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from cases.tiny_configs import BY_FAMILY
from cases.tiny_models import LENGTHS, logprob_gradients, make_decoder, packed, relative_error
from fakes.attention_kernels import engine_kernel, use_stand_ins
from hypothesis import example, given, strategies as st
from torch import Tensor

from slipstream.trainer.model.attention import attend as attend_module, grouped_queries, latent
from slipstream.trainer.model.attention.attend import AttentionBackend, attend, padded_attention, refusal_of
from slipstream.trainer.model.attention.chunk_attention import chunk_attention, chunks_of
from slipstream.trainer.model.attention.flash_attention import (
    AttentionCall,
    KeptAttention,
    cut_out,
    cut_out_log_sums,
    padded_length,
    put_back,
    runs_of_equal_length,
)
from slipstream.trainer.model.context import Piece, _laid_out
from slipstream.trainer.model.forward import Forward
from slipstream.trainer.model.packed_sequences import PackedSequences


def test_few_padded_lengths_and_little_padding():
    lengths = range(1, 32769)
    padded = [padded_length(length) for length in lengths]
    assert all(mine >= length for mine, length in zip(padded, lengths, strict=True))
    assert all(mine - length <= max(127, length / 8) for mine, length in zip(padded, lengths, strict=True))
    assert len(set(padded)) == 8 + 8 * math.log2(32768 / 1024)
    assert all(mine % 128 == 0 for mine in padded)


@pytest.mark.parametrize("lengths", [(1024,), (256, 256), (5, 0, 130, 128), (0, 1), (7, 7, 0, 7, 9)], ids=str)
def test_sequences_cut_out_and_put_back_are_the_rows(lengths):
    starts = tuple(torch.tensor([0, *lengths]).cumsum(0).tolist())
    rows = torch.randn(sum(lengths), 2, 8)
    runs = runs_of_equal_length(starts)
    assert [length for _, count, length in runs for _ in range(count)] == [n for n in lengths if n]
    assert all(one[2] != other[2] for one, other in itertools.pairwise(runs))
    parts = [cut_out(rows, run) for run in runs]
    assert torch.equal(put_back(parts, starts), rows)
    for part, (first, count, length) in zip(parts, runs, strict=True):
        assert tuple(part.shape) == (count, 2, padded_length(length), 8)
        assert not part[:, :, length:].any()
        is_view = part.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
        assert is_view == (length == padded_length(length))  # nothing to pad: a view
        assert torch.equal(part[-1, :, :length].transpose(0, 1), rows[first + (count - 1) * length :][:length])


@pytest.mark.parametrize(("lengths", "is_long"), [((2048, 1), True), ((1023,), False), ((4096, *[10] * 20), False)])
def test_long_is_about_the_mean(lengths, is_long):
    starts = torch.tensor([0, *lengths]).cumsum(0)
    assert PackedSequences.from_cu_seqlens(starts, sum(lengths), torch.device("cpu")).is_long is is_long
    assert not PackedSequences.from_cu_seqlens(torch.tensor([0]), 0, torch.device("cpu")).is_long


@pytest.mark.parametrize(
    ("error", "does_mean_refused"),
    [
        (RuntimeError("No valid execution plans built."), True),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (torch.AcceleratorError("CUDA error: out of memory"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_full_device_is_no_refusal_of_heads(error, does_mean_refused):
    """As a refusal it would be remembered, and the whole run would take the slower kernel without a word of memory."""

    def fails() -> None:
        raise error

    if does_mean_refused:
        assert refusal_of(fails) is error
    else:
        with pytest.raises(type(error)):
            refusal_of(fails)
    assert refusal_of(lambda: None) is None


@pytest.mark.parametrize("has_sinks", [True, False])
def test_flex_attention_is_padded_attention(has_sinks):
    """Forward and uncompiled here, all that a CPU can; tests/gpu has the gradients. No block is full of tokens. Layers
    with another window follow on the same sequences.
    """
    generator = torch.Generator().manual_seed(0)
    sequences = PackedSequences.from_cu_seqlens(packed()[2], sum(LENGTHS), torch.device("cpu"))
    shapes = [(sum(LENGTHS), heads, 16) for heads in (4, 2, 2)] + ([(4,)] if has_sinks else [])
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    q, k, v = inputs[:3]
    sinks = inputs[3] if has_sinks else None
    for window in (None, 3, None):
        mine, wanted = (
            attend(q, k, v, AttentionCall(sequences, 0.3, window, sinks), backend)
            for backend in (AttentionBackend.flex, AttentionBackend.padded)
        )
        assert relative_error(mine, wanted) < 1e-5, window


@pytest.mark.parametrize("window", [None, 3])
def test_sinks_have_their_gradient_where_an_engines_kernel_gives_the_values(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_stand_ins(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    sequences = PackedSequences.from_cu_seqlens(packed()[2], sum(LENGTHS), torch.device("cpu"))
    shapes = [*((sum(LENGTHS), heads, 16) for heads in (4, 2, 2)), (4,), (sum(LENGTHS), 4, 16)]
    *inputs, probe = (torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)
    q, k, v, sinks = inputs
    call = AttentionCall(sequences, 0.3, window, sinks)
    found, expected = (
        torch.autograd.grad((attend(q, k, v, call, AttentionBackend.varlen, engine) * probe.detach()).sum(), inputs)
        for engine in (engine_kernel, None)
    )
    assert all(relative_error(*pair) < 1e-5 for pair in zip(found, expected, strict=True))


def test_a_rank_without_a_token_has_gradients_of_zeros() -> None:
    """Under FSDP2 a parameter without a gradient on one rank changes the size of that rank's reduce-scatter."""
    inputs = [torch.randn(shape).requires_grad_() for shape in ((0, 4, 16), (0, 2, 16), (0, 2, 16), (4,))]
    q, k, v, sinks = inputs
    sequences = PackedSequences.from_cu_seqlens(torch.tensor([0]), 0, torch.device("cpu"))
    out = attend(q, k, v, AttentionCall(sequences, 0.3, None, sinks), AttentionBackend.padded)
    assert out.shape == (0, 4, 16)
    assert [grad.any() for grad in torch.autograd.grad(out.sum(), inputs)] == [False] * 4


@pytest.mark.parametrize("device", ["cpu", "meta"], ids=["with the host's data", "apart from the host"])
def test_cudnn_is_tried_on_the_device_while_a_decoder_is_built_on_meta(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[torch.device] = []

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        tried.extend(one.device for one in (q, k, v, call.sequences.cu_seqlens))
        return padded_attention(q, k, v, call)

    monkeypatch.setattr(attend_module, "cudnn_attention", kernel)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with torch.device("meta"):
        assert attend_module._cudnn_takes.__wrapped__(torch.device(device), torch.float32, 2, 1, 64, 64)
    assert tried == [torch.device(device)] * 4


@pytest.mark.parametrize("backend", ["varlen", "cudnn"])
@pytest.mark.parametrize(
    ("family", "is_engines"),
    [("qwen3_moe", False), ("deepseek", False), ("gemma3", False), ("deepseek", True), ("gpt_oss", True)],
)
def test_decoders_call_kernels_of_gpus_as_these_take_it(
    family: str, backend: str, is_engines: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stand-ins for the kernels, log-probabilities and gradients are those of padded attention."""
    plain, plain_gradients = logprob_gradients(make_decoder(BY_FAMILY[family]), packed())
    use_stand_ins(monkeypatch)
    for module in (grouped_queries, latent):
        monkeypatch.setattr(module, "choose_attention_backend", lambda *_: AttentionBackend(backend))
    monkeypatch.setattr(PackedSequences, "is_long", True)
    calls = []

    def kernel(*given: Any) -> tuple[Tensor, Tensor]:
        calls.append(given)
        return engine_kernel(*given)

    decoder = make_decoder(BY_FAMILY[family], by=Forward(attention=kernel) if is_engines else None)
    found, gradients = logprob_gradients(decoder, packed())
    assert len(calls) == len(decoder.model.layers) * is_engines
    assert relative_error(found, plain) < 1e-5
    for name, expected in plain_gradients.items():
        actual = gradients[name]
        assert (actual is None) == (expected is None), name
        assert actual is None or expected is None or relative_error(actual, expected) < 1e-4, name


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "expected"), [(64, 48, "varlen"), (64, 72, "padded"), (60, 60, "padded")]
)
def test_varlen_takes_no_values_that_are_wider_than_keys(
    key_dim: int, value_dim: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(attend_module, "_cudnn_takes", lambda *_: False)
    heads = SimpleNamespace(sinks=False, num_heads=2, num_kv_heads=2, qk_head_dim=key_dim, v_head_dim=value_dim)
    chosen = attend_module.choose_attention_backend(torch.device("cuda"), torch.bfloat16, cast(Any, heads))
    assert chosen == expected


def test_log_sums_are_cut_out_as_the_rows_they_belong_to() -> None:
    """For cuDNN, which takes sequences of one length at a time; zeros where it pads."""
    starts, rows = (0, 130, 260, 260, 300), torch.randn(300, 4)
    for part, run in zip(cut_out_log_sums(rows.t(), starts), runs_of_equal_length(starts), strict=True):
        assert part.is_contiguous()
        assert torch.equal(part, cut_out(rows[..., None], run))


def test_a_recomputed_layer_takes_the_kept_values() -> None:
    """Checkpointing does not call the kernel again: what backward starts from are the first call's values."""
    q, k, v = (torch.randn(7, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    sequences = PackedSequences.from_cu_seqlens(torch.tensor([0, 3, 7]), 7, torch.device("cpu"))
    call, calls = AttentionCall(sequences, 0.3, kept=KeptAttention()), []

    def kernel(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(given)
        return engine_kernel(*given)

    first, again = (attend(q, k, v, call, AttentionBackend.padded, kernel) for _ in range(2))
    assert len(calls) == 1 and torch.equal(first, again)
    assert call.kept is not None and call.kept.take() is None


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
