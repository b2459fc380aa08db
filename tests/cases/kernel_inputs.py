"""What cases of kernels share: their sizes, drawn inputs, and how near is near."""

import torch
from torch import Tensor

from slipstream.trainer.kernels.experts.groups import RowGroups

TILE_ROWS = 64
COUNTS = (3, 0, TILE_ROWS + 5, 1)
"""An expert without rows, one of more than a tile, one of a single row."""
H, WIDTH = 96, 72
"""Neither is a multiple of a block."""
WIDE_RANK = 300
"""A rank that selects the last tilings in float32 and the ones before them in two bytes; no power of two."""


def dtypes_of(device: str) -> tuple[torch.dtype, torch.dtype]:
    """A wide and a narrow one; numpy, which the interpreter computes with, has no bfloat16."""
    return torch.float32, torch.float16 if device == "cpu" else torch.bfloat16


def is_tried(device: str, *places: int, one_of: int = 2) -> bool:
    """Whether a combination of three or more options is tried, by the place of each option's value: all of them on a
    GPU; half, or one of so many, under the interpreter, which takes seconds, where any two options that have no more
    values still meet in all of them."""
    return device != "cpu" or sum(places) % one_of == 0


def groups_of(counts: tuple[int, ...], device: str, expected_rows: int | None = None) -> RowGroups:
    return RowGroups(torch.tensor(counts, device=device), sum(counts), expected_rows=expected_rows)


def draw(*shape: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def assert_near(actual: Tensor | None, expected: Tensor | None, what: str) -> None:
    """float32: sums in another order. Narrow: one rounding (bfloat16 2^-8, float16 2^-11) may fall the other way."""
    assert (actual is None) == (expected is None), what
    if actual is None or expected is None:
        return
    assert actual.dtype == expected.dtype, what
    tolerance = {torch.bfloat16: 2**-7, torch.float16: 2**-9, torch.float32: 3e-5}[actual.dtype]
    bound = tolerance * (expected.float().abs() + expected.float().abs().mean())
    worst = ((actual.float() - expected.float()).abs() - bound).max() if actual.numel() else torch.zeros(())
    assert bool(worst <= 0), f"{what}: off by {float(worst)} beyond the tolerance"
