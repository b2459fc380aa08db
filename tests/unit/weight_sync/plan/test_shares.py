"""Who of several holders sends what, and in which order."""

import dataclasses
import itertools
from collections import Counter

from cases.plans import PROPERTY, all_tasks, copied, small_system
from hypothesis import given, strategies as st

from slipstream.weight_sync.layout import DestLayout, Param, PostLoad
from slipstream.weight_sync.plan.plan import SHARES_PER_SOURCE, build_plan
from slipstream.weight_sync.plan.schedule import MIN_SHARED_BYTES
from slipstream.weight_sync.plan.transfer_plan import MESH_GROUPS, TransferPlan, rank_tasks_from_wire


@PROPERTY
@given(
    num_sources=st.integers(2, 6),
    num_tensors=st.integers(1, 12),
    num_replicas=st.integers(1, 3),
    megabytes=st.integers(1, 4),
)
def test_replicated_tensors_are_shared_out_evenly(num_sources, num_tensors, num_replicas, megabytes):
    shapes = {f"t{i}": (megabytes * 1024, 512) for i in range(num_tensors)}  # rows of 1 KiB
    sources, layout = copied(shapes, [shapes] * num_sources, "bfloat16")
    plan = build_plan(sources, [[layout]] * num_replicas, max_task_bytes=1 << 30)
    sent = plan.summary().sent_bytes.values()
    # Greedy list scheduling: the fullest source got its last task when it was the emptiest.
    largest = max(MIN_SHARED_BYTES, sum(sent) // num_sources // SHARES_PER_SOURCE + 1024)  # cut between rows
    assert max(sent) - min(sent) <= plan.summary().largest_task_bytes <= largest


def shared_system(names: list[str], elements: int = 4):
    """Two sources that hold all tensors alike, and one engine rank whose parameters they are."""
    sources, layout = copied(dict.fromkeys(names, (elements,)), [names] * 2)
    return sources, [[layout]]


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

    names = [f"model.layers.0.mlp.{name}.weight" for name in ("a", "experts.0.b")]
    sources, replicas = shared_system(names)
    assert senders(build_plan(sources, replicas, max_task_bytes=1 << 20)) == {names[0]: {0}, names[1]: {1}}

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
    sources, layout = copied({name: (size << 20,) for name, size in sizes.items()}, [sizes, sizes.keys() - {"own"}])
    plan = build_plan(sources, [[layout]], max_task_bytes=1 << 26)
    num_bytes = {rank: sum(task.num_bytes for task in tasks) for rank, tasks in plan.tasks.items()}
    assert num_bytes[0] + num_bytes[1] == 4 * (9 << 20)
    assert abs(num_bytes[0] - num_bytes[1]) <= MIN_SHARED_BYTES, "even"
    assert [task.source_rank for task in all_tasks(plan) if task.param == "own"] == [0], "uncut: nobody shares it"


def test_bytes_that_one_source_must_send_count_once_for_every_replica():
    """Rank 0 sends 2 MiB to each of three replicas, so rank 1 sends the other 2 MiB to all of them."""
    sources, layout = copied(dict.fromkeys(("own", "all"), (1 << 19,)), [("own", "all"), ("all",)])
    plan = build_plan(sources, [[layout]] * 3, max_task_bytes=1 << 26)
    assert senders(plan) == {"own": {0}, "all": {1}}


def test_ranks_need_not_be_numbered_from_0_on():
    sources, replicas = own_tensors([4, 4], num_dests=1)
    sources = [dataclasses.replace(source, rank=rank) for source, rank in zip(sources, (3, 7), strict=True)]
    assert senders(build_plan(sources, replicas, max_task_bytes=1 << 20)) == {"own0": {3}, "own1": {7}}


def test_what_two_sources_send_to_a_replica_each_stays_with_both():
    """One tensor: it is the last one of the first source, and the first one of the second."""
    sources, (layouts,) = shared_system(["a"])
    plan = build_plan(sources, [layouts] * 2, max_task_bytes=1 << 20)
    assert {rank: [task.replica for task in tasks] for rank, tasks in plan.tasks.items()} == {0: [0], 1: [1]}


def test_each_of_overlapping_sets_of_holders_gives_to_who_has_least_by_then():
    """The largest first, whichever layer it is of; a layer each, so that each is a choice of its own."""
    sets = [(0, 1, 2), (0, 1), (1, 2), (0, 2), (1, 2, 3), (0, 3)]
    sizes = {f"model.layers.{i}.a.weight": 1000 - (7 * i % 30) ** 2 for i in range(30)}
    held_by = {name: sets[i * i % 7 % 6] for i, name in enumerate(sizes)}
    held = [[name for name in sizes if rank in held_by[name]] for rank in range(4)]
    sources, layout = copied({name: (size,) for name, size in sizes.items()}, held)
    plan = build_plan(sources, [[layout]], max_task_bytes=1 << 20)
    sent, wanted = [0] * 4, {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        least = min(held_by[name], key=lambda rank: (sent[rank], rank))
        sent[least] += sizes[name]
        wanted[name] = {least}
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

    sources, layout = copied(dict.fromkeys("abc", (4,)))
    plan = build_plan(sources, [[dataclasses.replace(layout, rank=rank) for rank in range(2)]], max_task_bytes=1 << 20)
    order = [(task.param, task.dest_rank) for task in plan.tasks[0]]
    assert order == [(name, rank) for name in "abc" for rank in range(2)], "also where every offset is 0"


def test_sources_begin_with_different_destinations():
    """Every source of a matrix by columns has rows for both destinations."""
    plan = build_plan(*small_system(num_sources=4, tp_size=2, num_replicas=1), max_task_bytes=1 << 20)
    by_columns = [[task for task in plan.tasks[rank] if task.param.endswith(".0.self_attn.o_proj.weight")]
                  for rank in range(4)]  # fmt: skip
    assert [[task.dest_rank for task in tasks] for tasks in by_columns] == [[0, 1], [1, 0]] * 2


def own_tensors(sizes: list[int], num_dests: int):
    """Source r alone holds tensor r, of so many elements; every engine rank needs them all."""
    shapes = {f"own{rank}": (size,) for rank, size in enumerate(sizes)}
    sources, layout = copied(shapes, [[name] for name in shapes])
    return sources, [[dataclasses.replace(layout, rank=rank) for rank in range(num_dests)]]


def test_a_source_goes_through_the_destinations_from_its_own_on():
    """Three sources, because with two there is no telling forwards from backwards."""
    plan = build_plan(*own_tensors([4, 4, 4], num_dests=3), max_task_bytes=1 << 20)
    order = {rank: [task.dest_rank for task in tasks] for rank, tasks in plan.tasks.items()}
    assert order == {0: [0, 1, 2], 1: [1, 2, 0], 2: [2, 0, 1]}


def test_sources_begin_with_different_replicas_once_each_destination_has_one():
    plan = build_plan(*small_system(num_sources=4, tp_size=2, num_replicas=2), max_task_bytes=1 << 20)
    assert [next(iter(plan.tasks[rank])).replica for rank in range(4)] == [0, 0, 1, 1]


def test_a_source_goes_through_the_replicas_from_its_own_first_one_also_with_what_others_hold():
    """Ranks 0 and 2 have so much of their own that rank 1 sends what all hold, to one replica after the other."""
    held = [("own0", "all"), ("all",), ("all", "own2")]
    sources, layout = copied({"own0": (64,), "all": (4,), "own2": (64,)}, held)
    plan = build_plan(sources, [[layout]] * 3, max_task_bytes=1 << 20)
    order = {rank: [task.replica for task in tasks] for rank, tasks in plan.tasks.items()}
    assert order == {0: [0, 1, 2], 1: [1, 2, 0], 2: [2, 0, 1]}
    assert [table.num_rows for table in plan.tasks.values()] == [1, 1, 1], "packed once for all of them"
    turned = dataclasses.replace(layout, params=layout.params[::-1])
    plan = build_plan(sources, [[layout], [layout], [turned]], max_task_bytes=1 << 20)
    assert [table.num_rows for table in plan.tasks.values()] == [2, 2, 2], "also where another one's turn is between"


def test_equal_tasks_of_several_replicas_are_neighbours_and_share_their_pieces():
    plan = build_plan(*small_system(num_replicas=2), max_task_bytes=1 << 20)
    for tasks in plan.tasks.values():
        for first, second in zip(*[iter(tasks)] * 2, strict=True):
            assert first.pieces is second.pieces
            assert dataclasses.replace(first, replica=0) == dataclasses.replace(second, replica=0)
    tasks = rank_tasks_from_wire(plan.to_wire(0))
    assert tasks[0].pieces is tasks[1].pieces


def test_a_rank_with_nothing_to_send_has_an_empty_part():
    sources, replicas = small_system()
    plan = build_plan([*sources, dataclasses.replace(sources[0], rank=2, shards=())], replicas, max_task_bytes=1 << 20)
    assert rank_tasks_from_wire(plan.to_wire(2)) == ()


def test_ranks_with_nothing_to_send_or_to_receive_count_in_the_balance():
    sources, ((layout,),) = own_tensors([12, 4], num_dests=1)
    idle_source = dataclasses.replace(sources[0], rank=2, shards=())
    idle_engine_rank = DestLayout(1, (Param("d", (4,), "float32", PostLoad.derived),), ())
    summary = build_plan([*sources, idle_source], [[layout, idle_engine_rank]], max_task_bytes=1 << 20).summary()
    assert summary.sent_bytes == {0: 48, 1: 16, 2: 0}
    assert summary.send_balance == 2.25  # 48 over a mean of 64 / 3
    assert summary.received_bytes == {(0, 0): 64, (0, 1): 0}
    assert summary.receive_balance == 2.0  # 64 over a mean of 64 / 2
