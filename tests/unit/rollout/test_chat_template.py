"""Locks: a chat is rendered as the folder's own tokenizer class does, without transformers where that is known."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.orchestrator.inputs.character_tokenizer import save_character_tokenizer
from slipstream.rollout.errors import DataError
from slipstream.rollout.text.chat_template import PRESENT, ChatTemplate
from slipstream.rollout.text.messages import Chat
from slipstream.rollout.text.plain_template import read_plain
from slipstream.rollout.text.turns import TurnCheck

TEMPLATES = Path(__file__).parents[2] / "cases" / "chat_templates"
CHAT = [
    {"role": "system", "content": "you are."},
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "sure?"},
]
TOOL = {"type": "function", "function": {"name": "add", "description": "d", "parameters": {"type": "object"}}}


def save(folder: Path, template: str | list[dict[str, str]], **description: Any) -> Path:
    """The character tokenizer's tokens, and this description of them."""
    save_character_tokenizer(folder, vocab_size=64)
    given = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **description}
    (folder / "tokenizer_config.json").write_text(json.dumps(given))
    return folder


def by_its_own_class(folder: Path, tools: list[dict[str, Any]]) -> str:
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(CHAT, tools=tools or None, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("name", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
def test_published_templates_are_rendered_as_their_own_class_does(name: str, tmp_path: Path) -> None:
    template = (TEMPLATES / f"{name}.jinja").read_text()
    folder = save(tmp_path, template, bos_token="<bos>", eos_token="<eos>", pad_token=None)
    for tools in ([], [TOOL]):
        assert read_plain(folder) is not None
        assert ChatTemplate(folder).render(CHAT, is_open=True, tools=tools) == by_its_own_class(folder, tools)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% if loop.last %}{% break %}"
        "{% endif %}{% endfor %}{{ {'a': '<\\xfc>', 'b': [1]} | tojson }}{{ {'a': 1} | tojson(indent=2) }}",
        "{{ bos_token }}{{ sep_token is defined }}{{ unk_token }}{{ eos_token }}{{ tools is none }}"
        "{{ documents is none }}{{ pad_token is defined }}",
        "{{ {'b': [1, 2], 'a': '\xfc'} | tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}",
        "{% set max_tokens = 3 %}{{ max_tokens }}{{ strftime_now('%Y') }}\n  {%- if true %}\n x {% endif %}",
    ],
)
def test_what_templates_may_use_is_rendered_as_transformers_does(template: str, tmp_path: Path) -> None:
    tokens = {
        "bos_token": {"__type": "AddedToken", "content": "<bos>", "lstrip": False},
        "eos_token": "<eos>",
        "unk_token": "<unk>",
    }
    folder = save(tmp_path, template, **tokens, pad_token=None, sep_token=None)
    assert read_plain(folder) is not None
    assert ChatTemplate(folder).render(CHAT, is_open=True) == by_its_own_class(folder, [])


@pytest.mark.parametrize("is_plain", [True, False])
def test_a_run_that_goes_on_another_day_has_the_same_prompts(is_plain: bool, tmp_path: Path) -> None:
    """Llama's, gpt-oss's and others write the date into every system prompt."""
    folder = save(tmp_path, "{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}")
    (folder / PRESENT).write_text("2025-01-02T03:04:05")
    template = ChatTemplate(folder)
    if not is_plain:
        template._renderer = template.tokenizer
    assert template.render([{"role": "user", "content": "!"}], is_open=True) == "02 Jan 2025!"


def test_an_option_goes_before_a_special_token_of_its_name(tmp_path: Path) -> None:
    folder = save(tmp_path, "{{ bos_token }}{{ eos_token }}", bos_token="<bos>", eos_token="<eos>")
    assert ChatTemplate(folder).render(CHAT, is_open=True, options={"bos_token": "<own>"}) == "<own><eos>"


@pytest.mark.parametrize(
    "description",
    [
        {"extra_special_tokens": {"image_token": "<unk>"}},
        {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}},
        {"chat_template": [{"name": "default", "template": "x"}]},
    ],
)
def test_folders_that_need_more_are_left_to_transformers(description: dict[str, Any], tmp_path: Path) -> None:
    assert read_plain(save(tmp_path, "{{ image_token }}", **description)) is None


@pytest.mark.parametrize("name", ["tekken.json", "chat_template.json", "additional_chat_templates"])
def test_folders_with_a_template_elsewhere_or_without_a_description_are_left_to_transformers(
    name: str, tmp_path: Path
) -> None:
    folder = save(tmp_path, "x")
    assert read_plain(folder) is not None
    (folder / name).write_text("{}")
    assert read_plain(folder) is None
    (folder / name).unlink()
    (folder / "tokenizer_config.json").unlink()
    assert read_plain(folder) is None


def test_special_tokens_that_another_file_may_name_are_left_to_transformers(tmp_path: Path) -> None:
    folder = save(tmp_path, "x", added_tokens_decoder={})
    (folder / "special_tokens_map.json").write_text("{}")
    assert read_plain(folder) is not None
    assert read_plain(save(tmp_path, "{{ special_tokens_map }}", added_tokens_decoder={})) is None
    assert read_plain(save(tmp_path, "x")) is None


@pytest.mark.parametrize("option", ["messages", "tools", "add_generation_prompt"])
def test_what_a_request_says_is_no_option(option: str, tmp_path: Path) -> None:
    template = ChatTemplate(save(tmp_path, "{{ messages }}{{ tools }}{{ add_generation_prompt }}"))
    with pytest.raises(DataError, match=rf"kwargs\.{option}: .* reads no such option; it reads none$"):
        template.check_options({option: 1})


@pytest.mark.parametrize("calls", [None, []])
def test_an_answer_may_say_that_it_has_no_calls(calls: list[object] | None, tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "4", "tool_calls": calls}
    template = ChatTemplate(save(tmp_path, "{{ messages[1].content }}{{ 'calls' if messages[1].tool_calls }}"))
    assert template.render([*CHAT[:1], answer], is_open=False) == "4"


def test_tools_that_the_template_does_not_write_are_refused(tmp_path: Path) -> None:
    ChatTemplate(save(tmp_path, "{{ messages }}{{ tools }}")).check(Chat(CHAT, [TOOL]))
    template = ChatTemplate(save(tmp_path, "{{ messages }}"))
    for _ in range(2):  # at every row
        with pytest.raises(DataError, match="tools: the model's chat template writes none"):
            template.check(Chat(CHAT, [TOOL]))


def test_the_template_in_a_file_of_its_own_is_the_one(tmp_path: Path) -> None:
    folder = save(tmp_path, "of the description")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }} \u2026 of the file", encoding="utf-8")
    assert read_plain(folder) is not None
    assert ChatTemplate(folder).render(CHAT, is_open=True) == by_its_own_class(folder, [])
    assert ChatTemplate(folder).render(CHAT, is_open=True) == "you are. \u2026 of the file"


def test_a_templates_own_refusal_is_raised(tmp_path: Path) -> None:
    folder = save(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(Exception, match="roles must alternate"):
        ChatTemplate(folder).render(CHAT, is_open=True)


def calling(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", **arguments}}]}]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"arguments": '{"a": 1}'}, '{"a": 1}'),
        ({"arguments": {"a": 1}}, '{"a": 1}'),  # an object already, as rows may have it
        ({"arguments": '{"a": '}, '"{\\"a\\": "'),  # the model's own words
        ({"arguments": None}, "null"),
        ({}, ""),
    ],
)
def test_arguments_of_a_tool_call_are_an_object_where_they_can_be(
    arguments: dict[str, Any], said: str, tmp_path: Path
) -> None:
    function = "messages[0].tool_calls[0].function"
    template = f"{{% if 'arguments' in {function} %}}{{{{ {function}.arguments | tojson }}}}{{% endif %}}"
    assert ChatTemplate(save(tmp_path, template)).render(calling(arguments), is_open=True) == said


@pytest.mark.parametrize(
    ("asks", "said"),
    [
        ("", ""),
        ("{% if messages[0].content is none %}none{% endif %}", "none"),
        ("{% if messages[0].content is none %}{{ raise_exception('no content') }}{% endif %}", ""),
    ],
)
def test_no_content_is_empty_unless_the_template_asks_for_it_and_takes_it(asks: str, said: str, tmp_path: Path) -> None:
    text = "" if asks else "{{ messages[0].content }}"
    assert ChatTemplate(save(tmp_path, text + asks)).render(calling({}), is_open=True) == said


def test_content_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    (message,) = calling({})
    del message["content"]
    folder = save(tmp_path, "{{ 'content' in messages[0] }}")
    assert ChatTemplate(folder).render([message], is_open=True) == "False"


def test_a_template_that_wants_arguments_as_text_gets_all_the_rest_too(tmp_path: Path) -> None:
    template = (
        "{{ mood + messages[0].tool_calls[0].function.arguments + (tools | length | string) }}"
        "{% if add_generation_prompt %}|{% endif %}"
    )
    render = ChatTemplate(save(tmp_path, template)).render
    messages = calling({"arguments": '{"a": 1}'})
    assert render(messages, is_open=True, tools=[TOOL], options={"mood": "calm "}) == 'calm {"a": 1}1|'
    assert render(messages, is_open=False, tools=[TOOL], options={"mood": "calm "}) == 'calm {"a": 1}1'


def test_options_of_any_of_several_named_templates_are_known(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "{{ mood }}"}, {"name": "tool_use", "template": "{{ tools }}{{ pace }}"}]
    template = ChatTemplate(save(tmp_path, named))
    template.check_options({"mood": "calm", "pace": "slow"})
    with pytest.raises(DataError, match=r"kwargs\.weather: .* it reads mood, pace$"):
        template.check_options({"mood": "calm", "weather": "fair"})


def test_special_tokens_that_only_the_class_knows_are_rendered(tmp_path: Path) -> None:
    folder = save(tmp_path, "{{ bos_token }}{{ messages[0].content }}", tokenizer_class="GPT2TokenizerFast")
    template = ChatTemplate(folder)
    assert template.render(CHAT, is_open=True) == by_its_own_class(folder, []) == "<|endoftext|>you are."
    assert template.tokenizer is template.tokenizer, "it is loaded once"


def test_rendering_imports_no_transformers(tmp_path: Path) -> None:
    save_character_tokenizer(tmp_path, vocab_size=64)
    code = (
        "import sys; from pathlib import Path; from slipstream.rollout.text.chat_template import ChatTemplate; "
        f"print(ChatTemplate(Path({str(tmp_path)!r})).render({CHAT!r}, is_open=True)); "
        "sys.exit('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("<bos>system: you are.")


class Written:
    """Writes the contents in their order; the system's only where no option hides it."""

    def names(self, role: str) -> bool:
        return role == "critic"

    def render(self, messages: Any, *, is_open: bool, tools: Any, options: Any) -> str:
        return " ".join(one["content"] for one in messages if one["role"] != "system" or not options)


def test_turns_that_the_model_would_not_see_as_the_row_has_them_are_refused_each_time() -> None:
    check = TurnCheck(Written())  # pyright: ignore[reportArgumentType]
    check.check(Chat(CHAT), is_open=True)
    for _ in range(2):
        with pytest.raises(DataError, match=r"^message 1 is of 'system', .* leaves it out in this place"):
            check.check(Chat(CHAT, options={"mute": True}), is_open=True)
    tools = [{"role": "tool", "content": text} for text in "ab"]
    check.check(Chat([*CHAT[:3], *tools, {"role": "critic", "content": "no"}]), is_open=True)
    for turns, message in (
        ([CHAT[1], CHAT[1]], "messages 1 and 2 are both of 'user'"),
        (CHAT[:3], "message 3, the last of the prompt, is of 'assistant'"),
        ([{"role": "bot", "content": "a"}], "message 1 has the role 'bot', which the model's chat template does not"),
    ):
        with pytest.raises(DataError, match=f"^{message}"):
            check.check(Chat(turns), is_open=True)


def test_a_role_that_the_template_does_not_name_is_refused_in_an_agents_request_too() -> None:
    check = TurnCheck(Written())  # pyright: ignore[reportArgumentType]
    check.check_shown(Chat([*CHAT[:3], {"role": "critic", "content": "no"}]))
    with pytest.raises(
        DataError, match=r"^message 2 has the role 'human', which the model's chat template does not name"
    ):
        check.check_shown(Chat([CHAT[0], {"role": "human", "content": "a"}]))
