# pyright: reportUnknownMemberType=false
"""YAML for people: scripts as blocks of lines, and every object in full where it stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def documents(objects: Sequence[dict[str, Any]]) -> str:
    """Objects as YAML documents, keys in their order."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=120)
