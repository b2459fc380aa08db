"""What a check of the run finds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fact:
    """One finding. Example: Fact("model", "qwen3_moe: 2 layers, 8 experts, 0.3 M parameters, random")."""

    subject: str
    finding: str
    is_warning: bool = False
    """Allowed, and seldom what was meant: said at the start of a run, too."""
    also: tuple[Fact, ...] = ()
    """What the same check found beside it."""
