"""W + scale * B @ A for rows of a weight. A row has the same bits in any rectangle in which it is computed.

Owns the one formula by which an adapter merges into its base. The merged export and the weight source of a publish
both go through it, so that an engine's bytes can be compared with an exported checkpoint's.

The bits of a matrix product depend not only on its operands' values: BLAS libraries choose a kernel, and so the order
of the sum over the rank, by shape and alignment. (On a CPU, about half of random rectangles of B @ A differ in the last
bit from the same rectangle of the full product.) Hence there are two forms; the kind of device decides which one runs:

* CUDA: the kernel of `merge_kernel.py`, which fixes that order itself. No scratch, one launch for a stack of experts.
* elsewhere: torch. Every product has the shape (BLOCK_ROWS, r) x (r, in), row i under its A sits in row i % BLOCK_ROWS
  of its block, and operands are aligned. Rows outside the rectangle are zeros, columns outside it are computed and
  dropped. Everything after the product is elementwise, in float32, one rounding at a time.

Shapes: G bands, R rows of a band, N columns, K rank of the adapter, E adapters of a stack.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trainer.weights.merge_operands import MergeOperands

BLOCK_ROWS = 256
"""Rows of one product. Larger means fewer kernels, smaller means less scratch and less waste at the edges of a
rectangle.
"""

ALIGNMENT_BYTES = 64
"""In bytes. torch's allocators align at least to this, and for aligned operands a BLAS library takes one code path."""


def merge_scratch_bytes(in_features: int, rank: int, device: torch.device) -> int:
    """The most temporary bytes of one merge: the product, the block of B, and an aligned copy of A."""
    if device.type == "cuda":
        return 0
    return 4 * (BLOCK_ROWS * in_features + BLOCK_ROWS * rank + rank * in_features)


def merger(operands: MergeOperands, out_GRN: Tensor) -> Callable[[], object]:
    """A function that writes base + (scale * b) @ a[:, :, columns] into `out`, computed in float32, cast to out.dtype.

    The function keeps the tensors, and may be called again after their values changed.

    Args:
        operands: Base and factors.
        out_GRN: Any strides and float dtype, on the same device.
    """
    if operands.base_GRN.is_cuda:
        from trainer.weights import merge_kernel  # needs Triton, which a CPU host may lack

        return merge_kernel.merger(operands, out_GRN)
    a_EKN, rows_a_factor = operands.a_EKN, operands.rows_a_factor

    def merge_on_host() -> None:
        """Band by band, factor by factor."""
        bands = zip(operands.base_GRN, operands.b_GRK, out_GRN, strict=True)
        for band, (base_RN, b_RK, out_RN) in enumerate(bands):
            done = 0
            while done < len(base_RN):
                factor, place = divmod(operands.first_row + band * operands.pitch + done, rows_a_factor)
                count = min(rows_a_factor - place, len(base_RN) - done)
                rows = slice(done, done + count)
                _merge_with_torch(
                    base_RN[rows], b_RK[rows], a_EKN[factor], operands.scale, out_RN[rows], place, operands.first_column
                )
                done += count

    return merge_on_host


def _merge_with_torch(
    base: Tensor, b: Tensor, a: Tensor, scale: float, out: Tensor, first_row: int, first_column: int
) -> None:
    """Merge rows under one A, in products of one shape."""
    num_rows, num_columns = base.shape
    columns = slice(first_column, first_column + num_columns)
    a = a.to(torch.float32)
    a = a.contiguous() if a.data_ptr() % ALIGNMENT_BYTES == 0 else a.clone(memory_format=torch.contiguous_format)
    block = torch.empty(BLOCK_ROWS, b.shape[1], dtype=torch.float32, device=b.device)
    product = torch.empty(BLOCK_ROWS, a.shape[1], dtype=torch.float32, device=b.device)
    done = 0
    while done < num_rows:
        place = (first_row + done) % BLOCK_ROWS
        count = min(BLOCK_ROWS - place, num_rows - done)
        rows, places = slice(done, done + count), slice(place, place + count)
        block.zero_()
        block[places].copy_(b[rows]).mul_(scale)  # float32 for any format of B
        torch.mm(block, a, out=product)
        out[rows].copy_(product[places, columns].add_(base[rows]))
        done += count
