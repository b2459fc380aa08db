"""Host memory from which a GPU copies without a stop: pages that torch did not allocate, locked for it."""

import contextlib
import logging
import mmap
import weakref
from typing import Any, cast

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def pages(num_bytes: int) -> mmap.mmap:
    """Zeros; large pages if the system gives them, because then fewer must be touched and locked."""
    memory = mmap.mmap(-1, num_bytes)
    with contextlib.suppress(AttributeError, OSError):  # not every kernel has them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def host_bytes(num_bytes: int, *, is_locked: bool) -> Tensor:
    """Zeros in host memory, as bytes; locked where a GPU reads or writes them."""
    memory = pages(num_bytes)
    if is_locked:
        page_lock(memory)
    return torch.frombuffer(memory, dtype=torch.uint8)


def page_lock(memory: mmap.mmap) -> bool:
    """Page-lock memory that torch did not allocate. (torch's own pinned memory is rounded up to a power of two.)

    It is unlocked when nothing refers to the pages any more, not even a tensor.
    """
    address, cudart = torch.frombuffer(memory, dtype=torch.uint8).data_ptr(), cast(Any, torch.cuda.cudart())
    code = int(cudart.cudaHostRegister(address, len(memory), 1))  # 1: for all contexts of this process
    if code != 0:
        logger.warning("%d bytes cannot be page-locked (code %d): copies from them will be slow", len(memory), code)
        return False
    weakref.finalize(memory, cudart.cudaHostUnregister, address)
    return True
