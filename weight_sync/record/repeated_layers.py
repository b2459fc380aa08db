"""Recording two layers of each kind and repeating them: a model of 61 layers and 384 experts in seconds, not minutes.

Two layers are of one kind if their checkpoint tensors and their parameters are the same except for the layer's number:
names, shapes, dtypes, post-load forms, and which names share memory. The first two of a kind are recorded. If the
loader did the same in both, except for the number, it is assumed to do so in the others. If it did not, in any kind,
every layer is recorded.

Invariant: parameters are those of the whole model, never repeated. The layout equals the one that `record_layout`
returns for all tensors at once, unless a loader treats a layer by its number in a way that neither the first two layers
nor any parameter shows.

A live engine does this if the digest of its kind's whole layout is known, from its node or from a plan, and compares.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from slipstream.weight_sync.layout import DestLayout, Fill, Param, PostLoad, TensorMeta
from slipstream.weight_sync.plan.columns import Ints, LoadTable, as_list
from slipstream.weight_sync.record.op_schema import storage_of
from slipstream.weight_sync.record.recorder import record_layout

NUM_RECORDED = 2
"""Layers of a kind: one to repeat, and one to compare it with."""
_LAYER = re.compile(r"(?<![^.])layers\.(\d+)\.")


def record_repeating(
    load_weights: Callable[[Iterable[tuple[str, Tensor]]], object],
    params: Mapping[str, Tensor],
    tensors: Sequence[TensorMeta],
    rank: int,
    *,
    post_load: Mapping[str, PostLoad],
) -> DestLayout:
    """As `record_layout`, with the same arguments, but without running the loader over every layer."""
    kinds = _kinds(params, tensors, post_load)
    skipped = {layer for layers in kinds for layer in layers[NUM_RECORDED:]}
    sample = record_layout(
        load_weights,
        {name: param for name, param in params.items() if layer_of(name) not in skipped},
        [meta for meta in tensors if layer_of(meta.name) not in skipped],
        rank,
        post_load={name: form for name, form in post_load.items() if layer_of(name) not in skipped},
    )
    if not skipped:
        return sample
    loads = LoadTable.of(sample.loads)
    tensor_layer, param_layer = _layers(loads, loads.tensor), _layers(loads, loads.param)
    repeated = [layers for layers in kinds if len(layers) > NUM_RECORDED]
    is_alike = (tensor_layer == param_layer).all() and all(
        _is_repeated(loads, tensor_layer, sample.fills, first, second) for first, second, *_ in repeated
    )
    if not is_alike:
        return record_layout(load_weights, params, tensors, rank, post_load=post_load)
    return _repeat(sample, loads, tensor_layer, repeated, params, tensors)


def layer_of(name: str) -> int:
    """The layer that a tensor or a parameter belongs to; -1: none."""
    found = _LAYER.search(name)
    return int(found[1]) if found else -1


def _at(name: str, layer: int) -> str:
    return _LAYER.sub(f"layers.{layer}.", name, count=1)


def layers_by_kind(facts: Iterable[tuple[str, object]]) -> list[list[int]]:
    """Groups of layers that are the same except for their number, in ascending order. A fact is the name of a tensor or
    a parameter, and what must be equal in two layers of a kind."""
    by_layer: dict[int, list[object]] = {}
    for name, fact in facts:
        by_layer.setdefault(layer_of(name), []).append((_at(name, 0), fact))
    by_layer.pop(-1, None)
    kinds: dict[tuple[object, ...], list[int]] = {}
    for layer in sorted(by_layer):
        kinds.setdefault(tuple(by_layer[layer]), []).append(layer)
    return list(kinds.values())


def _kinds(
    params: Mapping[str, Tensor], tensors: Sequence[TensorMeta], post_load: Mapping[str, PostLoad]
) -> list[list[int]]:
    facts: list[tuple[str, object]] = [(meta.name, (meta.shape, meta.dtype)) for meta in tensors]
    first_name: dict[tuple[int, int], str] = {}
    for name, param in params.items():
        layer = layer_of(name)
        first = first_name.setdefault((storage_of(param), int(param.storage_offset())), name)
        shared = _at(first, 0) if layer_of(first) == layer else first
        form = post_load.get(name, PostLoad.identity)
        facts.append((name, (tuple(param.shape), param.dtype, form, shared)))
    return layers_by_kind(facts)


def _layers(loads: LoadTable, column: Ints) -> Ints:
    return np.array([layer_of(name) for name in loads.names], np.int64)[column]


def _is_repeated(loads: LoadTable, layer: Ints, fills: Sequence[Fill], first: int, second: int) -> bool:
    """Whether the loader did the same in two layers, in the same order."""
    mine, other = np.flatnonzero(layer == first), np.flatnonzero(layer == second)
    if len(mine) != len(other):
        return False
    places = (loads.start, loads.shape, loads.stride, loads.offset, loads.axes)
    if any((column[mine] != column[other]).any() for column in places):
        return False
    for column in (loads.tensor, loads.param):
        pairs = np.unique(np.stack([column[mine], column[other]]), axis=1)
        if any(_at(loads.names[a], second) != loads.names[b] for a, b in zip(as_list(pairs[0]), as_list(pairs[1]))):
            return False
    moved = [replace(fill, param=_at(fill.param, second)) for fill in fills if layer_of(fill.param) == first]
    return moved == [fill for fill in fills if layer_of(fill.param) == second]


def _repeat(
    sample: DestLayout,
    loads: LoadTable,
    layer: Ints,
    kinds: Sequence[Sequence[int]],
    params: Mapping[str, Tensor],
    tensors: Sequence[TensorMeta],
) -> DestLayout:
    """The layout of all layers, parameters in the engine's order, loads in the checkpoint's."""
    numbers = {name: number for number, name in enumerate(loads.names)}
    recorded = loads.columns()
    columns = {name: [column] for name, column in recorded.items()}
    described = {param.name: param for param in sample.params}
    fills = list(sample.fills)
    for first, _, *others in kinds:
        rows = np.flatnonzero(layer == first)
        used = as_list(np.unique(np.stack([loads.tensor[rows], loads.param[rows]])))
        for other in others:
            moved = np.full(len(loads.names), -1, np.int64)
            for number in used:
                moved[number] = numbers.setdefault(_at(loads.names[number], other), len(numbers))
            for name, column in recorded.items():
                columns[name].append(moved[column[rows]] if name in ("tensor", "param") else column[rows])
            own = [fill for fill in sample.fills if layer_of(fill.param) == first]
            fills += [replace(fill, param=_at(fill.param, other)) for fill in own]
            mine = [param for param in sample.params if layer_of(param.name) == first]
            described |= {_at(param.name, other): replace(param, name=_at(param.name, other)) for param in mine}
    whole = {name: np.concatenate(parts) for name, parts in columns.items()}
    position = {meta.name: number for number, meta in enumerate(tensors)}
    by_name = np.array([position.get(name, -1) for name in numbers], np.int64)
    order = np.argsort(by_name[whole["tensor"]], kind="stable")
    place = {name: number for number, name in enumerate(params)}
    ordered: tuple[Param, ...] = tuple(described[name] for name in params if name in described)
    table = LoadTable(tuple(numbers), **{name: column[order] for name, column in whole.items()})
    return DestLayout(sample.rank, ordered, table, tuple(sorted(fills, key=lambda fill: place[fill.param])))
