"""Promises of rollout/text/ends.py: whatever a file of the model calls an end ends a response."""

import json
from pathlib import Path
from typing import Any

import pytest
from fakes.template_tokenizer import save_template_tokenizer
from tokenizers.processors import TemplateProcessing

from slipstream.conf.errors import ConfigError
from slipstream.orchestrator.inputs.rows.conversations import end_of_text
from slipstream.orchestrator.inputs.text_encoder import TextEncoder
from slipstream.rollout.agents.chat_text import FolderChatText
from slipstream.rollout.text.ends import end_token_ids
from slipstream.rollout.text.plain_text import load_tokenizer

NAMES = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer that calls <|im_end|> the end."""
    save_template_tokenizer(tmp_path, "qwen3", NAMES)
    return tmp_path


def _write(folder: Path, name: str, content: dict | None) -> None:
    if content is not None:
        (folder / name).write_text(json.dumps(content))


def _ids(folder: Path) -> dict[str, int]:
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    return {one["content"]: one["id"] for one in added}


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 2}, [7, 8, 2]),
        ({"temperature": 1.0}, {"eos_token_id": 2}, [2]),
        (None, {"eos_token_id": 0}, [0]),  # id 0 is a token like any other
        ({"eos_token_id": 2}, {"eos_token_id": [2, 3]}, [2, 3]),
        ({"eos_token_id": -1}, {"eos_token_id": 64, "vocab_size": 64}, []),  # no token of the model
        ({"eos_token_id": 63}, {"eos_token_id": [64, 0], "vocab_size": 64}, [63, 0]),
        ({"eos_token_id": None}, {"eos_token_id": None}, []),
        (None, {}, []),
    ],
)
def test_the_ends_are_those_of_both_configs(tmp_path, generation, config, expected):
    _write(tmp_path, "config.json", config)
    _write(tmp_path, "generation_config.json", generation)
    assert end_token_ids(tmp_path) == expected


@pytest.mark.parametrize("ends", ["2", 2.0, True, [2, None], {"eos": 2}])
def test_an_end_that_is_no_number_of_a_token_is_refused_by_its_file(tmp_path, ends):
    _write(tmp_path, "generation_config.json", {"eos_token_id": ends})
    with pytest.raises(ConfigError, match=r"generation_config.json: eos_token_id must be the number of a token"):
        end_token_ids(tmp_path)


@pytest.mark.parametrize("as_object", [False, True])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_the_end_of_the_tokenizer_is_one_whatever_the_configs_say(folder, file, as_object):
    described = json.loads((folder / "tokenizer_config.json").read_text())
    del described["eos_token"]
    _write(folder, "tokenizer_config.json", described)
    token = {"content": NAMES[0], "special": True} if as_object else NAMES[0]
    _write(folder, file, (described if file == "tokenizer_config.json" else {}) | {"eos_token": token})
    _write(folder, "config.json", {"eos_token_id": 0})
    _write(folder, "generation_config.json", {"eos_token_id": 0})
    assert end_token_ids(folder) == [_ids(folder)[NAMES[0]], 0]


def test_the_end_of_a_tokenizer_is_told_by_the_loaded_one_or_by_its_file_or_by_nobody(folder):
    _write(folder, "config.json", {"eos_token_id": 0})
    _write(folder, "special_tokens_map.json", {"eos_token": NAMES[1]})  # asked where tokenizer_config.json has none
    end, loaded = _ids(folder)[NAMES[0]], load_tokenizer(folder)
    (folder / "tokenizer.json").rename(folder / "aside.json")
    assert end_token_ids(folder, loaded) == [end, 0]
    assert end_token_ids(folder) == [0]
    described = json.loads((folder / "tokenizer_config.json").read_text())
    _write(folder, "tokenizer_config.json", described | {"eos_token": "<|nobody|>"})
    assert end_token_ids(folder, loaded) == [0]
    _write(folder, "tokenizer_config.json", described)
    (folder / "tokenizer.json").write_text("{")  # not read again where the caller has it
    assert end_token_ids(folder, loaded) == [end, 0]


def test_fine_tuning_and_the_endpoint_of_agents_end_at_the_same_tokens(folder):
    ids = _ids(folder)
    _write(folder, "config.json", {"eos_token_id": ids["<|endoftext|>"]})
    encoder = TextEncoder(folder)
    assert dict(encoder.ends) == {ids["<|im_end|>"]: "<|im_end|>", ids["<|endoftext|>"]: "<|endoftext|>"}
    assert end_of_text(encoder) == "<|im_end|>", "an answer that is plain text ends as the tokenizer says"
    chat = FolderChatText(folder, end_token_ids(folder))
    for end in encoder.ends:
        assert chat.reply([*chat.encode("yes"), end], ()).content == "yes"


def test_a_prompt_of_text_ends_where_its_text_does_in_rows_and_requests(folder):
    end, tokenizer = _ids(folder)[NAMES[0]], load_tokenizer(folder)
    added: Any = TemplateProcessing(single=f"$A {NAMES[0]}", special_tokens=[(NAMES[0], end)])
    tokenizer.post_processor = added  # as of a tokenizer that was saved with add_eos_token=true
    tokenizer.save(str(folder / "tokenizer.json"))
    encoder = TextEncoder(folder)
    plain = encoder.encode("yes", add_special_tokens=False)
    assert encoder.encode("yes") == FolderChatText(folder, end_token_ids(folder)).encode_prompt("yes") == plain
    assert encoder.encode_with_places("yes", True)[0] == [*plain, end], "what is taught has its end"


def test_where_only_a_config_names_an_end_plain_answers_are_taught_that_one(folder):
    described = json.loads((folder / "tokenizer_config.json").read_text())
    _write(folder, "tokenizer_config.json", described | {"eos_token": None})
    assert end_of_text(TextEncoder(folder)) == ""
    _write(folder, "config.json", {"eos_token_id": [_ids(folder)["<|endoftext|>"]]})
    assert end_of_text(TextEncoder(folder)) == "<|endoftext|>"
