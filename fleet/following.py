"""Follows the machines that there are: `rollout.num_workers=MIN..MAX`.

    every FOLLOW_EVERY_S   look --a machine has room--> a further worker starts, until there are as many as asked for
                             '----a machine has left--> its worker goes, and starts anew where there is room

Owns: when it looks, and how long a run without any worker waits for a machine. Does not own: who starts where and how a
worker goes (scaling.py), nor what machines there are (`look` is handed in).
Invariant: a worker that failed too often stays out, and none takes its place: it would fail as well, on and on.
"""

import asyncio
import logging
import time

from slipstream.conf.failures import outcome_when_done
from slipstream.fleet.replicas import ReplicaState
from slipstream.fleet.roster import Roster
from slipstream.fleet.scaling import Scaling

logger = logging.getLogger(__name__)
FOLLOW_EVERY_S = 5.0


async def follow(roster: Roster, scaling: Scaling, *, patience_s: float, every_s: float = FOLLOW_EVERY_S) -> None:
    """Have as many workers as was asked for and machines have room for, until cancelled.

    Args:
        patience_s: how long a run without a worker waits for room. It ends then, as if all had failed.
    """
    served_at, said = time.monotonic(), ""
    while True:
        if any(one.is_wanted for one in roster.replicas.values()):
            served_at = time.monotonic()
        async with roster.changed:
            goes = any(one.state in (ReplicaState.gone, ReplicaState.leaving) for one in roster.replicas.values())
            # Two looks tell whether those that are out failed, or their machines left.
            roster.awaits_room = time.monotonic() - served_at < (patience_s if goes else 3 * every_s)
            roster.changed.notify_all()
        refusal = await outcome_when_done(scaling.follow_once())  # Ray's: another run may have taken the room
        if refusal is not None and str(refusal) != said:
            logger.warning("no further rollout worker for now: %s", refusal)
        said = "" if refusal is None else str(refusal)
        await asyncio.sleep(every_s)
