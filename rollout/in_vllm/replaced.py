"""Changing an attribute of vLLM's or Triton's that must exist: for good, or while a block runs.

Owns: that, and what is said where it does not exist. Does not own which attributes are changed (vllm_patches.py lists
those of vLLM).
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from slipstream.rollout.errors import EngineError


@contextlib.contextmanager
def replaced(target: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """While the block runs, attributes of `target` have these values."""
    before = {name: replace(target, name, value) for name, value in values.items()}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)


def replace(target: Any, name: str, value: Any) -> Any:
    """Set an attribute that must exist. Returns its old value.

    Raises:
        EngineError: There is no such attribute.
    """
    if not hasattr(target, name):
        where = getattr(target, "__name__", type(target).__name__)
        raise EngineError(
            f"{where} has no {name}, which Slipstream replaces; the releases of vLLM that it supports are 0.25.1 "
            "and 0.32, with the Triton that they ask for"
        )
    before = getattr(target, name)
    setattr(target, name, value)
    return before
