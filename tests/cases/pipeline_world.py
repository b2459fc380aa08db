"""One trainer rank's pipeline over the memory link, for test_pipeline.py and test_replay.py."""

from collections.abc import Sequence
from typing import Any

import torch
from fakes.memory_transport import MemoryFabric, MemoryTransport
from fakes.publish import DictSource, PlainEngine, engine_bytes, engine_layout, repacked

from slipstream.weight_sync.errors import TransferTimeout
from slipstream.weight_sync.integrity import MIN_SCRATCH_BYTES
from slipstream.weight_sync.layout import Binding, Destination
from slipstream.weight_sync.pipeline.lanes import PipelineResult
from slipstream.weight_sync.pipeline.packing import Packet
from slipstream.weight_sync.pipeline.pipeline import Pipeline
from slipstream.weight_sync.plan.budget import sums_bytes
from slipstream.weight_sync.plan.plan import build_plan

NUM_RANKS = 2
HASH_BYTES = MIN_SCRATCH_BYTES + sums_bytes(0)
SMALL_WATERMARK = HASH_BYTES + 256
"""Two slots of 128 bytes: the tiny model (290 bytes a rank and replica) needs several loads."""


def wire_of(version: int, rank: int) -> dict[str, torch.Tensor]:
    """What a publish leaves in the memory of an engine rank, before its commit."""
    wanted = engine_bytes(version, rank)
    wanted["w2"] = repacked(wanted["w2"])
    del wanted["absorbed"]
    return wanted


class World:
    """One trainer rank that holds everything, some replicas of two engine ranks, one fabric."""

    def __init__(
        self,
        num_replicas: int = 1,
        watermark_bytes: int = SMALL_WATERMARK,
        temporary_bytes: int = 0,
        transport: type[MemoryTransport] = MemoryTransport,
    ) -> None:
        self.fabric = MemoryFabric()
        self.transport: Any = transport(self.fabric)
        self.source = DictSource(0, num_ranks=1, temporary_bytes=temporary_bytes)
        self.sessions = [[MemoryTransport(self.fabric) for _ in range(NUM_RANKS)] for _ in range(num_replicas)]
        self.engines = [PlainEngine(transports) for transports in self.sessions]
        self.pipeline = Pipeline(self.source, self.transport, device="cpu", watermark_bytes=watermark_bytes)
        layouts = [engine_layout(rank) for rank in range(NUM_RANKS)]
        self.plan = build_plan(
            [self.source.layout()], [layouts] * num_replicas, max_task_bytes=self.pipeline.max_task_bytes
        )
        self.pipeline.load(self.plan.tasks[0])
        self.budgets_s = dict.fromkeys(range(num_replicas), 5.0)

    def bindings(self) -> dict[Destination, Binding]:
        return {
            (replica, rank): receiver.describe().binding
            for replica, engine in enumerate(self.engines)
            for rank, receiver in enumerate(engine.receivers)
        }

    def run(self, version: int, bindings: dict[Destination, Binding] | None = None) -> PipelineResult:
        self.pipeline.prepare(version)
        return self.pipeline.run(version, self.bindings() if bindings is None else bindings, self.budgets_s)

    def holds_nothing_else(self, replica: int, version: int) -> bool:
        """Whether every value of a replica is that of a version, or was never written."""
        return all(
            bool(((held == wanted) | (held == 0)).all())
            for rank, params in enumerate(self.engines[replica].params)
            for held, wanted in ((params[name], data) for name, data in wire_of(version, rank).items())
        )

    def arrived(self, replica: int, version: int) -> bool:
        """Whether a replica holds a version's wire bytes."""
        for rank, params in enumerate(self.engines[replica].params):
            if not all(torch.equal(params[name], data) for name, data in wire_of(version, rank).items()):
                return False
        return True


class UnclosableTransport(MemoryTransport):
    """A link whose failed writes cannot be closed for a while."""

    is_stuck = True
    num_refused = 0

    def reset(self, session: str) -> None:
        if self.is_stuck:
            self.num_refused += 1
            raise TransferTimeout(f"{session} is still draining")
        super().reset(session)


def num_reads(loads: Sequence[Sequence[Packet]]) -> int:
    return sum(len(packet.tasks[0].pieces) for packets in loads for packet in packets)


def destinations(packets: Sequence[Packet]) -> set[Destination]:
    """Where a load goes."""
    return {(task.replica, task.dest_rank) for packet in packets for task in packet.tasks}
