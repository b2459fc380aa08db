"""The host-to-device stage on a GPU: slices, casts and permutations, from page-locked and pageable memory."""

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slipstream.weight_sync.disk.safetensors_source import Checkpoint
from slipstream.weight_sync.disk.tensor_source import TensorSource
from slipstream.weight_sync.layout import Region
from slipstream.weight_sync.pipeline.packing import PackedRead

pytestmark = pytest.mark.gpu

SHAPES = {"a.rows": (96, 64), "b.columns": (80, 128), "c.experts": (4, 24, 40), "d.norm": (77,), "e.scalar": ()}


def reads() -> list[PackedRead]:
    """Whole tensors, row runs, column slices, casts and transposes, one behind the other in a slot."""
    wanted: list[tuple[str, Region, tuple[int, ...], str]] = []
    for name, shape in SHAPES.items():
        whole = Region((0,) * len(shape), shape)
        half = Region(tuple(size // 2 for size in shape), tuple(size - size // 2 for size in shape))
        columns = Region((0,) * (len(shape) - 1) + (shape[-1] // 4,), (*shape[:-1], shape[-1] // 2)) if shape else whole
        for region, dtype in itertools.product({whole, half, columns}, ("bfloat16", "float32")):
            wanted.append((name, region, tuple(range(len(shape))), dtype))
            if len(shape) > 1:
                wanted.append((name, region, tuple(reversed(range(len(shape)))), dtype))
    offset, made = 0, []
    for name, region, axes, dtype in wanted:
        made.append(PackedRead(name, region, axes, dtype, offset))
        offset += -(-made[-1].num_bytes // 64) * 64
    return made


@pytest.mark.parametrize("pinned", [True, False])
def test_slots_hold_slices_casts_and_permutations_of_what_is_on_disk(
    pinned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in SHAPES.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    if not pinned:
        monkeypatch.setattr("slipstream.weight_sync.disk.safetensors_source.page_lock", lambda _: False)
    checkpoint = Checkpoint(tmp_path, scratch_bytes=1 << 10)
    report = checkpoint.read()
    assert (report.pinned_bytes > 0) == pinned
    source, wanted = checkpoint.source, reads()
    assert isinstance(source, TensorSource)
    slots = [torch.zeros(wanted[-1].offset_bytes + 1024, dtype=torch.uint8, device="cuda") for _ in range(2)]
    fills = [*map(source.compile_reads(wanted), slots)]
    source.begin(0)
    for slot, fill in zip((*slots, *slots), (*fills, *fills), strict=True):
        slot.zero_()
        fill()
    for read, slot in itertools.product(wanted, slots):
        window = tuple(slice(a, b) for a, b in zip(read.region.start, read.region.stop, strict=True))
        expected = tensors[read.tensor][window].to(getattr(torch, read.dtype))
        assert torch.equal(read.view(slot).cpu(), expected), read
    held = [item.data for items in source._held.values() for item in items]
    assert all(data.is_pinned() == pinned for data in held)


def test_copies_do_not_grow_device_memory_beyond_the_declared_scratch(tmp_path: Path) -> None:
    save_file({"w": torch.randn(4096, 1024)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path, scratch_bytes=1 << 20)
    checkpoint.read()
    source = checkpoint.source
    whole = Region((0, 0), (4096, 1024))
    slot = torch.zeros(2 * whole.num_elements, dtype=torch.uint8, device="cuda")
    fill = source.compile_reads([PackedRead("w", whole, (0, 1), "bfloat16", 0)])(slot)
    source.begin(0)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fill()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= source.temporary_bytes == 1 << 20
