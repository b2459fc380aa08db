"""A publish that enters every node once: the trainer writes to one replica, the node's others read it from there.

    trainer ranks ==write==> primary of node A ==read==> replica ==read==> replica       one holder feeds one reader,
                 \\                             \\==read==> replica                        then two feed two, ...
                  ==write==> primary of node B ==read==> ...

A replica reads as it does in a recovery (docs/decisions/0009). The peer's offer is asked for again before the version
is adopted.

Owns: which replicas are written, which read from which, and what a failure of either costs the others. Does not own:
the writes (the trainer), the read and its proof (weight_sync.replica.recovery), and who serves afterwards (supervisor).
Invariants: in one publish a replica is written once or reads once, never both. A primary that does not commit, or is
gone before it was read, is replaced in the same publish by the node's next replica, which nobody has touched. A read
that fails costs its reader alone. Every round takes a replica of each node that goes on: a publish ends after as many
rounds as a node has replicas.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
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


@dataclass(slots=True)
class _Outcome:
    """What became of the readers of all nodes, and of primaries that were gone before they were read."""

    reads: dict[Replica, tuple[Pulled, float]] = field(default_factory=dict["Replica", tuple[Pulled, float]])
    """Reader -> what it read, and the seconds in which it did not serve."""
    failed: dict[Replica, str] = field(default_factory=dict["Replica", str])
    """Replica -> why it does not serve the version."""


def by_node(replicas: Iterable[Replica]) -> dict[str, list[Replica]]:
    """The replicas that take part in the publish under way, node by node; those that have served come first. The first
    of a node is its primary: the same one in every publish, so that the trainer's links stay open."""
    nodes: dict[str, list[Replica]] = {}
    for one in sorted(replicas, key=lambda one: (bool(one.reason), one.place)):
        if one.takes_part:
            nodes.setdefault(one.worker.node, []).append(one)
    return nodes


async def publish_by_relay(write: Write, supervisor: Supervisor) -> PublishReport:
    """Bring one version to every replica that takes part. Failures are in the report. The supervisor has begun the
    publish (`hold`)."""
    replicas = supervisor.roster.replicas.values()
    waiting = list(by_node(replicas).values())
    rounds: list[PublishReport] = []
    primaries: list[list[int]] = []
    outcome = _Outcome()
    relay_s = 0.0
    while waiting or not rounds:
        chosen = [members[0] for members in waiting]
        report = await write([one.place for one in replicas if one not in chosen], len(rounds))
        rounds.append(report)
        primaries.append([primary.place for primary in chosen])
        began = time.monotonic()
        has_it = [report.replicas[primary.place].committed for primary in chosen]
        nodes = zip(waiting, has_it, strict=True)
        untouched = await asyncio.gather(*(_pass_on(node, is_done, supervisor, outcome) for node, is_done in nodes))
        relay_s += time.monotonic() - began
        waiting = list[list[Replica]]()
        for primary, members in zip(chosen, untouched, strict=True):
            if alive := [one for one in members if one.takes_part]:
                logger.warning("the trainer writes to %s instead of %s", alive[0].worker.name, primary.worker.name)
                waiting.append(alive)
    return _whole(rounds, primaries, outcome, relay_s)


async def _pass_on(
    members: Sequence[Replica], is_written: bool, supervisor: Supervisor, outcome: _Outcome
) -> list[Replica]:
    """Fill a node's replicas from its primary, the first, if that was written; return those that found no peer to read.

    A holder gives to one reader at a time; a reader becomes a holder next. So n readers take log2(n + 1) reads one
    after the other, where n readers of the primary alone would share its link.
    """
    untouched = list(members[1:])
    holders = [members[0]] if is_written else []
    while holders:
        untouched = [reader for reader in untouched if reader.takes_part]
        pairs = list(zip(holders, untouched))
        if not pairs:
            break
        del untouched[: len(pairs)]
        reads = await asyncio.gather(*(_read(*pair, supervisor) for pair in pairs), return_exceptions=True)
        for (peer, reader), read in zip(pairs, reads, strict=True):
            if isinstance(read, _PeerLost):
                holders.remove(peer)
                outcome.failed[peer] = str(read)
                untouched.insert(0, reader)
            elif isinstance(read, BaseException):
                outcome.failed[reader] = f"reading from {peer.worker.name} failed with {type(read).__name__}: {read}"
            else:
                holders.append(reader)
                outcome.reads[reader] = read
    return untouched


async def _read(peer: Replica, reader: Replica, supervisor: Supervisor) -> tuple[Pulled, float]:
    """One replica reads what its peer committed, and serves it. The link stays open until the peer dies: closing it
    takes a second without sampling."""
    call, source, target = supervisor.starts.call, peer.worker, reader.worker
    with raised_as(_PeerLost, "it committed, and then made no offer: "):
        offers = await call(peer, "offer", source.offer())
    began = time.monotonic()
    pulled = await call(reader, "pull", target.pull(offers))
    reader.links[peer.name] = offers
    if await call(peer, "offer", source.offer()) != offers:
        raise ReplicaDirty(f"{source.name} has moved on while {target.name} read version {offers[-1].version}")
    await call(reader, "adopt", target.adopt(offers[-1].version, offers[-1].epoch))
    return pulled, time.monotonic() - began


def _whole(
    rounds: Sequence[PublishReport], primaries: Sequence[Sequence[int]], outcome: _Outcome, relay_s: float
) -> PublishReport:
    """What was written and what was read, as one report."""
    report = rounds[0] if len(rounds) == 1 else joined(rounds, primaries)
    replicas, pauses_s = list(report.replicas), [report.pause_s]
    for one, (_, pause_s) in outcome.reads.items():
        replicas[one.place] = ReplicaReport(replicas[one.place].endpoint, True, pause_s=pause_s)
        pauses_s.append(pause_s)
    for one, why in outcome.failed.items():
        replicas[one.place] = ReplicaReport(replicas[one.place].endpoint, False, why)
        logger.error("version %d: %s did not get it: %s", report.version, one.name, why)
    return replace(
        report,
        replicas=tuple(replicas),
        pause_s=max(pauses_s),
        total_s=report.total_s + relay_s,
        num_relayed=len(outcome.reads.keys() - outcome.failed.keys()),
        relay_s=relay_s,
        relay_bytes=sum(pulled.num_bytes for pulled, _ in outcome.reads.values()),
    )
