"""A chat template as transformers renders it, without transformers, whose import takes a second of a core.

    tokenizer_config.json, chat_template.jinja --read_plain--> PlainTemplate, or None: ask transformers

Owns: which folders can be read so, and what templates may use. Invariant: the text is that of
transformers.PreTrainedTokenizerFast (render_jinja_template, transformers 5.17 and 5.19); a folder whose templates or
special tokens need more is left to it.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slipstream.conf.json_files import JsonMapping, JsonObject

CLASS_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""Variables of templates that a tokenizer class may fill with tokens of its own."""
_OTHER_PLACES = ("tekken.json", "chat_template.json", "additional_chat_templates")
"""Files that make transformers look elsewhere, too."""


class PlainTemplate:
    def __init__(self, chat_template: str, special_tokens: Mapping[str, str]) -> None:
        self.chat_template = chat_template
        self._special_tokens = special_tokens
        self._template = _environment().from_string(chat_template)

    def apply_chat_template(
        self,
        messages: Sequence[JsonMapping],
        *,
        tools: Sequence[JsonMapping] | None,
        add_generation_prompt: bool,
        tokenize: bool = False,
        **options: Any,
    ) -> str:
        assert not tokenize
        variables = {"documents": None, **self._special_tokens, **options}
        return self._template.render(
            messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
        )


def read_plain(folder: Path) -> PlainTemplate | None:
    """The template of a tokenizer's folder; None where transformers may find another one, or where the tokenizer's own
    class may fill a special token that the template writes and the folder does not name."""
    description = folder / "tokenizer_config.json"
    if not description.is_file() or any((folder / name).exists() for name in _OTHER_PLACES):
        return None
    config: JsonObject = json.loads(description.read_text(encoding="utf-8"))
    file = folder / "chat_template.jinja"
    template = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if not isinstance(template, str) or "auto_map" in config or isinstance(config.get("extra_special_tokens"), dict):
        return None
    if "added_tokens_decoder" not in config and (folder / "special_tokens_map.json").is_file():
        return None  # it has tokens that tokenizer_config.json may lack
    if "special_tokens" in template or any(name in template and name not in config for name in CLASS_TOKENS):
        return None
    tokens = {name: _text_of(config[name]) for name in CLASS_TOKENS if config.get(name) is not None}
    return PlainTemplate(template, tokens)


def variables_of(chat_template: str) -> set[str]:
    """Names that a template reads from what it is given."""
    environment = _environment()
    return find_undeclared_variables(environment.parse(chat_template)) - set(environment.globals)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment


def _text_of(token: str | JsonObject) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


class _Generation(Extension):
    """The block {% generation %}, by which templates mark the assistant's words; it changes nothing of the text."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_unchanged"), [], [], body).set_lineno(line)

    def _unchanged(self, caller: Macro) -> str:
        return caller()


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes what HTML does."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
