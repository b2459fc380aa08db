"""Promises of orchestrator/inputs/rows/preferences.py: both forms of a pair, exactly the answers count, and every bad
row is named."""

import json
from pathlib import Path
from typing import ClassVar

import pytest
from unit.orchestrator.inputs.test_conversations import (
    TEMPLATE,
    folder as folder,  # a fixture
    set_template,
)

from slipstream.conf.load import load_run_config
from slipstream.conf.schema import DataConfig
from slipstream.orchestrator.data.sources import read_rows
from slipstream.orchestrator.inputs.rows.conversations import tokenized
from slipstream.orchestrator.inputs.rows.preferences import PreferenceReader
from slipstream.orchestrator.inputs.rows.prompt_rows import check_data
from slipstream.orchestrator.inputs.text_encoder import TextEncoder
from slipstream.rollout.errors import DataError


class Words:
    """One token for each word with the space before it, as BPE has; no end of text."""

    ends: ClassVar[dict[int, str]] = {}

    def encode_with_places(self, text: str, add_special_tokens: bool) -> tuple[list[int], list[tuple[int, int]]]:
        starts = [0, *(place for place, one in enumerate(text) if one == " " and place)]
        places = list(zip(starts, [*starts[1:], len(text)], strict=True))
        return [sum(map(ord, text[start:stop])) for start, stop in places], places


def _read(folder: Path, row: dict, encoder=None, **options):
    path = folder / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    reader = PreferenceReader(DataConfig(**options), encoder or TextEncoder(folder))
    return next(reader.read(row, 0) for row in read_rows(str(path)))


def _texts(folder: Path, pair) -> list[tuple[str, str]]:
    """(what precedes the answer, the answer) of both."""
    decode = TextEncoder(folder)._tokenizer.decode
    found = []
    for one in pair.sequences:
        first = one.is_taught.index(True)
        assert all(one.is_taught[first:])
        halves = (one.token_ids[:first], one.token_ids[first:])
        found.append(tuple(decode(half, skip_special_tokens=False) for half in halves))
    return found


def _turns(*texts: str) -> list[dict]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def _answer(text: str) -> list[dict]:
    return [{"role": "assistant", "content": text}]


def test_texts_count_behind_the_prompt_with_their_end(folder):
    pair = _read(folder, {"prompt": "2+2=", "chosen": "4", "rejected": "42"})
    assert _texts(folder, pair) == [("<bos>2+2=", "4<eos>"), ("<bos>2+2=", "42<eos>")]


def test_texts_that_were_rendered_before_are_the_same_pair(folder):
    plain = _read(folder, {"prompt": "2+2=", "chosen": "4", "rejected": "42"})
    assert _read(folder, {"prompt": "<bos>2+2=", "chosen": "4<eos>", "rejected": "42<eos>\n"}) == plain
    whole = _read(folder, {"chosen": "2+2=4", "rejected": "2+2=42"})
    assert _read(folder, {"chosen": "<bos>2+2=4<eos>", "rejected": "<bos>2+2=42<eos>"}) == whole


CHAT = [("[user]2+2?<eos>[assistant]", "4<eos>"), ("[user]2+2?<eos>[assistant]", "5<eos>")]


PARTS = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [{"role": "user", "content": PARTS}], "chosen": "4", "rejected": "5"},
        {"prompt": _turns("2+2?"), "chosen": _answer("4"), "rejected": _answer("5")},
        {"prompt": _turns("2+2?"), "chosen": "4", "rejected": "5"},
        {"prompt": "2+2?", "chosen": _answer("4"), "rejected": _answer("5")},
        {"chosen": _turns("2+2?", "4"), "rejected": _turns("2+2?", "5")},
        {"prompt": None, "chosen": _turns("2+2?", "4"), "rejected": _turns("2+2?", "5")},
    ],
    ids=["parts", "explicit", "texts as answers", "text as prompt", "implicit", "null"],
)
def test_every_form_of_messages_gives_the_same_pair(folder, row):
    assert _texts(folder, _read(folder, row)) == CHAT


def test_earlier_turns_of_the_assistant_do_not_count_and_later_ones_of_the_user_neither(folder):
    pair = _read(folder, {"chosen": _turns("a", "b", "c", "d", "e", "f"), "rejected": _turns("a", "b", "c", "z")})
    decode = TextEncoder(folder)._tokenizer.decode
    for one, answer in zip(pair.sequences, ("d<eos>f<eos>", "z<eos>"), strict=True):
        counted = [token for token, counts in zip(one.token_ids, one.is_taught, strict=True) if counts]
        assert decode(counted, skip_special_tokens=False) == answer


def test_whole_texts_count_from_their_first_difference(folder):
    pair = _read(folder, {"chosen": "Q: 2+2? A: four", "rejected": "Q: 2+2? A: five"})
    assert _texts(folder, pair) == [("<bos>Q: 2+2? A: f", "our<eos>"), ("<bos>Q: 2+2? A: f", "ive<eos>")]


def test_a_first_token_that_nothing_precedes_does_not_count():
    assert tokenized(" a b", [(0, 4)], "row 1", Words()).is_taught == (False, True)


def test_the_template_is_given_the_runs_variables(folder):
    set_template(folder, "{{ mood }}" + TEMPLATE)
    turns = [[{"role": "assistant", "content": said}] for said in "45"]
    row = {"prompt": [{"role": "user", "content": "2+2?"}], "chosen": turns[0], "rejected": turns[1]}
    texts = _texts(folder, _read(folder, row, chat_template_kwargs={"mood": "glad"}))
    assert texts == [("glad[user]2+2?<eos>[assistant]", f"{said}<eos>") for said in "45"]


def test_other_columns_can_be_named(folder):
    row = {"question": "2+2=", "better": "4", "worse": "5"}
    pair = _read(folder, row, prompt_key="question", columns={"chosen": "better", "rejected": "worse"})
    assert _texts(folder, pair)[0] == ("<bos>2+2=", "4<eos>")


def test_the_trainer_gets_the_chosen_one_first(folder):
    pair = _read(folder, {"prompt": "2+2=", "chosen": "4", "rejected": "42"})
    ((chosen, rejected),) = pair.samples(policy_version=7)
    assert (chosen.num_valid_tokens, rejected.num_valid_tokens, rejected.oldest_version) == (2, 3, 7)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"prompt": "a", "chosen": "b"}, r"no column 'rejected' \(data.columns.rejected\).* are chosen, prompt"),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, "column 'rejected' .* text or a non-empty list.*got int"),
        ({"prompt": "a", "chosen": [], "rejected": "b"}, "column 'chosen' .* must be text or a non-empty list"),
        ({"prompt": "a", "chosen": " ", "rejected": "b"}, "column 'chosen' .* is empty"),
        (
            {"prompt": "a", "chosen": str(_answer("b")), "rejected": str(_answer("c"))},
            "'chosen' is the text of messages",
        ),
        ({"prompt": "", "chosen": "c", "rejected": "b"}, r"column 'prompt' \(data.prompt_key\) is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": _answer("")}, "column 'rejected' .* is empty"),
        ({"chosen": _turns("a", "b"), "rejected": _turns("a", "")}, "answer of column 'rejected' is empty"),
        ({"chosen": _turns("a", "b", "c", ""), "rejected": _turns("a", "d")}, "turn 4, of the assistant, is empty"),
        ({"prompt": [*_turns("a"), *_turns("a")], "chosen": "b", "rejected": "c"}, "1 and 2 are both of 'user'"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "'chosen' and 'rejected' are equal"),
        ({"prompt": "a", "chosen": "b", "rejected": _answer("b")}, "'chosen' and 'rejected' have the same tokens"),
        ({"chosen": "b", "rejected": "c"}, "no column 'prompt'.*no common beginning"),
        ({"chosen": _turns("a", "b"), "rejected": _turns("c", "b")}, "no column 'prompt'.*no common beginning"),
        (
            {"prompt": "a", "chosen": _turns("a", "b"), "rejected": _turns("a", "c")},
            "a turn of 'user'.*data.prompt_key",
        ),
        ({"chosen": _turns("a", "b", "c", "d"), "rejected": _turns("a", "b")}, "goes on .* with a turn of 'user'"),
        ({"prompt": "a", "chosen": "b", "rejected": "c" * 9}, "'rejected', with its prompt, has 12 tokens.* allows 11"),
    ],
)
def test_bad_rows_are_refused_with_their_place(folder, row, complaint):
    with pytest.raises(DataError, match=rf"rows\.jsonl:1: .*{complaint}"):
        _read(folder, row, max_sequence_tokens=11)


@pytest.mark.parametrize(
    ("words", "row", "what"),
    [
        (["algorithm=dpo"], {"prompt": "1a=", "chosen": "a", "rejected": "b"}, "column 'rejected', with its prompt,"),
        ([], {"prompt": "1a=", "response": "b"}, "the conversation"),
    ],
)
def test_every_row_that_teaches_is_checked_before_a_run(tmp_path, words, row, what):
    path = tmp_path / "rows.jsonl"
    rows = [row, {name: "b" * 30 if text == "b" else text for name, text in row.items()}]
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    words = ["experiment=sft_quickstart", *words, "data=files", f"data.path={path}"]
    assert check_data(load_run_config(words)).finding.startswith(f"2 in {path}")
    words += ["data.max_sequence_tokens=10"]
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: {what} has 35 tokens.*data\.drop_too_long=true"):
        check_data(load_run_config(words))
    finding = check_data(load_run_config([*words, "data.drop_too_long=true"])).finding
    assert finding.startswith(f"1 (1 too long and left out) in {path}; fewer than a step takes")
    rows[0]["prompt"] = "\u00e9"
    path.write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(DataError, match=r"rows\.jsonl:1: characters without a token"):
        check_data(load_run_config(words))
