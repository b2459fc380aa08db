"""Simulates a plan with a link model: when each rank does what, and how long a publish takes. Integers and floats.

Owns: the timing rules of a publish. Does not own: the figures (links.py), the plan (plan.py), the real pipeline
(pipeline.py), whose rules are repeated here without its memory, threads and torch; a test compares the two.

    begin (engines pause)     -> per trainer rank, load by load      -> barrier, messages -> verify -> commit
      source begins | prepare     |0 |1 |     |2|    |3     two slots: load i needs the slot that load i-2 left
                    write to A |0   |1     |2   |3          one write at a time to a destination, of its part of a load;
                    write to B |0 |1   |2   |3              writes to different destinations do not wait for each other

Rules. Nothing is written before all replicas have paused; the loads of two slots are packed meanwhile. A load is
consecutive tasks that fit one slot (cut as pipeline.py cuts). Each stage of a rank, and each destination, takes its
loads in schedule order. A rank writes to at most MAX_LINK_THREADS destinations at once; here that adds latency but does
not change the order at ports. A load's bytes pass the sender's port and each receiver's port. A port serves its loads
one after the other, as fast as it can, and a load is written when all its ports have served it. So ports are shared
first-in-first-out, not max-min fairly. Fair shares must be computed anew at every event, and they have anomalies: with
a faster link, a load arrives earlier and slows down the loads with which it then shares a port. Here the order is
decided by how many bytes a sender has sent before (times how slow that sender is), which no rate changes. Hence all
times are sums and maxima along one fixed graph: a faster link never makes a publish slower, and a million tasks take
seconds. The price: a port sometimes waits for the load whose turn it is while another one is ready. If a port is the
bottleneck, both kinds of sharing end at the same time. Host launch time is one constant per load.

Invariants: deterministic; no publish is faster than its floors; no rank holds more than its watermark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weight_sync.errors import PlanError
from weight_sync.layout import Destination
from weight_sync.plan.budget import MAX_LINK_THREADS, NUM_SLOTS, Staging
from weight_sync.plan.transfer_plan import TransferPlan
from weight_sync.simulation.links import Faults, LinkRates, Placement, Port, nic_of
from weight_sync.simulation.slot_loads import SlotLoad, cut_loads

PACK_PASSES = 5.0
"""Device memory traffic per packed and merged byte, in bytes: reading the weight and writing the slot are two, and the
rest is the merge's cost (79 ms for 61 GB with r=32, measured as LinkRates says)."""
HASH_PASSES = 1.0
"""Further traffic per byte, on each side, if it is hashed."""


@dataclass(frozen=True, slots=True)
class Interval:
    """One load in one stage of one trainer rank. Example: Interval("write", 3, "experts", 0.021, 0.024, 268435456)."""

    stage: str
    """prepare or write."""
    load: int
    mesh_group: str
    start_s: float
    stop_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RankTimeline:
    """What one trainer rank does. Times count from the start of the publish, "go"."""

    rank: int
    gpu: int
    intervals: tuple[Interval, ...]
    sent_bytes: int
    slot_bytes: int
    peak_bytes: int
    """The most temporary memory that it holds: both slots and the reserved memory."""

    def busy_s(self, stage: str) -> float:
        """Seconds during which a stage works."""
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
    """When the writing of its first load starts."""
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
    """The longest time that a rank spends packing and hashing; overlaps with writing."""
    write_s: float
    """The longest time that a rank spends writing."""
    barrier_s: float
    messages_s: float
    """Time of the messages about all parameters and ranks; after the last write, before the proof."""
    verify_s: float
    commit_s: float
    sender_floor_s: float
    """Largest bytes / rate of an outgoing port."""
    receiver_floor_s: float
    """Largest bytes / rate of an incoming port."""
    peak_bytes: int
    """The largest peak of all ranks."""
    ranks: tuple[RankTimeline, ...]
    receivers: tuple[ReceiverTimeline, ...]

    @property
    def floor_s(self) -> float:
        """The time that the links alone take."""
        return max(self.sender_floor_s, self.receiver_floor_s)


def simulate(
    plan: TransferPlan,
    placement: Placement,
    rates: LinkRates,
    staging: Staging,
    *,
    faults: Faults | None = None,
    verify_hashes: bool = True,
) -> Simulation:
    """Predict one publish of a plan.

    Args:
        plan: which rank sends what.
        placement: the GPU of every rank of the plan.
        rates: rates of the hardware.
        staging: the watermark of every trainer rank.
        faults: faults of the cluster; None: none.
        verify_hashes: hash on both sides.

    Raises:
        PlanError: the placement lacks a rank.
        WatermarkError: the watermark leaves no room for staging.
    """
    _check(plan, placement)
    run = _Run(placement, rates, faults or Faults(), verify_hashes=verify_hashes)
    senders = [
        _Sender(rank, placement.trainer_gpus[rank], run.faults.slow_ranks.get(rank, 1.0), *cut_loads(tasks, staging))
        for rank, tasks in plan.tasks.items()
    ]
    may_write_s = rates.begin_s + rates.replay_s
    run.replay(senders, may_write_s)
    write_end_s = max([may_write_s, *(sender.written_s for sender in senders)])
    counted_s = messages_s(plan, rates)
    may_verify_s = write_end_s + rates.barrier_s + counted_s
    receivers = run.verify(plan, may_verify_s)
    verify_end_s = max((one.verify_stop_s for one in receivers), default=may_verify_s)
    ranks = tuple(sender.timeline(staging.reserved_bytes) for sender in senders)
    return Simulation(
        total_s=verify_end_s + rates.commit_s,
        begin_s=rates.begin_s,
        write_end_s=write_end_s,
        prepare_s=max((rank.busy_s("prepare") for rank in ranks), default=0.0),
        write_s=max((rank.busy_s("write") for rank in ranks), default=0.0),
        barrier_s=rates.barrier_s,
        messages_s=counted_s,
        verify_s=verify_end_s - may_verify_s,
        commit_s=rates.commit_s,
        sender_floor_s=run.busiest_s(run.senders),
        receiver_floor_s=run.busiest_s(run.receivers),
        peak_bytes=max((rank.peak_bytes for rank in ranks), default=0),
        ranks=ranks,
        receivers=receivers,
    )


def messages_s(plan: TransferPlan, rates: LinkRates) -> float:
    """Time of the messages: rank 0 handles every parameter of every engine rank, then each replica reads its own
    part."""
    entries: dict[int, int] = {}
    for (replica, _), params in plan.expected.items():
        entries[replica] = entries.get(replica, 0) + len(params)
    return (sum(entries.values()) + max(entries.values(), default=0)) * rates.entry_s


@dataclass(slots=True)
class _PortState:
    """One direction of one device. It serves its loads one after the other."""

    free_s: float = 0.0
    """When it becomes free."""
    served_s: float = 0.0
    """How long it has been busy."""


@dataclass(slots=True)
class _Arrivals:
    """What one engine rank has received so far."""

    first_s: float
    last_s: float = 0.0


@dataclass(slots=True)
class _Link:
    """The link from one trainer rank to one engine rank."""

    out_port: _PortState
    in_port: _PortState
    rate: float
    arrivals: _Arrivals | None = None
    sent_until_s: float | None = None
    """When the destination has its parts of all loads so far; None before the first."""


class _Sender:
    """One trainer rank during the simulation: how far each of its stages is."""

    def __init__(self, rank: int, gpu: int, slowness: float, loads: list[SlotLoad], slot_bytes: int) -> None:
        self.rank, self.gpu, self.slowness = rank, gpu, slowness
        self.loads, self.slot_bytes = loads, slot_bytes
        self.prepared_s = self.written_s = 0.0
        self.links: dict[Destination, _Link] = {}
        self.slot_free_s = [0.0] * NUM_SLOTS
        self.intervals: list[Interval] = []

    def timeline(self, reserved_bytes: int) -> RankTimeline:
        """The timeline of what it did."""
        return RankTimeline(
            self.rank,
            self.gpu,
            tuple(self.intervals),
            sum(load.sent_bytes for load in self.loads),
            self.slot_bytes,
            NUM_SLOTS * self.slot_bytes + reserved_bytes if self.loads else reserved_bytes,
        )


class _Run:
    """The state of one simulation: when every port becomes free, and how much it has served."""

    def __init__(self, placement: Placement, rates: LinkRates, faults: Faults, *, verify_hashes: bool) -> None:
        self.placement, self.rates, self.faults, self.verify_hashes = placement, rates, faults, verify_hashes
        self.senders: dict[Port, _PortState] = {}
        self.receivers: dict[Port, _PortState] = {}
        self._arrivals: dict[Destination, _Arrivals] = {}

    @staticmethod
    def busiest_s(ports: Mapping[Port, _PortState]) -> float:
        """The longest time that any of these ports serves."""
        return max((port.served_s for port in ports.values()), default=0.0)

    def replay(self, senders: Sequence[_Sender], may_write_s: float) -> None:
        """Run all loads in the fixed order of the module's docstring.

        Sources begin at "go", and packing waits for that, not for the replicas; writing waits until `may_write_s`.
        """
        order: list[tuple[float, int, int]] = []
        for position, sender in enumerate(senders):
            sender.prepared_s = self.rates.source_begin_s
            sender.slot_free_s = [self.rates.source_begin_s] * NUM_SLOTS
            sent_before = 0
            for number, load in enumerate(sender.loads):
                order.append((sent_before * sender.slowness, number, position))
                sent_before += load.sent_bytes
        order.sort()
        for _, number, position in order:
            self._replay_load(senders[position], number, may_write_s)

    def _replay_load(self, sender: _Sender, number: int, may_write_s: float) -> None:
        load, rates = sender.loads[number], self.rates
        slot = number % NUM_SLOTS
        start_s = max(sender.prepared_s, sender.slot_free_s[slot])
        passes = PACK_PASSES + (HASH_PASSES if self.verify_hashes else 0.0)
        device_s = load.packed_bytes * passes * sender.slowness / rates.hbm_bytes_s
        # The host launches the next load's kernels while the device works, so the slower of the two counts.
        sender.prepared_s = start_s + max(device_s, rates.load_launch_s)
        group = load.mesh_group
        sender.intervals.append(Interval("prepare", number, group, start_s, sender.prepared_s, load.packed_bytes))

        start_s, stop_s = self._write(sender, load, max(sender.prepared_s, may_write_s))
        sender.written_s = max(sender.written_s, stop_s)
        sender.slot_free_s[slot] = stop_s
        sender.intervals.append(Interval("write", number, group, start_s, stop_s, load.sent_bytes))

    def _write(self, sender: _Sender, load: SlotLoad, may_write_s: float) -> tuple[float, float]:
        """When a load's first write starts, and when its last one ends.

        This loop runs once per load and destination, half a million times for a plan of a thousand GPUs. So it uses
        comparisons instead of max() and min(), which would read better but take three times as long.
        """
        rates, links, slowness = self.rates, sender.links, sender.slowness
        latency_s = -(-len(load.flows) // MAX_LINK_THREADS) * rates.write_latency_s
        even_ops = -(-sum(ops for _, ops in load.flows.values()) // MAX_LINK_THREADS)
        hand_over_s, op_s = rates.hand_over_s, rates.op_s
        first_s, end_s = float("inf"), may_write_s
        for where, (num_bytes, own_ops) in load.flows.items():
            link = links.get(where)
            if link is None:
                link = links[where] = self._link(sender.gpu, where)
            start_s = may_write_s
            if link.sent_until_s is not None and link.sent_until_s + hand_over_s > start_s:
                start_s = link.sent_until_s + hand_over_s
            flowing_s = start_s + latency_s + (own_ops if own_ops > even_ops else even_ops) * op_s
            out_port, in_port, rate = link.out_port, link.in_port, link.rate
            out_s, in_s = num_bytes * slowness / rate, num_bytes / rate
            out_free_s = (out_port.free_s if out_port.free_s > flowing_s else flowing_s) + out_s
            in_free_s = (in_port.free_s if in_port.free_s > flowing_s else flowing_s) + in_s
            out_port.free_s, in_port.free_s = out_free_s, in_free_s
            out_port.served_s += out_s
            in_port.served_s += in_s
            arrived_s = out_free_s if out_free_s > in_free_s else in_free_s
            link.sent_until_s = arrived_s
            arrivals = link.arrivals
            if arrivals is None:
                arrivals = link.arrivals = self._arrivals.setdefault(where, _Arrivals(flowing_s))
            if arrived_s > arrivals.last_s:
                arrivals.last_s = arrived_s
            if start_s < first_s:
                first_s = start_s
            if arrived_s > end_s:
                end_s = arrived_s
        return first_s, end_s

    def _link(self, gpu: int, where: Destination) -> _Link:
        """The ports between two GPUs, and their rate."""
        placement = self.placement
        to = placement.engine_gpus[where]
        if placement.node_of(gpu) == placement.node_of(to):
            out, into, rate = ("nvlink", gpu), ("nvlink", to), self.rates.nvlink_bytes_s
        else:
            out, into = (("nic", nic_of(one, placement, self.faults)) for one in (gpu, to))
            rate = self.rates.nic_bytes_s
        return _Link(self.senders.setdefault(out, _PortState()), self.receivers.setdefault(into, _PortState()), rate)

    def verify(self, plan: TransferPlan, start_s: float) -> tuple[ReceiverTimeline, ...]:
        """Every receiver hashes what it got."""
        timelines: list[ReceiverTimeline] = []
        for where, params in plan.expected.items():
            num_bytes = sum(params.values())
            verify_s = num_bytes * HASH_PASSES / self.rates.hbm_bytes_s if self.verify_hashes else 0.0
            arrivals = self._arrivals.get(where, _Arrivals(start_s, start_s))
            timelines.append(
                ReceiverTimeline(
                    where,
                    self.placement.engine_gpus[where],
                    num_bytes,
                    arrivals.first_s,
                    arrivals.last_s,
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
