"""Metadata of a field: in which runs the option is read. Who types an option that his run does not read is told so.

Owns: how that is written. Does not own: how it is evaluated and said (conf/checks/ignored.py).
"""

from typing import NamedTuple

READ_IF = "read_if"
REMOVE_ONE = "remove one of the two"


class If(NamedTuple):
    """One condition. Example: If("weight_sync.mode=adapter", ", which has no slots")."""

    condition: str
    """`NAME=VALUE`, `NAME=VALUE|VALUE` or `NAME!=VALUE`, and several of these with ` or ` between them. NAME is an
    option or a property of RunConfig; a VALUE may have `*`, and of a list it is one that the list has."""
    told: str = ""
    """What is said of the first NAME and its value; without a comma or colon at its beginning: instead of these."""
    cure: str = ""
    """What else to do; empty: to set NAME to the first VALUE."""


def read_if(*conditions: If) -> dict[str, tuple[If, ...]]:
    """The option, or each of a section, is read where all of these hold."""
    return {READ_IF: conditions}
