"""One word of the command line, NAME=VALUE in Hydra's grammar.

Owns: how a word is read, and how one is written whose value is a path. Does not own: what its name and its value mean
(load.py).
Invariant: what Hydra reads is read as by Hydra. Its grammar takes letters beyond ASCII only in quotes, and does not say
so; here a value that needs them gets them. Names of a mapping may have quotes, as in JSON.
"""

import re

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

_QUOTED_OR_BARE = re.compile(r""""(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[^\[\]{},:"'\\]+""")
"""In a list or a mapping: text in quotes, or text between the signs of the grammar."""
_JSON_NAME = re.compile(r'"(\w+)" *:')
"""A name in a mapping as JSON writes it; Hydra's grammar takes it without quotes."""


def read_word(text: str) -> Override:
    """Parse one word; a HydraException where the grammar has none such."""
    try:
        return _parsed(text)
    except HydraException:
        name, equals, value = text.partition("=")
        unquoted = _JSON_NAME.sub(r"\1: ", value)
        if value.isascii() and value == unquoted:
            raise
        return _parsed(f"{name}{equals}{unquoted if value.isascii() else _quoted(unquoted)}")


def word_of(name: str, value: str) -> str:
    """The word that gives `name` this text, in quotes where the grammar has a meaning for one of its signs."""
    if re.fullmatch(r"[\w./-]+", value):
        return f"{name}={value}"
    escaped = re.sub(r'(\\*)("|$)', lambda found: found[1] * 2 + found[2].replace('"', '\\"'), value)
    return f'{name}="{escaped}"'


def _parsed(text: str) -> Override:
    (override,) = OverridesParser.create().parse_overrides([text])
    return override


def _quoted(value: str) -> str:
    """The value with quotes around what is not ASCII; a value that has quotes or brackets of its own keeps them."""
    if not set(value) & set("[]{}\"'\\"):
        return f'"{value}"'
    return _QUOTED_OR_BARE.sub(lambda found: _quoted_if_bare(found[0]), value)


def _quoted_if_bare(text: str) -> str:
    bare = text.strip()
    if text[0] in "\"'" or bare.isascii():
        return text
    return text.replace(bare, f'"{bare}"')
