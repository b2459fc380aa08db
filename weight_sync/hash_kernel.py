"""The fingerprint of `integrity.py` as a Triton kernel: near memory bandwidth, without scratch memory.

The definition, the keys and the torch form that this must equal to the last bit are in `integrity.py`, its only caller.
With block j holding words w_j0 ... w_j1023, the sum is taken as

    H = sum_w A[w] * (sum_j w_jw * B[j])

so that the inner loop is one multiplication per word, and a program reduces over its threads once. Sums are of
integers, so the order in which programs add to them does not matter.

One launch hashes many ranges, which a table on the device describes: one row of ROW int64 each.
"""

# pyright: basic
# Triton is untyped.
import torch
import triton
import triton.language as tl

BLOCKS_A_PROGRAM = 32
"""Blocks of 4 KiB that one program adds up: large enough to pay for its reduction and its atomic."""
ROW = 6
"""Address, bytes between the start of the first block and the address, size in bytes, first block, blocks, index."""


@triton.jit
def _add_hashes(
    table_ptr, within_ptr, across_ptr, sums_ptr,
    ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """sums[index] += hash of BLOCKS blocks of one row's range."""
    row = table_ptr + tl.program_id(1) * ROW
    num_blocks = tl.load(row + 4)
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    if first < num_blocks:
        address = tl.multiple_of(tl.load(row), ALIGNMENT)
        front = tl.multiple_of(tl.load(row + 1), ALIGNMENT)
        size = tl.multiple_of(tl.load(row + 2), ALIGNMENT)
        keys_ptr = across_ptr + tl.load(row + 3)
        lane = tl.arange(0, BLOCK)
        acc = tl.zeros([BLOCK], dtype=tl.int64)
        for step in range(BLOCKS):
            block = first + step
            key = tl.load(keys_ptr + block, mask=block < num_blocks, other=0)
            if ALIGNMENT >= 4:
                data_ptr = address.to(tl.pointer_type(tl.int32), bitcast=True)
                at, count = block * BLOCK - front // 4, size // 4
                if (at >= 0) & (at + BLOCK <= count):
                    words = tl.load(data_ptr + at + lane)
                else:
                    words = tl.load(data_ptr + at + lane, mask=(at + lane >= 0) & (at + lane < count), other=0)
                word = words.to(tl.uint32, bitcast=True).to(tl.int64)
            else:
                bytes_ptr = address.to(tl.pointer_type(tl.uint8), bitcast=True)
                word = tl.zeros([BLOCK], dtype=tl.int64)
                for byte in tl.static_range(4):
                    place = block * (4 * BLOCK) - front + 4 * lane + byte
                    loaded = tl.load(bytes_ptr + place, mask=(place >= 0) & (place < size), other=0)
                    word += loaded.to(tl.int64) << (8 * byte)
            acc += word * key
        total = tl.sum(acc * tl.load(within_ptr + lane), axis=0)
        tl.atomic_add(sums_ptr + tl.load(row + 5), total, sem="relaxed")


def add_hashes(
    sums: torch.Tensor,
    table: torch.Tensor,
    within: torch.Tensor,
    across: torch.Tensor,
    *,
    alignment: int,
    max_blocks: int,
) -> None:
    """Add every row's hash to its sum, on the current stream.

    Args:
        sums: int64.
        table: int64 (n, ROW).
        within: A[0 .. 1023].
        across: B of every block up to the last that a row names.
        alignment: Alignment of all addresses, fronts and sizes: 16, 4 or 1 bytes.
        max_blocks: The most blocks of a row.
    """
    _add_hashes[(-(-max_blocks // BLOCKS_A_PROGRAM), table.shape[0])](
        table,
        within,
        across,
        sums,
        ALIGNMENT=alignment,
        BLOCK=within.numel(),
        BLOCKS=BLOCKS_A_PROGRAM,
        ROW=ROW,
        num_warps=8,  # pyright: ignore[reportCallIssue]
    )
