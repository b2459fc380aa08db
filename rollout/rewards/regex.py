"""Reward 1 for a response that contains the answer at the place that a pattern finds."""

from __future__ import annotations

import re
from typing import Any


def regex_match(response: str, fields: dict[str, Any], *, pattern: re.Pattern[str], answer_key: str) -> float:
    """1.0 if the first group of the pattern's first match equals the answer; white space around both is ignored.

    Example: pattern `answer: (\\d+)`, response "so the answer: 42." and answer 42 give 1.0.

    Raises:
        KeyError: The row has no answer column.
    """
    found = pattern.search(response)
    return float(found is not None and (found.group(1) or "").strip() == str(fields[answer_key]).strip())
