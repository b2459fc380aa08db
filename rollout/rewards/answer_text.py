"""The right answer of a row as text, and the rewards that compare a response with it: exact_match and regex.

A row's answer is text or a number. The text of anything else (None, True, [1]) is nobody's answer, and a response might
say it. Rows are checked before a run starts; an agent's rows only here, because an agent may judge by itself.
"""

import math
import re
import unicodedata

from slipstream.conf.json_files import JsonObject
from slipstream.conf.schema import ANSWER
from slipstream.rollout.errors import RewardError


def answer_text(answer: object) -> str:
    """The answer's text, as `normal` writes it. Raises ValueError: it is neither text nor a number."""
    is_number = isinstance(answer, int) or (isinstance(answer, float) and math.isfinite(answer))
    if isinstance(answer, bool) or not (isinstance(answer, str) or is_number):
        raise ValueError(f"an answer must be text or a number, got {answer!r:.60}")
    if isinstance(answer, float) and answer.is_integer() and abs(answer) < 2**53:
        answer = int(answer)  # 42.0: pandas makes it of a whole number in a column where another one is missing
    return normal(str(answer))


def normal(text: str) -> str:
    """A text without white space around it, each letter in one form: an accent may be a character of its own."""
    return unicodedata.normalize("NFC", text.strip())


def answer_of(fields: JsonObject) -> str:
    """`answer_text` of a row's answer. Raises KeyError: the row has no answer column; ValueError: the answer is neither
    text nor a number."""
    if ANSWER not in fields:
        raise KeyError(f"the row has no column {ANSWER!r} (data.columns.{ANSWER}); it has {', '.join(sorted(fields))}")
    return answer_text(fields[ANSWER])


def exact_match(response: str, fields: JsonObject) -> tuple[float, str]:
    """(1.0 if the response and the answer are equal once white space around them is gone; case counts, the response).
    Raises as answer_of."""
    given = normal(response)
    return float(given == answer_of(fields)), given


def regex_match(response: str, fields: JsonObject, pattern: re.Pattern[str]) -> tuple[float, str | None]:
    """(1.0 if the first group of the pattern's first match equals the answer, that group); white space around both is
    ignored. Raises as answer_of.

    Example: pattern `answer: (\\d+)`, response "so the answer: 42." and answer 42 give 1.0."""
    found = pattern.search(response)
    given = None if found is None else normal(found.group(1) or "")
    return float(given == answer_of(fields)), given


def compile_pattern(pattern: str, option: str) -> re.Pattern[str]:
    """A regular expression with a group. Raises RewardError: it is not one."""
    try:
        compiled = re.compile(pattern)
    except re.error as e:
        raise RewardError(f"{option}={pattern!r} is not a regular expression: {e}") from e
    if compiled.groups < 1:
        raise RewardError(f"{option}={pattern!r} has no group; put parentheses around the answer")
    return compiled
