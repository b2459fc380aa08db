"""What a merge of adapters into rows of weights reads, whichever kernel does it.

Shapes: G bands, R rows of a band, N columns, K rank of the adapter, E adapters of a stack.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class MergeOperands:
    """What a merge reads. Weights lie one below the other, each with its own A; a rank of 0 merges nothing.

    A single band may run through several weights; each of several bands lies in one weight.
    """

    base_GRN: Tensor
    """Bands of rows of frozen weights, any float dtype."""
    b_GRK: Tensor
    """The rows of B that belong to them; float32 or bfloat16 (trainer.lora.dtype)."""
    a_EKN: Tensor
    """Whole factors A, in the format of B: a[0] belongs to rows 0 .. rows_a_factor - 1, a[1] to the next ones."""
    scale: float
    """alpha / rank."""
    first_row: int
    """Index of base's first row, counted from the first row under a[0]."""
    rows_a_factor: int
    """Rows under one A."""
    pitch: int = 0
    """Rows from a band's first one to the next band's; ignored for one band."""
    first_column: int = 0
    """The column of A that belongs to base's first column."""
    key: int | None = None
    """Values are rounded by the thresholds of the parameter with this key (rounding.py). None: to nearest."""
    stack_row: int = 0
    """Index of the first row under a[0], counted through the parameter over all ranks."""

    def a_of_columns(self) -> Tensor:
        """The columns of A that belong to those of base."""
        return self.a_EKN[:, :, self.first_column : self.first_column + self.base_GRN.shape[2]]
