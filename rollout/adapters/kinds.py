"""Kinds of modules that have adapters, by the names of their factors: a probe fills the factors of one kind."""

from collections.abc import Iterable

from slipstream.weight_sync.record.repeated_layers import layer_of


def kind_of(factor: str) -> str:
    """The kind of module to which a factor belongs."""
    if ".experts." in factor:
        return "experts"
    return "attention" if ".self_attn." in factor else "feed-forward"


def last_of_kind(factors: Iterable[str], kind: str) -> list[str]:
    """The factors of one kind of module in the last layer that has it: whatever acts there, acts through the fewest
    other layers. (Where the first layer alone acts, noise in all of them shows nothing.)
    """
    of_kind = [name for name in factors if kind_of(name) == kind]
    last = max(map(layer_of, of_kind), default=-1)
    return [name for name in of_kind if layer_of(name) == last]
