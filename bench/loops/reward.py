"""The reward of a benchmark's job: cheap, and about half of a group's random responses get it."""

from collections.abc import Mapping
from typing import Any


def is_even(prompt: str, response: str, fields: Mapping[str, Any]) -> float:
    """1 if the sum of the characters' codes is even, otherwise 0."""
    return float(sum(map(ord, response)) % 2 == 0)
