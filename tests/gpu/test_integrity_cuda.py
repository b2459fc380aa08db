"""The fingerprint is the same number on a GPU, within its scratch bound."""

from __future__ import annotations

import pytest
import torch

from weight_sync.integrity import hash_bytes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("count", "offset_bytes"), [(300_001, 0), (1_000_003, 3), (40 << 20, 2), (70 << 20, 4096)])
def test_cpu_and_cuda_agree(count: int, offset_bytes: int) -> None:
    data = torch.randint(0, 256, (count,), dtype=torch.uint8)
    wanted = hash_bytes(data, offset_bytes=offset_bytes)
    assert hash_bytes(data.cuda(), offset_bytes=offset_bytes) == wanted
    assert hash_bytes(data.cuda(), offset_bytes=offset_bytes, scratch_bytes=1 << 20) == wanted


@pytest.mark.parametrize("start", [0, 2])
def test_scratch_stays_within_its_bound(start: int) -> None:
    data = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")[start:]
    hash_bytes(data, offset_bytes=start, scratch_bytes=16 << 20)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    hash_bytes(data, offset_bytes=start, scratch_bytes=16 << 20)
    assert torch.cuda.max_memory_allocated() - before <= 16 << 20
