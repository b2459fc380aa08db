"""Promise of tests/longest_first.py: the files that it names exist, and start first, the longest of them before all."""

from longest_first import LONGEST_FIRST, TESTS


def test_every_name_is_a_file_and_stands_there_once() -> None:
    assert [name for name in LONGEST_FIRST if not (TESTS / name).is_file()] == []
    assert len(set(LONGEST_FIRST)) == len(LONGEST_FIRST)
