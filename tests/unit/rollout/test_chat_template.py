"""Locks: a chat is rendered as the folder's own tokenizer class does, without transformers where that is known."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.conf.errors import ConfigError
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


def test_folders_that_need_more_are_left_to_transformers(tmp_path: Path) -> None:
    named = {"added_tokens_decoder": {}}  # else another file may name special tokens
    for template, description in (
        ("{{ image_token }}", {"extra_special_tokens": {"image_token": "<unk>"}}),
        ("x", {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}),
        ([{"name": "default", "template": "x"}], {}),
        ("{{ special_tokens_map }}", named),
    ):
        assert read_plain(save(tmp_path, template, **description)) is None, template
    folder = save(tmp_path, "x")
    for name in ("tekken.json", "chat_template.json", "additional_chat_templates", "special_tokens_map.json"):
        assert read_plain(folder) is not None
        (folder / name).write_text("{}")
        assert read_plain(folder) is None, name
        (folder / name).unlink()
    (folder / "special_tokens_map.json").write_text("{}")
    assert read_plain(save(tmp_path, "x", **named)) is not None
    (folder / "tokenizer_config.json").unlink()
    assert read_plain(folder) is None


@pytest.mark.parametrize("option", ["messages", "tools", "add_generation_prompt"])
def test_what_a_request_says_is_no_option(option: str, tmp_path: Path) -> None:
    template = ChatTemplate(save(tmp_path, "{{ messages }}{{ tools }}{{ add_generation_prompt }}"))
    with pytest.raises(DataError, match=rf"kwargs\.{option}: .* reads no such option; it reads none$"):
        template.check_options({option: 1})


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


@pytest.mark.parametrize(
    ("template", "description", "what"),
    [
        ("{% if %}", {}, "TemplateSyntaxError: "),
        ("{{ image_token }}", {"extra_special_tokens": {"image_token": 3}}, "TypeError: "),
        ("x", {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}, "ValueError: "),
    ],
)
def test_files_that_no_class_reads_are_refused_in_words(
    template: str, description: dict[str, Any], what: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"^the files of the model's tokenizer .* cannot be used: {what}"):
        ChatTemplate(save(tmp_path, template, **description)).render(CHAT, is_open=True)


def test_a_templates_own_refusal_is_raised(tmp_path: Path) -> None:
    folder = save(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(Exception, match="roles must alternate"):
        ChatTemplate(folder).render(CHAT, is_open=True)


def calling(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", **arguments}}]}


FUNCTION = "messages[0].tool_calls[0].function"
ARGUMENTS = f"{{% if 'arguments' in {FUNCTION} %}}{{{{ {FUNCTION}.arguments | tojson }}}}{{% endif %}}"
OF_EITHER_FORM = (  # as Qwen2.5's
    "{% set call = messages[0].tool_calls[0] %}{% if call.function is defined %}{% set call = call.function %}"
    "{% endif %}{{ call.name }} {{ call.arguments | tojson }}"
)
DEEP = "[" * 100_000
IF_NONE = "{% if messages[0].content is none %}"
AS_TEXT = "{{ mood + FUNCTION.arguments + (tools | length | string) }}{% if add_generation_prompt %}|{% endif %}"
CALM = {"tools": [TOOL], "options": {"mood": "calm "}}


@pytest.mark.parametrize(
    ("template", "message", "given", "said"),
    [
        ("{{ bos_token }}{{ eos_token }}", CHAT[0], {"options": {"bos_token": "<own>"}}, "<own><eos>"),
        *(
            ("{{ messages[0].content }}{{ messages[0].tool_calls or '' }}", CHAT[2] | {"tool_calls": calls}, {}, "3")
            for calls in (None, [])
        ),
        (ARGUMENTS, calling({"arguments": '{"a": 1}'}), {}, '{"a": 1}'),
        (ARGUMENTS, calling({"arguments": {"a": 1}}), {}, '{"a": 1}'),  # an object already, as rows may have it
        (ARGUMENTS, calling({"arguments": '{"a": '}), {}, '"{\\"a\\": "'),  # the model's own words
        pytest.param(ARGUMENTS, calling({"arguments": DEEP}), {}, f'"{DEEP}"', id="deep"),
        (ARGUMENTS, calling({"arguments": None}), {}, "null"),
        (ARGUMENTS, calling({}), {}, ""),
        (OF_EITHER_FORM, calling({"arguments": '{"a": 1}'}), {}, 'add {"a": 1}'),
        (OF_EITHER_FORM, {**CHAT[2], "tool_calls": [{"name": "add", "arguments": '{"a": 1}'}]}, {}, 'add {"a": 1}'),
        ("{{ messages[0].content }}", calling({}), {}, ""),
        (IF_NONE + "none{% endif %}", calling({}), {}, "none"),
        (IF_NONE + "{{ raise_exception('no content') }}{% endif %}", calling({}), {}, ""),
        ("{{ 'content' in messages[0] }}", {"role": "user"}, {}, "False"),
        (AS_TEXT.replace("FUNCTION", FUNCTION), calling({"arguments": '{"a": 1}'}), CALM, 'calm {"a": 1}1|'),
        (AS_TEXT.replace("FUNCTION", FUNCTION), calling({"arguments": '{"a": 1}'}), CALM | {"is_open": False},
         'calm {"a": 1}1'),
    ],
)  # fmt: skip
def test_what_a_template_is_given(
    template: str, message: dict[str, Any], given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """Calls have arguments as an object where they can be, unless the template wants text; no content is an empty one,
    unless the template asks for it and takes it."""
    folder = save(tmp_path, template, bos_token="<bos>", eos_token="<eos>")
    assert ChatTemplate(folder).render([message], **({"is_open": True} | given)) == said


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
    """Writes the contents in their order; the system's only where neither an option nor a tool hides it."""

    def names(self, role: str) -> bool:
        return role == "critic"

    def render(self, messages: Any, *, is_open: bool, tools: Any, options: Any) -> str:
        return " ".join(one["content"] for one in messages if one["role"] != "system" or not (options or tools))


class Behind(Written):
    """Writes the system's words behind the others, as Mistral's template does with the first ones."""

    def render(self, messages: Any, **_: Any) -> str:
        return " ".join(one["content"] for one in sorted(messages, key=lambda one: one["role"] == "system"))


def test_turns_that_the_model_would_not_see_as_the_row_has_them_are_refused_each_time() -> None:
    check = TurnCheck(Written())  # pyright: ignore[reportArgumentType]
    check.check(Chat(CHAT), is_open=True)
    for _ in range(2):
        for hidden in (Chat(CHAT, options={"mute": True}), Chat(CHAT, [TOOL])):
            with pytest.raises(DataError, match=r"^message 1 is of 'system', .* leaves it out in this place"):
                check.check(hidden, is_open=True)
    tools = [{"role": "tool", "content": text} for text in "ab"]
    check.check(Chat([*CHAT[:3], *tools, {"role": "critic", "content": "no"}]), is_open=True)
    for turns, message in (
        ([CHAT[1], CHAT[1]], "messages 1 and 2 are both of 'user'"),
        (CHAT[:3], "message 3, the last of the prompt, is of 'assistant'"),
        ([{"role": "bot", "content": "a"}], "message 1 has the role 'bot', which the model's chat template does not"),
        ([{"role": "developer", "content": "a"}], "message 1 has the role 'developer', which the model's"),
    ):
        with pytest.raises(DataError, match=f"^{message}"):
            check.check(Chat(turns), is_open=True)
    behind = TurnCheck(Behind())  # pyright: ignore[reportArgumentType]
    behind.check(Chat([CHAT[0], CHAT[0], CHAT[1]]), is_open=True)
    moved = Chat([CHAT[1], CHAT[0], *CHAT[2:]])
    with pytest.raises(DataError, match=r"^message 4 is of 'user', .* writes it before others that precede it"):
        behind.check(moved, is_open=True)
    behind.check_shown(moved)


def test_a_role_that_the_template_does_not_name_is_refused_in_an_agents_request_too() -> None:
    check = TurnCheck(Written())  # pyright: ignore[reportArgumentType]
    check.check_shown(Chat([*CHAT[:3], {"role": "critic", "content": "no"}]))
    with pytest.raises(
        DataError, match=r"^message 2 has the role 'human', which the model's chat template does not name"
    ):
        check.check_shown(Chat([CHAT[0], {"role": "human", "content": "a"}]))
