"""What lets a rank train on while its state is written: copies in host memory, and a thread that writes them.

    prepare(num_bytes)   take memory, and page-lock it for a GPU; a thread does this, beside other work
    begin()              all of it may be written again
    copy(tensor)         a contiguous copy in it; the device's current stream writes it
    wait()               the copies are there

    begin(write)         the thread calls write(), after those that were begun before
    are_done()           whether all have returned; raises what the first one that failed raised, once

Fresh memory is what makes a copy slow: a host gives it page by page, and a GPU's driver copies twice where it is not
page-locked. 20 GB of Qwen3-30B-A3B's state took 17 s. So every checkpoint of a rank uses the same memory again, and
callers see to it that nobody reads earlier copies any more. The thread writes large files, for which Python's lock is
not held.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from torch import Tensor

CHUNK_BYTES = 1 << 28
ALIGNMENT_BYTES = 64


class HostCopies:
    def __init__(self, device: torch.device, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Memory is taken in chunks of so many bytes, or of as many as one tensor has."""
        self._device, self._chunk_bytes = device, chunk_bytes
        self._chunks: list[Tensor] = []
        self._used: list[int] = []
        """How many bytes of each chunk copies have."""

    def prepare(self, num_bytes: int) -> None:
        """Take memory for tensors of so many bytes in all, where there is not as much yet."""
        missing = num_bytes + num_bytes // 16 - sum(map(len, self._chunks))  # what does not fit at chunks' ends
        while missing > 0:
            self._add(min(missing, self._chunk_bytes))
            missing -= self._chunk_bytes

    def begin(self) -> None:
        """Forget the copies that were made."""
        self._used = [0] * len(self._chunks)

    def copy(self, tensor: Tensor) -> Tensor:
        """The tensor's values. Its copy is whole after wait(); a tensor of the host is copied at once."""
        out = self._take(tensor.numel() * tensor.element_size()).view(tensor.dtype).view(tensor.shape)
        return out.copy_(tensor.detach(), non_blocking=True)

    def wait(self) -> None:
        """Return when all copies are whole."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _take(self, num_bytes: int) -> Tensor:
        size = -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        for index, chunk in enumerate(self._chunks):
            if self._used[index] + size <= len(chunk):
                break
        else:
            self._add(max(size, self._chunk_bytes))
            index = len(self._chunks) - 1
        start = self._used[index]
        self._used[index] += size
        return self._chunks[index][start : start + num_bytes]

    def _add(self, num_bytes: int) -> None:
        # torch rounds page-locked memory up to a power of two
        self._chunks.append(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda"))
        self._used.append(0)


class BackgroundWrites:
    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writes files")
        self._begun: list[Future[None]] = []

    def begin(self, write: Callable[[], None]) -> None:
        """Have the thread call a function once."""
        self._begun.append(self._thread.submit(write))

    def are_done(self) -> bool:
        """Whether nothing is being written any more. Does not wait.

        Raises:
            Exception: what a function raised that begin() was given. The next call does not raise it again.
        """
        if not all(write.done() for write in self._begun):
            return False
        begun, self._begun = self._begun, []
        for write in begun:
            write.result()
        return True

    def settle(self) -> None:
        """Wait for all, and forget what failed: whoever asked for it is gone."""
        wait(self._begun)
        self._begun = []

    def finish(self) -> None:
        """Wait for all. Raises as are_done()."""
        wait(self._begun)
        self.are_done()
