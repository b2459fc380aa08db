"""Prompts: every row is checked before a run starts; the order is seeded and a cursor continues it."""

import gzip
import json
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.conf.schema import DataConfig
from slipstream.orchestrator.data.prompts import PromptReader, chat_of
from slipstream.orchestrator.data.sources import read_rows, resolve_path
from slipstream.rollout.errors import DataError
from slipstream.rollout.text.messages import Chat
from slipstream.rollout.types import Prompt


def a_reader(encoder: Any, limit: int = 8, is_for_agent: bool = False, **options: Any) -> PromptReader:
    data = DataConfig(**options)
    return PromptReader(data=data, encoder=encoder, max_prompt_tokens=limit, is_for_agent=is_for_agent)


def read_prompts(source: str, encoder: Any, **options: Any) -> list[Prompt]:
    reader = a_reader(encoder, **options)
    return [reader.prompt(row, row.after.num_rows - 1) for row in read_rows(source)]


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_jsonl_rows_become_prompts_with_their_other_columns(tmp_path, encoder):
    path = write(tmp_path / "a.jsonl", '{"prompt": "ab", "answer": "b", "level": 3}', "", '{"prompt": "c"}')
    first, second = read_prompts(path, encoder)
    assert first == Prompt(0, (1, ord("a"), ord("b")), "ab", {"answer": "b", "level": 3})
    assert second == Prompt(1, (1, ord("c")), "c", {})


def test_chat_prompts_go_through_the_template_without_special_tokens(tmp_path, encoder):
    path = write(tmp_path / "a.jsonl", json.dumps({"prompt": [{"role": "user", "content": "hi"}]}))
    (prompt,) = read_prompts(path, encoder)
    assert prompt.text == "user:hi|"
    assert prompt.token_ids == tuple(map(ord, "user:hi|"))


def test_no_content_beside_a_tool_call_and_fields_that_are_null(tmp_path, encoder):
    """As Parquet has them: every message of a column has the fields of all."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}
    turns = [
        {"role": "user", "content": "1?", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_calls": None},
    ]
    called = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    (chat,) = chats_of(tmp_path, encoder, {"prompt": turns})
    assert chat.messages == [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "content": "2"},
    ]


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def chats_of(tmp_path, encoder, row, **options):
    """What the chat template is given of a row."""
    seen = []

    class Watched(type(encoder)):
        def render(self, chat, *, is_open):
            seen.append(chat)
            return "x"

    read_prompts(write(tmp_path / "a.jsonl", json.dumps(row)), Watched(), **options)
    return seen


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_and_options_of_a_row_reach_the_template(tmp_path, encoder, as_text):
    row = {"prompt": [{"role": "user", "content": "hi"}], "tools": [TOOL], "chat_template_kwargs": {"a": 1, "b": None}}
    if as_text:
        row |= {name: json.dumps(row[name]) for name in ("tools", "chat_template_kwargs")}
    options = {"a": 0, "c": 2}
    asked = row["prompt"]
    assert chats_of(tmp_path, encoder, row, chat_template_kwargs=options) == [Chat(asked, [TOOL], {"a": 1, "c": 2})]
    plain = {"prompt": asked, "tools": None, "chat_template_kwargs": None}
    assert chats_of(tmp_path, encoder, plain, chat_template_kwargs=options) == [Chat(asked, [], options)]
    (of_agent,) = chats_of(tmp_path, encoder, row, is_for_agent=True)
    assert of_agent == Chat(asked, [], {"a": 1}), "an agent offers its own tools"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"tools": ["search"]}, "column tools must be a list of objects"),
        ({"tools": "search"}, "column tools is text that is not JSON"),
        ({"chat_template_kwargs": [1]}, "column chat_template_kwargs must be an object"),
        ({"prompt": "hi", "tools": [TOOL]}, "column 'tools' is for the chat template, and text goes through none"),
        ({"prompt": "hi", "chat_template_kwargs": {"a": 1}}, "column 'chat_template_kwargs' is for the chat template"),
        ({"prompt": json.dumps([{"role": "user", "content": "hi"}])}, "column 'prompt' is the text of messages"),
        ({"prompt": str([{"content": "hi", "role": "user"}])}, "column 'prompt' is the text of messages"),
    ],
)
def test_tools_and_options_that_cannot_reach_it_are_refused(tmp_path, encoder, columns, message):
    row = {"prompt": [{"role": "user", "content": "hi"}], **columns}
    with pytest.raises(DataError, match=rf"a\.jsonl:1: {message}"):
        read_prompts(write(tmp_path / "a.jsonl", json.dumps(row)), encoder)


def test_the_column_is_an_option(tmp_path, encoder):
    path = write(tmp_path / "a.jsonl", '{"question": "x", "prompt": "kept as a field"}')
    (prompt,) = read_prompts(path, encoder, prompt_key="question")
    assert prompt.token_ids == (1, ord("x"))
    assert prompt.fields == {"prompt": "kept as a field"}


def test_values_that_json_has_not_are_text_and_columns_without_text_are_left_out(tmp_path, encoder):
    rows = {
        "prompt": ["p", "q"],
        "day": [date(2026, 1, 31), None],
        "price": [Decimal("1.50"), Decimal("2.00")],
        "seen": [[{"at": datetime(2026, 1, 31, 12, tzinfo=UTC), "for": timedelta(seconds=3)}], []],
        "image": [{"bytes": b"\x89PNG", "path": None}, None],
    }
    pq.write_table(pa.table(rows), tmp_path / "a.parquet")
    reader = a_reader(encoder)
    first, second = (reader.prompt(row, 0) for row in read_rows(str(tmp_path / "a.parquet")))
    assert first.fields == {
        "day": "2026-01-31",
        "price": "1.50",
        "seen": [{"at": "2026-01-31 12:00:00+00:00", "for": "0:00:03"}],
    }
    assert second.fields == {"day": None, "price": "2.00", "seen": [], "image": None}
    assert reader.left_out == {"image": "bytes"}


def test_a_prompt_holds_what_json_holds(tmp_path, encoder):
    """Agents and checkpoints get its messages as JSON."""
    turn = {"role": "user", "content": "2+2=?", "asked": date(2026, 1, 31)}
    pq.write_table(pa.table({"prompt": [[turn]]}), tmp_path / "a.parquet")
    (prompt,) = read_prompts(str(tmp_path / "a.parquet"), encoder, limit=99)
    assert prompt.messages == [turn | {"asked": "2026-01-31"}]
    for wrong in (b"2+2=?", [turn | {"image": b"\x89PNG"}]):
        pq.write_table(pa.table({"prompt": [wrong]}), tmp_path / "b.parquet")
        with pytest.raises(
            DataError, match=r"b\.parquet: row 0: column 'prompt' holds bytes; a prompt is text, or mess"
        ):
            read_prompts(str(tmp_path / "b.parquet"), encoder, limit=99)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', r"a\.jsonl:2: not a JSON object: Expecting ',' delimiter at character 15"),
        ('{"prompt": "a', r"a\.jsonl:2: not a JSON object: Unterminated string starting at character 12$"),
        pytest.param("[" * 100_000, r"a\.jsonl:2: not a JSON object: maximum recursion depth exceeded", id="deep"),
        ("{", r"a\.jsonl:2: not a JSON object: .*; a row is one line: jq -c \. .*a\.jsonl"),
        ('["prompt"]', r"a\.jsonl:2: each line must be a JSON object, got list"),
        ('{"text": "a"}', r"a\.jsonl:2: no column 'prompt' \(data\.prompt_key\); the columns are text$"),
        ('{"question": "a"}', r"the columns are question; did you mean data\.prompt_key=question\?"),
        ('{"instruction": "Add.", "input": "1, 2", "output": "3"}', r"the columns are input, instruction, output$"),
        ('{"conversations": []}', r"columns are conversations; these look like ShareGPT's .* algorithm=sft learns"),
        ('{"messages": []}', r"the columns are messages; algorithm=sft learns rows with 'messages'$"),
        ('{"chosen": "a", "rejected": "b"}', r"are chosen, rejected; algorithm=dpo learns rows with 'chosen'$"),
        ('{"prompt": 3}', r"a\.jsonl:2: column 'prompt' must be text or a non-empty list of messages.*got int"),
        ('{"prompt": []}', r"a\.jsonl:2: column 'prompt' must be text or a non-empty list .*got an empty list"),
        ('{"prompt": null}', r"a\.jsonl:2: column 'prompt' must be text or a non-empty list .*got null"),
        ('{"prompt": [{"role": "user"}]}', r"a\.jsonl:2: column 'prompt': content of message 1 \(user\) must be text"),
        ('{"prompt": [{"role": "u", "content": []}]}', r"a\.jsonl:2: the prompt is empty"),
        (r'{"prompt": "ab\ud83d"}', r"a\.jsonl:2: character 3 of the text is '\\ud83d', half of a surrogate pair"),
        (r'{"prompt": [{"role": "u", "content": "\ude00"}]}', r"a\.jsonl:2: character 3 of the text is '\\ude00'"),
        ('{"prompt": ""}', r"a\.jsonl:2: the prompt is empty \(column 'prompt'\)"),
        ('{"prompt": " \\n"}', r"a\.jsonl:2: the prompt is empty"),
        ('{"prompt": [{"role": "u", "content": ""}]}', r"a\.jsonl:2: the prompt is empty"),
        (r'{"prompt": "a\u0000"}', r"a\.jsonl:2: character 2 of the text is NUL; remove it"),
        ('{"answer": 1, "prompt": "a", "prompt": "b"}', r"a\.jsonl:2: the key 'prompt' is there twice"),
        ('{"prompt": "a", "more": {"x": 1, "x": 2}}', r"a\.jsonl:2: the key 'x' is there twice"),
        ('{"prompt": "12345678"}', r"a\.jsonl:2: the prompt has 9 tokens, data\.max_prompt_tokens allows 8"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(tmp_path, encoder, line, message):
    path = write(tmp_path / "a.jsonl", '{"prompt": "ok"}', line)
    with pytest.raises(DataError, match=message):
        read_prompts(path, encoder)


def test_missing_and_unknown_files_are_refused(tmp_path, encoder):
    with pytest.raises(DataError, match=r"^data\.path=.*no\.jsonl does not exist; give a \.jsonl"):
        read_prompts(str(tmp_path / "no.jsonl"), encoder)
    assert read_prompts(write(tmp_path / "empty.jsonl", ""), encoder) == []
    for name, cure in (
        ("a.csv", r"write it anew: .*read_csv\('.*/a\.csv', dtype=str\)\.to_parquet\('.*/a\.parquet'\)"),
        ("a.json", r"jq -c '\.\[\]' .*/a\.json > .*/a\.jsonl"),
        ("a.jsonl.gz", r"gunzip .*/a\.jsonl\.gz"),
        ("a.jsonl.zst", r"zstd -d .*/a\.jsonl\.zst"),
        ("a.txt", r"\.txt'$"),
    ):
        with pytest.raises(DataError, match=rf"must end in \.jsonl or \.parquet, got .*{cure}"):
            read_prompts(write(tmp_path / name, "prompt"), encoder)
    (tmp_path / "a.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        read_prompts(str(tmp_path / "a.parquet"), encoder)
    (tmp_path / "named.jsonl").write_bytes(gzip.compress(b'{"prompt": "a"}\n'))
    with pytest.raises(DataError, match=r"named\.jsonl is compressed; unpack it"):
        read_prompts(str(tmp_path / "named.jsonl"), encoder)
    with pytest.raises(DataError, match=r"data\.path=https://a/b\.jsonl is an address; download it first"):
        read_prompts("https://a/b.jsonl", encoder)


def test_packaged_files_are_found_in_conf_data():
    assert resolve_path("pkg://x.jsonl").parts[-3:] == ("conf", "data", "x.jsonl")
    assert resolve_path("dir/x.jsonl") == Path("dir/x.jsonl")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_a_file_of_another_encoding_is_told_in_plain_words(tmp_path, encoder, encoding):
    (tmp_path / "a.jsonl").write_bytes('{"prompt": "a"}\n{"prompt": "b"}\n'.encode(encoding))
    with pytest.raises(
        DataError, match=r"a\.jsonl is not UTF-8 text: line 1 looks like UTF-16; save the file as UTF-8"
    ):
        read_prompts(str(tmp_path / "a.jsonl"), encoder)
    (tmp_path / "a.jsonl").write_bytes('{"prompt": "a"}\n{"prompt": "\u00e9"}\n'.encode("latin-1"))
    with pytest.raises(DataError, match=r"a\.jsonl:2: byte 13 of the line is not UTF-8; save the file as UTF-8"):
        read_prompts(str(tmp_path / "a.jsonl"), encoder)


def test_a_byte_order_mark_of_utf_8_is_no_mistake(tmp_path, encoder):
    (tmp_path / "a.jsonl").write_bytes('{"prompt": "a"}\n'.encode("utf-8-sig"))
    (prompt,) = read_prompts(str(tmp_path / "a.jsonl"), encoder)
    assert prompt.text == "a"


def test_of_a_prompt_of_megabytes_only_the_beginning_is_tokenized(tmp_path, encoder):
    seen = []

    class Watched(type(encoder)):
        def encode(self, text, add_special_tokens=True):
            seen.append(len(text))
            return super().encode(text, add_special_tokens)

    path = write(tmp_path / "a.jsonl", '{"prompt": "%s"}' % ("x" * 1_000_000))
    with pytest.raises(DataError, match="the prompt has 1000000 characters, more than 8 tokens"):
        read_prompts(path, Watched())
    assert max(seen) < 1000


def test_nulls_of_tools_are_parquets_unless_the_tools_are_text():
    for given, tool in (([{"a": {"b": None, "c": 1}}], {"a": {"c": 1}}), ('[{"a": null}]', {"a": None})):
        assert chat_of([], {"tools": given}, {}, "row 1").tools == [tool]
