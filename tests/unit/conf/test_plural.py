"""Numbers with their nouns."""

import pytest

from slipstream.conf.plural import counted


@pytest.mark.parametrize(
    ("number", "noun", "words"),
    [(1, "trainer rank", "1 trainer rank"), (2, "trainer rank", "2 trainer ranks"), (0, "process", "0 processes")],
)
def test_one_is_one(number: int, noun: str, words: str) -> None:
    assert counted(number, noun) == words
