"""What a response to the tasks of tasks.py is worth: 1 with the right number after the last "Answer:", 0.1 with another
number there, 0 without one."""

from __future__ import annotations

import re
from typing import Any

_ANSWER = re.compile(r"Answer:\s*\**(-?\d+)")


def answer(prompt: Any, response: str, fields: dict[str, Any]) -> float:
    """The reward; fields["answer"] is the right number."""
    found = _ANSWER.findall(response)
    return (0.9 * (found[-1] == fields["answer"]) + 0.1) if found else 0.0
