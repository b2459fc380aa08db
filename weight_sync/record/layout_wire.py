"""Layouts as bytes, and back: small and quick, for files with an engine's layouts, for messages and for collectives.

Each name is written once and referred to by its number. Each column of loads is written once, too: the ranks of an
engine differ, as a rule, only in where their shares start, so they share the other columns, in the file and once read.
16 ranks with 140,000 loads each are read in 60 ms. The checkpoint's
tensors, which every trainer rank lists alike, are decoded once per process.

Invariants: what is read equals what was written; truncated bytes are refused; equal layouts have equal bytes.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgpack
import numpy as np

from slipstream.weight_sync.layout import (
    DestLayout,
    Fill,
    Param,
    PostLoad,
    Region,
    SourceLayout,
    SourceShard,
    TensorMeta,
)
from slipstream.weight_sync.plan.columns import Ints, LoadTable, as_list

_NUMBERS = np.dtype("<i8")


def layouts_to_bytes(layouts: Sequence[DestLayout]) -> bytes:
    names: dict[str, int] = {}
    blocks: dict[bytes, int] = {}

    def number(name: str) -> int:
        return names.setdefault(name, len(names))

    def block(column: Ints) -> list[int]:
        data = np.ascontiguousarray(column, _NUMBERS).tobytes()
        return [blocks.setdefault(data, len(blocks)), *column.shape]

    rows: list[Any] = []
    for layout in layouts:
        params = [[number(p.name), p.shape, number(p.dtype), number(p.post_load.value)] for p in layout.params]
        fills = [[number(f.param), f.offset, f.num_elements, f.value] for f in layout.fills]
        table = LoadTable.of(layout.loads)
        columns = table.columns()
        for name in ("tensor", "param"):
            used, first, which = np.unique(columns[name], return_index=True, return_inverse=True)
            numbers = np.empty(len(used), np.int64)
            for one in as_list(np.argsort(first)):  # by first use, which is the same in all tables of these loads
                numbers[one] = number(table.names[int(used[one])])
            columns[name] = numbers[which]
        rows.append([layout.rank, params, [block(column) for column in columns.values()], fills])
    return msgpack.packb([list(names), list(blocks), rows])


def layouts_digest(layouts: Sequence[DestLayout]) -> str:
    """sha256, hex, of one engine's layouts."""
    return hashlib.sha256(layouts_to_bytes(layouts)).hexdigest()


def layouts_from_bytes(data: bytes) -> tuple[DestLayout, ...]:
    names, blocks, rows = msgpack.unpackb(data, use_list=False)
    arrays: list[Ints] = [np.frombuffer(block, _NUMBERS) for block in blocks]
    return tuple(
        DestLayout(
            rank,
            tuple(
                Param(names[name], shape, names[dtype], PostLoad(names[form])) for name, shape, dtype, form in params
            ),
            LoadTable(names, *(arrays[int(column[0])].reshape(column[1:]) for column in columns)),
            tuple(Fill(names[param], offset, size, value) for param, offset, size, value in fills),
        )
        for rank, params, columns, fills in rows
    )


def source_layout_to_bytes(layout: SourceLayout) -> bytes:
    numbers = {meta.name: number for number, meta in enumerate(layout.tensors)}
    tensors = msgpack.packb([[meta.name, meta.shape, meta.dtype] for meta in layout.tensors])
    shards = [
        [numbers.setdefault(shard.tensor, len(numbers)), shard.region.start, shard.region.shape]
        for shard in layout.shards
    ]
    unlisted = list(numbers)[len(layout.tensors) :]  # a plan refuses them by name
    return msgpack.packb([layout.rank, tensors, unlisted, shards])


def source_layout_from_bytes(data: bytes) -> SourceLayout:
    content: Any = msgpack.unpackb(data, use_list=False)
    rank, packed, unlisted, shards = content
    tensors = _tensors_from_bytes(packed)
    names = [*(meta.name for meta in tensors), *unlisted]
    return SourceLayout(
        rank, tensors, tuple(SourceShard(names[number], Region(start, shape)) for number, start, shape in shards)
    )


@lru_cache(maxsize=2)
def _tensors_from_bytes(data: bytes) -> tuple[TensorMeta, ...]:
    content: Any = msgpack.unpackb(data, use_list=False)
    return tuple(TensorMeta(name, shape, dtype) for name, shape, dtype in content)
