"""Fixtures of the unit tests of data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


class LetterEncoder:
    """One token per character, its code point; `<bos>` is 1; chat messages become "role:content|"."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`."""
        return [1] * add_special_tokens + [ord(c) for c in text]

    def render_chat(self, messages: Sequence[dict[str, Any]]) -> str:
        """Messages as one text."""
        if any(not isinstance(message["content"], str) for message in messages):
            raise TypeError("content must be text")
        return "".join(f"{message['role']}:{message['content']}|" for message in messages)


@pytest.fixture
def encoder() -> LetterEncoder:
    return LetterEncoder()
