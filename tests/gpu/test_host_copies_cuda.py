"""Copies of a checkpoint from a GPU: their values, in page-locked memory that the next ones take again."""

import pytest
import torch

from slipstream.trainer.checkpoint.background import HostCopies

pytestmark = pytest.mark.gpu


def test_copies_have_the_values_at_the_time_of_the_call_and_lie_in_locked_memory() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    copies = HostCopies(device, chunk_bytes=1 << 20)
    tensors = [torch.randn(count, 33, device=device).mT for count in range(1, 4000, 333)]
    copies.prepare(sum(tensor.nbytes for tensor in tensors))
    for _ in range(2):
        wanted = [tensor.cpu() for tensor in tensors]
        copies.begin()
        copied = [copies.copy(tensor) for tensor in tensors]
        for tensor in tensors:
            tensor.add_(1)
        copies.wait()
        assert all(copy.is_pinned() for copy in copied)
        assert all(torch.equal(copy, tensor) for copy, tensor in zip(copied, wanted, strict=True))
