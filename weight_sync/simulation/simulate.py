"""A plan against a link model: when does which rank do what, and how long does a publish take. Integers and floats.

Owns: the timing rules of a publish. Does not own: the figures (links.py), the plan (plan.py), the real pipeline
(pipeline.py), whose rules are repeated here without its memory, threads and torch; a test holds the two together.

    begin (engines pause)     -> per trainer rank, load by load      -> barrier, messages -> verify -> commit
      source begins | h2d     |0  |1  |   |2  |   |3
                      prepare     |0 |1 |     |2|    |3     two slots: load i needs the slot that load i-2 left
                    write to A |0   |1     |2   |3          one write at a time to a destination, of its part of each
                    write to B |0 |1   |2   |3              load, whatever the writes to others do

Rules. Nothing is written before all replicas stand still; what two slots hold is packed meanwhile. A load is
consecutive tasks that fit one slot (cut as pipeline.py cuts). Each stage of a rank, and each destination, takes its
loads in schedule order. That a rank writes to no more than MAX_LINK_THREADS destinations at once costs it latency
here, not its turn at a port. A load's bytes pass the sender's port and each receiver's port; a port serves its loads
one after the other, as fast as it can, and a load is written when all its ports have served it: a first-in-first-out
share of a port, not a max-min fair one. Fair shares must be computed anew at every event, and they have anomalies: a
faster link lets a load arrive earlier, which slows whoever it then shares a port with. Here who comes first is
decided by how many bytes its sender has sent before (times how slow that sender is), which no rate changes. Hence all
times are sums and maxima along one fixed graph: a faster link never makes a publish slower, and a million tasks take
seconds. The price: a port now and then waits for a load whose turn it is while another one is ready. Where a port is
what limits, both shares end together. Launching a load takes the host one figure, however many launches fill it.

Invariants: deterministic; no publish is faster than its floors; no rank holds more than its watermark.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from weight_sync.errors import PlanError
from weight_sync.layout import Destination
from weight_sync.plan.budget import MAX_LINK_THREADS, NUM_SLOTS, Staging, aligned
from weight_sync.plan.tasks import MESH_GROUPS, Task, TaskTable
from weight_sync.plan.transfer_plan import TransferPlan
from weight_sync.simulation.links import Faults, LinkRates, Placement, Port, nic_of

PACK_PASSES = 5.0
"""Device memory traffic of a packed and merged byte, in bytes: reading the weight and writing the slot are two, the
rest is what the merge costs (79 ms for 61 GB with r=32, measured as LinkRates says)."""
HASH_PASSES = 1.0
"""... and once more, on either side, where it is hashed."""


@dataclass(frozen=True, slots=True)
class SlotLoad:
    """What one slot carries at once, added up per destination."""

    mesh_group: str
    packed_bytes: int
    """Packed and hashed once, however many replicas get them."""
    num_packets: int
    flows: Mapping[Destination, tuple[int, int]]
    """Destination -> bytes, and entries of its batched write."""

    @property
    def sent_bytes(self) -> int:
        """Over all destinations."""
        return sum(num_bytes for num_bytes, _ in self.flows.values())


@dataclass(frozen=True, slots=True)
class Interval:
    """One load in one stage of one trainer rank. Example: Interval("write", 3, "experts", 0.021, 0.024, 268435456)."""

    stage: str
    """host_to_device, prepare or write."""
    load: int
    mesh_group: str
    start_s: float
    stop_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RankTimeline:
    """What one trainer rank does. Times count from the publish's "go"."""

    rank: int
    gpu: int
    intervals: tuple[Interval, ...]
    sent_bytes: int
    slot_bytes: int
    peak_bytes: int
    """Most temporary memory that it holds: both slots and what is reserved."""

    def busy_s(self, stage: str) -> float:
        """Seconds during which a stage is at work."""
        busy_s = until_s = 0.0
        for start_s, stop_s in sorted((one.start_s, one.stop_s) for one in self.intervals if one.stage == stage):
            busy_s += max(0.0, stop_s - max(start_s, until_s))
            until_s = max(until_s, stop_s)
        return busy_s

    @property
    def end_s(self) -> float:
        """When its last write is over; 0 for a rank that sends nothing."""
        return max((one.stop_s for one in self.intervals if one.stage == "write"), default=0.0)


@dataclass(frozen=True, slots=True)
class ReceiverTimeline:
    """What one engine rank sees."""

    destination: Destination
    gpu: int
    received_bytes: int
    first_s: float
    """When a first load on its way starts to be written."""
    last_s: float
    """When its last byte has arrived."""
    verify_start_s: float
    verify_stop_s: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """A predicted publish."""

    total_s: float
    """From "go" to committed everywhere."""
    begin_s: float
    write_end_s: float
    """When the last byte has arrived."""
    prepare_s: float
    """Longest that one rank spends packing and hashing; overlaps with writing."""
    write_s: float
    """Longest that one rank spends writing."""
    barrier_s: float
    messages_s: float
    """What messages take because there are many parameters and ranks; after the last write, before the proof."""
    verify_s: float
    commit_s: float
    sender_floor_s: float
    """Largest bytes / rate of an outgoing port."""
    receiver_floor_s: float
    """Largest bytes / rate of an incoming port."""
    peak_bytes: int
    """Largest of the ranks'."""
    ranks: tuple[RankTimeline, ...]
    receivers: tuple[ReceiverTimeline, ...]

    @property
    def floor_s(self) -> float:
        """What the wire alone takes."""
        return max(self.sender_floor_s, self.receiver_floor_s)


def simulate(
    plan: TransferPlan,
    placement: Placement,
    rates: LinkRates,
    staging: Staging,
    *,
    faults: Faults | None = None,
    verify_hashes: bool = True,
    is_offloaded: bool = False,
    has_group_barriers: bool = False,
) -> Simulation:
    """Predict one publish of a plan.

    Args:
        plan: Who sends what.
        placement: Which GPU every rank of the plan is.
        rates: What the hardware does.
        staging: The watermark of every trainer rank.
        faults: What is broken; None: nothing.
        verify_hashes: Hash on both sides.
        is_offloaded: Parameters come from host memory.
        has_group_barriers: No rank writes experts before all have written what is dense. The pipeline needs none,
            because its reads never communicate; a source that gathers with collectives would.

    Raises:
        PlanError: the placement lacks a rank.
        WatermarkError: the watermark leaves no room for staging.
    """
    _check(plan, placement)
    run = _Run(placement, rates, faults or Faults(), verify_hashes=verify_hashes, is_offloaded=is_offloaded)
    senders = [
        _Sender(rank, placement.trainer_gpus[rank], run.faults.slow_ranks.get(rank, 1.0), *cut_loads(tasks, staging))
        for rank, tasks in plan.tasks.items()
    ]
    run.begin(senders)
    groups = MESH_GROUPS if has_group_barriers else (None,)
    may_write_s = rates.begin_s + rates.replay_s
    for group in groups:
        run.replay(senders, group, may_write_s)
        may_write_s = max([may_write_s, *(sender.written_s for sender in senders)]) + rates.barrier_s
    # The last barrier is the collection of what the ranks wrote; verification starts after it.
    write_end_s = may_write_s - rates.barrier_s
    counted_s = messages_s(plan, rates)
    may_write_s += counted_s
    receivers = run.verify(plan, may_write_s)
    verify_end_s = max((one.verify_stop_s for one in receivers), default=may_write_s)
    ranks = tuple(sender.timeline(staging.reserved_bytes) for sender in senders)
    return Simulation(
        total_s=verify_end_s + rates.commit_s,
        begin_s=rates.begin_s,
        write_end_s=write_end_s,
        prepare_s=max((rank.busy_s("prepare") for rank in ranks), default=0.0),
        write_s=max((rank.busy_s("write") for rank in ranks), default=0.0),
        barrier_s=rates.barrier_s * len(groups),
        messages_s=counted_s,
        verify_s=verify_end_s - may_write_s,
        commit_s=rates.commit_s,
        sender_floor_s=max(run.sent_s.values(), default=0.0),
        receiver_floor_s=max(run.received_s.values(), default=0.0),
        peak_bytes=max((rank.peak_bytes for rank in ranks), default=0),
        ranks=ranks,
        receivers=receivers,
    )


def messages_s(plan: TransferPlan, rates: LinkRates) -> float:
    """Rank 0 asks and tells for every parameter of every engine rank; then each replica reads its own part."""
    entries: dict[int, int] = {}
    for (replica, _), params in plan.expected.items():
        entries[replica] = entries.get(replica, 0) + len(params)
    return (sum(entries.values()) + max(entries.values(), default=0)) * rates.entry_s


def cut_loads(tasks: Sequence[Task], staging: Staging) -> tuple[list[SlotLoad], int]:
    """Slot loads in schedule order, and the size of a slot, as pipeline.py makes them.

    A row of a table is a packet here; where equal ranks of replicas are cut unlike, the pipeline may find a few more
    that are equal.

    Raises:
        PlanError: a task is larger than a slot.
    """
    if not tasks:
        return [], 0
    table = tasks if isinstance(tasks, TaskTable) else TaskTable.of(tasks[0].source_rank, tasks)
    sizes, max_slot_bytes = table.num_bytes, staging.max_slot_bytes
    for row in np.flatnonzero(sizes > max_slot_bytes)[:1].tolist():
        raise PlanError(
            f"a task of {sizes[row]} bytes for {table.params[int(table.param[row])]} does not fit a slot of "
            f"{max_slot_bytes} bytes"
        )
    padded = aligned(sizes)
    slot_bytes = staging.slot_bytes(int(padded.sum()), int(padded.max()))
    before = np.cumsum(padded) - padded
    reach = before + sizes  # where each row's bytes end, if all were in one slot
    edges = [0]
    while (first := edges[-1]) < len(sizes):
        last = int(np.searchsorted(reach, before[first] + slot_bytes, side="right"))
        edges.append(min(last, first + staging.max_load_packets(len(edges) - 1)))
    loads: list[SlotLoad] = []
    num_dests = 1 + int(table.dest_rank.max())
    keys = table.replicas * num_dests + table.dest_rank
    for first, last in itertools.pairwise(edges):
        flows: dict[Destination, tuple[int, int]] = {}
        used, which = np.unique(keys[first:last], return_inverse=True)
        num_bytes = np.bincount(which, sizes[first:last]).astype(np.int64).tolist()  # exact: far below 2^53
        for key, size, num_ops in zip(used.tolist(), num_bytes, np.bincount(which).tolist()):
            for replica in table.replica_sets[key // num_dests]:
                where = (replica, key % num_dests)
                held, ops = flows.get(where, (0, 0))
                flows[where] = (held + size, ops + num_ops)
        group = MESH_GROUPS[int(table.group[first])]
        loads.append(SlotLoad(group, int(sizes[first:last].sum()), last - first, flows))
    return loads, slot_bytes


class _Sender:
    """One trainer rank under way: what each of its stages is done with."""

    def __init__(self, rank: int, gpu: int, slowness: float, loads: list[SlotLoad], slot_bytes: int) -> None:
        self.rank, self.gpu, self.slowness = rank, gpu, slowness
        self.loads, self.slot_bytes = loads, slot_bytes
        self.host_s = self.prepared_s = self.written_s = 0.0
        self.sent_until_s: dict[Destination, float] = {}
        """When each destination has its parts of the loads so far."""
        self.slot_free_s = [0.0] * NUM_SLOTS
        self.intervals: list[Interval] = []

    def timeline(self, reserved_bytes: int) -> RankTimeline:
        """What it did."""
        return RankTimeline(
            self.rank,
            self.gpu,
            tuple(self.intervals),
            sum(load.sent_bytes for load in self.loads),
            self.slot_bytes,
            NUM_SLOTS * self.slot_bytes + reserved_bytes if self.loads else reserved_bytes,
        )


class _Run:
    """The state of one simulation: until when every port is busy, and what passed it."""

    def __init__(
        self, placement: Placement, rates: LinkRates, faults: Faults, *, verify_hashes: bool, is_offloaded: bool
    ) -> None:
        self.placement, self.rates, self.faults = placement, rates, faults
        self.verify_hashes, self.is_offloaded = verify_hashes, is_offloaded
        self.sent_s: dict[Port, float] = {}
        self.received_s: dict[Port, float] = {}
        self._out_free_s: dict[Port, float] = {}
        self._in_free_s: dict[Port, float] = {}
        self._first_s: dict[Destination, float] = {}
        self._last_s: dict[Destination, float] = {}
        self._routes: dict[tuple[int, Destination], tuple[Port, Port, float]] = {}

    def begin(self, senders: Sequence[_Sender]) -> None:
        """Sources begin at "go"; packing waits for them, not for the replicas."""
        ready_s = self.rates.source_begin_s
        for sender in senders:
            sender.host_s = sender.prepared_s = ready_s
            sender.slot_free_s = [ready_s] * NUM_SLOTS

    def replay(self, senders: Sequence[_Sender], group: str | None, may_write_s: float) -> None:
        """Run the loads of one mesh group (None: all) in the fixed order of the module's docstring."""
        order: list[tuple[float, int, int]] = []
        for position, sender in enumerate(senders):
            sent_before = 0
            for number, load in enumerate(sender.loads):
                if group is None or load.mesh_group == group:
                    order.append((sent_before * sender.slowness, number, position))
                sent_before += load.sent_bytes
        order.sort()
        for _, number, position in order:
            self._replay_load(senders[position], number, may_write_s)

    def _replay_load(self, sender: _Sender, number: int, may_write_s: float) -> None:
        load, rates = sender.loads[number], self.rates
        slot = number % NUM_SLOTS

        def note(stage: str, start_s: float, stop_s: float, num_bytes: int) -> None:
            sender.intervals.append(Interval(stage, number, load.mesh_group, start_s, stop_s, num_bytes))

        filled_s = sender.slot_free_s[slot]
        if self.is_offloaded:
            start_s = max(sender.host_s, filled_s)
            filled_s = start_s + load.packed_bytes * sender.slowness / rates.host_bytes_s
            sender.host_s = filled_s
            note("host_to_device", start_s, filled_s, load.packed_bytes)
        start_s = max(sender.prepared_s, filled_s)
        passes = PACK_PASSES + (HASH_PASSES if self.verify_hashes else 0.0)
        device_s = load.packed_bytes * passes * sender.slowness / rates.hbm_bytes_s
        # The host launches the next load's kernels while the device works: the slower of the two counts.
        sender.prepared_s = start_s + max(device_s, rates.load_launch_s)
        note("prepare", start_s, sender.prepared_s, load.packed_bytes)

        start_s, stop_s = self._write(sender, load, max(sender.prepared_s, may_write_s))
        sender.written_s = max(sender.written_s, stop_s)
        sender.slot_free_s[slot] = stop_s
        note("write", start_s, stop_s, load.sent_bytes)

    def _write(self, sender: _Sender, load: SlotLoad, may_write_s: float) -> tuple[float, float]:
        """When a load's first write starts, and when its last one ends."""
        rates = self.rates
        num_ops = sum(ops for _, ops in load.flows.values())
        num_rounds = -(-len(load.flows) // MAX_LINK_THREADS)
        first_s, end_s = float("inf"), may_write_s
        for where, (num_bytes, own_ops) in load.flows.items():
            before_s = sender.sent_until_s.get(where)
            start_s = may_write_s if before_s is None else max(may_write_s, before_s + rates.hand_over_s)
            most_ops = max(own_ops, -(-num_ops // MAX_LINK_THREADS))
            flowing_s = start_s + num_rounds * rates.write_latency_s + most_ops * rates.op_s
            out_port, in_port, rate = self._route(sender.gpu, where)
            out_s, in_s = num_bytes * sender.slowness / rate, num_bytes / rate
            self._out_free_s[out_port] = max(self._out_free_s.get(out_port, 0.0), flowing_s) + out_s
            self._in_free_s[in_port] = max(self._in_free_s.get(in_port, 0.0), flowing_s) + in_s
            self.sent_s[out_port] = self.sent_s.get(out_port, 0.0) + out_s
            self.received_s[in_port] = self.received_s.get(in_port, 0.0) + in_s
            arrived_s = max(self._out_free_s[out_port], self._in_free_s[in_port])
            sender.sent_until_s[where] = arrived_s
            self._first_s.setdefault(where, flowing_s)
            self._last_s[where] = max(self._last_s.get(where, 0.0), arrived_s)
            first_s, end_s = min(first_s, start_s), max(end_s, arrived_s)
        return first_s, end_s

    def _route(self, gpu: int, where: Destination) -> tuple[Port, Port, float]:
        """The ports between two GPUs, and their rate."""
        found = self._routes.get((gpu, where))
        if found is None:
            placement = self.placement
            to = placement.engine_gpus[where]
            if placement.node_of(gpu) == placement.node_of(to):
                found = ("nvlink", gpu), ("nvlink", to), self.rates.nvlink_bytes_s
            else:
                ports = (nic_of(one, placement, self.faults) for one in (gpu, to))
                found = ("nic", next(ports)), ("nic", next(ports)), self.rates.nic_bytes_s
            self._routes[gpu, where] = found
        return found

    def verify(self, plan: TransferPlan, start_s: float) -> tuple[ReceiverTimeline, ...]:
        """Every receiver hashes what it got."""
        timelines: list[ReceiverTimeline] = []
        for where, params in plan.expected.items():
            num_bytes = sum(params.values())
            verify_s = num_bytes * HASH_PASSES / self.rates.hbm_bytes_s if self.verify_hashes else 0.0
            timelines.append(
                ReceiverTimeline(
                    where,
                    self.placement.engine_gpus[where],
                    num_bytes,
                    self._first_s.get(where, start_s),
                    self._last_s.get(where, start_s),
                    start_s,
                    start_s + verify_s,
                )
            )
        return tuple(timelines)


def _check(plan: TransferPlan, placement: Placement) -> None:
    missing = [f"trainer rank {rank}" for rank in plan.tasks if rank not in placement.trainer_gpus]
    missing += [f"replica {r} rank {rank}" for r, rank in plan.expected if (r, rank) not in placement.engine_gpus]
    if missing:
        raise PlanError(f"the placement lacks {', '.join(missing[:3])}" + (", ..." if len(missing) > 3 else ""))
