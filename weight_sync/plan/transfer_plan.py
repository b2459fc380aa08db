"""What a plan is: every trainer rank's tasks, the bytes that they write, and the digests that name them.

Owns: the plan's form, its totals, its digest, and the wire form of one rank's part. Does not own: how a plan is made
(plan.py) or proven (proof.py).

Invariant: `digest` covers everything that a publish depends on, so two processes with equal digests replay the same
plan; a rank's part cannot be changed without its digest telling.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgpack

from slipstream.weight_sync.errors import PlanError
from slipstream.weight_sync.layout import Destination
from slipstream.weight_sync.plan.tasks import MESH_GROUPS, Task, TaskTable

FORMAT_VERSION = 2
"""Version of the wire form and of the digest; the two ends of a publish must agree on it."""


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """Facts about a plan, for logs and `slipstream plan`."""

    digest: str
    num_tasks: int
    num_bytes: int
    largest_task_bytes: int
    group_bytes: dict[str, int]
    """Bytes per mesh group."""
    sent_bytes: dict[int, int]
    """Bytes per source rank; idle ranks are listed with 0."""
    received_bytes: dict[Destination, int]
    """Bytes per (replica, destination rank)."""
    send_balance: float
    """Largest / mean of `sent_bytes`; 1.0 is even."""
    receive_balance: float
    """Largest / mean of `received_bytes`."""


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """The whole plan: every source rank's tasks in schedule order."""

    max_task_bytes: int
    tasks: Mapping[int, TaskTable]
    """Schedule per source rank, in ascending order of rank; every source rank has an entry."""
    expected: Mapping[Destination, Mapping[str, int]]
    """(replica, destination rank) -> parameter -> bytes that a publish writes into it; derived ones are absent."""
    layouts_digest: str
    """sha256, hex, over the checkpoint and the destination layouts alone; part of `digest`."""
    rank_digests: Mapping[int, str]
    """sha256, hex, over each source rank's tasks; part of `digest`, so that a rank can check its own part."""

    @property
    def named(self) -> list[Any]:
        """What its digest is of."""
        return [FORMAT_VERSION, self.max_task_bytes, self.layouts_digest, list(self.rank_digests.items())]

    @property
    def digest(self) -> str:
        """sha256, hex, over the format, the bound, the checkpoint, every destination layout and every task."""
        return digest_of(self.named)

    @property
    def num_tasks(self) -> int:
        """Tasks of all source ranks together."""
        return sum(len(table) for table in self.tasks.values())

    def summary(self) -> PlanSummary:
        """Totals and balance."""
        group_bytes: dict[str, int] = dict.fromkeys(MESH_GROUPS, 0)
        sent = dict.fromkeys(self.tasks, 0)
        received = dict.fromkeys(self.expected, 0)
        largest = num_tasks = 0
        for rank, table in self.tasks.items():
            num_tasks += len(table)
            if not table.num_rows:
                continue
            rows = table.num_bytes * table.num_replicas
            for number, name in enumerate(MESH_GROUPS):
                group_bytes[name] += int(rows[table.group == number].sum())
            sent[rank] = int(rows.sum())
            largest = max(largest, int(table.num_bytes.max()))
            for where, (size, _) in table.flows().items():
                received[where] += size
        return PlanSummary(
            digest=self.digest,
            num_tasks=num_tasks,
            num_bytes=sum(sent.values()),
            largest_task_bytes=largest,
            group_bytes=group_bytes,
            sent_bytes=sent,
            received_bytes=received,
            send_balance=_max_over_mean(sent.values()),
            receive_balance=_max_over_mean(received.values()),
        )

    def to_wire(self, rank: int) -> dict[str, object]:
        """One source rank's part, as plain data for msgpack; `rank_tasks_from_wire` reads it."""
        return {"digest": self.digest, "named": self.named, "rank": rank, "tasks": self.tasks[rank].to_wire()}


def rank_tasks_from_wire(wire: Mapping[str, Any]) -> tuple[Task, ...]:
    """The tasks of one source rank, in schedule order.

    Raises:
        PlanError: the format is another one, or the tasks are not those that the digest names.
    """
    rank, (version, *_, rank_digests) = wire["rank"], wire["named"]
    if version != FORMAT_VERSION:
        raise PlanError(f"the plan has format {version}, this process reads format {FORMAT_VERSION}")
    if digest_of(wire["tasks"]) != dict(rank_digests).get(rank):
        raise PlanError(f"the tasks of source rank {rank} differ from those that plan {wire['digest']} names")
    if digest_of(wire["named"]) != wire["digest"]:
        raise PlanError(f"source rank {rank}: the parts of the plan do not add up to its digest {wire['digest']}")
    return tuple(TaskTable.from_wire(rank, wire["tasks"]))


def digest_of(plain: object) -> str:
    """sha256, hex, of plain data; msgpack writes equal data as equal bytes (lists and tuples alike)."""
    return hashlib.sha256(msgpack.packb(plain)).hexdigest()


def _max_over_mean(values: Iterable[int]) -> float:
    """Largest / mean; 1.0 when there is nothing."""
    numbers = list(values)
    total = sum(numbers)
    return max(numbers) * len(numbers) / total if total else 1.0
