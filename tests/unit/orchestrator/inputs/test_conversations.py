"""Promises of orchestrator/inputs/rows/conversations.py: exactly the assistant's tokens are taught, and every bad row
is named."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from slipstream.conf.schema import DataConfig
from slipstream.orchestrator.data.sources import START, Row, read_rows
from slipstream.orchestrator.inputs.character_tokenizer import save_character_tokenizer
from slipstream.orchestrator.inputs.rows.conversations import ConversationReader
from slipstream.orchestrator.inputs.rows.preferences import PreferenceReader
from slipstream.orchestrator.inputs.text_encoder import TextEncoder
from slipstream.rollout.errors import DataError

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TURNS = [("user", "2+2?"), ("assistant", "4")]
FORGETFUL = (
    "{% for m in messages %}[{{ m.role }}]{% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A character tokenizer with a chat template."""
    save_character_tokenizer(tmp_path, vocab_size=96)
    set_template(tmp_path, TEMPLATE)
    return tmp_path


def set_template(folder: Path, template: str) -> None:
    described = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(described | {"chat_template": template}))


def _read(folder: Path, rows: list[dict], config: DataConfig | None = None):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reader = ConversationReader(config or DataConfig(), TextEncoder(folder))
    return [one for row in read_rows(str(path)) for one in reader.read(row, 0).sequences]


def _taught_text(folder: Path, conversation) -> str:
    encoder = TextEncoder(folder)
    taught = [token for token, is_taught in zip(conversation.token_ids, conversation.is_taught) if is_taught]
    return encoder._tokenizer.decode(taught, skip_special_tokens=False)


def test_every_assistant_turn_and_its_end_are_taught_and_nothing_else(folder):
    turns = [("user", "2+2?"), ("assistant", "4"), ("user", "3+3?"), ("assistant", "it is 6")]
    (conversation,) = _read(folder, [{"messages": [{"role": r, "content": c} for r, c in turns]}])
    assert _taught_text(folder, conversation) == "4<eos>it is 6<eos>"
    (longer,) = _read(folder, [{"messages": [{"role": r, "content": c} for r, c in [*turns, ("user", "bye")]]}])
    assert _taught_text(folder, longer) == "4<eos>it is 6<eos>"
    assert longer.token_ids[: len(conversation.token_ids)] == conversation.token_ids
    assert len(longer.token_ids) == len(conversation.token_ids) + len("[user]bye") + 1, "as the template writes it"
    assert len(conversation.token_ids) == len(conversation.is_taught)


def test_the_run_judges_the_tokens_of_every_sequence(folder):
    judged: list[tuple[str, tuple[int, ...]]] = []
    reader = ConversationReader(DataConfig(), TextEncoder(folder), lambda where, ids: judged.append((where, ids)))
    row = Row("row 1", {"messages": [{"role": role, "content": text} for role, text in TURNS]}, START)
    assert judged == [("row 1", one.token_ids) for one in reader.read(row, 0).sequences] and judged


def test_a_plain_row_teaches_the_response_and_the_end(folder):
    (conversation,) = _read(folder, [{"prompt": "6d8=", "response": "d"}])
    assert _taught_text(folder, conversation) == "d<eos>"
    assert conversation.token_ids[0] == 1, "<bos> as prompts of rollouts have it"


ASKED, SAID = ({"role": role, "content": text} for role, text in TURNS)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [ASKED], "completion": [SAID]},
        {"prompt": [ASKED], "response": [SAID], "completion": "of another use"},
        {"prompt": "2+2?", "completion": [SAID]},
        {"prompt": [ASKED], "completion": "4"},
        {"prompt": [ASKED], "answer": 4},
        {"prompt": [ASKED], "answer": 4, "messages": None},
        {"messages": [{**ASKED, "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]}, SAID]},
    ],
)
def test_every_form_of_messages_is_the_same_conversation(folder, row):
    """TRL's prompt-completion format, and content in parts."""
    assert _read(folder, [row]) == _read(folder, [{"messages": [ASKED, SAID]}])


def test_of_a_completion_alone_the_turns_are_taught(folder):
    before = [ASKED, SAID, {"role": "user", "content": "3+3?"}]
    after = [{"role": "assistant", "content": "6"}, ASKED, {"role": "assistant", "content": "five"}]
    (conversation,) = _read(folder, [{"prompt": before, "completion": after}])
    assert _taught_text(folder, conversation) == "6<eos>five<eos>"
    (whole,) = _read(folder, [{"messages": [*before, *after]}])
    assert conversation.token_ids == whole.token_ids


def test_text_that_was_rendered_before_and_a_completion_are_taught_as_a_plain_response(folder):
    rows = [
        {"prompt": "6d8=", "response": "d"},
        {"prompt": "<bos>6d8=", "response": "d<eos>"},
        {"prompt": "6d8=", "response": "d<eos>\n"},
        {"prompt": "6d8=", "completion": "d"},
    ]
    plain, *others = _read(folder, rows)
    assert others == [plain] * 3
    of_text, of_number = _read(folder, [{"prompt": "2+2=", "response": "4"}, {"prompt": "2+2=", "answer": 4}])
    assert of_number == of_text


def test_an_answer_whose_first_token_begins_in_the_prompt_is_taught_whole(folder):
    """The tokens are "is" and " Paris", and the space is the prompt's."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(special_tokens=["<eos>"], show_progress=False)
    tokenizer.train_from_iterator(["it is Paris", "is Paris"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (conversation,) = _read(folder, [{"prompt": "it is ", "response": "Paris"}])
    pieces = [tokenizer.decode([token], skip_special_tokens=False) for token in conversation.token_ids]
    assert pieces == ["it", " is", " Paris", "<eos>"]
    assert conversation.is_taught == (False, False, True, True)
    path = folder / "pair.jsonl"
    path.write_text(json.dumps({"prompt": "it is ", "chosen": "Paris", "rejected": "it"}))
    pair = PreferenceReader(DataConfig(), TextEncoder(folder)).read(next(read_rows(str(path))), 0)
    assert pair.sequences[0] == conversation, "as algorithm=dpo counts it"


def test_the_sample_predicts_each_taught_token(folder):
    (conversation,) = _read(folder, [{"prompt": "6d8=", "response": "d"}])
    sample = conversation.sample(policy_version=7)
    assert sample.num_valid_tokens == 2 and sample.oldest_version == 7
    assert sample.loss_mask.tolist() == [False] * 5 + [True, True]


EMPTY = [{"role": "assistant", "content": content} for content in ("", " \n", [{"type": "text", "text": ""}])]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"text": "a"}, "needs a column 'messages'"),
        ({"question": "a", "answer": "b"}, r"mean data.prompt_key=question data.columns.response=answer\?"),
        ({"question": "a"}, "the columns are question$"),
        ({"prompt": [ASKED], "completion": [ASKED]}, "column 'completion' must begin with a turn of 'assistant'"),
        ({"prompt": [ASKED], "completion": []}, "column 'completion' .*non-empty list of messages.*got an empty list"),
        ({"prompt": [], "completion": [SAID]}, "column 'prompt' .* must be text or a non-empty list"),
        ({"prompt": "", "completion": [SAID]}, "column 'prompt' .* is empty"),
        ({"prompt": [ASKED], "completion": " "}, "column 'completion' .* is empty"),
        ({"prompt": "2+2?", "response": " "}, "column 'response' .* is empty"),
        ({"prompt": str([ASKED]), "response": "4"}, "column 'prompt' is the text of messages"),
        ({"prompt": [ASKED, SAID], "completion": [SAID]}, "messages 2 and 3 are both of 'assistant'"),
        ({"prompt": [ASKED]}, r"column 'response' \(data.columns.response\)"),
        ({"messages": [ASKED, ASKED, SAID]}, "messages 1 and 2 are both of 'user'"),
        ({"messages": [{"role": "user"}]}, r"column 'messages': content of message 1 \(user\) must be text"),
        ({"messages": [{"role": "user", "content": "hello"}]}, "nothing to learn"),
        *(({"messages": [ASKED, SAID, ASKED, empty]}, "turn 4, of the assistant, is empty") for empty in EMPTY),
        ({"messages": [ASKED, EMPTY[0], ASKED, SAID]}, "turn 2, .* would teach the model to end at once; fill it, or"),
        ({"prompt": [ASKED], "completion": [SAID, ASKED, EMPTY[1]]}, "turn 4, of the assistant, is empty"),
        ({"prompt": "a", "response": "b\ud83d"}, "half of a surrogate pair"),
        ({"prompt": "a", "response": "b" * 98}, r"has 101 tokens, data\.max_sequence_tokens allows 100"),
    ],
)
def test_a_bad_row_is_named_with_its_line(folder, row, complaint):
    good = {"prompt": "a", "response": "b" * 97}  # 100 tokens, with the first one and the end
    with pytest.raises(DataError, match=complaint) as caught:
        _read(folder, [good, row], replace(DataConfig(), max_sequence_tokens=100))
    assert "rows.jsonl:2" in str(caught.value)


def test_a_template_that_rewrites_earlier_turns_makes_a_sequence_of_each_answer(folder):
    set_template(folder, FORGETFUL)
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    first, second = _read(folder, [{"messages": [{"role": r, "content": c} for r, c in turns]}])
    decode = TextEncoder(folder)._tokenizer.decode
    assert decode(first.token_ids) == "[user]a[assistant]b"
    assert decode(second.token_ids) == "[user]a[assistant][user]c[assistant]d"
    assert (_taught_text(folder, first), _taught_text(folder, second)) == ("b", "d")
