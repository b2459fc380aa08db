"""Fixtures of the unit tests of data."""

import pytest

from slipstream.rollout.text.messages import Chat


class LetterEncoder:
    """One token per character, its code point; `<bos>` is 1; chat messages become "role:content|"."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(c) for c in text]

    def render(self, chat: Chat, *, is_open: bool) -> str:
        return "".join(f"{message['role']}:{message['content']}|" for message in chat.messages)

    def check_turns(self, chat: Chat, *, is_open: bool) -> None:
        """All are taken."""


@pytest.fixture
def encoder() -> LetterEncoder:
    return LetterEncoder()
