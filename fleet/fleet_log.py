"""fleet.jsonl: what happened to each rollout worker and when, and how many tokens it has sampled.

    {"time": 1767225600.2, "worker": 1, "name": "rollout-1.1", "event": "serving", "down_s": 14.8}

Owns: the events, their form, and the regular questions for tokens. Does not own: when something happens (roster.py).
Invariants: a row has the time at which its event happened, in seconds since 1970; of a worker's own events, by the
clock of its machine. Rows of a start are written when the worker is up, so the file is not in order of time.
"""

import asyncio
import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from slipstream.conf.whole_files import append_line
from slipstream.fleet.replicas import Replica, ReplicaState
from slipstream.rollout.types import Progress

logger = logging.getLogger(__name__)

COUNT_EVERY_S = 2.0
Fact = float | int | str


class FleetEvent(StrEnum):
    """What can happen to a rollout worker; docs/metrics.md has the same list with the facts of each."""

    process_up = "process_up"
    imported = "imported"
    freed = "freed"
    engine_up = "engine_up"
    layout_known = "layout_known"
    up = "up"
    read = "read"
    waiting = "waiting"
    serving = "serving"
    first_token = "first_token"
    tokens = "tokens"
    failed = "failed"
    restarting = "restarting"
    out = "out"
    joining = "joining"
    leaving = "leaving"
    gone = "gone"


@dataclass(frozen=True, slots=True)
class FleetRow:
    time: float
    worker: int
    name: str
    """The process: "rollout-1", and "rollout-1.2" after its second restart."""
    event: FleetEvent
    facts: Mapping[str, Fact] = field(default_factory=dict[str, Fact])


class FleetLog:
    """Appends rows to a file. When that fails, it says so once and goes on without: metrics.jsonl, which cannot be
    written then either, ends the run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._works = True

    def write(self, row: FleetRow) -> None:
        head = {"time": round(row.time, 3), "worker": row.worker, "name": row.name, "event": row.event}
        try:
            append_line(self._path, json.dumps({**head, **row.facts}))
        except OSError as error:
            if self._works:
                logger.warning("%s lacks rows from here on: %s", self._path, error)
            self._works = False


async def count_tokens(replicas: Collection[Replica], log: FleetLog, *, every_s: float = COUNT_EVERY_S) -> None:
    """Ask every replica in service how many tokens it has sampled, again and again until cancelled. A worker is asked
    again only after it has answered: a hanging one has one open question, and no row."""
    asked: dict[str, tuple[int, asyncio.Future[Progress]]] = {}
    begun: set[str] = set()
    try:
        while True:
            for replica in replicas:
                name = replica.process
                if replica.state in (ReplicaState.serving, ReplicaState.updating) and name not in asked:
                    asked[name] = replica.place, asyncio.ensure_future(replica.worker.progress())
            await asyncio.sleep(every_s)
            for name, (index, answer) in [(name, one) for name, one in asked.items() if one[1].done()]:
                del asked[name]
                if answer.exception() is not None:  # the router and publishes notice it, too, and they act
                    continue
                progress = answer.result()
                if progress.first_token_at is not None and name not in begun:
                    begun.add(name)
                    log.write(FleetRow(progress.first_token_at, index, name, FleetEvent.first_token))
                log.write(FleetRow(progress.at, index, name, FleetEvent.tokens, {"tokens": progress.num_tokens}))
    finally:
        for _, answer in asked.values():
            answer.cancel()
