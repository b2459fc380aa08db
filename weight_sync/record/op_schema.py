"""What one torch op does to its arguments, from its schema, and which tensors it touches. Records nothing."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

from torch import Tensor

from slipstream.conf.json_files import is_list, is_object


class OpSchema(NamedTuple):
    written: tuple[tuple[int, str], ...]
    """(position, name) of the arguments that it writes."""
    is_view: bool
    """Whether a result shares an argument's memory."""


@functools.cache
def schema_of(func: Any) -> OpSchema:
    """Computed once per op, because a loader calls few ops, but each ten thousand times."""
    written = [
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return OpSchema(tuple(written), any(value.alias_info is not None for value in func._schema.returns))


def mutated(schema: OpSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The (name, tensor) arguments that an op writes."""
    for position, name in schema.written:
        for tensor in tensors_in(args[position] if position < len(args) else kwargs.get(name)):
            yield name, tensor


def storage_of(tensor: Tensor) -> int:
    """torch's number for the storage of a tensor and its views, also for those on meta, which have no addresses."""
    return cast(Any, tensor.untyped_storage())._cdata


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors among an op's arguments or results, which nest only in lists. (pytree takes ten times as long.)"""
    if isinstance(value, Tensor):
        yield value
    elif is_list(value):
        for item in value:
            yield from tensors_in(item)
    elif is_object(value):
        yield from tensors_in(list(value.values()))
