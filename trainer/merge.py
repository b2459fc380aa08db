"""W + scale * B @ A for one rectangle of a weight, to the bit the same whichever rectangle asks.

Owns the one formula by which an adapter merges into its base. The merged export and the weight source of a publish
both go through it, so that an engine's bytes can be compared with an exported checkpoint's.

A matrix product is not bitwise a function of its operands' values alone: BLAS libraries pick another kernel,
and so another order of the sum over the rank, by shape and alignment (on a CPU, about half of random
rectangles of B @ A differ in the last bit from the same rectangle of the full product). Hence the invariant:
every product has the shape (BLOCK_ROWS, r) x (r, in), row i of the tensor sits in row i % BLOCK_ROWS of its
block, and operands are aligned. Rows outside the rectangle are zeros, columns outside it are computed and
dropped. Everything after the product is elementwise, in float32, one rounding at a time.

Callers: trainer/shards.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_ROWS = 256
"""Rows of one product. Larger means fewer kernels, smaller means less scratch and less waste at the edges of a
rectangle.
"""

ALIGNMENT_BYTES = 64
"""What torch's allocators give at least, and what keeps a BLAS library on one code path."""


def merge_scratch_bytes(in_features: int, rank: int) -> int:
    """Most temporary memory of one `merge_region`, in bytes: the product, the block of B, and an aligned copy of A."""
    return 4 * (BLOCK_ROWS * in_features + BLOCK_ROWS * rank + rank * in_features)


def merge_region(
    base: Tensor, b: Tensor, a: Tensor, scale: float, out: Tensor, *, first_row: int, first_column: int = 0
) -> None:
    """Write base + (scale * b) @ a[:, columns] into `out`, computed in float32, cast to out.dtype.

    Args:
        base: (rows, columns) of the frozen weight, any float dtype.
        b: (rows, r) float32, the rows of B that belong to them.
        a: (r, in) float32, the whole of A.
        scale: alpha / rank.
        out: (rows, columns), any strides and float dtype, on the same device.
        first_row: where base's first row stands in the whole weight.
        first_column: where its first column stands.
    """
    num_rows, num_columns = base.shape
    columns = slice(first_column, first_column + num_columns)
    a = a.contiguous() if a.data_ptr() % ALIGNMENT_BYTES == 0 else a.clone(memory_format=torch.contiguous_format)
    block = torch.empty(BLOCK_ROWS, b.shape[1], dtype=torch.float32, device=b.device)
    product = torch.empty(BLOCK_ROWS, a.shape[1], dtype=torch.float32, device=b.device)
    done = 0
    while done < num_rows:
        place = (first_row + done) % BLOCK_ROWS
        count = min(BLOCK_ROWS - place, num_rows - done)
        rows, places = slice(done, done + count), slice(place, place + count)
        block.zero_()
        torch.mul(b[rows], scale, out=block[places])
        torch.mm(block, a, out=product)
        out[rows].copy_(product[places, columns].add_(base[rows]))
        done += count
