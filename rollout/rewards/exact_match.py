"""Reward 1 for a response that is the answer, 0 for any other."""

from __future__ import annotations

from typing import Any

from rollout.rewards.answer_text import answer_text


def exact_match(response: str, fields: dict[str, Any], *, answer_key: str) -> tuple[float, str]:
    """(1.0 if the response and the answer are equal once white space around them is gone; case counts, the response).

    Raises:
        KeyError: The row has no answer column.
        ValueError: The answer is neither text nor a number.
    """
    given = response.strip()
    return float(given == answer_text(fields[answer_key])), given
