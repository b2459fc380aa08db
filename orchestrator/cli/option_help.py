"""What `slipstream train --help` says of options and presets.

Owns: their words on the screen. Does not own: what there is to say: it is written where options and presets are
declared, and conf.options lists it.
"""

import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path

from slipstream.conf.errors import ConfigError
from slipstream.conf.options import (
    GROUPS,
    Choice,
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
    """Every preset and section, for `slipstream train --help`."""
    return "\n".join([_groups(config_dir), _sections()])


def topic(name: str, config_dir: Path | None = None) -> str:
    """`slipstream train --help NAME`.

    Args:
        name: `options`, or the name of a section, option or group.
        config_dir: A folder of the user's own YAML files, whose choices are listed, too.

    Raises:
        ConfigError: There is no such topic.
    """
    if name == "options":
        return "\n".join(_section(section, own_only=True) for section in section_docs())
    if name in options_by_name():
        return _option(options_by_name()[name])
    if name in section_docs() or name in GROUPS:
        parts = [_choices(name, group_choices(name, config_dir))] if name in GROUPS else []
        parts += [_section(name, own_only=False)] if name in section_docs() else []
        return "\n".join(parts)
    known = ["options", *GROUPS, *section_docs(), *options_by_name()]
    raise ConfigError(f"no help on {name!r}. {did_you_mean(name, known) or 'See: slipstream train --help'}")


def _groups(config_dir: Path | None) -> str:
    lines = ["groups: presets, chosen with GROUP=CHOICE"]
    for group in GROUPS:
        choices = group_choices(group, config_dir)
        width = max((len(choice.name) for choice in choices), default=0)
        for i, choice in enumerate(choices):
            lead = f"  {group if i == 0 else '':<13}{choice.name:<{width}}  "
            lines.append(_wrap(choice.doc, lead))
    return "\n".join([*lines, ""])


def _sections() -> str:
    lines = ["sections: options, set with SECTION.OPTION=VALUE, listed by --help SECTION"]
    for section, doc in section_docs().items():
        count = sum(option.name.rpartition(".")[0] == section for option in flat_options())
        lines.append(_wrap(f"{doc} ({counted(count, 'option')})", f"  {section:<18}"))
    return "\n".join(lines)


def _choices(group: str, choices: Sequence[Choice]) -> str:
    lines = [f"{group}=CHOICE"]
    for choice in choices:
        lines += [_wrap(choice.doc, f"  {choice.name:<22}")]
    return "\n".join([*lines, ""])


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
    """Columns that help may take."""
    return max(60, min(shutil.get_terminal_size((110, 24)).columns, 120))


def _wrap(text: str, lead: str) -> str:
    """Fold `text` behind `lead`, further lines indented by as much."""
    folded = textwrap.fill(
        text,
        width(),
        initial_indent=lead,
        subsequent_indent=" " * len(lead),
        break_on_hyphens=False,
        break_long_words=False,
    )
    return folded or lead.rstrip()  # a preset without a comment is a choice, too
