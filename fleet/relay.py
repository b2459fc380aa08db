"""A publish that enters every node once: the trainer writes to one replica, the node's others read it from there.

    trainer ranks ==write==> primary of node A ==read==> replica ==read==> replica       one holder feeds one reader,
                 \\                             \\==read==> replica                        then two feed two, ...
                  ==write==> primary of node B ==read==> ...

A replica reads as it does in a recovery: rank i reads the parameters of the peer's rank i as its kernels hold them, and
proves them by the hashes of the peer's commit. The peer's offer is asked for again before the version is adopted.

Owns: which replicas are written, which read from which, and what a failure of either costs the others. Does not own:
the writes (the trainer), the read and its proof (rollout.worker, weight_sync.replica.recovery), links that stay open
and who serves afterwards (supervisor).
Invariants: in one publish a replica is written once or reads once, never both. A primary that does not commit, or is
gone before it was read, is replaced in the same publish by the node's next replica, which nobody has touched. A read
that fails costs its reader alone. Every call has a deadline, and every round takes a replica of each node that goes on:
a publish ends after as many rounds as a node has replicas.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slipstream.conf.failures import raised_as
from slipstream.fleet.replicas import Replica
from slipstream.fleet.supervisor import Supervisor
from slipstream.weight_sync.errors import ReplicaDirty, WeightSyncError
from slipstream.weight_sync.publish.report import PublishReport, ReplicaReport, joined
from slipstream.weight_sync.replica.recovery import Pulled

logger = logging.getLogger(__name__)

Write = Callable[[Sequence[int], int], Awaitable[PublishReport]]
"""Publish to all replicas but these, in the round of this number."""


class _PeerLost(WeightSyncError):
    """The peer made no offer. Its reader was not touched."""


@dataclass(frozen=True, slots=True)
class _Read:
    """One replica's read from its peer."""

    pulled: Pulled
    pause_s: float
    """Seconds in which it did not serve."""


@dataclass(slots=True)
class _NodeOutcome:
    """What became of the replicas of one node, or of all nodes."""

    reads: dict[str, _Read] = field(default_factory=dict[str, _Read])
    """By reader."""
    failed: dict[str, str] = field(default_factory=dict[str, str])
    """Replica -> why it does not serve the version."""
    untouched: list[str] = field(default_factory=list[str])
    """Readers that found no peer to read from."""


def by_node(replicas: Iterable[Replica]) -> dict[str, list[str]]:
    """The replicas that take part in the publish under way, node by node; those that have served come first.

    The first replica of a node is its primary: the same one in every publish, so that the trainer's links stay open.
    """
    nodes: dict[str, list[str]] = {}
    for one in sorted(replicas, key=lambda one: (bool(one.reason), one.place)):
        if one.takes_part:
            nodes.setdefault(one.worker.node, []).append(one.name)
    return nodes


async def publish_by_relay(write: Write, supervisor: Supervisor) -> PublishReport:
    """Bring one version to every replica that takes part. Failures are in the report.

    Args:
        write: the trainer's publish.
        supervisor: has begun the publish (`hold`).
    """
    replicas = supervisor.roster.replicas
    waiting = by_node(replicas.values())
    rounds: list[PublishReport] = []
    primaries: list[list[int]] = []
    total = _NodeOutcome()
    relay_s = 0.0
    while waiting or not rounds:
        chosen = {node: members[0] for node, members in waiting.items()}
        exclude = [one.place for one in replicas.values() if one.name not in chosen.values()]
        report = await write(exclude, len(rounds))
        rounds.append(report)
        primaries.append([replicas[primary].place for primary in chosen.values()])
        began = time.monotonic()
        committed = [node for node, primary in chosen.items() if report.replicas[replicas[primary].place].committed]
        outcomes = await asyncio.gather(*(_pass_on(chosen[node], waiting[node][1:], supervisor) for node in committed))
        relay_s += time.monotonic() - began
        rest = {node: members[1:] for node, members in waiting.items()}
        for node, outcome in zip(committed, outcomes, strict=True):
            total.reads |= outcome.reads
            total.failed |= outcome.failed
            rest[node] = outcome.untouched
        alive = {node: [name for name in members if replicas[name].takes_part] for node, members in rest.items()}
        waiting = {node: members for node, members in alive.items() if members}
        for node, members in waiting.items():
            instead, failed = (replicas[name].worker.name for name in (members[0], chosen[node]))
            logger.warning("the trainer writes to %s instead of %s", instead, failed)
    return _whole(rounds, primaries, total, relay_s, {name: one.place for name, one in replicas.items()})


async def _pass_on(primary: str, readers: Sequence[str], supervisor: Supervisor) -> _NodeOutcome:
    """Fill a node's replicas from its primary. A holder gives to one reader at a time; a reader becomes a holder next.

    So n readers take log2(n + 1) reads one after the other, where n readers of the primary alone would share its link.
    """
    replicas = supervisor.roster.replicas
    result = _NodeOutcome(untouched=list(readers))
    holders = [primary]
    while holders:
        result.untouched = [reader for reader in result.untouched if replicas[reader].takes_part]
        pairs = list(zip(holders, result.untouched))
        if not pairs:
            break
        del result.untouched[: len(pairs)]
        reads = [_read(replicas[peer], replicas[reader], supervisor) for peer, reader in pairs]
        for (peer, reader), outcome in zip(pairs, await asyncio.gather(*reads, return_exceptions=True), strict=True):
            if isinstance(outcome, _PeerLost):
                holders.remove(peer)
                result.failed[peer] = str(outcome)
                result.untouched.insert(0, reader)
            elif isinstance(outcome, BaseException):
                name = replicas[peer].worker.name
                result.failed[reader] = f"reading from {name} failed with {type(outcome).__name__}: {outcome}"
            else:
                holders.append(reader)
                result.reads[reader] = outcome
    return result


async def _read(peer: Replica, reader: Replica, supervisor: Supervisor) -> _Read:
    """One replica reads what its peer committed, and serves it.

    The link stays open: closing it takes a second without sampling. The supervisor closes it when the peer dies.
    """
    call, source, target = supervisor.starts.call, peer.worker, reader.worker
    with raised_as(_PeerLost, "it committed, and then made no offer: "):
        offers = await call(peer, "offer", source.offer())
    began = time.monotonic()
    pulled = await call(reader, "pull", target.pull(offers))
    reader.links[peer.name] = offers
    if await call(peer, "offer", source.offer()) != offers:
        raise ReplicaDirty(f"{source.name} has moved on while {target.name} read version {offers[-1].version}")
    await call(reader, "adopt", target.adopt(offers[-1].version, offers[-1].epoch))
    return _Read(pulled, time.monotonic() - began)


def _whole(
    rounds: Sequence[PublishReport],
    primaries: Sequence[Sequence[int]],
    total: _NodeOutcome,
    relay_s: float,
    places: Mapping[str, int],
) -> PublishReport:
    """What was written and what was read, as one report."""
    report = rounds[0] if len(rounds) == 1 else joined(rounds, primaries)
    replicas = list(report.replicas)
    for name, read in total.reads.items():
        replicas[places[name]] = ReplicaReport(replicas[places[name]].endpoint, True, pause_s=read.pause_s)
    for name, why in total.failed.items():
        replicas[places[name]] = ReplicaReport(replicas[places[name]].endpoint, False, why)
        logger.error("version %d: %s did not get it: %s", report.version, name, why)
    return replace(
        report,
        replicas=tuple(replicas),
        pause_s=max([report.pause_s, *(read.pause_s for read in total.reads.values())]),
        total_s=report.total_s + relay_s,
        num_relayed=len(total.reads.keys() - total.failed.keys()),
        relay_s=relay_s,
        relay_bytes=sum(read.pulled.num_bytes for read in total.reads.values()),
    )
