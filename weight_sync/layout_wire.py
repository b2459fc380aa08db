"""Engine layouts as bytes, and back: small and quick, for files that hold a whole engine's.

Owns: that form. Does not own: the form of control messages (protocol.py), whose layouts come one at a time. Every name
is written once and then called by its position; an engine of 16 ranks says each of 50,000 names 16 times and more.
Invariant: what comes back equals what was written. Callers: rollout/offline_layout.py, rollout/meta_engine.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]

from weight_sync.layout import DestLayout, Fill, Load, Param, PostLoad, Region


def layouts_to_bytes(layouts: Sequence[DestLayout]) -> bytes:
    """Write the layouts of one engine."""
    names: dict[str, int] = {}

    def number(name: str) -> int:
        return names.setdefault(name, len(names))

    rows = [
        [
            layout.rank,
            [[number(p.name), p.shape, number(p.dtype), number(p.post_load.value)] for p in layout.params],
            [
                [number(x.tensor), x.region.start, x.region.shape, x.axes, number(x.param), x.offset, x.stride]
                for x in layout.loads
            ],
            [[number(f.param), f.offset, f.num_elements, f.value] for f in layout.fills],
        ]
        for layout in layouts
    ]
    return cast(bytes, msgpack.packb([list(names), rows]))  # pyright: ignore[reportUnknownMemberType]


def layouts_from_bytes(data: bytes) -> tuple[DestLayout, ...]:
    """Read what `layouts_to_bytes` wrote."""
    content: Any = msgpack.unpackb(data, use_list=False)
    names, rows = content
    return tuple(
        DestLayout(
            rank,
            tuple(
                Param(names[name], shape, names[dtype], PostLoad(names[form])) for name, shape, dtype, form in params
            ),
            tuple(
                Load(names[tensor], Region(start, shape), axes, names[param], offset, stride)
                for tensor, start, shape, axes, param, offset, stride in loads
            ),
            tuple(Fill(names[param], offset, size, value) for param, offset, size, value in fills),
        )
        for rank, params, loads, fills in rows
    )
