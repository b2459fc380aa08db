"""Trainer ranks and some replicas over memory: publishers, and engines whose every byte can be compared."""

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


class Unhashed(WeightSyncConfig):
    verify_hashes = False


class World:
    """Replicas of two ranks, and trainer ranks that hold different shards; several of those are threads."""

    def __init__(
        self, num_replicas: int = 2, *, num_ranks: int = 1, num_ranks_of_last: int = 2, zone: int = 0,
        timeout_s: float = 60.0, verify_hashes: bool = True,
    ) -> None:  # fmt: skip
        self.fabric = MemoryFabric()
        self.room = Room(num_ranks)
        self.num_ranks, self.zone = num_ranks, zone
        self.engines: list[PlainEngine] = []
        self.endpoints: list[EndpointThread] = []
        for replica in range(num_replicas):
            self.start(replica, num_ranks_of_last if replica == num_replicas - 1 else 2)
        kind = WeightSyncConfig if verify_hashes else Unhashed
        self.config = kind(watermark_bytes=1 << 16, timeout_s=timeout_s, delta_bytes=zone)
        self.new_publishers()

    def new_publishers(self) -> None:
        ranks = range(self.num_ranks)
        self.sources = [DictSource(rank, num_ranks=self.num_ranks) for rank in ranks]
        self.links = [MemoryTransport(self.fabric) for _ in ranks]
        self.publishers: list[Publisher] = [
            Publisher(
                KeptSource(self.sources[rank], 1 << 16, "cpu") if self.zone else self.sources[rank], self.links[rank],
                rank=rank, world_size=self.num_ranks, group=self.room if self.num_ranks > 1 else None, key=KEY,
                config=self.config,
            )
            for rank in ranks
        ]  # fmt: skip

    @property
    def publisher(self) -> Publisher:
        (publisher,) = self.publishers
        return publisher

    @property
    def addresses(self) -> list[str]:
        return [endpoint.address for endpoint in self.endpoints]

    def connect(self) -> None:
        self.all(lambda publisher: publisher.connect(tuple(self.addresses)))

    def all(self, call: Callable[[Publisher], T]) -> list[T]:
        return on_all_ranks(self.num_ranks, lambda rank: call(self.publishers[rank]))

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

    def end(self, replica: int) -> None:
        """As the end of its process does."""
        self.endpoints[replica].close()
        for receiver in self.engines[replica].receivers:
            receiver.transport.close()

    def start(self, replica: int, num_ranks: int = 2) -> str:
        """Again, or as the first of that number. Returns its address."""
        links = [MemoryTransport(self.fabric) for _ in range(num_ranks)]
        engine = PlainEngine(links, landing_bytes=self.zone)
        self.engines[replica : replica + 1] = [engine]
        self.endpoints[replica : replica + 1] = [EndpointThread(engine)]
        return self.endpoints[replica].address

    def sessions(self, replica: int) -> list[str]:
        return [one.describe().binding.session for one in self.engines[replica].receivers]

    def serving(self) -> list[bool]:
        return [endpoint.endpoint.state.is_serving for endpoint in self.endpoints]

    def close(self) -> None:
        for closing in (*self.publishers, *self.endpoints):
            closing.close()
