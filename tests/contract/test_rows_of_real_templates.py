"""Locks: rows reach the chat templates of models that people train as transformers' apply_chat_template renders them,
with tools and options, in reinforcement, fine-tuning and preferences; what a template does not know is refused.

Templates (tests/cases/chat_templates) and transformers' rendering are real; the vocabulary is a small one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from fakes.template_tokenizer import QWEN, QWEN_PLAIN, save_template_tokenizer

from conf.schema import DataConfig
from orchestrator.data.prompts import PromptReader
from orchestrator.data.sources import START, Row
from orchestrator.inputs.conversations import ConversationReader
from orchestrator.inputs.preferences import PreferenceReader
from orchestrator.inputs.text_encoder import TextEncoder
from rollout.errors import DataError

TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "w", "parameters": {"type": "object"}}}
]
USER, ANSWER = {"role": "user", "content": "Paris?"}, {"role": "assistant", "content": "Sunny."}
DEEPSEEK = tuple(f"<｜{name}｜>" for name in ("end▁of▁sentence", "begin▁of▁sentence", "User", "Assistant"))
SPECIALS = {
    "qwen3": QWEN,
    "qwen3_instruct_2507": QWEN,
    "llama3_1": ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    "glm4moe": ("<|user|>", "<|observation|>", "<|system|>", "<|assistant|>", "[gMASK]", "<sop>"),
    "gptoss": ("<|return|>", "<|end|>", "<|start|>", "<|message|>", "<|channel|>"),
    "deepseekv3": DEEPSEEK,
    "deepseek_r1_distill": DEEPSEEK,
}


def saved(folder: Path, name: str) -> Path:
    save_template_tokenizer(folder, name, SPECIALS[name], QWEN_PLAIN)
    return folder


def read(folder: Path, columns: dict[str, Any], config: DataConfig) -> tuple[tuple[int, ...], ...]:
    """Token ids of a prompt, a conversation or a pair, whichever the row is."""
    row, encoder = Row("rows.jsonl:1", columns, START), TextEncoder(folder)
    if "chosen" in columns:
        pair = PreferenceReader(config, encoder).read(row, 0)
        return pair.chosen.token_ids, pair.rejected.token_ids
    if "messages" in columns:
        return (ConversationReader(config, encoder).read(row, 0).token_ids,)
    options = config.chat_template_kwargs
    return (PromptReader(encoder=encoder, max_prompt_tokens=9999, template_options=options).prompt(row, 0).token_ids,)


ROWS = {
    "prompt": ({"prompt": [USER]}, [([USER], True)]),
    "conversation": ({"messages": [USER, ANSWER]}, [([USER, ANSWER], False)]),
    "pair": (
        {"prompt": [USER], "chosen": [ANSWER], "rejected": "Rain."},
        [([USER, ANSWER], False), ([USER, {"role": "assistant", "content": "Rain."}], False)],
    ),
}


@pytest.mark.parametrize("name", [name for name in SPECIALS if not name.startswith(("deepseek", "glm", "gptoss"))])
@pytest.mark.parametrize(("row", "theirs"), ROWS.values(), ids=ROWS)
def test_tools_of_a_row_are_written_as_transformers_writes_them(
    tmp_path: Path, name: str, row: dict[str, Any], theirs: list[tuple[list[dict[str, Any]], bool]]
) -> None:
    folder = saved(tmp_path, name)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    found = read(folder, {**row, "tools": TOOLS}, DataConfig())
    for ids, (messages, is_open) in zip(found, theirs, strict=True):
        text = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False, add_generation_prompt=is_open)
        assert "get_weather" in text
        assert list(ids) == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", ["deepseekv3", "deepseek_r1_distill"])
def test_tools_that_a_template_does_not_write_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:1: tools: the model's chat template writes none"):
        read(saved(tmp_path, name), {"prompt": [USER], "tools": TOOLS}, DataConfig())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3", {"enable_thinking": False}),
        ("qwen3", {"enable_thinking": True}),
        ("glm4moe", {"enable_thinking": False}),
        ("gptoss", {"reasoning_effort": "high", "model_identity": "You are you."}),
        ("llama3_1", {"date_string": "1 Jan 2031"}),
    ],
)
def test_options_reach_the_template_from_the_run_and_from_the_row(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    folder = saved(tmp_path, name)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True, **options)
    theirs = (tuple(tokenizer.encode(text, add_special_tokens=False)),)
    row, other = {"prompt": [USER]}, dict.fromkeys(options, "other")
    assert read(folder, row, DataConfig(chat_template_kwargs=options)) == theirs
    for column in (options, json.dumps(options)):
        assert read(folder, {**row, "chat_template_kwargs": column}, DataConfig(chat_template_kwargs=other)) == theirs


@pytest.mark.parametrize(
    ("name", "option", "known"),
    [
        ("qwen3", "enable_thoughts", "enable_thinking"),
        ("qwen3_instruct_2507", "enable_thinking", "content"),
        ("gptoss", "messages", "reasoning_effort"),
        ("llama3_1", "add_generation_prompt", "date_string"),
        ("deepseekv3", "tokenize", "content"),
    ],
)
def test_options_that_are_no_variables_of_the_template_are_refused(
    tmp_path: Path, name: str, option: str, known: str
) -> None:
    folder = saved(tmp_path, name)
    message = rf"chat_template_kwargs\.{option}: the model's chat template reads no such option; it reads .*{known}"
    with pytest.raises(DataError, match=rf"rows\.jsonl:1: {message}"):
        read(folder, {"prompt": [USER], "chat_template_kwargs": {option: True}}, DataConfig())
    with pytest.raises(DataError, match=rf"^data\.{message}"):
        TextEncoder(folder).check_options({option: True}, "data.chat_template_kwargs")
