"""Dataclasses of plain values as msgpack, checked against their types on arrival. Never pickle.

A dataclass becomes the list of its fields, a layout the bytes of `record/layout_wire.py`; msgpack encodes the rest.
The reader names the type that it expects; bytes that do not fit it raise ProtocolError.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Collection, Sequence
from enum import StrEnum
from typing import Any, NoReturn, TypeVar

import msgpack  # pyright: ignore[reportMissingTypeStubs]

from slipstream.weight_sync.errors import ProtocolError
from slipstream.weight_sync.layout import DestLayout, SourceLayout
from slipstream.weight_sync.record.layout_wire import (
    layouts_from_bytes,
    layouts_to_bytes,
    source_layout_from_bytes,
    source_layout_to_bytes,
)

T = TypeVar("T")
Decoder = Callable[[Any], Any]
"""Turns what msgpack read into a value of the expected type; raises ProtocolError if it does not fit."""


def pack(value: Any) -> bytes:
    """Encode dataclasses of plain values (layouts, bindings, tuples and lists of them)."""
    return msgpack.packb(value, default=_fields_of)  # pyright: ignore[reportUnknownMemberType]


def unpack(cls: type[T], data: bytes) -> T:
    """Inverse of pack, for a known type, e.g. unpack(EngineRank, data)."""
    return from_plain(cls, read(data))


def read(data: bytes) -> Any:
    """What msgpack reads, unchecked: plain values, with tuples for lists."""
    return typing.cast(Any, msgpack).unpackb(data, use_list=False, strict_map_key=False)


def from_plain(cls: Any, value: Any) -> Any:
    """Turn what msgpack read into the type `cls`. Raises ProtocolError if it does not fit."""
    return _decoder(cls)(value)


@functools.cache
def _decoder(cls: Any) -> Decoder:
    """from_plain for one type; made once per type."""
    origin, args = typing.get_origin(cls), typing.get_args(cls)
    if cls is Any:
        return lambda value: value
    if cls is None:
        return lambda value: None if value is None else _refuse(value, cls)
    if cls is DestLayout or cls is SourceLayout:
        return functools.partial(_layout_of, cls)
    if dataclasses.is_dataclass(cls):
        return _dataclass_decoder(typing.cast(type, cls))
    if origin in (tuple, list, dict):
        return _collection_decoder(cls, origin, args)
    if origin is types.UnionType:  # a union of plain types, or of one type and None
        kinds: list[Any] = [kind for kind in args if kind is not types.NoneType]
        some = _decoder(kinds[0]) if len(kinds) == 1 else _one_of(cls, kinds)
        return lambda value: None if value is None and types.NoneType in args else some(value)
    if isinstance(cls, type) and issubclass(cls, StrEnum):
        return lambda value: cls(value if value in cls._value2member_map_ else _refuse(value, cls))
    if cls is float:
        return lambda value: float(value if type(value) in (int, float) else _refuse(value, cls))
    plain: list[Any] = [cls]
    return _one_of(cls, plain)


def _collection_decoder(cls: Any, origin: type, args: tuple[Any, ...]) -> Decoder:
    """from_plain for list[X], tuple[X, ...], tuple[X, Y] and dict[X, Y]."""
    if origin is dict:
        keys, items = (_items_decoder(kind) for kind in args)

        def decode_dict(value: Any) -> dict[Any, Any]:
            _checked(value, dict, cls)
            pairs: dict[Any, Any] = value
            return dict(zip(keys(pairs), items(pairs.values()), strict=True))

        return decode_dict
    if origin is list or args[1:] == (Ellipsis,):
        many = _items_decoder(args[0])
        kind: Any = origin
        return lambda value: kind(many(_checked(value, tuple, cls)))
    decoders = [_decoder(kind) for kind in args]

    def decode_tuple(value: Any) -> tuple[Any, ...]:
        parts = _checked(value, tuple, cls)
        if len(parts) != len(decoders):
            _refuse(value, cls)
        return tuple([decode(one) for decode, one in zip(decoders, parts, strict=True)])

    return decode_tuple


def _one_of(cls: Any, kinds: Sequence[Any]) -> Decoder:
    return lambda value: value if type(value) in kinds else _refuse(value, cls)


def _items_decoder(cls: Any) -> Callable[[Collection[Any]], Collection[Any]]:
    """from_plain for many values of one type. Values of a plain type are checked together: there may be millions."""
    item = _decoder(cls)
    if cls in (str, int, bytes, bool):
        return lambda values: values if set(map(type, values)) <= {cls} else [item(one) for one in values]
    return lambda values: [item(one) for one in values]


def _dataclass_decoder(cls: type) -> Decoder:
    fields = [(name, _decoder(kind)) for name, kind in _fields(cls)]

    def decode(value: Any) -> Any:
        parts = _checked(value, tuple, cls)
        if len(parts) != len(fields):
            raise ProtocolError(f"expected the {len(fields)} fields of {cls.__name__}, got {_brief(value)}")
        return cls(**{name: decode_field(one) for (name, decode_field), one in zip(fields, parts, strict=True)})

    return decode


def _layout_of(cls: type, value: Any) -> Any:
    """Read a layout. Its 20,000 loads are read as columns, which is quick."""
    data = _checked(value, bytes, cls)
    try:
        return source_layout_from_bytes(data) if cls is SourceLayout else layouts_from_bytes(data)[0]
    except ProtocolError:
        raise
    except Exception as e:  # bytes of a stranger may break the reading anywhere
        raise ProtocolError(f"expected a layout, got {len(data)} bytes that are none: {e}") from e


def _checked(value: Any, kind: type, cls: Any) -> Any:
    if type(value) is not kind:
        _refuse(value, cls)
    return value


def _refuse(value: Any, cls: Any) -> NoReturn:
    raise ProtocolError(f"expected {cls}, got {_brief(value)}")


def _fields_of(value: Any) -> list[Any] | bytes:
    if isinstance(value, DestLayout):
        return layouts_to_bytes((value,))
    if isinstance(value, SourceLayout):
        return source_layout_to_bytes(value)
    if not dataclasses.is_dataclass(value):
        raise TypeError(f"a message cannot hold {_brief(value)}")
    return [getattr(value, name) for name, _ in _fields(type(value))]


@functools.cache
def _fields(cls: type) -> tuple[tuple[str, Any], ...]:
    hints = typing.get_type_hints(cls)
    return tuple((item.name, hints[item.name]) for item in dataclasses.fields(cls))


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
