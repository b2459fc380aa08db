"""Chunks of long sequences on a GPU: cuDNN takes them, and gives what padded attention gives in float32."""

import pytest
import torch

from slipstream.trainer.model.attention.attend import (
    CHUNK_TOLERANCE,
    CUDNN_WIDTHS,
    AttentionBackend,
    _cudnn_takes_chunks,
    attend,
)
from slipstream.trainer.model.attention.flash_attention import AttentionCall
from slipstream.trainer.model.context import Piece, _laid_out

CUDA = torch.device("cuda")


@pytest.mark.parametrize("widths", CUDNN_WIDTHS)
def test_chunks_by_cudnn_are_padded_attention(widths: tuple[int, int]) -> None:
    key_dim, value_dim = widths
    assert _cudnn_takes_chunks(CUDA, torch.bfloat16, 8, key_dim, 2, value_dim)
    pieces, keys, first = [], [], 0
    for before, count in ((0, 1500), (3000, 1500), (4321, 1111)):
        pieces.append(Piece(first, first + before, first + before + count))
        keys.append(Piece(first, first, first + before + count))
        first += before + count
    sequences = _laid_out(pieces, keys, CUDA)
    assert sequences.is_long
    call, draw = AttentionCall(sequences, key_dim**-0.5), torch.Generator(CUDA).manual_seed(1)
    shapes = ((4111, 8, key_dim), (first, 2, key_dim), (first, 2, value_dim), (4111, 8, value_dim))
    *inputs, dout = (torch.randn(shape, generator=draw, device=CUDA, dtype=torch.bfloat16) for shape in shapes)
    results = []
    for dtype, backend in ((torch.bfloat16, AttentionBackend.cudnn), (torch.float32, AttentionBackend.padded)):
        q, k, v = qkv = [x.to(dtype).requires_grad_() for x in inputs]
        out = attend(q, k, v, call, backend)
        results.append([out.detach(), *torch.autograd.grad(out, qkv, dout.to(dtype))])
    for found, expected in zip(*results, strict=True):
        assert (found.float() - expected).norm() <= CHUNK_TOLERANCE * expected.norm()
