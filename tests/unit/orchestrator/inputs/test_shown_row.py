"""What is shown of rows before a start, and which of their tokens a model has."""

import pytest

from slipstream.conf.load import load_run_config
from slipstream.orchestrator.inputs.rows.conversations import Conversation, Lesson
from slipstream.orchestrator.inputs.rows.prompt_rows import check_vocabulary
from slipstream.orchestrator.inputs.rows.shown_row import MAX_SHOWN, shown_row, thoughts_not_given
from slipstream.rollout.errors import DataError
from slipstream.rollout.types import Prompt


class Letters:
    """Token 0 is a, 1 is b, ..."""

    def decode(self, token_ids: tuple[int, ...]) -> str:
        return "".join(chr(97 + token) for token in token_ids)


def of(text: str, taught: str, unseen: str = "") -> Conversation:
    return Conversation(tuple(ord(one) - 97 for one in text), tuple(one == "x" for one in taught), unseen)


def test_taught_tokens_are_marked_run_by_run() -> None:
    first, second = of("abcdef", "..xx.x"), of("ab", ".x")
    shown = "6 tokens (3 taught): 'ab>>>cd<<<e>>>f<<<'"
    assert shown_row(Lesson((first,)), Letters()) == shown
    assert shown_row(Lesson((first, second)), Letters()) == f"{shown} (and 1 more sequences of this row)"
    assert (
        shown_row(Lesson((first, second), are_compared=True), Letters())
        == f"chosen {shown}, rejected 2 tokens (1 taught): 'a>>>b<<<'"
    )
    assert shown_row(Prompt(0, (2, 0), "of no use"), Letters()) == "2 tokens: 'ca'"
    assert shown_row(Prompt(0, (2,), "of no use"), Letters()) == "1 token: 'c'"


def test_of_a_long_row_both_ends_are_shown() -> None:
    whole, cut = (0,) * (MAX_SHOWN - 1) + (1,), (0,) * MAX_SHOWN + (1,)
    assert shown_row(Prompt(0, whole, ""), Letters()) == f"600 tokens: {'a' * 599 + 'b'!r}"
    assert shown_row(Prompt(0, cut, ""), Letters()) == f"601 tokens: {'a' * 300 + ' ... ' + 'a' * 299 + 'b'!r}"


def test_rows_without_the_thought_that_is_begun_are_counted() -> None:
    plain, lacks = of("ab", ".x"), of("ab", ".x", "<think>")
    several, equal = Lesson((plain, plain)), Lesson((plain, plain), are_compared=True)
    assert thoughts_not_given([several, equal]) == []
    (said,) = thoughts_not_given([Lesson((plain, lacks)), equal, Lesson((plain, lacks), are_compared=True)])
    assert said.startswith("2 of the first 3 rows have answers without '<think>', which")


def test_tokens_are_rows_of_the_models_embedding() -> None:
    config = load_run_config(["experiment=quickstart", "model.tokenizer=elsewhere"])
    check_vocabulary(config, 100, "a.jsonl:1", (5, 99, 3))
    with pytest.raises(DataError, match=r"^a\.jsonl:1: the tokenizer makes token 100, and .* vocab_size=100; give"):
        check_vocabulary(config, 100, "a.jsonl:1", (5, 100, 99))
    check_vocabulary(config, 100, "a.jsonl:1", (3,), "\u00e9")
    characters = load_run_config(["experiment=quickstart"])
    with pytest.raises(
        DataError, match=r"characters \('BCDEF'\) without a token in .*vocab_size=64; .*vocab_size=101 "
    ):
        check_vocabulary(characters, 64, "a.jsonl:1", (5, 3), "FEDCBA a")
