"""A checkpoint of random bfloat16 weights on disk, and the page cache that keeps its files."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from slipstream.weight_sync.layout import TensorMeta

LAYERS_A_FILE = 4
BFLOAT16_BYTES = 2
POOL_ELEMENTS = 1 << 26
"""Random numbers from which all tensors are cut, each at another place."""
NUM_WRITERS = 4


def begin_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    """Write only config.json, which is all that an engine with dummy weights reads.

    Raises:
        SystemExit: The folder holds another model, and is not changed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file, text = folder / "config.json", json.dumps(config)
    if file.is_file() and file.read_text() != text:
        raise SystemExit(f"{folder} holds another model; give an empty --folder")
    file.write_text(text)


def write_checkpoint(folder: Path, config: dict[str, Any]) -> dict[str, float]:
    """Write random weights in files of a few layers, synchronously; does nothing if they are there.

    Raises:
        SystemExit: The disk is too small.
    """
    import torch

    from slipstream.conf.architecture.families import read_config
    from slipstream.weight_sync.disk.safetensors_files import INDEX_NAME

    index = folder / INDEX_NAME
    if index.is_file():
        return {}
    began = time.perf_counter()
    groups: dict[int, list[TensorMeta]] = {}
    for meta in read_config(config).checkpoint_tensors("bfloat16"):
        layer = int(meta.name.split(".")[2]) if ".layers." in meta.name else -1
        groups.setdefault(layer // LAYERS_A_FILE, []).append(meta)
    num_bytes = sum(BFLOAT16_BYTES * prod(meta.shape) for metas in groups.values() for meta in metas)
    if shutil.disk_usage(folder).free < num_bytes + (1 << 30):
        raise SystemExit(f"{folder} has no room for {num_bytes / 1e9:.1f} GB; give fewer --layers, or another --folder")
    pool = torch.randn(POOL_ELEMENTS, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(torch.bfloat16)
    values = memoryview(cast(Any, pool.view(torch.uint8).numpy()))
    names = [f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors" for number in range(len(groups))]
    with ThreadPoolExecutor(NUM_WRITERS) as writers:
        list(writers.map(lambda name, metas: _write_file(folder / name, metas, values), names, groups.values()))
    weight_map = {meta.name: name for name, metas in zip(names, groups.values(), strict=True) for meta in metas}
    index.write_text(json.dumps({"weight_map": weight_map}))
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "gb_per_s": num_bytes / seconds / 1e9}


def _write_file(path: Path, metas: list[TensorMeta], values: memoryview) -> None:
    """Write one safetensors file from the pool to the disk."""
    header: dict[str, Any] = {}
    at = 0
    for meta in metas:
        end = at + BFLOAT16_BYTES * prod(meta.shape)
        header[meta.name] = {"dtype": "BF16", "shape": meta.shape, "data_offsets": [at, end]}
        at = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for number, meta in enumerate(metas):
            left, start = BFLOAT16_BYTES * prod(meta.shape), (number * 7919 * 4096) % len(values)
            while left:
                left -= file.write(values[start : start + left])
                start = 0
        os.fsync(file.fileno())


def drop_cache(folder: Path) -> float:
    """Ask the kernel to forget the files. Returns the part of their bytes that is still in memory."""
    resident = total = 0
    for path in folder.glob("*.safetensors"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        size = os.fstat(file).st_size
        pages = mmap.mmap(file, size, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE)
        flags = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        anchor = ctypes.c_char.from_buffer(pages)
        ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(size), flags)
        resident += sum(flag & 1 for flag in bytes(flags)) * mmap.PAGESIZE
        total += size
        del anchor
        pages.close()
        os.close(file)
    return min(1.0, resident / total)
