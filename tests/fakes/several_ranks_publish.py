"""Two trainer ranks and some replicas over memory, whose every byte can be compared."""

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from fakes.meeting import Room, on_all_ranks
from fakes.memory_transport import MemoryFabric, MemoryTransport
from fakes.publish import KEY, DictSource, EndpointThread, PlainEngine
from slipstream.conf.schema import WeightSyncConfig
from slipstream.weight_sync.disk.kept_source import KeptSource
from slipstream.weight_sync.publish.publisher import Publisher
from slipstream.weight_sync.publish.report import PublishReport

T = TypeVar("T")
NUM_RANKS = 2


class World:
    """Two trainer ranks that hold different shards, and two replicas of two ranks."""

    def __init__(self, num_replicas: int = 2, zone: int = 0) -> None:
        self.fabric = MemoryFabric()
        self.room = Room(NUM_RANKS)
        self.engines = [
            PlainEngine([MemoryTransport(self.fabric) for _ in range(2)], landing_bytes=zone)
            for _ in range(num_replicas)
        ]
        self.endpoints = [EndpointThread(engine) for engine in self.engines]
        self.sources = [DictSource(rank, num_ranks=NUM_RANKS) for rank in range(NUM_RANKS)]
        self.links = [MemoryTransport(self.fabric) for _ in range(NUM_RANKS)]
        self.publishers: list[Publisher] = [
            Publisher(
                KeptSource(self.sources[rank], 1 << 16, "cpu") if zone else self.sources[rank], self.links[rank],
                rank=rank, world_size=NUM_RANKS, group=self.room, key=KEY,
                config=WeightSyncConfig(watermark_bytes=1 << 16, timeout_s=30.0, delta_bytes=zone),
            )
            for rank in range(NUM_RANKS)
        ]  # fmt: skip

    @property
    def addresses(self) -> list[str]:
        return [endpoint.address for endpoint in self.endpoints]

    def connect(self) -> None:
        self.all(lambda publisher: publisher.connect(self.addresses))

    def all(self, call: Callable[[Publisher], T]) -> list[T]:
        return on_all_ranks(NUM_RANKS, lambda rank: call(self.publishers[rank]))

    def publish(self, version: int, **options: Any) -> PublishReport:
        first, *others = self.all(lambda publisher: publisher.publish(version, **options))
        assert all(report == first for report in others), "the same on every rank"
        return first

    def raises(self, error: type[Exception], match: str, call: Callable[[Publisher], object]) -> None:
        """Every rank raises it."""

        def one(publisher: Publisher) -> None:
            with pytest.raises(error, match=match):
                call(publisher)

        self.all(one)

    def sessions(self, replica: int) -> list[str]:
        return sorted(one.describe().binding.session for one in self.engines[replica].receivers)

    def serving(self) -> list[bool]:
        return [endpoint.endpoint.state.is_serving for endpoint in self.endpoints]

    def close(self) -> None:
        for publisher in self.publishers:
            publisher.close()
        for endpoint in self.endpoints:
            endpoint.close()
