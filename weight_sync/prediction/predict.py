"""Predicts how long a publish of a plan takes: the two floors of the wire, and around them what was measured to come on
top. Integers and floats.

The figures are links.py's. Loads are counted here as pipeline.py cuts them; a test compares the two, and another every
measured publish with this formula.

    begin (engines pause) | replay | write                                        | barrier, messages | verify | commit
                            a port, out or in:  its bytes / its rate
                            a sender:           its port + loads x (latency + hand-over) + entries of its writes;
                                                no sooner than it has packed all loads, two of them before the start,
                                                and written the last one

A port is one direction of a NIC or of a GPU's NVLink. The write lasts as long as the slowest port and sender. How
senders and receivers wait for each other in between is not predicted (docs/decisions/0006-floors-of-a-publish.md).

With relay (fleet/relay.py) the trainer writes some replicas, from which others of their nodes read: in rounds, after
the writes.

Invariants: deterministic; never below a floor; better hardware never makes a publish slower; no rank holds more than
its watermark.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from slipstream.weight_sync.errors import PlanError
from slipstream.weight_sync.layout import Destination, DestLayout, PostLoad
from slipstream.weight_sync.plan.budget import MAX_LINK_THREADS, NUM_SLOTS, Staging
from slipstream.weight_sync.plan.transfer_plan import TaskTable, TransferPlan
from slipstream.weight_sync.prediction.links import LinkRates, Placement, Port, ports

PACK_PASSES = 5.0
"""Device memory traffic per packed and merged byte, in bytes: reading the weight and writing the slot are two, and the
rest is the merge's cost (79 ms for 61 GB with r=32, measured as LinkRates says)."""
HASH_PASSES = 1.0
"""Further traffic per byte, on each side, if it is hashed."""
MARK_PASSES = 7.7
"""Further traffic per byte if changes are sent: 5.5 to mark them, by merging a second time with the factors published
last (merging takes 87 ms and both together 182 ms for 61 GB on an H100), and 2.2 to pack them into streams (39 ms on an
H200; docs/decisions/0036-a-publish-of-changes.md)."""
BUS_BYTES_S = 55e9
"""Page-locked host memory to a GPU, or back (bench/results/push-gpu.json): what was published last is copied both ways
where it is kept on the host."""


@dataclass(frozen=True, slots=True)
class SenderFigures:
    """What one trainer rank does. Times count from the start of the publish, "go"."""

    rank: int
    num_loads: int
    peak_bytes: int
    """The most temporary memory that it holds: both slots and the reserved memory."""
    prepare_start_s: float
    prepare_s: float
    """Packing and hashing all loads; overlaps with writing."""
    write_start_s: float
    write_s: float
    """Its port's time for what passes it, and what its writes take besides."""
    end_s: float


@dataclass(frozen=True, slots=True)
class ReceiverFigures:
    destination: Destination
    receive_s: float
    """Its ports' time for what passes them."""
    verify_s: float


@dataclass(frozen=True, slots=True)
class Prediction:
    total_s: float
    """From "go" to committed everywhere."""
    begin_s: float
    write_start_s: float
    write_end_s: float
    """When the last byte has arrived."""
    prepare_s: float
    """The longest time that a rank spends packing and hashing."""
    write_s: float
    """The longest time that a rank, or a receiver's port, is busy with writes."""
    barrier_s: float
    messages_s: float
    """Time of the messages about all parameters and ranks; after the last write, before the proof."""
    verify_s: float
    commit_s: float
    sender_floor_s: float
    """Largest bytes / rate of an outgoing port."""
    receiver_floor_s: float
    """Largest bytes / rate of an incoming port."""
    senders: tuple[SenderFigures, ...]
    receivers: tuple[ReceiverFigures, ...]

    @property
    def floor_s(self) -> float:
        """What the links alone take."""
        return max(self.sender_floor_s, self.receiver_floor_s)

    @property
    def peak_bytes(self) -> int:
        return max((one.peak_bytes for one in self.senders), default=0)


def predict(
    plan: TransferPlan,
    placement: Placement,
    rates: LinkRates,
    staging: Staging,
    *,
    slow_ranks: Mapping[int, float] | None = None,
    verify_hashes: bool = True,
    sent_share: float = 1.0,
    mark_passes: float = 0.0,
    apply_passes: float = 0.0,
) -> Prediction:
    """Predict one publish of a plan.

    Args:
        staging: the watermark of every trainer rank.
        slow_ranks: trainer rank -> how many times slower its links and its memory are, >= 1.
        verify_hashes: hash on both sides.
        sent_share: part of the plan's bytes that cross the links; all are packed and hashed.
        mark_passes, apply_passes: of a publish of changes: further traffic per packed byte to find what changed, and
            per byte of an engine rank to put it in.

    Raises PlanError if the placement lacks a rank, WatermarkError if the watermark leaves no room for staging.
    """
    missing = [f"trainer rank {rank}" for rank in plan.tasks if rank not in placement.trainer_gpus]
    missing += [f"replica {r} rank {rank}" for r, rank in plan.expected if (r, rank) not in placement.engine_gpus]
    if missing:
        raise PlanError(f"the placement lacks {', '.join(missing[:3])}" + (", ..." if len(missing) > 3 else ""))
    slow_ranks = slow_ranks or {}
    out_s: dict[Port, float] = defaultdict(float)
    in_s: dict[Port, float] = defaultdict(float)
    used_out: dict[int, set[Port]] = defaultdict(set)
    used_in: dict[Destination, set[Port]] = defaultdict(set)
    flows = {rank: table.flows() for rank, table in plan.tasks.items()}
    for rank, sent in flows.items():
        gpu, slowness = placement.trainer_gpus[rank], slow_ranks.get(rank, 1.0)
        for where, (num_bytes, _) in sent.items():
            out, into, rate = ports(gpu, placement.engine_gpus[where], placement, rates)
            out_s[out] += num_bytes * sent_share * slowness / rate
            in_s[into] += num_bytes * sent_share / rate
            used_out[rank].add(out)
            used_in[where].add(into)
    pack_passes = PACK_PASSES + (HASH_PASSES if verify_hashes else 0.0) + mark_passes
    senders: list[SenderFigures] = []
    for rank, table in plan.tasks.items():
        busy_s = max((out_s[port] for port in used_out[rank]), default=0.0)
        slowness = slow_ranks.get(rank, 1.0)
        senders.append(_sender(table, flows[rank], busy_s, slowness * pack_passes, rates, staging))
    write_start_s = min((one.write_start_s for one in senders if one.num_loads), default=rates.begin_s + rates.replay_s)
    receive_s = {where: max(in_s[port] for port in used_in[where]) for where in used_in}
    last_received_s = write_start_s + max(receive_s.values(), default=0.0)
    write_end_s = max([write_start_s, last_received_s, *(one.end_s for one in senders)])
    verify_passes = (HASH_PASSES if verify_hashes else 0.0) + apply_passes
    receivers = tuple(
        ReceiverFigures(where, receive_s.get(where, 0.0), sum(params.values()) * verify_passes / rates.hbm_bytes_s)
        for where, params in plan.expected.items()
    )
    counted_s, verify_s = messages_s(plan, rates), max((one.verify_s for one in receivers), default=0.0)
    return Prediction(
        total_s=write_end_s + rates.barrier_s + counted_s + verify_s + rates.commit_s,
        begin_s=rates.begin_s,
        write_start_s=write_start_s,
        write_end_s=write_end_s,
        prepare_s=max((one.prepare_s for one in senders), default=0.0),
        write_s=max([0.0, last_received_s - write_start_s, *(one.write_s for one in senders)]),
        barrier_s=rates.barrier_s,
        messages_s=counted_s,
        verify_s=verify_s,
        commit_s=rates.commit_s,
        sender_floor_s=max(out_s.values(), default=0.0),
        receiver_floor_s=max(in_s.values(), default=0.0),
        senders=tuple(senders),
        receivers=receivers,
    )


def _sender(
    table: TaskTable,
    flows: Mapping[Destination, tuple[int, int]],
    port_s: float,
    passes: float,
    rates: LinkRates,
    staging: Staging,
) -> SenderFigures:
    """One rank, whose port is busy for `port_s`; each packed byte costs so many passes over its memory."""
    # A row is a packet. Where equal ranks of several replicas are cut differently, the pipeline may find a few more.
    edges, slot_bytes = staging.cut(table.num_bytes, lambda row: table.params[int(table.param[row])])
    loads = [int(table.num_bytes[first:last].sum()) for first, last in pairwise(edges)]
    # The host launches the next load's kernels while the device works, so the slower of the two counts.
    packing = [max(size * passes / rates.hbm_bytes_s, rates.load_launch_s) for size in loads]
    entries = [ops for _, ops in flows.values()]
    rounds = -(-len(flows) // MAX_LINK_THREADS)
    busiest_entries = max(max(entries, default=0), -(-sum(entries) // MAX_LINK_THREADS))
    write_s = port_s + len(loads) * rounds * rates.write_latency_s + busiest_entries * rates.op_s
    start_s = max(rates.begin_s + rates.replay_s, rates.source_begin_s + (packing[0] if packing else 0.0))
    packed_s = max(rates.source_begin_s + sum(packing), start_s + sum(packing[NUM_SLOTS:]))
    end_s = max(start_s + write_s + len(loads) * rates.hand_over_s, packed_s + write_s / max(1, len(loads)))
    return SenderFigures(
        table.source_rank,
        len(loads),
        (NUM_SLOTS + staging.has_changes) * slot_bytes + staging.reserved_bytes,
        rates.source_begin_s,
        sum(packing),
        start_s,
        write_s,
        end_s if packing else 0.0,
    )


def apply_passes(changed: float) -> float:
    """Traffic per byte of an engine rank to check streams and to put in this share of the elements: a line near 16,
    28, 38 and 56 ms at 0.5, 2, 5 and 12 % of 61 GB, measured beside MARK_PASSES."""
    return 1.3 + 19.0 * changed


def messages_s(plan: TransferPlan, rates: LinkRates) -> float:
    """Time of the messages: rank 0 handles every parameter of every engine rank, then each replica its own part."""
    entries: dict[int, int] = {}
    for (replica, _), params in plan.expected.items():
        entries[replica] = entries.get(replica, 0) + len(params)
    return (sum(entries.values()) + max(entries.values(), default=0)) * rates.entry_s


def neighbours(placement: Placement) -> dict[int, list[int]]:
    """Replica that is written -> replicas that read from it. One that spans nodes is written, and none reads it."""
    nodes: dict[int, set[int]] = {}
    for (replica, _), gpu in placement.engine_gpus.items():
        nodes.setdefault(replica, set()).add(placement.node_of(gpu))
    readers: dict[int, list[int]] = {}
    first_of: dict[int, int] = {}
    for replica in sorted(nodes):
        (node, *others) = nodes[replica]
        primary = replica if others else first_of.setdefault(node, replica)
        readers.setdefault(primary, [])
        if primary != replica:
            readers[primary].append(replica)
    return readers


def written_alone(placement: Placement, primaries: Sequence[int]) -> Placement:
    """The same GPUs with only these replicas, numbered anew."""
    number = {replica: i for i, replica in enumerate(primaries)}
    engine_gpus = {(number[r], rank): gpu for (r, rank), gpu in placement.engine_gpus.items() if r in number}
    return Placement(placement.ranks_per_node, placement.trainer_gpus, engine_gpus)


def num_rounds(num_readers: int) -> int:
    """Rounds until all have read. In a round, each replica that has the version is read by one that has it afterwards.

    0, 1, 2, 2, 3 for 0, 1, 2, 3, 4 readers: the smallest r with 2^r > readers.
    """
    return num_readers.bit_length()


def relay_s(
    readers: Mapping[int, Sequence[int]], engine: Sequence[DestLayout], rates: LinkRates, *, verify_hashes: bool
) -> float:
    """Seconds from the commit of the replicas that were written until the last reader of any node serves.

    In a round, readers pause, every rank reads the peer's same rank over NVLink, hashes and resumes. Nodes do not share
    a link, and neither do the pairs of a round. Calls between workers, some milliseconds, are left out.
    """
    rounds = num_rounds(max((len(members) for members in readers.values()), default=0))
    slowest_s = 0.0
    for layout in engine:
        sent = [param.num_bytes for param in layout.params if param.post_load is not PostLoad.derived]
        read_s = rates.write_latency_s + len(sent) * rates.op_s + sum(sent) / rates.nvlink_bytes_s
        hash_s = sum(sent) * HASH_PASSES / rates.hbm_bytes_s if verify_hashes else 0.0
        slowest_s = max(slowest_s, read_s + hash_s)
    return rounds * (rates.begin_s + slowest_s + rates.commit_s)
