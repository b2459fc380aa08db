"""A publish that enters every node once: the trainer writes to one replica, the node's others read it from there.

    trainer ranks ==write==> primary of node A ==read==> replica ==read==> replica       one holder feeds one reader,
                 \\                             \\==read==> replica                        then two feed two, ...
                  ==write==> primary of node B ==read==> ...

A read is that of a recovery: rank i reads the parameters of rank i as its kernels hold them, and proves them by the
hashes of the peer's commit; the peer's offer is asked for again before the version is adopted.

Owns: who is written and who reads from whom, and what a failure of either costs the others. Does not own: the writes
(the trainer), the read and its proof (rollout.worker, weight_sync.recovery), who serves afterwards (supervisor).
Invariants: a replica is written once or reads once in a publish, never both. A primary that does not commit, or is gone
before it was read, is replaced by the node's next replica in the same publish, which nobody has touched; a read that
fails costs its reader alone. Every call has a deadline, and every round takes a replica of each node that goes on: a
publish ends after as many rounds as a node has replicas.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from orchestrator.cluster.replicas import Replica, ReplicaState
from orchestrator.waiting import wait_for
from weight_sync.errors import ReplicaDirty, WeightSyncError
from weight_sync.publish.report import PublishReport, ReplicaReport, joined

if TYPE_CHECKING:
    from weight_sync.replica.recovery import Pulled

logger = logging.getLogger(__name__)

Write = Callable[[list[int], int], Awaitable[PublishReport]]
"""Publish to all replicas but these; the number of the round names its trace."""


class _PeerLost(WeightSyncError):
    """A holder made no offer. Nothing of its reader was touched."""


@dataclass(slots=True)
class _Passed:
    """What became of one node's replicas, or of all of them."""

    pulled: dict[int, tuple[Pulled, float]] = field(default_factory=dict)
    """Reader -> what it read, and the seconds in which it did not serve."""
    failed: dict[int, str] = field(default_factory=dict)
    """Replica -> why it does not serve the version."""
    untouched: list[int] = field(default_factory=list)
    """Readers that found nobody to read from."""


def by_node(replicas: Sequence[Replica]) -> dict[str, list[int]]:
    """The replicas that take part in the publish under way, node by node; those that have served come first.

    The first of a node is its primary: the same one publish after publish, so that the trainer's links stay open.
    """
    nodes: dict[str, list[int]] = {}
    for one in sorted(replicas, key=lambda one: (bool(one.reason), one.index)):
        if _takes_part(one):
            nodes.setdefault(one.worker.node, []).append(one.index)
    return nodes


async def publish_by_relay(write: Write, replicas: Sequence[Replica], *, timeout_s: float) -> PublishReport:
    """Bring one version to every replica that takes part. Failures are in the report.

    Args:
        write: The trainer's publish.
        replicas: All of them, in the publisher's order, held by the supervisor.
        timeout_s: Longest that one call to a rollout worker may take.
    """
    waiting = by_node(replicas)
    rounds: list[PublishReport] = []
    primaries: list[list[int]] = []
    passed = _Passed()
    relay_s = 0.0
    while waiting or not rounds:
        chosen = {node: members[0] for node, members in waiting.items()}
        exclude = [one.index for one in replicas if one.index not in chosen.values()]
        report = await write(exclude, len(rounds))
        rounds.append(report)
        primaries.append(list(chosen.values()))
        began = time.monotonic()
        committed = [node for node, primary in chosen.items() if report.replicas[primary].committed]
        outcomes = await asyncio.gather(
            *(_pass_on(chosen[node], waiting[node][1:], replicas, timeout_s) for node in committed)
        )
        relay_s += time.monotonic() - began
        rest = {node: members[1:] for node, members in waiting.items()}
        for node, outcome in zip(committed, outcomes, strict=True):
            passed.pulled |= outcome.pulled
            passed.failed |= outcome.failed
            rest[node] = outcome.untouched
        alive = {node: [i for i in members if _takes_part(replicas[i])] for node, members in rest.items()}
        waiting = {node: members for node, members in alive.items() if members}
        for node, members in waiting.items():
            logger.warning(
                "%s is written instead of %s", *(replicas[i].worker.name for i in (members[0], chosen[node]))
            )
    return _whole(rounds, primaries, passed, relay_s)


async def _pass_on(primary: int, readers: Sequence[int], replicas: Sequence[Replica], timeout_s: float) -> _Passed:
    """Fill a node's replicas from its primary. Every holder gives to one reader at a time; a reader is a holder next.

    So n readers take log2(n + 1) reads one after the other, where n from the primary alone would share its link.
    """
    result = _Passed(untouched=list(readers))
    holders = [primary]
    while holders:
        result.untouched = [reader for reader in result.untouched if _takes_part(replicas[reader])]
        pairs = list(zip(holders, result.untouched))
        if not pairs:
            break
        del result.untouched[: len(pairs)]
        reads = [_read(replicas[peer], replicas[reader], timeout_s) for peer, reader in pairs]
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
                result.pulled[reader] = outcome
    return result


async def _read(peer: Replica, reader: Replica, timeout_s: float) -> tuple[Pulled, float]:
    """One replica reads what its neighbour committed, and serves it. Returns what it read and how long it stood still.

    The link stays open: closing it takes a second without sampling. The supervisor does it when the peer dies.
    """

    who = peer.worker.name
    try:
        offers = await wait_for(peer.worker.offer(), f"offer on {who}", timeout_s=timeout_s)
    except Exception as error:  # the boundary to another process
        raise _PeerLost(f"it committed, and then made no offer: {type(error).__name__}: {error}") from error
    name, began = reader.worker.name, time.monotonic()
    pulled = await wait_for(reader.worker.pull(offers), f"pull on {name}", timeout_s=timeout_s)
    reader.links[peer.index] = offers
    if await wait_for(peer.worker.offer(), f"offer on {who}", timeout_s=timeout_s) != offers:
        raise ReplicaDirty(f"{who} has moved on while {name} read version {offers[-1].version}")
    adopt = reader.worker.adopt(offers[-1].version, offers[-1].epoch)
    await wait_for(adopt, f"adopt on {name}", timeout_s=timeout_s)
    return pulled, time.monotonic() - began


def _whole(
    rounds: Sequence[PublishReport], primaries: Sequence[Sequence[int]], passed: _Passed, relay_s: float
) -> PublishReport:
    """What was written and what was read, as one report."""
    report = rounds[0] if len(rounds) == 1 else joined(rounds, primaries)
    replicas = list(report.replicas)
    for number, (_, pause_s) in passed.pulled.items():
        replicas[number] = ReplicaReport(replicas[number].endpoint, True, pause_s=pause_s)
    for number, why in passed.failed.items():
        replicas[number] = ReplicaReport(replicas[number].endpoint, False, why)
        logger.error("version %d: %s did not get it: %s", report.version, replicas[number].endpoint, why)
    pauses = [pause_s for _, pause_s in passed.pulled.values()]
    return replace(
        report,
        replicas=tuple(replicas),
        pause_s=max([report.pause_s, *pauses]),
        total_s=report.total_s + relay_s,
        num_relayed=len(passed.pulled.keys() - passed.failed.keys()),
        relay_s=relay_s,
        relay_bytes=sum(pulled.num_bytes for pulled, _ in passed.pulled.values()),
    )


def _takes_part(replica: Replica) -> bool:
    """Held for the publish under way, and not failed since."""
    return replica.is_held and replica.state is ReplicaState.updating
