"""The transfer plan: who sends which bytes to whom, in which order. Pure, deterministic, computed once, then replayed.

Owns: how the parts of planning follow each other, and the digest of layouts. Does not own: the parts (below), addresses
(an engine's `Binding` joins them at run time), moving bytes (pipeline.py), what a layout is (layout.py), the proof that
a plan is right (proof.py; `build_plan` runs it on every plan that it returns).

    SourceLayout x ranks ---> holders.py: disjoint cells of each checkpoint tensor, and the ranks that hold each
                                                |
    DestLayout x replicas --> loads, cut into contiguous runs of a parameter that lie in one cell
                                                |   chunks.py: neighbours of the same holders merge, long ones are cut
                                              chunks
                                                |   schedule.py: one source for each, the holder with the least bytes
                                              tasks, per source: dense before experts, layer order, destinations in turn

A cluster's plan has millions of tasks; here they are rows of columns, and objects only where they are used. Equal ranks
of several replicas are cut once and share their rows.

Invariant: every byte of every parameter that is not derived and not a declared fill is written by exactly one task,
and is the byte that the engine's own loader would have put there. No task is longer than `max_task_bytes`.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from slipstream.weight_sync.errors import PlanError
from slipstream.weight_sync.layout import DTYPE_BYTES, Destination, DestLayout, SourceLayout
from slipstream.weight_sync.plan.chunks import Chunks, check_layout, cut_layout
from slipstream.weight_sync.plan.columns import Ints, LoadTable, num_dims
from slipstream.weight_sync.plan.holders import Holders, find_holders
from slipstream.weight_sync.plan.proof import prove_coverage
from slipstream.weight_sync.plan.schedule import MIN_SHARED_BYTES, Alike, Needs, choose_sources, schedule_of
from slipstream.weight_sync.plan.transfer_plan import DTYPES, PieceColumns, TransferPlan, digest_of

SHARES_PER_SOURCE = 64
"""A chunk with several holders is cut to 1/64 of a source's fair share: greedy choice then ends within 2 % of even."""


def build_plan(
    sources: Sequence[SourceLayout], replicas: Sequence[Sequence[DestLayout]], *, max_task_bytes: int
) -> TransferPlan:
    """Join what the trainer ranks hold with what the engine ranks need, and prove the result.

    Args:
        sources: one layout per trainer rank; ranks are distinct, the checkpoint is the same on all.
        replicas: for every replica, one layout per engine rank.
        max_task_bytes: no task is longer; a quarter of a staging slot, so that slots are nearly full (budget.py).

    Raises:
        PlanError: the sides do not fit, or one is empty. Names the tensor, the parameter and the rank.
    """
    if max_task_bytes < 1:
        raise PlanError(f"max_task_bytes must be >= 1, got {max_task_bytes}")
    if not replicas:
        raise PlanError("there is no replica to plan for")
    holders = find_holders(sources)
    ranks = sorted(source.rank for source in sources)
    alike = _alike(holders, replicas)
    sizes = [one.layout.written_bytes() for one in alike]
    found = {(replica, one.dest_rank): own for one, own in zip(alike, sizes) for replica in one.replicas}
    expected = {dest: found[dest] for dest in ((n, layout.rank) for n, of in enumerate(replicas) for layout in of)}
    num_bytes = sum(sum(params.values()) for params in expected.values())
    needs = _cut(alike, holders, max_task_bytes, max(MIN_SHARED_BYTES, num_bytes // len(ranks) // SHARES_PER_SOURCE))
    schedule = schedule_of(needs, choose_sources(needs, holders, ranks), ranks, num_replicas=len(replicas))

    plan = TransferPlan(
        max_task_bytes=max_task_bytes,
        tasks=schedule,
        expected=expected,
        layouts_digest=_layouts_digest(holders, alike),
        rank_digests={rank: digest_of(table.to_wire()) for rank, table in schedule.items()},
    )
    prove_coverage(plan, replicas, sources)
    return plan


def _alike(holders: Holders, replicas: Sequence[Sequence[DestLayout]]) -> list[Alike]:
    """Check every layout, and group the engine ranks by rank and layout; layouts are equal when their digests are."""
    digests: dict[int, str] = {}
    seen: set[Destination] = set()
    groups: dict[tuple[int, str], list[tuple[int, DestLayout]]] = {}
    for replica, layouts in enumerate(replicas):
        if not layouts:
            raise PlanError(f"replica {replica} has no engine rank")
        for layout in layouts:
            if (replica, layout.rank) in seen:
                raise PlanError(f"replica {replica}: two layouts claim rank {layout.rank}")
            seen.add((replica, layout.rank))
            if id(layout) not in digests:
                check_layout(layout, holders, f"replica {replica} rank {layout.rank}")
                digests[id(layout)] = _layout_digest(layout, holders)
            groups.setdefault((layout.rank, digests[id(layout)]), []).append((replica, layout))
    return [
        Alike(rank, members[0][1], digest, tuple(replica for replica, _ in members))
        for (rank, digest), members in groups.items()
    ]


def _cut(alike: Sequence[Alike], holders: Holders, max_task_bytes: int, max_shared_bytes: int) -> Needs:
    """Cut what every group of equal engine ranks needs, once."""
    names: dict[str, int] = {}
    found: list[Chunks] = []
    dtypes: list[Ints] = []
    for one in alike:
        who = f"replica {one.replicas[0]} rank {one.dest_rank}"
        chunks = cut_layout(one.layout, holders, who, max_task_bytes=max_task_bytes, max_shared_bytes=max_shared_bytes)
        numbers = np.array([names.setdefault(param.name, len(names)) for param in one.layout.params], np.int64)
        dtype = np.array([DTYPES.index(param.dtype) for param in one.layout.params], np.int64)
        found.append(replace(chunks, param=numbers[chunks.param]))
        dtypes.append(dtype[chunks.param])
    pieces, dtype = PieceColumns.concat([one.pieces for one in found]), np.concatenate(dtypes)
    chunks = replace(Chunks.concat(found), pieces=pieces)
    element_bytes = np.array([DTYPE_BYTES[name] for name in DTYPES], np.int64)[dtype]
    return Needs(
        alike=alike,
        params=tuple(names),
        member=np.repeat(np.arange(len(alike)), [len(chunks.param) for chunks in found]),
        chunks=chunks,
        offset_bytes=chunks.offset * element_bytes,
        num_bytes=chunks.num_elements * element_bytes,
        dtype=dtype,
    )


def _layout_digest(layout: DestLayout, holders: Holders) -> str:
    """Digest of a layout but for its rank, whatever form its loads have; tensors by their place in the checkpoint."""
    table = LoadTable.of(layout.loads)
    columns = table.columns()
    columns["tensor"] = holders.tensors_of(table)
    columns["param"] = table.params_in({param.name: number for number, param in enumerate(layout.params)})
    dims = int(num_dims(table.axes).max(initial=1))
    columns |= {name: np.ascontiguousarray(columns[name][:, :dims]) for name in ("start", "shape", "stride")}
    return digest_of(
        [
            [[p.name, p.shape, p.dtype, p.post_load.value] for p in layout.params],
            [column.astype("<i8", copy=False).tobytes() for column in columns.values()],
            [[f.param, f.offset, f.num_elements, f.value] for f in layout.fills],
        ]
    )


def _layouts_digest(holders: Holders, alike: Sequence[Alike]) -> str:
    """Digest of the checkpoint and of every destination."""
    checkpoint = [[meta.name, meta.shape, meta.dtype] for meta in holders.metas]
    return digest_of(
        [checkpoint, sorted([replica, one.dest_rank, one.digest] for one in alike for replica in one.replicas)]
    )
