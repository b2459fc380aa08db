"""Writes docs/options.md: python docs/options_page.py > docs/options.md

Owns: the form of the page. Does not own: what there is to say, which conf/options.py lists.
"""

import re
import sys

from slipstream.conf.options import GROUPS, flat_options, group_choices, section_docs, show


def page() -> str:
    lines = [
        "# Options",
        "",
        "<!-- Written by `python docs/options_page.py > docs/options.md`; a unit test compares the two. -->",
        "",
        "Every option of `slipstream train`, from `conf/schema/`. Set one with `section.option=value`; choose a "
        "preset of a",
        "section with `group=choice`; see the resulting options with `--cfg job`.",
        "",
        "## Groups and their choices",
        "",
        "| group | choice | what it is |",
        "|---|---|---|",
    ]
    for group in GROUPS:
        lines += [f"| {group} | `{choice.name}` | {_cell(choice.doc)} |" for choice in group_choices(group)]
    for section, doc in section_docs().items():
        own = [option for option in flat_options() if option.name.rpartition(".")[0] == section]
        lines += ["", f"## {section}", "", _linked(doc), ""]
        lines += ["| option | type | default | meaning |", "|---|---|---|---|"]
        for option in own:
            default = f"`{show(option.default)}`"
            lines.append(f"| `{option.name}` | {_cell(option.type_label)} | {_cell(default)} | {_cell(option.doc)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """A cell of a table. Outside of code spans a `<` would begin an HTML tag."""
    parts = text.replace("|", "\\|").split("`")
    return _linked("`".join(part if number % 2 else part.replace("<", "&lt;") for number, part in enumerate(parts)))


def _linked(text: str) -> str:
    """`docs/NAME.md` as a link from the page, which lies in docs/ itself."""
    return re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text)


if __name__ == "__main__":
    sys.stdout.write(page())
