"""Reward 1 for a response that contains the answer at the place that a pattern finds."""

from __future__ import annotations

import re
from typing import Any

from rollout.errors import RewardError
from rollout.rewards.answer_text import answer_text


def regex_match(
    response: str, fields: dict[str, Any], *, pattern: re.Pattern[str], answer_key: str
) -> tuple[float, str | None]:
    """(1.0 if the first group of the pattern's first match equals the answer, that group); white space around both is
    ignored.

    Example: pattern `answer: (\\d+)`, response "so the answer: 42." and answer 42 give 1.0.

    Raises:
        KeyError: The row has no answer column.
        ValueError: The answer is neither text nor a number.
    """
    found = pattern.search(response)
    given = None if found is None else (found.group(1) or "").strip()
    return float(given == answer_text(fields[answer_key])), given


def compile_pattern(pattern: str, option: str) -> re.Pattern[str]:
    """A regular expression with a group.

    Raises:
        RewardError: It is not one.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as e:
        raise RewardError(f"{option}={pattern!r} is not a regular expression: {e}") from e
    if compiled.groups < 1:
        raise RewardError(f"{option}={pattern!r} has no group; put parentheses around the answer")
    return compiled
