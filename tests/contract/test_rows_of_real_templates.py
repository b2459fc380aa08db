"""Locks: rows reach the chat templates of models that people train as transformers' apply_chat_template renders them,
with tools and options, in reinforcement, fine-tuning and preferences; what a template does not know is refused.

Templates (tests/cases/chat_templates) and transformers' rendering are real; the vocabulary is a small one.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from contract.test_real_templates import FAMILIES

from slipstream.conf.schema import DataConfig
from slipstream.orchestrator.data.prompts import PromptReader
from slipstream.orchestrator.data.sources import START, Row
from slipstream.orchestrator.inputs.rows.conversations import ConversationReader
from slipstream.orchestrator.inputs.rows.preferences import PreferenceReader
from slipstream.orchestrator.inputs.text_encoder import TextEncoder
from slipstream.rollout.agents.chat_text import FolderChatText
from slipstream.rollout.errors import DataError
from slipstream.rollout.text.messages import Chat
from slipstream.rollout.text.plain_text import load_tokenizer

TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "w", "parameters": {"type": "object"}}}
]
USER, ANSWER = {"role": "user", "content": "Paris?"}, {"role": "assistant", "content": "Sunny."}
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0].role != 'system' %}<|im_start|>system\nBe kind."
    "<|im_end|>\n{% endif %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As SmolLM2's."""
MODELS = {family.template: family for family in FAMILIES.values()}


def saved(folder: Path, name: str) -> Path:
    MODELS[name].chat(folder)
    return folder


def read(folder: Path, columns: dict[str, Any], config: DataConfig) -> tuple[tuple[int, ...], ...]:
    """Token ids of a prompt, a conversation or a pair, whichever the row is."""
    row, encoder = Row("rows.jsonl:1", columns, START), TextEncoder(folder)
    if "chosen" in columns:
        pair = PreferenceReader(config, encoder).read(row, 0)
        return tuple(one.token_ids for one in pair.sequences)
    if "messages" in columns:
        return (ConversationReader(config, encoder).read(row, 0).token_ids,)
    return (PromptReader(data=config, encoder=encoder, max_prompt_tokens=9999).prompt(row, 0).token_ids,)


ROWS = {
    "prompt": ({"prompt": [USER]}, [([USER], True)]),
    "conversation": ({"messages": [USER, ANSWER]}, [([USER, ANSWER], False)]),
    "pair": (
        {"prompt": [USER], "chosen": [ANSWER], "rejected": "Rain."},
        [([USER, ANSWER], False), ([USER, {"role": "assistant", "content": "Rain."}], False)],
    ),
}


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith(("deepseek", "glm", "gptoss"))])
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


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("calls", [None, []])
def test_an_answer_without_calls_is_the_same_whether_it_says_so_or_not(
    tmp_path: Path, name: str, calls: list[Any] | None
) -> None:
    """Templates that ask whether `tool_calls` is there drop the answer, or fail."""
    folder = saved(tmp_path, name)
    answer = {**ANSWER, "tool_calls": calls, "function_call": None, "refusal": None}
    for column, end in (("prompt", []), ("messages", [ANSWER])):
        plain, dumped = (read(folder, {column: [USER, one, USER, *end]}, DataConfig()) for one in (ANSWER, answer))
        assert dumped == plain


@pytest.mark.parametrize("name", MODELS)
def test_a_message_of_an_agent_that_the_template_leaves_out_is_refused_each_time(tmp_path: Path, name: str) -> None:
    """Instructions of a developer, in a family that does not know this role, would be silently unheard."""
    chat, refused = FolderChatText(saved(tmp_path, name), []), 0
    chat.check(Chat([USER, ANSWER, USER]))
    for role, is_first in itertools.product(("system", "developer", "function"), (True, False)):
        told = {"role": role, "content": "Be brief."}
        messages = [told, USER] if is_first else [USER, ANSWER, told, USER]
        for _ in range(2):
            if "Be brief." in chat.render(messages, ()):
                chat.check(Chat(messages))
                continue
            with pytest.raises(DataError, match=rf"^message {1 if is_first else 3} is of '{role}', .* leaves it out"):
                chat.check(Chat(messages))
            refused += 1
    assert (refused == 0) == (name == "llama3_1"), "that one writes any role"


def turns(*texts: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]


def taught(folder: Path, messages: list[dict[str, Any]], **columns: Any) -> list[tuple[str, list[str], str]]:
    """(text, the pieces of it that are taught, what a generation prompt has beyond it) of each sequence of a row."""
    encoder = TextEncoder(folder)
    tokenizer = load_tokenizer(folder)
    row = Row("rows.jsonl:1", {"messages": messages, **columns}, START)
    found = []
    for one in ConversationReader(DataConfig(), encoder).read(row, 0).sequences:
        runs = itertools.groupby(zip(one.token_ids, one.is_taught, strict=True), key=lambda pair: pair[1])
        pieces = [
            tokenizer.decode([t for t, _ in run], skip_special_tokens=False) for is_taught, run in runs if is_taught
        ]
        found.append((tokenizer.decode(one.token_ids, skip_special_tokens=False), pieces, one.unseen))
    return found


@pytest.mark.parametrize("name", [*MODELS, "chatml"])
def test_an_answer_that_begins_a_conversation_is_taught_alone(tmp_path: Path, name: str) -> None:
    """ShareGPT's often begin so. A template that begins with words of its own has them untaught."""
    folder = saved(tmp_path, "qwen3" if name == "chatml" else name)
    if name == "chatml":
        (folder / "chat_template.jinja").write_text(CHATML)
    messages = [{"role": "assistant", "content": "Hello."}, *turns("2+2?", "4")]
    pieces = [piece for _, pieces, _ in taught(folder, messages) for piece in pieces]
    assert pieces[0].partition("<")[0] == "Hello." and "4" in pieces[1] and len(pieces) == 2


@pytest.mark.parametrize("name", MODELS)
def test_every_answer_is_taught_once_and_as_the_template_writes_it_in_the_last_place(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path, name)
    messages = turns("2+2?", "4", "3+3?", "6")
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)

    def theirs(count: int, is_open: bool = False) -> str:
        return tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=is_open)

    header = "<|user|>" if name == "glm4moe" else ""  # what a model of it samples to end a turn
    begun = "<think>\n" if name.startswith("deepseek") else ""  # of its generation prompt alone
    answers = [
        theirs(count).removeprefix(theirs(count - 1, is_open=True).removesuffix(begun)).rstrip() + header
        for count in (2, 4)
    ]  # a model is asked for no line break behind its <|im_end|>
    assert all(len(answer) < 50 for answer in answers)
    found = taught(folder, messages)
    assert [piece for _, pieces, _ in found for piece in pieces] == answers
    assert {unseen for _, _, unseen in found} == {begun}
    assert [text for text, _, _ in found] == [theirs(count) + header for count in ((2, 4) if len(found) == 2 else (4,))]
    assert (len(found) == 2) == (name in ("qwen3", "gptoss")), "these write an answer in another way later"


@pytest.mark.parametrize("name", ["deepseekv3", "deepseek_r1_distill"])
def test_thinking_that_the_template_leaves_out_is_taught_behind_its_beginning(tmp_path: Path, name: str) -> None:
    """A model of it is given <think>, and goes on."""
    said = "hm\n</think>\n\n4<｜end▁of▁sentence｜>"
    folder = saved(tmp_path, name)
    (one, two) = taught(folder, turns("2+2?", "<think>\nhm\n</think>\n\n4", "3+3?", "<think>so</think>6"))
    assert one == ("<｜begin▁of▁sentence｜><｜User｜>2+2?<｜Assistant｜><think>\n" + said, [said], "")
    assert two[1:] == (["so</think>6<｜end▁of▁sentence｜>"], "")
    assert two[0].endswith(
        "<｜Assistant｜>\n\n4<｜end▁of▁sentence｜><｜User｜>3+3?<｜Assistant｜><think>\n" + two[1][0]
    )


@pytest.mark.parametrize("name", ["qwen3", "glm4moe"])
def test_thinking_of_every_answer_is_taught(tmp_path: Path, name: str) -> None:
    messages = turns("2+2?", "<think>\nhm\n</think>\n\n4", "3+3?", "6")
    messages[3]["reasoning_content"] = "so"
    first, second = (pieces for _, pieces, _ in taught(saved(tmp_path, name), messages))
    assert "hm" in first[0] and "4" in first[0] and "so" in second[0] and "6" in second[0]


def test_answers_of_several_turns_that_are_no_one_sequence_are_no_pair(tmp_path: Path) -> None:
    folder = saved(tmp_path, "qwen3")
    row = {"prompt": turns("2+2?"), "chosen": turns("4", "3+3?", "6"), "rejected": turns("4", "3+3?", "7")}
    for answer in (row["chosen"], row["rejected"]):
        for number, turn in enumerate(answer):
            turn["role"] = ("assistant", "user")[number % 2]
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the chat template writes turns .* column 'chosen' in another"):
        read(folder, row, DataConfig())
    whole = {name: [*turns("2+2?"), *row[name]] for name in ("chosen", "rejected")}
    chosen, rejected = read(folder, whole, DataConfig())
    assert chosen[:-4] == rejected[:-4] and chosen != rejected


CALLS = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
SYSTEM, CALL = ({"role": "system", "content": "Be brief."}, {"role": "assistant", "content": None, "tool_calls": CALLS})
RESULT = {"role": "tool", "tool_call_id": "c", "name": "f", "content": "2"}


@pytest.mark.parametrize("name", MODELS)
def test_what_templates_take_is_taken(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path, name)
    for messages in ([SYSTEM, USER], [SYSTEM, USER, ANSWER, USER], [USER, CALL, RESULT], [SYSTEM, USER, CALL, RESULT]):
        read(folder, {"prompt": messages}, DataConfig())
        read(folder, {"messages": [*messages, ANSWER]}, DataConfig())
        read(folder, {"prompt": messages, "chosen": [ANSWER], "rejected": "Rain."}, DataConfig())


LATER = {"role": "system", "content": "Be long."}
IN_THE_MIDDLE = {
    "qwen3": None,
    "qwen3_instruct_2507": None,
    "llama3_1": None,
    "glm4moe": None,
    "gptoss": "leaves it out",
    "deepseekv3": "writes it before others",
    "deepseek_r1_distill": "leaves it out",  # the first one
}


@pytest.mark.parametrize("name", MODELS)
def test_a_system_turn_in_the_middle_is_refused_where_the_template_drops_or_moves_it(tmp_path: Path, name: str) -> None:
    folder, middle = saved(tmp_path, name), [SYSTEM, USER, ANSWER, LATER, USER]
    refusal = IN_THE_MIDDLE[name]
    for row in ({"prompt": middle}, {"messages": [*middle, ANSWER]}):
        if refusal is None:
            read(folder, row, DataConfig())
            continue
        with pytest.raises(DataError, match=rf"rows\.jsonl:1: message [14] is of 'system', and .*({refusal})"):
            read(folder, row, DataConfig())


@pytest.mark.parametrize("name", MODELS)
def test_an_unknown_role_is_refused_unless_the_template_names_it(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path, name)
    for role in ("human", "developer", "gpt"):
        row = {"prompt": [{"role": role, "content": "Be brief."}, USER]}
        if role == "developer" and name == "gptoss":
            read(folder, row, DataConfig())
            continue
        with pytest.raises(DataError, match=rf"rows\.jsonl:1: message 1 has the role '{role}', which .* does not name"):
            read(folder, row, DataConfig())
