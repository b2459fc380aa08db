"""What `slipstream train --help` says of options and presets.

Owns: their words on the screen. Does not own: what there is to say: it is written where options and presets are
declared, and conf.options lists it.
"""

import shutil
import textwrap
from pathlib import Path

from slipstream.conf.errors import ConfigError
from slipstream.conf.options import (
    GROUPS,
    Option,
    did_you_mean,
    flat_options,
    group_choices,
    options_by_name,
    section_docs,
    show,
)
from slipstream.conf.plural import counted


def options(config_dir: Path | None = None) -> str:
    return "\n".join([_groups(config_dir), _sections()])


def topic(name: str, config_dir: Path | None = None) -> str:
    """`slipstream train --help NAME`: `options`, or the name of a section, option or group."""
    if name == "options":
        return "\n".join(_section(section, own_only=True) for section in section_docs())
    if name in options_by_name():
        return _option(options_by_name()[name])
    if name in section_docs() or name in GROUPS:
        parts = ["\n".join([f"{name}=CHOICE", *_choices(name, config_dir, "  "), ""])] if name in GROUPS else []
        parts += [_section(name, own_only=False)] if name in section_docs() else []
        return "\n".join(parts)
    known = ["options", *GROUPS, *section_docs(), *options_by_name()]
    raise ConfigError(f"no help on {name!r}. {did_you_mean(name, known) or 'See: slipstream train --help'}")


def _groups(config_dir: Path | None) -> str:
    lines = ["groups: presets, chosen with GROUP=CHOICE"]
    for group in GROUPS:
        lines += _choices(group, config_dir, f"  {group:<13}")
    return "\n".join([*lines, ""])


def _choices(group: str, config_dir: Path | None, lead: str) -> list[str]:
    """A group's presets, the first one behind `lead`."""
    choices = group_choices(group, config_dir)
    longest = max((len(choice.name) for choice in choices), default=0)
    leads = [lead, *[" " * len(lead)] * (len(choices) - 1)]
    return [_wrap(one.doc, f"{lead}{one.name:<{longest}}  ") for lead, one in zip(leads, choices, strict=False)]


def _sections() -> str:
    lines = ["sections: options, set with SECTION.OPTION=VALUE, listed by --help SECTION"]
    for section, doc in section_docs().items():
        count = sum(option.name.rpartition(".")[0] == section for option in flat_options())
        lines.append(_wrap(f"{doc} ({counted(count, 'option')})", f"  {section:<18}"))
    return "\n".join(lines)


def _section(section: str, *, own_only: bool) -> str:
    lines = [section, _wrap(section_docs()[section], "  "), ""]
    for option in flat_options():
        parent = option.name.rpartition(".")[0]
        if parent == section or (not own_only and parent.startswith(f"{section}.")):
            lines.append(_option(option, indent="  "))
    return "\n".join(lines)


def _option(option: Option, indent: str = "") -> str:
    head = f"{indent}{option.name}={show(option.default)}"
    return f"{head}\n{_wrap(f'{option.doc} ({option.type_label})', indent + '    ')}\n"


def width() -> int:
    return max(60, min(shutil.get_terminal_size((110, 24)).columns, 120))


def _wrap(text: str, lead: str) -> str:
    """Fold `text` behind `lead`, further lines indented by as much."""
    folder = textwrap.TextWrapper(width(), lead, " " * len(lead), break_long_words=False, break_on_hyphens=False)
    return folder.fill(text) or lead.rstrip()  # a preset without a comment is a choice, too
