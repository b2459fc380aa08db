"""W + scale * B @ A for rows of a weight. A row has the same bits in any rectangle in which it is computed.

The merged export and the weight source of a publish both go through this one formula, so that an engine's bytes can be
compared with an exported checkpoint's.

The bits of a matrix product depend not only on its operands' values: BLAS libraries choose a kernel, and so the order
of the sum over the rank, by shape and alignment. (On a CPU, about half of random rectangles of B @ A differ in the last
bit from the same rectangle of the full product.) Hence there are two forms; the kind of device decides which one runs:

* CUDA: the kernel of `merge_kernel.py`, which fixes that order itself. No scratch, one launch for a stack of experts.
* elsewhere: torch. Every product has the shape (MERGE_ROWS, r) x (r, in), row i under its A sits in row i % MERGE_ROWS
  of its block, and operands are aligned. Rows outside the rectangle are zeros, columns outside it are computed and
  dropped. Everything after the product is elementwise, in float32, one rounding at a time.

Shapes: G bands, R rows of a band, N columns, K rank of the adapter, E adapters of a stack.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from slipstream.weight_sync.merging.factors import MERGE_ROWS, ROUNDED_ROWS
from slipstream.weight_sync.merging.merge_operands import MergeOperands
from slipstream.weight_sync.merging.rounding import dithered, thresholds

ALIGNMENT_BYTES = 64
"""In bytes. torch's allocators align at least to this, and for aligned operands a BLAS library takes one code path."""


def merger(operands: MergeOperands, out_GRN: Tensor) -> Callable[[], object]:
    """A function that writes base + (scale * b) @ a[:, :, columns] into `out`, computed in float32, rounded to
    out.dtype: by the thresholds of operands.key if there is one and the format is bfloat16, else to nearest.

    The function keeps the tensors, and may be called again after their values changed. `out` has any strides and any
    float dtype.
    """
    if operands.base_GRN.is_cuda:
        from slipstream.weight_sync.merging import merge_kernel  # needs Triton, which a CPU host may lack

        return merge_kernel.merger(operands, out_GRN)
    a_EKN, rows_a_factor = operands.a_EKN, operands.rows_a_factor

    def merge_on_host() -> None:
        bands = zip(operands.base_GRN, operands.b_GRK, out_GRN, strict=True)
        for band, (base_RN, b_RK, out_RN) in enumerate(bands):
            done = 0
            while done < len(base_RN):
                first_row = operands.first_row + band * operands.pitch + done
                factor, place = divmod(first_row, rows_a_factor)
                count = min(rows_a_factor - place, len(base_RN) - done)
                rows = slice(done, done + count)
                parts = _merged_with_torch(
                    base_RN[rows], b_RK[rows], a_EKN[factor], operands.scale, place, operands.first_column
                )
                for first, merged in parts:
                    out = out_RN[done + first :][: len(merged)]
                    if operands.key is None or out.dtype is not torch.bfloat16:
                        out.copy_(merged)
                        continue
                    stack_row = operands.stack_row + first_row + first
                    numbers = torch.arange(stack_row, stack_row + len(merged))
                    round_into(out, merged, operands.key, numbers, operands.first_column)
                done += count

    return merge_on_host


def marker(operands: MergeOperands, last: MergeOperands, out_GRN: Tensor, marks_GRN: Tensor) -> Callable[[], object]:
    """A function that does what merger() does, and marks with 1 the elements whose bits differ from what `last` gives,
    with 0 the others. Like merger's, it may be called again after values changed.

    Args:
        operands, last: Of the same rows; only the values of the factors differ.
        out_GRN, marks_GRN: bfloat16 and uint8, of equal strides.
    """
    if operands.base_GRN.is_cuda:
        from slipstream.weight_sync.merging import merge_kernel

        return merge_kernel.merger(operands, out_GRN, last, marks_GRN)
    merge = merger(operands, out_GRN)

    def merge_and_mark_on_host() -> None:
        merge()
        scratch_RN = out_GRN.new_empty(MERGE_ROWS, out_GRN.shape[2])
        for band in range(out_GRN.shape[0]):
            for first in range(0, out_GRN.shape[1], MERGE_ROWS):
                rows = slice(first, first + MERGE_ROWS)
                part = replace(
                    last,
                    base_GRN=last.base_GRN[band : band + 1, rows],
                    b_GRK=last.b_GRK[band : band + 1, rows],
                    first_row=last.first_row + band * last.pitch + first,
                )
                before_RN = scratch_RN[: part.base_GRN.shape[1]]
                merger(part, before_RN[None])()
                now_RN = out_GRN[band, rows].view(torch.int16)
                marks_GRN[band, rows].copy_(now_RN != before_RN.view(torch.int16))

    return merge_and_mark_on_host


def _merged_with_torch(
    base: Tensor, b: Tensor, a: Tensor, scale: float, first_row: int, first_column: int
) -> Iterator[tuple[int, Tensor]]:
    """Merge rows under one A, in products of one shape. Yields (rows before, merged float32 rows, until the next)."""
    num_rows, num_columns = base.shape
    columns = slice(first_column, first_column + num_columns)
    a = a.to(torch.float32)
    a = a.contiguous() if a.data_ptr() % ALIGNMENT_BYTES == 0 else a.clone(memory_format=torch.contiguous_format)
    block = torch.empty(MERGE_ROWS, b.shape[1], dtype=torch.float32, device=b.device)
    product = torch.empty(MERGE_ROWS, a.shape[1], dtype=torch.float32, device=b.device)
    done = 0
    while done < num_rows:
        place = (first_row + done) % MERGE_ROWS
        count = min(MERGE_ROWS - place, num_rows - done)
        rows, places = slice(done, done + count), slice(place, place + count)
        block.zero_()
        block[places].copy_(b[rows]).mul_(scale)  # float32 for any format of B
        torch.mm(block, a, out=product)
        yield done, product[places, columns].add_(base[rows])
        done += count


def round_into(out_RN: Tensor, values_RN: Tensor, key: int, rows_R: Tensor, first_column: int) -> None:
    """Round float32 values by thresholds into `out`, a few rows at a time; see weight_sync.merging.rounding."""
    columns = range(first_column, first_column + out_RN.shape[1])
    for first in range(0, len(out_RN), ROUNDED_ROWS):
        rows = slice(first, first + ROUNDED_ROWS)
        out = out_RN[rows]
        out.copy_(dithered(values_RN[rows], thresholds(key, rows_R[rows], columns), out.dtype))
