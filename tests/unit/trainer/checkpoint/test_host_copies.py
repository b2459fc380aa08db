"""Copies of a checkpoint: their values, that none lies on another, and that the next ones take the same memory."""

import itertools

import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from slipstream.trainer.checkpoint.background import HostCopies

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int64)
SHAPES = st.lists(st.integers(0, 7), max_size=3)


def drawn(shapes: list[tuple[torch.dtype, list[int]]]) -> list[Tensor]:
    """Tensors, of which those of two dims and more are not contiguous."""
    tensors = [torch.randint(0, 200, shape).to(dtype) for dtype, shape in shapes]
    return [tensor.mT if tensor.dim() > 1 else tensor for tensor in tensors]


@settings(max_examples=60)
@given(
    shapes=st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=12),
    chunk_bytes=st.sampled_from([64, 640, 1 << 16]),
    is_prepared=st.booleans(),
)
def test_copies_have_the_values_and_memory_of_their_own(shapes, chunk_bytes, is_prepared):
    copies, tensors = HostCopies(torch.device("cpu"), chunk_bytes), drawn(shapes)
    if is_prepared:
        copies.prepare(sum(tensor.nbytes for tensor in tensors))
    places = []
    for _ in range(2):
        copies.begin()
        copied = [copies.copy(tensor) for tensor in tensors]
        copies.wait()
        for copy, tensor in zip(copied, tensors, strict=True):
            assert copy.is_contiguous()
            assert copy.dtype == tensor.dtype
            assert torch.equal(copy, tensor)
        spans = sorted((copy.data_ptr(), copy.data_ptr() + copy.nbytes) for copy in copied if copy.numel())
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
        places.append(spans)
        tensors = [tensor.clone() + 1 for tensor in tensors]
    assert places[0] == places[1]


def test_what_was_prepared_is_enough():
    copies = HostCopies(torch.device("cpu"), chunk_bytes=1 << 16)
    tensors = [torch.ones(count) for count in range(1, 700, 7)]
    copies.prepare(sum(tensor.nbytes for tensor in tensors))
    held = len(copies._chunks)
    assert held > 1
    copies.begin()
    for tensor in tensors:
        copies.copy(tensor)
    assert len(copies._chunks) == held
