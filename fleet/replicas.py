"""One rollout worker as the controller's process sees it: its calls, its state, and what is noted about it.

Owns: the facts about a worker. Does not own: its calls (rollout/worker_verbs.py), who changes a state and when
(roster.py, supervisor.py, starts.py and scaling.py; router.py counts what is in flight, relay.py notes links,
loop/publication.py whom the trainer has met), or the worker behind the protocol (orchestrator/cluster/ray_handles.py).
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from slipstream.conf.failures import outcome_when_done
from slipstream.fleet.errors import WaitTimeout
from slipstream.fleet.waiting import wait_for
from slipstream.rollout.worker_verbs import RolloutVerbs
from slipstream.weight_sync.replica.recovery import Offer, Pulled


class RolloutHandle(RolloutVerbs, Protocol):
    """One rollout worker."""

    name: str
    endpoint: str
    node: str
    pid: int
    """Its process there; the engine's is a child of it."""
    started_at: Mapping[str, float]
    """Name of an event (fleet_log.py) -> when its start had come so far, in seconds since 1970."""


_DEATH_TOLD_S = 3.0
"""A publish failed on a worker: how long it is asked whether it has died. Ray knows of a death within a second."""


async def cause_of(worker: RolloutHandle, reason: str) -> str:
    """Why a publish failed on a worker: how the worker died, if it did, and `reason`: what the trainer noticed."""
    says = wait_for(worker.check(), f"{worker.name} to say whether it is alive", timeout_s=_DEATH_TOLD_S)
    death = await outcome_when_done(says)
    if death is None or isinstance(death, WaitTimeout) or str(death) in reason:
        return reason
    return f"{death}; a publish noticed it: {reason}"


class ReplicaState(StrEnum):
    """What a worker is doing; supervisor.py draws what leads from one state to the next."""

    pending = "pending"
    serving = "serving"
    updating = "updating"
    starting = "starting"
    recovering = "recovering"
    out = "out"
    leaving = "leaving"
    gone = "gone"


@dataclass(eq=False)
class Replica:
    """One rollout worker and what the router knows about it."""

    name: str
    """The same after a restart, when the worker has another one."""
    place: int
    """In the lists of the publisher, and its number in fleet.jsonl."""
    handle: RolloutHandle | None
    """None: it was asked for while the run goes on, and was never up."""
    state: ReplicaState = ReplicaState.pending
    reason: str = ""
    is_further: bool = False
    """It comes because more workers were asked for, not because it failed."""
    num_in_flight: int = 0
    """Groups it samples right now."""
    num_updates: int = 0
    num_restarts: int = 0
    """Attempts to start it again."""
    is_known: bool = True
    """Whether the trainer has met it; false from a restart until the next publish."""
    failed_at: float = 0.0
    base_wanted_at: str = ""
    """Where its base goes before it can take part in a publish."""
    pulled: Pulled | None = None
    num_missed: int = 0
    """Publishes in a row that failed on it while it went on serving (adapter mode)."""
    is_held: bool = False
    links: dict[str, list[Offer]] = field(default_factory=dict[str, "list[Offer]"])
    """Peer -> what this replica read there in a publish (relay.py), over a link that stays open until the peer ends."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it fails, so that groups in flight on it are given up at once."""

    @property
    def worker(self) -> RolloutHandle:
        assert self.handle is not None, f"{self.name} was never up"
        return self.handle

    @property
    def process(self) -> str:
        """The name of its newest process, for people: "rollout-1.2" after the second restart."""
        return self.name if self.handle is None else self.handle.name

    @property
    def is_wanted(self) -> bool:
        """It serves, or is about to."""
        return self.state not in (ReplicaState.out, ReplicaState.leaving, ReplicaState.gone)

    @property
    def takes_part(self) -> bool:
        """Held for the publish under way, and not failed since."""
        return self.is_held and self.state is ReplicaState.updating


@dataclass(frozen=True, slots=True)
class Held:
    exclude: list[int]
    joining: list[Replica]
    """Replicas that were started again, which the trainer must meet first."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """A replica that came back into service."""

    replica: str
    down_s: float
    """Seconds from its failure until it served again."""
    read_s: float | None
    """Seconds of reading from a peer; None when a publish filled it."""
