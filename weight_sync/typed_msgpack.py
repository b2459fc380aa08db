"""Dataclasses of plain values as msgpack, checked against their types on arrival. Never pickle.

msgspec reads and writes them. A layout, which it would write load by load, travels as the bytes of
`record/layout_wire.py` (`Sent`), an array of NumPy as its dtype, shape and bytes. The reader names the type that it
expects; bytes that do not fit it raise ProtocolError.
"""

import functools
import typing
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from slipstream.weight_sync.errors import ProtocolError
from slipstream.weight_sync.layout import DestLayout, SourceLayout
from slipstream.weight_sync.record.layout_wire import (
    layouts_from_bytes,
    layouts_to_bytes,
    source_layout_from_bytes,
    source_layout_to_bytes,
)

T = TypeVar("T")
Layout = TypeVar("Layout", DestLayout, SourceLayout)


class Sent(Generic[Layout]):
    """A layout in a message."""

    __slots__ = ("layout",)

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sent) and self.layout == typing.cast(Any, other).layout


def unpack(cls: type[T], data: bytes | msgspec.Raw) -> T:
    """Inverse of pack, e.g. unpack(EngineRank, data). Raises ProtocolError if the bytes do not fit the type."""
    try:
        return decoder_of(cls).decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise ProtocolError(f"expected {cls}, got {len(bytes(data))} bytes that are none: {e}") from e


def _plain_of(value: Any) -> Any:
    if isinstance(value, Sent):
        layout: DestLayout | SourceLayout = typing.cast(Any, value).layout
        return layouts_to_bytes((layout,)) if isinstance(layout, DestLayout) else source_layout_to_bytes(layout)
    if isinstance(value, np.ndarray):
        array = typing.cast(Any, value)
        return array.dtype.name, array.shape, array.tobytes()
    if isinstance(value, np.generic):
        return typing.cast(Any, value).item()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a message cannot hold {type(value).__name__}")


pack = msgspec.msgpack.Encoder(enc_hook=_plain_of).encode
"""Encode dataclasses of plain values, tuples, lists and dicts of them, paths, arrays, and layouts that are Sent."""


def _special_of(kind: Any, data: Any) -> Any:
    """Read a layout, an array or a path. A layout's 20,000 loads are read as columns, which is quick."""
    try:
        if kind is Path:
            return Path(data)
        if kind is np.ndarray:
            dtype, shape, content = data
            return np.frombuffer(content, dtype=dtype).reshape(shape).copy()  # so that it can be written
        if typing.get_args(kind) == (SourceLayout,):
            return Sent(source_layout_from_bytes(data))
        return Sent(layouts_from_bytes(data)[0])
    except Exception as e:  # bytes of a stranger may break the reading anywhere
        raise ValueError(f"expected {kind}, got {type(data).__name__} that is none: {e}") from e


@functools.cache
def decoder_of(cls: Any) -> msgspec.msgpack.Decoder[Any]:
    """Reads a value of this type. Raises msgspec.MsgspecError if the bytes are none."""
    return msgspec.msgpack.Decoder(cls, dec_hook=_special_of)
