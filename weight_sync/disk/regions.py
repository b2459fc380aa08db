"""Reads rectangles of a checkpoint on disk, one after the other, without a copy of the files in memory."""

from collections.abc import Iterable
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from slipstream.conf.errors import ConfigError
from slipstream.weight_sync.disk.language_model import language_model_tensors
from slipstream.weight_sync.disk.safetensors_files import DTYPES, StoredTensor, read_index
from slipstream.weight_sync.layout import DTYPE_BYTES, Region


class RegionReader:
    """Reads rectangles of tensors from a folder of safetensors files. Raises ConfigError if a wanted one is missing."""

    def __init__(self, folder: Path, wanted: Iterable[str]) -> None:
        names = list(wanted)
        self._stored = language_model_tensors(read_index(folder, "model.path"), names)
        missing = [name for name in names if name not in self._stored]
        if missing:
            raise ConfigError(f"model.path={folder} lacks {len(missing)} of {len(names)} tensors ({missing[0]}, ...)")
        self._files: dict[Path, Tensor] = {}

    def read(self, tensor: str, region: Region, out: Tensor) -> None:
        """Copy a rectangle into `out`, of its shape and any strides, cast to its format."""
        whole = self._whole(self._stored[tensor])
        out.copy_(whole[tuple(slice(a, b) for a, b in zip(region.start, region.stop, strict=True))])

    def _whole(self, stored: StoredTensor) -> Tensor:
        if stored.path not in self._files:
            size = stored.path.stat().st_size
            self._files[stored.path] = torch.from_file(str(stored.path), shared=False, size=size, dtype=torch.uint8)
        dtype = DTYPES[stored.dtype]
        num_bytes = prod(stored.shape) * DTYPE_BYTES[dtype]
        held = self._files[stored.path][stored.offset : stored.offset + num_bytes]
        if stored.offset % DTYPE_BYTES[dtype]:  # headers need not end at a multiple of it
            held = held.clone()
        return held.view(getattr(torch, dtype)).view(stored.shape)
