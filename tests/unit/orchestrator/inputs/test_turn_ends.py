"""Promises of orchestrator/inputs/rows/turn_ends.py: whatever template a model has, each answer that is taught ends in
a token at which responses of the model end."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.template_tokenizer import QWEN, QWEN_PLAIN, save_template_tokenizer

from slipstream.conf.load import load_run_config
from slipstream.conf.schema import DataConfig
from slipstream.orchestrator.data.sources import START, Row
from slipstream.orchestrator.inputs.rows.conversations import Conversation, ConversationReader
from slipstream.orchestrator.inputs.rows.prompt_rows import check_data
from slipstream.orchestrator.inputs.rows.turn_ends import end_after, unknown_end
from slipstream.orchestrator.inputs.text_encoder import TextEncoder
from slipstream.rollout.text.messages import Chat

GLM = ("<|endoftext|>", "<|user|>", "<|observation|>", "<|system|>", "<|assistant|>", "[gMASK]", "<sop>")
SUMS = [("user", "2+2?"), ("assistant", "4"), ("user", "3+3?"), ("assistant", "6")]
CALL = {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def save_model(folder: Path, template: str, names: tuple[str, ...], ends: tuple[str, ...]) -> Path:
    """A tokenizer, and a config.json that names the ends."""
    save_template_tokenizer(folder, template, names, QWEN_PLAIN if names is QWEN else ())
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    ids = {one["content"]: one["id"] for one in added}
    (folder / "config.json").write_text(json.dumps({"eos_token_id": [ids[end] for end in ends]}))
    return folder


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("glm"), "glm4moe", GLM, GLM[:3])


def taught(folder: Path, one: Conversation) -> list[str]:
    """Text of each run of taught tokens."""
    decode = TextEncoder(folder)._tokenizer.decode
    runs: list[list[int]] = []
    for place, (token, is_taught) in enumerate(zip(one.token_ids, one.is_taught, strict=True)):
        if is_taught and (place == 0 or not one.is_taught[place - 1]):
            runs.append([])
        if is_taught:
            runs[-1].append(token)
    return [decode(run, skip_special_tokens=False) for run in runs]


def read(folder: Path, messages: list[dict]) -> Conversation:
    reader = ConversationReader(DataConfig(), TextEncoder(folder))
    (conversation,) = reader.read(Row("row 1", {"messages": messages}, START), 0).sequences
    return conversation


def test_a_header_that_ends_an_answer_is_taught_in_the_middle_and_after_the_last_one(glm):
    conversation = read(glm, [{"role": role, "content": text} for role, text in SUMS])
    assert taught(glm, conversation) == ["\n<think></think>\n4<|user|>", "\n<think></think>\n6<|user|>"]
    whole = TextEncoder(glm)._tokenizer.decode(conversation.token_ids, skip_special_tokens=False)
    assert whole.endswith("6<|user|>") and whole.count("<|user|>") == 3


def test_a_call_of_tools_ends_with_the_header_of_their_answer(glm):
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    (last,) = taught(glm, read(glm, turns))
    assert last.startswith("\n<think></think>\n<tool_call>add") and last.endswith("</tool_call><|observation|>")
    answered = [*turns, {"role": "tool", "tool_call_id": "call-1", "name": "add", "content": "4"}]
    assert taught(glm, read(glm, answered)) == [last]


def test_a_header_that_is_no_end_is_not_taught(tmp_path):
    folder = save_model(tmp_path, "glm4moe", GLM, GLM[:1])
    conversation = read(folder, [{"role": role, "content": text} for role, text in SUMS])
    assert taught(folder, conversation) == ["\n<think></think>\n4", "\n<think></think>\n6"]


class Renders:
    """A template of `<role>text` turns that closes the last one with `last`."""

    def __init__(self, ends: list[str], last: str = "") -> None:
        self.ends = dict(enumerate(ends))
        self.last = last

    def render(self, chat: Chat, *, is_open: bool) -> str:
        return "".join(f"<{turn['role']}>{turn['content']}" for turn in chat.messages) + self.last


@pytest.mark.parametrize(
    ("ends", "last", "answer", "following", "found"),
    [
        (["", "</s>", "<user>"], "", "4", "</s><user>", "</s>"),
        (["</s>", "<user>"], "", "4", "<user>5", "<user>"),
        (["</s>", "<user>"], "", "4</s>", "<user>5", ""),
        (["</s>", "<user>"], "", "4</s>\n", "<user>5", ""),
        (["</s>", "<user>"], "", "4", " </s>", ""),
        (["", "</s>", "<user>"], "", "4", "", "<user>"),
        (["", "</s>"], "", "4", "", ""),
        (["<user>", "user>"], ".", "4", "", ""),
    ],
)
def test_an_answer_ends_by_what_follows_or_else_by_the_next_header(ends, last, answer, following, found):
    """A token without a text is no end; where the last turn is closed otherwise than others, no header is known."""
    assert end_after(answer, following, {"role": "assistant"}, Renders(ends, last)) == found


def test_neither_a_token_without_a_text_nor_a_template_that_writes_no_answer_ends_one():
    class Mute(Renders):
        def render(self, chat: Chat, *, is_open: bool) -> str:
            return "nothing"

    assert unknown_end(Renders(["", "</s>"], " <eot> ")) == "<eot>"
    assert unknown_end(Renders(["", "</s>"], "</s>")) is unknown_end(Mute(["</s>"])) is None


BASE = (QWEN[2], *QWEN[:2])
"""Qwen's tokens as its base models have them: <|endoftext|> is the end, and the template writes <|im_end|>."""
SAMPLED = ["experiment=quickstart"]


@pytest.mark.parametrize(
    ("template", "names", "found"),
    [("qwen3", QWEN, None), ("qwen3", BASE, "<|im_end|>"), ("glm4moe", GLM[:1] + GLM[3:], ""), ("glm4moe", GLM, None)],
)
def test_answers_that_end_elsewhere_than_responses_are_known(tmp_path, template, names, found):
    ends = [name for name in names if name in GLM[:3]] or names[:1]
    assert unknown_end(TextEncoder(save_model(tmp_path, template, names, tuple(ends)))) == found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            [],
            r"answer with '<\|im_end\|>', which no file .* \(<\|endoftext\|>\): .* rollouts of it need .*=\[601\], or",
        ),
        (
            [*SAMPLED, "rollout.sampling.stop_at_eos=true"],
            r"; set rollout\.sampling\.stop_token_ids=\[601\], or name it by eos_token",
        ),
        ([*SAMPLED, "rollout.sampling.stop_at_eos=true", "rollout.sampling.stop_token_ids=[601]"], None),
        ([*SAMPLED, "rollout.sampling.stop_at_eos=false"], None),
    ],
)
def test_a_run_says_that_answers_end_elsewhere(tmp_path, words, said):
    save_template_tokenizer(tmp_path, "qwen3", BASE)
    asked, answer = ({"role": role, "content": text} for role, text in SUMS[:2])
    row = {"prompt": [asked], "answer": "4"} if words else {"messages": [asked, answer]}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 64)  # as many as a step takes
    given = words or ["experiment=sft_quickstart"]
    config = load_run_config(
        [*given, "data=files", f"data.path={tmp_path / 'rows.jsonl'}", f"model.tokenizer={tmp_path}"]
    )
    model = replace(config.model, hf_config={**config.model.hf_config, "vocab_size": 700})
    fact = check_data(replace(config, model=model))
    assert fact.is_warning == (said is not None)
    assert said is None or re.search(said, fact.finding), fact.finding
