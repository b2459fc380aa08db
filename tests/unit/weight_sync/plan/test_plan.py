"""Plans against a naive oracle: random layouts on both sides, tasks executed in memory, compared with the loads
themselves."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import msgpack
import numpy as np
import pytest
from cases.layouts import (
    UNWRITTEN,
    checkpoint_values,
    engine_rank,
    filled_by_loads,
    filled_by_tasks,
    rows,
    shard_rows,
    systems,
    tiny_checkpoint,
)
from cases.plan_tables import table_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.weight_sync.errors import PlanError
from slipstream.weight_sync.layout import (
    DestLayout,
    Load,
    Param,
    PostLoad,
    Region,
    SourceLayout,
    SourceShard,
    TensorMeta,
)
from slipstream.weight_sync.plan.chunks import MAX_RUNS
from slipstream.weight_sync.plan.plan import SHARES_PER_SOURCE, build_plan
from slipstream.weight_sync.plan.schedule import MIN_SHARED_BYTES
from slipstream.weight_sync.plan.tasks import MESH_GROUPS, Task
from slipstream.weight_sync.plan.transfer_plan import TransferPlan, rank_plan_from_wire

PROPERTY = settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def all_tasks(plan: TransferPlan) -> list[Task]:
    return [task for tasks in plan.tasks.values() for task in tasks]


def small_system(num_sources: int = 2, tp_size: int = 2, num_replicas: int = 2):
    """Experts by EP, everything else by rows; two replicas of TP=2."""
    tensors = tiny_checkpoint(2, 4, hidden=8, heads=4, kv_heads=2, head_dim=2, inter=4, vocab=8)
    held: list[list[SourceShard]] = [[] for _ in range(num_sources)]
    for meta in tensors:
        if ".experts." in meta.name:
            expert = int(meta.name.split(".experts.")[1].split(".")[0])
            held[expert % num_sources].append(SourceShard(meta.name, shard_rows(meta, [0, meta.shape[0]])[0]))
        else:
            step = -(-meta.shape[0] // num_sources)
            edges = [min(i * step, meta.shape[0]) for i in range(num_sources + 1)]
            for rank, region in enumerate(shard_rows(meta, edges)):
                held[rank].append(SourceShard(meta.name, region))
    sources = [SourceLayout(rank, tensors, tuple(shards)) for rank, shards in enumerate(held)]
    return sources, [[engine_rank(tensors, rank, tp_size) for rank in range(tp_size)] for _ in range(num_replicas)]


# --- properties ---


@PROPERTY
@given(system=systems(), max_task_bytes=st.integers(4, 400))
def test_a_plan_of_any_system_is_right(system, max_task_bytes):
    sources, replicas = system
    plan = build_plan(sources, replicas, max_task_bytes=max_task_bytes)
    replaying_it_leaves_what_the_loader_leaves(plan, sources, replicas)
    assert all(0 < task.num_bytes <= max_task_bytes for task in all_tasks(plan))
    for source in sources:
        it_holds_what_it_sends(source, plan)
    expected_bytes_are_what_the_tasks_write(plan, replicas)
    again = build_plan(list(reversed(sources)), replicas, max_task_bytes=max_task_bytes)
    assert plan.digest == again.digest, "is deterministic"
    for source in sources:
        part = rank_plan_from_wire(msgpack.unpackb(msgpack.packb(plan.to_wire(source.rank))))
        assert part.tasks == tuple(plan.tasks[source.rank])
        assert (part.digest, part.rank, part.max_task_bytes) == (plan.digest, source.rank, max_task_bytes)


def replaying_it_leaves_what_the_loader_leaves(plan, sources, replicas):
    values = checkpoint_values(sources[0].tensors)
    memory, writes = filled_by_tasks(replicas, all_tasks(plan), values)
    for replica, layouts in enumerate(replicas):
        for layout in layouts:
            for name, wanted in filled_by_loads(layout, values).items():
                key = (replica, layout.rank, name)
                np.testing.assert_array_equal(memory[key], wanted, err_msg=str(key))
                # once where the loader copies; never in fills and derived parameters
                np.testing.assert_array_equal(writes[key], (wanted != UNWRITTEN).astype(int), err_msg=str(key))


def it_holds_what_it_sends(source, plan):
    held = {meta.name: np.zeros(meta.shape, dtype=bool) for meta in source.tensors}
    for shard in source.shards:
        held[shard.tensor][tuple(map(slice, shard.region.start, shard.region.stop))] = True
    for task in plan.tasks[source.rank]:
        assert task.source_rank == source.rank
        for piece in task.pieces:
            assert held[piece.tensor][tuple(map(slice, piece.region.start, piece.region.stop))].all(), piece


def expected_bytes_are_what_the_tasks_write(plan, replicas):
    for replica, layouts in enumerate(replicas):
        for layout in layouts:
            written = {param.name: 0 for param in layout.params if param.post_load is not PostLoad.derived}
            for task in all_tasks(plan):
                if (task.replica, task.dest_rank) == (replica, layout.rank):
                    written[task.param] += task.num_bytes
            assert plan.expected[replica, layout.rank] == written
    summary = plan.summary()
    assert sum(summary.sent_bytes.values()) == sum(summary.received_bytes.values()) == summary.num_bytes
    assert sum(summary.group_bytes.values()) == summary.num_bytes


@PROPERTY
@given(
    num_sources=st.integers(2, 6),
    num_tensors=st.integers(1, 12),
    num_replicas=st.integers(1, 3),
    megabytes=st.integers(1, 4),
)
def test_replicated_tensors_are_shared_out_evenly(num_sources, num_tensors, num_replicas, megabytes):
    # rows of 1 KiB
    tensors = tuple(TensorMeta(f"t{i}", (megabytes * 1024, 512), "bfloat16") for i in range(num_tensors))
    whole = Region((0, 0), tensors[0].shape)
    sources = [SourceLayout(r, tensors, tuple(SourceShard(t.name, whole) for t in tensors)) for r in range(num_sources)]
    layout = DestLayout(
        0,
        tuple(Param(t.name, t.shape, "bfloat16") for t in tensors),
        tuple(Load(t.name, whole, (0, 1), t.name, 0, (512, 1)) for t in tensors),
    )
    plan = build_plan(sources, [[layout]] * num_replicas, max_task_bytes=1 << 30)
    sent = plan.summary().sent_bytes.values()
    # Greedy list scheduling: the fullest source got its last task when it was the emptiest.
    largest = max(MIN_SHARED_BYTES, sum(sent) // num_sources // SHARES_PER_SOURCE + 1024)  # cut between rows
    assert max(sent) - min(sent) <= plan.summary().largest_task_bytes <= largest


# --- order and shape of a plan ---


def shared_system(names: list[str], num_sources: int = 2, elements: int = 4):
    """Sources that hold all tensors alike, and one engine rank whose parameters they are."""
    whole = Region((0,), (elements,))
    metas = tuple(TensorMeta(name, (elements,), "float32") for name in names)
    shards = tuple(SourceShard(name, whole) for name in names)
    params = tuple(Param(name, (elements,), "float32") for name in names)
    loads = tuple(Load(name, whole, (0,), name, 0, (1,)) for name in names)
    return [SourceLayout(rank, metas, shards) for rank in range(num_sources)], [[DestLayout(0, params, loads)]]


def senders(plan: TransferPlan) -> dict[str, set[int]]:
    """Parameter -> who sends a part of it."""
    found: dict[str, set[int]] = {}
    for task in all_tasks(plan):
        found.setdefault(task.param, set()).add(task.source_rank)
    return found


def test_small_tensors_of_a_layer_that_the_same_sources_hold_come_from_one_of_them():
    """Up to MIN_SHARED_BYTES together: each is a write, and costs its latency. The next parcel goes to the next one."""
    names = [f"model.layers.{layer}.{name}.weight" for layer in range(4) for name in "abc"]
    sources, replicas = shared_system(names)
    found = senders(build_plan(sources, replicas, max_task_bytes=1 << 20))
    of_layer = [{min(found[name]) for name in names if f".{layer}." in name} for layer in range(4)]
    assert [len(ranks) for ranks in of_layer] == [1] * 4
    assert sorted(min(ranks) for ranks in of_layer) == [0, 0, 1, 1]

    third = MIN_SHARED_BYTES // 4 // 3  # three of them fill a parcel, but for two bytes; a fourth does not fit
    names = [f"model.layers.0.{name}.weight" for name in "abcdef"]
    sources, replicas = shared_system(names, elements=third)
    found = senders(build_plan(sources, replicas, max_task_bytes=1 << 22))
    assert [found[name] for name in names] == [{0}] * 3 + [{1}] * 3
    half = MIN_SHARED_BYTES // 4 // 2  # two of them fill it exactly
    sources, replicas = shared_system(names[:4], elements=half)
    found = senders(build_plan(sources, replicas, max_task_bytes=1 << 22))
    assert [found[name] for name in names[:4]] == [{0}] * 2 + [{1}] * 2


def test_the_largest_is_given_away_first_and_to_who_has_least():
    """Bytes that only one can send count before: rank 0 alone holds `own`, as large as two of the others."""
    sizes = {"own": 4, "x": 1, "model.layers.0.y": 1, "model.layers.1.z": 3}
    metas = tuple(TensorMeta(name, (size << 20,), "float32") for name, size in sizes.items())
    shards = [SourceShard(meta.name, Region((0,), meta.shape)) for meta in metas]
    sources = [SourceLayout(0, metas, tuple(shards)), SourceLayout(1, metas, tuple(shards[1:]))]
    params = tuple(Param(meta.name, meta.shape, "float32") for meta in metas)
    loads = tuple(Load(meta.name, Region((0,), meta.shape), (0,), meta.name, 0, (1,)) for meta in metas)
    plan = build_plan(sources, [[DestLayout(0, params, loads)]], max_task_bytes=1 << 26)
    num_bytes = {rank: sum(task.num_bytes for task in tasks) for rank, tasks in plan.tasks.items()}
    assert num_bytes[0] + num_bytes[1] == 4 * (9 << 20)
    assert abs(num_bytes[0] - num_bytes[1]) <= MIN_SHARED_BYTES, "even"
    assert senders(plan)["own"] == {0}


def test_bytes_that_one_source_must_send_count_once_for_every_replica():
    """Rank 0 sends 2 MiB to each of three replicas, so rank 1 sends the other 2 MiB to all of them."""
    metas = tuple(TensorMeta(name, (1 << 19,), "float32") for name in ("own", "all"))
    own, everybodys = (SourceShard(meta.name, Region((0,), meta.shape)) for meta in metas)
    params = tuple(Param(meta.name, meta.shape, "float32") for meta in metas)
    loads = tuple(Load(meta.name, Region((0,), meta.shape), (0,), meta.name, 0, (1,)) for meta in metas)
    sources = [SourceLayout(0, metas, (own, everybodys)), SourceLayout(1, metas, (everybodys,))]
    plan = build_plan(sources, [[DestLayout(0, params, loads)]] * 3, max_task_bytes=1 << 26)
    assert senders(plan) == {"own": {0}, "all": {1}}


def test_each_of_overlapping_sets_of_holders_gives_to_who_has_least_by_then():
    """The largest first, a layer each, so that each is a choice of its own."""
    sets = [(0, 1, 2), (0, 1), (1, 2), (0, 2), (1, 2, 3), (0, 3)]
    metas = tuple(TensorMeta(f"model.layers.{i}.a.weight", (1000 - i**2,), "float32") for i in range(30))
    held_by = {meta.name: sets[i * i % 7 % 6] for i, meta in enumerate(metas)}
    whole = {meta.name: Region((0,), meta.shape) for meta in metas}
    sources = [
        SourceLayout(rank, metas, tuple(SourceShard(name, whole[name]) for name in whole if rank in held_by[name]))
        for rank in range(4)
    ]
    params = tuple(Param(meta.name, meta.shape, "float32") for meta in metas)
    loads = tuple(Load(name, whole[name], (0,), name, 0, (1,)) for name in whole)
    plan = build_plan(sources, [[DestLayout(0, params, loads)]], max_task_bytes=1 << 20)
    sent, wanted = [0] * 4, {}
    for meta in metas:
        least = min(held_by[meta.name], key=lambda rank: (sent[rank], rank))
        sent[least] += meta.shape[0]
        wanted[meta.name] = {least}
    assert senders(plan) == wanted


def test_dense_goes_before_experts_and_layers_ascend_and_embeddings_are_last_of_what_is_dense():
    plan = build_plan(*small_system(), max_task_bytes=1 << 20)
    for tasks in plan.tasks.values():
        groups = [MESH_GROUPS.index(task.mesh_group) for task in tasks]
        assert groups == sorted(groups)
        for group in MESH_GROUPS:
            layers = [
                int(piece.split(".")[2]) if ".layers." in piece else 1 << 10
                for piece in (task.pieces[0].tensor for task in tasks if task.mesh_group == group)
            ]
            assert layers == sorted(layers)


def test_like_chunks_of_all_destinations_follow_each_other():
    plan = build_plan(*small_system(num_sources=2, tp_size=2, num_replicas=1), max_task_bytes=1 << 20)
    num_turns = 0
    for tasks in plan.tasks.values():
        experts = [task for task in tasks if task.mesh_group == "experts"]
        for one, other in itertools.pairwise(experts):
            if (one.param, one.dest_offset_bytes) == (other.param, other.dest_offset_bytes):
                assert one.dest_rank != other.dest_rank
                num_turns += 1
        by_rank = Counter(task.dest_rank for task in experts[: len(experts) // 2])
        assert max(by_rank.values()) - min(by_rank.values()) <= 1, "half of a schedule is half of every rank's"
    assert num_turns

    metas = tuple(TensorMeta(name, (4,), "float32") for name in ("a", "b", "c"))
    source = SourceLayout(0, metas, tuple(SourceShard(meta.name, Region((0,), (4,))) for meta in metas))
    loads = tuple(Load(meta.name, Region((0,), (4,)), (0,), meta.name, 0, (1,)) for meta in metas)
    params = tuple(Param(meta.name, (4,), "float32") for meta in metas)
    plan = build_plan([source], [[DestLayout(rank, params, loads) for rank in range(2)]], max_task_bytes=1 << 20)
    order = [(task.param, task.dest_rank) for task in plan.tasks[0]]
    assert order == [(name, rank) for name in "abc" for rank in range(2)], "also where every offset is 0"


def test_sources_begin_with_different_destinations():
    """Of a matrix by columns, every source has rows for both destinations."""
    plan = build_plan(*small_system(num_sources=4, tp_size=2, num_replicas=1), max_task_bytes=1 << 20)
    by_columns = [[task for task in plan.tasks[rank] if task.param.endswith(".0.self_attn.o_proj.weight")]
                  for rank in range(4)]  # fmt: skip
    assert [[task.dest_rank for task in tasks] for tasks in by_columns] == [[0, 1], [1, 0]] * 2


def own_tensors(sizes: list[int], num_dests: int, num_replicas: int = 1):
    """Source r alone holds tensor r, of so many elements; every engine rank needs them all."""
    metas = tuple(TensorMeta(f"own{rank}", (size,), "float32") for rank, size in enumerate(sizes))
    shards = [SourceShard(meta.name, Region((0,), meta.shape)) for meta in metas]
    params = tuple(Param(meta.name, meta.shape, "float32") for meta in metas)
    loads = tuple(Load(meta.name, Region((0,), meta.shape), (0,), meta.name, 0, (1,)) for meta in metas)
    sources = [SourceLayout(rank, metas, (shard,)) for rank, shard in enumerate(shards)]
    return sources, [[DestLayout(rank, params, loads) for rank in range(num_dests)]] * num_replicas


def test_a_source_goes_through_the_destinations_from_its_own_on():
    """Of three: with two of them there is no telling forwards from backwards."""
    plan = build_plan(*own_tensors([4, 4, 4], num_dests=3), max_task_bytes=1 << 20)
    order = {rank: [task.dest_rank for task in tasks] for rank, tasks in plan.tasks.items()}
    assert order == {0: [0, 1, 2], 1: [1, 2, 0], 2: [2, 0, 1]}


def test_sources_begin_with_different_replicas_once_each_destination_has_one():
    plan = build_plan(*small_system(num_sources=4, tp_size=2, num_replicas=2), max_task_bytes=1 << 20)
    assert [next(iter(plan.tasks[rank])).replica for rank in range(4)] == [0, 0, 1, 1]


def test_a_source_goes_through_the_replicas_from_its_own_first_one_also_with_what_others_hold():
    """Ranks 0 and 2 have so much of their own that rank 1 sends what all hold, to one replica after the other."""
    metas = tuple(TensorMeta(name, (size,), "float32") for name, size in (("own0", 64), ("all", 4), ("own2", 64)))
    own0, everybodys, own2 = (SourceShard(meta.name, Region((0,), meta.shape)) for meta in metas)
    held = [(own0, everybodys), (everybodys,), (everybodys, own2)]
    params = tuple(Param(meta.name, meta.shape, "float32") for meta in metas)
    loads = tuple(Load(meta.name, Region((0,), meta.shape), (0,), meta.name, 0, (1,)) for meta in metas)
    sources = [SourceLayout(rank, metas, shards) for rank, shards in enumerate(held)]
    plan = build_plan(sources, [[DestLayout(0, params, loads)]] * 3, max_task_bytes=1 << 20)
    order = {rank: [task.replica for task in tasks] for rank, tasks in plan.tasks.items()}
    assert order == {0: [0, 1, 2], 1: [1, 2, 0], 2: [2, 0, 1]}


def test_equal_tasks_of_several_replicas_are_neighbours_and_share_their_pieces():
    plan = build_plan(*small_system(num_replicas=2), max_task_bytes=1 << 20)
    for tasks in plan.tasks.values():
        for first, second in zip(*[iter(tasks)] * 2, strict=True):
            assert first.pieces is second.pieces
            assert dataclasses.replace(first, replica=0) == dataclasses.replace(second, replica=0)
    part = rank_plan_from_wire(plan.to_wire(0))
    assert part.tasks[0].pieces is part.tasks[1].pieces


def test_a_block_of_local_experts_is_one_write():
    tensors = tiny_checkpoint(1, 4, hidden=8, heads=4, kv_heads=2, head_dim=2, inter=4, vocab=8)
    source = SourceLayout(0, tensors, tuple(SourceShard(m.name, shard_rows(m, [0, m.shape[0]])[0]) for m in tensors))
    plan = build_plan([source], [[engine_rank(tensors, 0, 1)]], max_task_bytes=1 << 20)
    (w13,) = [task for task in plan.tasks[0] if task.param.endswith(".w13")]
    # 4 experts x (gate, up) of 4 x 8 bfloat16
    assert w13.num_bytes == 4 * 2 * 4 * 8 * 2
    assert [piece.tensor.split(".")[5:7] for piece in w13.pieces] == [
        [str(expert), half] for expert in range(4) for half in ("gate_proj", "up_proj")
    ]


def test_a_row_longer_than_the_bound_is_cut_inside():
    meta = TensorMeta("t", (3, 10), "bfloat16")
    whole = Region((0, 0), (3, 10))
    layout = DestLayout(0, (Param("p", (3, 10), "bfloat16"),), (Load("t", whole, (0, 1), "p", 0, (10, 1)),))
    plan = build_plan([SourceLayout(0, (meta,), (SourceShard("t", whole),))], [[layout]], max_task_bytes=12)
    # rows of 20 bytes, bound 12: every row is 6 + 4 elements
    assert [task.num_bytes for task in plan.tasks[0]] == [12, 8] * 3


def test_a_scalar_and_a_dim_of_size_one_cross():
    tensors = (TensorMeta("scale", (), "float32"), TensorMeta("thin", (1, 4, 1), "float32"))
    source = SourceLayout(
        0, tensors, (SourceShard("scale", Region((), ())), SourceShard("thin", Region((0, 0, 0), (1, 4, 1))))
    )
    layout = DestLayout(
        0,
        (Param("scale", (), "float32"), Param("thin", (4,), "float32")),
        (
            Load("scale", Region((), ()), (), "scale", 0, ()),
            Load("thin", Region((0, 0, 0), (1, 4, 1)), (0, 1, 2), "thin", 0, (4, 1, 1)),
        ),
    )
    plan = build_plan([source], [[layout]], max_task_bytes=1 << 20)
    assert sorted(task.num_bytes for task in plan.tasks[0]) == [4, 16]
    regions = {piece.tensor: piece.region for task in plan.tasks[0] for piece in task.pieces}
    assert regions == {shard.tensor: shard.region for shard in source.shards}
    assert table_of(0, list(plan.tasks[0])).to_wire() == plan.tasks[0].to_wire(), "the same columns from objects"


def test_a_parameter_of_dense_and_of_expert_tensors_is_sent_in_both_groups():
    """Neighbours in memory, of the same source."""
    names, whole = ("layers.0.mlp.experts.0.w", "layers.0.mlp.shared.w"), Region((0, 0), (2, 4))
    metas = tuple(TensorMeta(name, (2, 4), "float32") for name in names)
    source = SourceLayout(0, metas, tuple(SourceShard(name, whole) for name in names))
    loads = tuple(Load(name, whole, (0, 1), "p", 8 * number, (4, 1)) for number, name in enumerate(names))
    plan = build_plan([source], [[DestLayout(0, (Param("p", (4, 4), "float32"),), loads)]], max_task_bytes=1 << 20)
    assert [(task.mesh_group, task.dest_offset_bytes) for task in plan.tasks[0]] == [("dense", 32), ("experts", 0)]


def test_ranks_may_have_other_parameters_in_another_order():
    (source,), ((layout,),) = one_matrix()
    (param,), (load,) = layout.params, layout.loads
    half = dataclasses.replace(load, param="q", region=Region((0, 0), (2, 6)))
    more = DestLayout(1, (dataclasses.replace(param, name="q", shape=(2, 6)), param), (half, load))
    plan = build_plan([source], [[layout, more]], max_task_bytes=1 << 20)
    sizes = {(task.dest_rank, task.param): task.num_bytes for task in plan.tasks[0]}
    assert sizes == {(0, "p"): 96, (1, "p"): 96, (1, "q"): 48}


def test_a_known_system_keeps_its_digests():
    """A planner that is made faster must make the same plan; one that should make another changes these numbers."""
    plan = build_plan(*small_system(), max_task_bytes=100)
    assert plan.layouts_digest == "2fbd59725eaf487d1310433225e0882f230148b60708d75d77b5d80dbcd3078f"
    assert plan.digest == "28498491e427820c6756422c27db12a511a9097c721c6ffdd014a3c24c3519a4"


@pytest.mark.parametrize("field", ["bound", "dtype", "fill", "route"])
def test_the_digest_covers_everything(field):
    sources, replicas = small_system()
    plan = build_plan(sources, replicas, max_task_bytes=1 << 20)
    bound = 1 << 20
    if field == "bound":
        bound += 1
    elif field == "dtype":
        first = replicas[0][0]
        params = tuple(dataclasses.replace(p, dtype="float16") for p in first.params)
        replicas[0][0] = dataclasses.replace(first, params=params)
    elif field == "fill":
        first = replicas[0][0]
        replicas[0][0] = dataclasses.replace(first, fills=tuple(dataclasses.replace(f, value=1.0) for f in first.fills))
    else:
        sources = [dataclasses.replace(s, rank=1 - s.rank) for s in sources]
    assert build_plan(sources, replicas, max_task_bytes=bound).digest != plan.digest


# --- what is refused; what a proof refuses: test_proof.py ---


def test_a_tampered_wire_part_is_refused():
    sources, replicas = small_system()
    plan = build_plan(sources, replicas, max_task_bytes=1 << 20)
    for path, pattern in (
        (("tasks", "num_rows"), "differ"),
        (("max_task_bytes",), "add up"),
        (("format_version",), "format"),
    ):
        wire = msgpack.unpackb(msgpack.packb(plan.to_wire(0)))
        target = wire
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] += 1
        with pytest.raises(PlanError, match=pattern):
            rank_plan_from_wire(wire)


def test_a_missing_shard_names_the_tensor_the_rows_and_the_parameter():
    sources, replicas = small_system()
    name = "model.layers.1.self_attn.k_proj.weight"
    sources[1] = dataclasses.replace(sources[1], shards=tuple(s for s in sources[1].shards if s.tensor != name))
    with pytest.raises(
        PlanError, match=r"layers\.1\.qkv needs model\.layers\.1\.self_attn\.k_proj\.weight start \[2, 0\]"
    ):
        build_plan(sources, replicas, max_task_bytes=1 << 20)
    (source,), ((layout,),) = one_matrix()
    source = dataclasses.replace(source, shards=(SourceShard("t", Region((0, 0), (3, 6))),))
    derived = Param("d", (4, 6), "float32", PostLoad.derived)
    more = {
        "params": (derived, *layout.params),
        "loads": (dataclasses.replace(layout.loads[0], param="d"), *layout.loads),
    }
    with pytest.raises(PlanError, match=r"p needs t start \[3, 0\] shape \[1, 6\]"):  # what is derived needs nothing
        build_plan([source], [[dataclasses.replace(layout, **more)]], max_task_bytes=1 << 20)


def one_matrix(**changes):
    """A (4, 6) matrix, one source, one engine rank; `changes` break the load."""
    load = dataclasses.replace(Load("t", Region((0, 0), (4, 6)), (0, 1), "p", 0, (6, 1)), **changes)
    source = SourceLayout(0, (TensorMeta("t", (4, 6), "float32"),), (SourceShard("t", Region((0, 0), (4, 6))),))
    return [source], [[DestLayout(0, (Param("p", (4, 6), "float32"),), (load,))]]


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"region": Region((1, 0), (4, 6))}, r"does not lie inside t of shape \[4, 6\]"),
        ({"region": Region((0,), (4,))}, "does not lie inside t"),
        ({"tensor": "x"}, "no such tensor"),
        ({"param": "x"}, "no such parameter"),
        ({"axes": (0, 0)}, "do not order"),
        ({"offset": 1}, "leaves the parameter"),
        ({"region": Region((0, 0), (3, 6))}, "has 24 elements, its loads bring 18"),
        ({"stride": (0, 1)}, r"nobody writes bytes|written twice"),
        ({"stride": (1, 3)}, r"written twice|nobody writes|no load"),
    ],
)
def test_a_load_that_does_not_fit_is_refused_and_named(changes, pattern):
    with pytest.raises(PlanError, match=pattern) as caught:
        build_plan(*one_matrix(**changes), max_task_bytes=1 << 20)
    assert "replica 0 rank 0" in str(caught.value)


def test_two_loads_of_the_same_bytes_are_refused():
    sources, ((layout,),) = one_matrix()
    twice = dataclasses.replace(layout, loads=(*layout.loads, *layout.loads))
    with pytest.raises(PlanError, match="has 24 elements, its loads bring 48"):
        build_plan(sources, [[twice]], max_task_bytes=1 << 20)


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (lambda s: [], "at least one source rank"),
        (lambda s: [s[0], s[0]], "claim rank 0"),
        (lambda s: [s[0], dataclasses.replace(s[1], tensors=s[1].tensors[:-1])], "disagree on the checkpoint"),
        (
            lambda s: [s[0], dataclasses.replace(s[1], tensors=(TensorMeta("x", (1,), "int32"), *s[1].tensors[1:]))],
            "disagree on the checkpoint: TensorMeta",
        ),
        (lambda s: [s[0], dataclasses.replace(s[1], shards=(SourceShard("x", Region((0,), (1,))),))], "does not have"),
        (
            lambda s: [s[0], dataclasses.replace(s[1], shards=(SourceShard("model.norm.weight", Region((4,), (8,))),))],
            "does not lie inside model.norm.weight",
        ),
    ],
)
def test_source_layouts_that_do_not_belong_together_are_refused(change, pattern):
    sources, replicas = small_system()
    with pytest.raises(PlanError, match=pattern):
        build_plan(change(sources), replicas, max_task_bytes=1 << 20)


def test_an_empty_parameter_an_unknown_dtype_and_a_tiny_bound_are_refused():
    sources, ((layout,),) = one_matrix()
    for params, bound, pattern in (
        ((Param("p", (0,), "float32"),), 64, "is empty"),
        ((Param("p", (4, 6), "complex64"),), 64, "known are"),
        (layout.params, 3, "more than max_task_bytes 3"),
        (layout.params, 0, "must be >= 1"),
    ):
        with pytest.raises(PlanError, match=pattern):
            build_plan(sources, [[dataclasses.replace(layout, params=params)]], max_task_bytes=bound)


def test_replicas_that_claim_a_rank_twice_or_have_none_are_refused():
    sources, ((layout,),) = one_matrix()
    for replicas, pattern in (
        ([[layout, layout]], "claim rank 0"),
        ([[]], "has no engine rank"),
        ([], "no replica to plan for"),
    ):
        with pytest.raises(PlanError, match=pattern):
            build_plan(sources, replicas, max_task_bytes=64)


def test_a_load_that_would_make_too_many_tiny_writes_is_refused():
    shape = (MAX_RUNS // 2 + 1, 2)
    meta, whole = TensorMeta("t", shape, "float32"), Region((0, 0), shape)
    source = SourceLayout(0, (meta,), (SourceShard("t", whole),))
    loads = (Load("t", whole, (0, 1), "p", 0, (4, 1)), Load("t", whole, (0, 1), "p", 2, (4, 1)))
    layout = DestLayout(0, (Param("p", (shape[0], 4), "float32"),), loads)
    build_plan([source], [[layout]], max_task_bytes=1 << 20)  # one run a row: within the limit
    columns = (
        SourceLayout(0, (meta,), (SourceShard("t", Region((0, 0), (shape[0], 1))),)),
        SourceLayout(1, (meta,), (SourceShard("t", Region((0, 1), (shape[0], 1))),)),
    )
    with pytest.raises(PlanError, match=f"more than {MAX_RUNS} runs"):  # one run an element
        build_plan(columns, [[layout]], max_task_bytes=1 << 20)


def test_rows_helper_is_row_major():
    for shape in itertools.product((1, 2, 3), repeat=3):
        assert rows(shape) == tuple(s // 8 for s in np.empty(shape, dtype=np.int64).strides)
