"""A merge of one band of rows, made and called at once."""

from torch import Tensor

from slipstream.weight_sync.merging.merge import merger
from slipstream.weight_sync.merging.merge_operands import MergeOperands


def merge_rows(
    base_RN: Tensor, b_RK: Tensor, a_EKN: Tensor, scale: float, out_RN: Tensor, *,
    first_row: int, rows_a_factor: int, first_column: int = 0, key: int | None = None, stack_row: int = 0,
) -> None:  # fmt: skip
    """See `trainer.weights.merge.merger`."""
    operands = MergeOperands(
        base_RN[None], b_RK[None], a_EKN, scale, first_row, rows_a_factor, first_column=first_column, key=key,
        stack_row=stack_row,
    )  # fmt: skip
    merger(operands, out_RN[None])()
