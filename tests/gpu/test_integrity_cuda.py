"""The fingerprint is the same number on a GPU, within its scratch bound."""

import pytest
import torch

from slipstream.weight_sync.integrity import HASH_MASK, hash_bytes, hash_with_torch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("start", [0, 1, 4])
@pytest.mark.parametrize(
    ("count", "offset_bytes"), [(1, 4095), (300_001, 0), (1_000_003, 3), (40 << 20, 2), (70 << 20, 4096), (8192, 64)]
)
def test_cpu_and_cuda_agree(count: int, offset_bytes: int, start: int) -> None:
    data = torch.randint(0, 256, (start + count,), dtype=torch.uint8)
    wanted = hash_bytes(data[start:], offset_bytes=offset_bytes)
    on_gpu = data.cuda()[start:]
    assert hash_bytes(on_gpu, offset_bytes=offset_bytes) == wanted
    assert int(hash_with_torch(on_gpu, offset_bytes=offset_bytes)) & HASH_MASK == wanted


def test_scratch_does_not_grow_with_the_data() -> None:
    data = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    hash_bytes(data)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    hash_bytes(data)
    assert torch.cuda.max_memory_allocated() - before <= 4096
