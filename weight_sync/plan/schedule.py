"""Who sends which chunk, and in which order: the choices of a plan, over columns.

Does not own: how chunks come about (chunks.py), or the proof (proof.py).

    needs      chunks of every group of equal engine ranks                (plan.py cuts them)
    choose     the only holder, or the one with the least bytes so far; largest first, small ones in parcels
    schedule   per source: dense before experts, by layer; like chunks of all destinations after each other, rotated

Invariant: every need has exactly one source for each replica. Deterministic: ties go to the lowest rank.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.weight_sync.layout import DestLayout
from slipstream.weight_sync.plan.chunks import Chunks
from slipstream.weight_sync.plan.columns import Flags, Ints, as_list, changes, spread, starts_of
from slipstream.weight_sync.plan.holders import Holders
from slipstream.weight_sync.plan.transfer_plan import TaskTable

MIN_SHARED_BYTES = 1 << 20
"""... but never finer than this: below it a write costs its latency, not its bytes. Smaller chunks of one engine rank
and layer that the same sources hold are given to one of them together, up to so many bytes."""


@dataclass(frozen=True, slots=True)
class Alike:
    """Engine ranks that need the same bytes: equal ranks of several replicas."""

    dest_rank: int
    layout: DestLayout
    digest: str
    replicas: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Needs:
    """All chunks that engine ranks need, in columns."""

    alike: Sequence[Alike]
    params: tuple[str, ...]
    member: Ints
    """Position in `alike`."""
    chunks: Chunks
    """Their `param` numbers `params`."""
    offset_bytes: Ints
    num_bytes: Ints
    """Bytes that one replica gets."""
    dtype: Ints


@dataclass(frozen=True, slots=True)
class Choice:
    """Who sends what: a row per need and source, and the replicas (by number of their set) that it sends to."""

    need: Ints
    source: Ints
    """Position among the ranks."""
    replicas: Ints
    replica_sets: list[tuple[int, ...]]


def choose_sources(needs: Needs, holders: Holders, ranks: list[int]) -> Choice:
    """Give every need to one holder: the only one, or the one with the least bytes so far (lowest rank on a tie).

    Bytes that leave no choice are counted before any choice is made; choices are made for the largest needs first.
    """
    position = {rank: index for index, rank in enumerate(ranks)}
    only = np.array([position[members[0]] if len(members) == 1 else -1 for members in holders.sets], np.int64)
    source = only[needs.chunks.holders]
    is_open = source < 0
    sizes = np.array([len(one.replicas) for one in needs.alike], np.int64)[needs.member]
    total = np.zeros(len(ranks), np.int64)
    np.add.at(total, source[~is_open], (needs.num_bytes * sizes)[~is_open])
    sets = {members: number for number, members in enumerate(dict.fromkeys(one.replicas for one in needs.alike))}
    whole = np.array([sets[one.replicas] for one in needs.alike], np.int64)
    rows = [(np.flatnonzero(~is_open), source[~is_open], whole[needs.member[~is_open]])]
    chosen = _share_out(needs, np.flatnonzero(is_open), holders, position, as_list(total))
    if chosen:
        members = np.array([sets.setdefault((replica,), len(sets)) for _, _, replica in chosen], np.int64)
        rows.append((np.array([need for need, _, _ in chosen]), np.array([who for _, who, _ in chosen]), members))
    need, sender, replicas = (np.concatenate(column) for column in zip(*rows))
    return Choice(need, sender, replicas, list(sets))


def _share_out(
    needs: Needs, open_needs: Ints, holders: Holders, position: Mapping[int, int], total: list[int]
) -> list[tuple[int, int, int]]:
    """(need, position of the source, replica) of every need with several holders."""
    chosen: list[tuple[int, int, int]] = []
    parcels = _parcels(needs, open_needs)
    jobs = [(size, parcel, replica) for size, parcel, members in parcels for replica in needs.alike[members].replicas]
    jobs.sort(key=lambda job: -job[0])  # stable, so the order of needs breaks ties
    heaps: dict[int, list[tuple[int, int]]] = {}
    for size, parcel, replica in jobs:
        number = int(needs.chunks.holders[parcel[0]])
        if number not in heaps:  # positions ascend, so it is a heap
            heaps[number] = [(0, position[rank]) for rank in holders.sets[number]]
        heap = heaps[number]
        # Totals only grow: stale entries are pushed down until the top is current.
        while heap[0][0] != total[heap[0][1]]:
            heapq.heapreplace(heap, (total[heap[0][1]], heap[0][1]))
        source = heap[0][1]
        chosen.extend((need, source, replica) for need in parcel)
        total[source] += size
    return chosen


def _parcels(needs: Needs, open_needs: Ints) -> list[tuple[int, list[int], int]]:
    """(bytes, needs, position among the alike): what goes to one source as one. Small needs of a layer go together."""
    parcels: list[tuple[int, list[int], int]] = []
    open_parcel: dict[tuple[int, int, int, int], int] = {}
    chunks = needs.chunks
    for need in as_list(open_needs):
        size, member = int(needs.num_bytes[need]), int(needs.member[need])
        key = (member, int(chunks.holders[need]), int(chunks.layer[need]), int(chunks.group[need]))
        index = open_parcel.get(key)
        if index is not None and parcels[index][0] + size <= MIN_SHARED_BYTES:
            parcels[index] = (parcels[index][0] + size, [*parcels[index][1], need], member)
            continue
        open_parcel[key] = len(parcels)
        parcels.append((size, [need], member))
    return parcels


def schedule_of(needs: Needs, choice: Choice, ranks: list[int], num_replicas: int) -> dict[int, TaskTable]:
    """Order every source's rows: dense before experts, then by layer, then what belongs to none.

    Packing many small tensors takes the host longer than writing them takes a link, and the first loads are packed
    while engines pause: embeddings, few and large, come after the layers' dense tensors.

    Inside a layer like chunks of all destinations follow each other, and source i begins with destination i: every
    load has bytes for all of them, and no engine rank is hit by all sources at once. Equal chunks of several replicas
    follow each other, and source i begins with replica i / destinations. Rows of one source and need stay neighbours:
    their key is the same, and needs sort before turns.
    """
    dest_rank = np.array([one.dest_rank for one in needs.alike], np.int64)[needs.member]
    num_dests = 1 + int(dest_rank.max(initial=0))
    chunks, source, need = needs.chunks, choice.source, choice.need
    last = 1 + int(chunks.layer.max(initial=0))
    layer = np.where(chunks.layer < 0, last, chunks.layer)
    place, num_places = _places(needs)
    first_replica = np.arange(len(ranks)) // num_dests % num_replicas
    lowest = np.array([members[0] for members in choice.replica_sets], np.int64)[choice.replicas]
    key = (source * 2 + chunks.group[need]) * (last + 1) + layer[need]
    key = key * num_places + place[need]
    key = key * num_dests + (dest_rank[need] - source) % num_dests
    turn = (lowest - first_replica[source]) % num_replicas
    order = np.lexsort((turn, need, key))
    source, need = source[order], need[order]
    replica_sets, replicas, heads = _rotated(choice.replica_sets, choice.replicas[order], source, need, first_replica)
    source, need = source[heads], need[heads]

    row, within = spread(chunks.num_pieces[need])
    pieces = chunks.pieces.take(starts_of(chunks.num_pieces)[need][row] + within)
    edges = np.searchsorted(source, np.arange(len(ranks) + 1))
    piece_edges = np.searchsorted(row, edges)
    schedule: dict[int, TaskTable] = {}
    for index, rank in enumerate(ranks):
        window = slice(edges[index], edges[index + 1])
        own = need[window]
        schedule[rank] = TaskTable(
            rank,
            needs.params,
            replica_sets,
            replicas[window],
            chunks.group[own],
            dest_rank[own],
            chunks.param[own],
            needs.offset_bytes[own],
            needs.num_bytes[own],
            needs.dtype[own],
            chunks.num_pieces[own],
            pieces.take(slice(piece_edges[index], piece_edges[index + 1])),
        )
    return schedule


def _places(needs: Needs) -> tuple[Ints, int]:
    """Where each need stands among all, by parameter and offset; alike for ranks that are cut alike. And how many."""
    found, place = np.unique(
        needs.chunks.param * (1 + int(needs.offset_bytes.max(initial=0))) + needs.offset_bytes, return_inverse=True
    )
    return place, max(1, len(found))


def _rotated(
    sets: list[tuple[int, ...]], replicas: Ints, source: Ints, need: Ints, first_replica: Ints
) -> tuple[list[tuple[int, ...]], Ints, Flags]:
    """Join neighbouring rows of one source and need, and let each source begin with its own first replica."""
    heads = changes(source, need)
    group = np.cumsum(heads) - 1
    numbers: dict[tuple[int, ...], int] = {}
    found = np.empty(int(heads.sum()), np.int64)
    alone = np.bincount(group, minlength=len(found)) == 1
    first = first_replica[source]
    pairs = replicas * (int(first.max(initial=0)) + 1) + first
    is_alone = alone[group]
    distinct, which = np.unique(pairs[is_alone], return_inverse=True)
    own: list[int] = []
    for pair in as_list(distinct):
        number, begin = divmod(int(pair), int(first.max(initial=0)) + 1)
        members: tuple[int, ...] = sets[number]
        turned: tuple[int, ...] = (*(one for one in members if one >= begin), *(one for one in members if one < begin))
        own.append(numbers.setdefault(turned, len(numbers)))
    found[group[is_alone]] = np.array(own, np.int64)[which] if own else which
    joined: dict[int, tuple[int, ...]] = {}
    for row in as_list(np.flatnonzero(~is_alone)):
        joined[int(group[row])] = (*joined.get(int(group[row]), ()), *sets[int(replicas[row])])
    for at, both in joined.items():
        found[at] = numbers.setdefault(both, len(numbers))
    return list(numbers), found, heads
