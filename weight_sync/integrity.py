"""A 64-bit hash of bytes at a position. It is additive: a parameter's hash is the sum of its parts' hashes.

On CUDA the kernel of `hash_kernel.py` gives the same number as the torch form here.

Definition, for bytes b_0, b_1, ... of a parameter (zero where a range does not reach), little-endian 32-bit words
w_i = b_4i + 2^8 b_4i+1 + 2^16 b_4i+2 + 2^24 b_4i+3, all arithmetic mod 2^64:

    H = sum_i w_i * K(i)         K(i) = A[i mod 1024] * B(i div 1024)         A, B odd numbers from splitmix64

H is linear in every byte, so ranges may start and end anywhere, inside a word too, and any partition sums to the same
H.

What it catches. A change inside one word changes H by d * K(i) with 0 < |d| < 2^32 and K odd: never 0, so any flipped
bit, and any burst inside one word, is caught with certainty. A change of several words is missed only if sum d_i K(i)
= 0. Over random odd keys that has probability at most 2^(t - 63), t the number of trailing zero bits of the d_i that
has fewest (at worst 2^-32, for words that differ in their top bit alone; 2^-63 for typical noise). The keys are
fixed, so this is a bound against accidents (swapped rows, shifted or repeated data, a range not written), not against
an adversary. Keys multiply rather than add up across
blocks: with A + B, swapping a rectangle of words would cancel.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

HASH_MASK = (1 << 64) - 1
DEFAULT_SCRATCH_BYTES = {"cpu": 4 << 20}
"""The most scratch of the torch form, in bytes, by device type: fits a core's cache. The kernel needs none."""

_BLOCK_WORDS = 1024
_BLOCK_BYTES = 4 * _BLOCK_WORDS
MIN_SCRATCH_BYTES = 4 * _BLOCK_BYTES
"""Scratch of one block: words as int64, and a copy of the bytes if they are not aligned."""
_SEED_WITHIN = 0x51A95D3A
_SEED_ACROSS = 0xB10C5EED
_GOLDEN_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))


def hash_bytes(data: torch.Tensor, *, offset_bytes: int = 0, scratch_bytes: int | None = None) -> int:
    """Hash of a contiguous tensor's bytes, which begin `offset_bytes` into their parameter. In [0, 2^64).

    `scratch_bytes` bounds temporary memory on data's device, at least MIN_SCRATCH_BYTES; default: by device type.
    """
    return RangeHashes([data], [offset_bytes], scratch_bytes=scratch_bytes).values()[0]


class RangeHashes:
    """Hashes many ranges at fixed places, any number of times: on CUDA in one launch without scratch, else with torch.

    Args:
        ranges: Contiguous tensors on one device, any dtype and shape; they stay where they are.
        offsets_bytes: Position of each one's first byte in its parameter.
        scratch_bytes: Of the torch form.
    """

    def __init__(
        self, ranges: Sequence[torch.Tensor], offsets_bytes: Sequence[int], *, scratch_bytes: int | None = None
    ) -> None:
        self._ranges = [(_bytes_of(data), offset) for data, offset in zip(ranges, offsets_bytes, strict=True)]
        self._scratch_bytes = scratch_bytes
        self._tables = _tables(self._ranges) if self._ranges and self._ranges[0][0].is_cuda else []

    def add_to(self, sums: torch.Tensor) -> None:
        """sums[i] += hash of range i, int64 in two's complement, on the ranges' device. Does not wait for it."""
        if not self._ranges or not self._ranges[0][0].is_cuda:
            for (data, offset), total in zip(self._ranges, sums.unbind(), strict=True):
                total += hash_with_torch(data, offset_bytes=offset, scratch_bytes=self._scratch_bytes)
            return
        from slipstream.weight_sync import hash_kernel  # needs Triton, which a CPU host may lack

        within = _within_keys(sums.device)
        for table in self._tables:
            hash_kernel.add_hashes(
                sums, table.rows, within, table.across, alignment=table.alignment, max_blocks=table.max_blocks
            )

    def values(self) -> list[int]:
        """All hashes, in order, in [0, 2^64). Waits for the current stream once.

        Copies through pinned memory: in a copy to pageable memory the driver waits, and blocks other threads' launches.
        """
        device = self._ranges[0][0].device if self._ranges else torch.device("cpu")
        sums = torch.zeros(len(self._ranges), dtype=torch.int64, device=device)
        self.add_to(sums)
        if device.type == "cuda":
            sums = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True).copy_(sums, non_blocking=True)
            torch.cuda.current_stream(device).synchronize()
        return [value & HASH_MASK for value in sums.numpy().tolist()]


def compile_kernels(device: torch.device) -> None:
    """Compile and load all forms of the kernel, so that no publish waits for it."""
    data = torch.zeros(_BLOCK_BYTES, dtype=torch.uint8, device=device)
    RangeHashes([data[:size] for size in (16, 4, 1)], [0, 0, 0]).values()


@dataclass(frozen=True, slots=True)
class _Table:
    """Ranges of one alignment, as the kernel reads them."""

    rows: torch.Tensor
    alignment: int
    max_blocks: int
    across: torch.Tensor
    """Keys of every block up to the last."""


def _tables(ranges: Sequence[tuple[torch.Tensor, int]]) -> list[_Table]:
    """The kernel's tables, one per alignment: ranges that can be read 16, 4 or 1 bytes at a time."""
    by_alignment: dict[int, list[list[int]]] = {}
    for index, (data, offset) in enumerate(ranges):
        if data.numel():
            address, front, size = data.data_ptr(), offset % _BLOCK_BYTES, data.numel()
            first, last = offset // _BLOCK_BYTES, (offset + size - 1) // _BLOCK_BYTES
            alignment = next(unit for unit in (16, 4, 1) if not (address | front | size) % unit)
            row = [address, front, size, first, last - first + 1, index]
            by_alignment.setdefault(alignment, []).append(row)
    return [
        _Table(
            torch.tensor(rows, dtype=torch.int64).to(ranges[0][0].device),
            alignment,
            max_blocks=max(row[4] for row in rows),
            across=_across_keys(0, max(row[3] + row[4] for row in rows), ranges[0][0].device),
        )
        for alignment, rows in by_alignment.items()
    ]


def hash_with_torch(data: torch.Tensor, *, offset_bytes: int = 0, scratch_bytes: int | None = None) -> torch.Tensor:
    """The hash as a scalar int64 tensor on data's device, in plain torch ops: the form for CPUs, and the reference.

    Chunked to bound its scratch; does not wait for the device.
    """
    flat = _bytes_of(data)
    if scratch_bytes is None:
        scratch_bytes = DEFAULT_SCRATCH_BYTES.get(data.device.type, MIN_SCRATCH_BYTES)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    chunk_bytes = scratch_bytes // MIN_SCRATCH_BYTES * _BLOCK_BYTES
    position, end = offset_bytes, offset_bytes + flat.numel()
    while position < end:
        stop = min(end, (position // _BLOCK_BYTES) * _BLOCK_BYTES + chunk_bytes)
        total += _hash_chunk(flat[position - offset_bytes : stop - offset_bytes], position)
        position = stop
    return total


def _bytes_of(data: torch.Tensor) -> torch.Tensor:
    if not data.is_contiguous():
        raise ValueError(f"hash needs contiguous data, got shape {tuple(data.shape)} with strides {data.stride()}")
    return data.detach().reshape(-1).view(torch.uint8)


def _hash_chunk(data: torch.Tensor, position: int) -> torch.Tensor:
    front = position % 4
    back = -(front + data.numel()) % 4
    if front or back or data.storage_offset() % 4:
        aligned = torch.zeros(front + data.numel() + back, dtype=torch.uint8, device=data.device)
        aligned[front : front + data.numel()] = data
        data = aligned
    words_W = data.view(torch.int32).to(torch.int64).bitwise_and_(0xFFFFFFFF)
    first = position // 4
    head = min(-first % _BLOCK_WORDS, words_W.numel())
    body = (words_W.numel() - head) // _BLOCK_WORDS * _BLOCK_WORDS
    within_W = _within_keys(data.device)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    if body:
        blocks_BW = words_W[head : head + body].view(-1, _BLOCK_WORDS)
        sums_B = blocks_BW.mul_(within_W).sum(dim=1)
        first_block = (first + head) // _BLOCK_WORDS
        total += sums_B.mul_(_across_keys(first_block, blocks_BW.shape[0], data.device)).sum()
    for start, stop in ((0, head), (head + body, words_W.numel())):
        if start < stop:
            place = (first + start) % _BLOCK_WORDS
            part = words_W[start:stop].mul_(within_W[place : place + stop - start]).sum()
            total += part * _across_keys((first + start) // _BLOCK_WORDS, 1, data.device)[0]
    return total


def _across_keys(first: int, count: int, device: torch.device) -> torch.Tensor:
    """B[first .. first + count - 1] on `device`. The table is kept: 8 bytes per 4 KiB of the largest parameter."""
    return _across_table(max(64, 1 << (first + count - 1).bit_length()), device)[first : first + count]


@functools.lru_cache(maxsize=64)
def _across_table(size: int, device: torch.device) -> torch.Tensor:
    return _odd_numbers(_SEED_ACROSS, size, device)


@functools.lru_cache(maxsize=64)
def _within_keys(device: torch.device) -> torch.Tensor:
    """A[0..1023] on one device (8 KiB, kept)."""
    return _odd_numbers(_SEED_WITHIN, _BLOCK_WORDS, device)


def _odd_numbers(seed: int, count: int, device: torch.device) -> torch.Tensor:
    """splitmix64(seed), splitmix64(seed + 1), ... with the lowest bit set, as int64 bit patterns."""
    return splitmix64_(torch.arange(seed, seed + count)).bitwise_or_(1).to(device)


def splitmix64_(values: torch.Tensor) -> torch.Tensor:
    """splitmix64's finalizer (Steele, Lea, Flood 2014) after one golden-ratio step, in place.

    Args:
        values: int64, bit patterns of numbers mod 2^64. Every device gives the same bits. The values key + 0, key + 1,
            ... become a stream of random numbers that can begin at any index.
    """
    values.add_(1).mul_(_GOLDEN_STEP)
    for shift, factor in _MIX:
        values.bitwise_xor_(_shifted(values, shift)).mul_(factor)
    return values.bitwise_xor_(_shifted(values, 31))


def _shifted(values: torch.Tensor, shift: int) -> torch.Tensor:
    """Shift right and fill with zeros; torch's own shift would repeat the sign."""
    return (values >> shift).bitwise_and_(HASH_MASK >> shift)
