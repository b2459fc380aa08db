"""The right answer of a row as text, for rewards that compare with it: exact_match, regex, math.

A row's answer is text or a number. The text of anything else (None, True, [1]) is nobody's answer, and a response might
say it. Rows are checked before a run starts; an agent's rows only here, because an agent may judge by itself.
"""

from __future__ import annotations

import math


def answer_text(answer: object) -> str:
    """The answer's text without the white space around it.

    Raises:
        ValueError: It is neither text nor a number.
    """
    is_number = isinstance(answer, int) or (isinstance(answer, float) and math.isfinite(answer))
    if isinstance(answer, bool) or not (isinstance(answer, str) or is_number):
        raise ValueError(f"an answer must be text or a number, got {answer!r:.60}")
    return str(answer).strip()
