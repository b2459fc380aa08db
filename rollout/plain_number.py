"""Numbers of Python, NumPy and PyTorch as plain ones: what a reward or an agent may return. Imports neither."""

import math
import numbers
from collections.abc import Sequence
from typing import Any

from slipstream.conf.json_files import is_sequence


def plain_number(value: Any) -> float | None:
    """The value as a finite float: of a number, NumPy's bool, an array or a tensor without dimensions. Else None."""
    if not isinstance(value, numbers.Real) and getattr(value, "shape", None) == ():
        value = value.item()
    if not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return number if math.isfinite(number) else None


def plain_list(value: Any) -> list[Any] | None:
    """The values of a sequence, or of an array or tensor with one dimension. Else None."""
    if not isinstance(value, Sequence):
        return list(value.tolist()) if len(getattr(value, "shape", ())) == 1 else None
    return list(value) if is_sequence(value) else None
