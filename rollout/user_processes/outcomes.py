"""What became of a sample or an episode, and how the process of the user's code writes it in a message to the run.

Owns the kinds of failure and the check of what a process says: the user's code may have written anything.
"""

import hashlib
import math
import numbers
import reprlib
import traceback
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.conf.json_files import is_sequence

SCORE, NOTHING = "score", "nothing"
"""A number, and an agent that returned none."""
RAISED, NOT_A_NUMBER, TIMEOUT = "raised", "not_a_number", "timeout"
DIED, GARBLED, BLOCKED = "died", "garbled", "blocked"
"""Failures that a process cannot tell of: it is gone."""
MAX_ANSWER = 200
"""Longest answer that is kept as it is, in characters; of a longer one the beginning and a hash."""
MAX_FRAMES = 10
"""Parts of a traceback that are reported: the last ones, including the exception's own line."""
MAX_PART = 600
"""Longest part, in characters. An exception's message may hold a whole response."""


@dataclass(frozen=True, slots=True)
class Outcome:
    kind: str
    """SCORE, NOTHING, or the kind of failure."""
    value: float | None = None
    report: str = ""
    place: str = ""
    """Class of an exception and where it was raised, without its message, which may contain the response."""
    answer: str | None = None
    """What the response answers, for majority votes."""

    @property
    def as_message(self) -> list[object]:
        if self.kind != SCORE:
            return [self.kind, self.report, self.place]
        return [SCORE, self.value] if self.answer is None else [SCORE, self.value, shortened(self.answer)]


def shortened(answer: str) -> str:
    """The answer without white space around it, or what stands for a long one."""
    answer = answer.strip()
    if len(answer) <= MAX_ANSWER:
        return answer
    return f"{answer[: MAX_ANSWER - 17]} {hashlib.sha256(answer.encode(errors='replace')).hexdigest()[:16]}"


def read_outcome(message: object, told: Collection[str]) -> Outcome | None:
    """What `as_message` wrote; None if that is no outcome. `told`: kinds without a number that it may tell of."""
    match message:
        case ["score", float() as value] if math.isfinite(value):
            return Outcome(SCORE, value)
        case ["score", float() as value, str() as answer] if math.isfinite(value) and len(answer) <= MAX_ANSWER:
            return Outcome(SCORE, value, answer=answer)
        case [str() as kind, str() as report, str() as place] if kind in told:
            return Outcome(kind, report=report, place=place)
        case _:
            return None


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


def no_number(rule: str, value: object) -> Outcome:
    """The outcome that says which rule a value breaks."""
    kind = type(value).__name__
    return Outcome(NOT_A_NUMBER, report=f"{rule}, got {kind}: {reprlib.repr(value)}", place=f"got {kind}")


def raised(error: BaseException) -> Outcome:
    """The end of the traceback, and "class file:line" of what was raised."""
    told = traceback.TracebackException.from_exception(error)
    parts = [
        part if len(part) <= MAX_PART else f"{part[:MAX_PART]}... ({len(part)} characters)\n" for part in told.format()
    ]
    place = f"{told.stack[-1].filename}:{told.stack[-1].lineno}" if told.stack else "nowhere"
    return Outcome(RAISED, report="".join(parts[-MAX_FRAMES:]), place=f"{type(error).__name__} {place}")
