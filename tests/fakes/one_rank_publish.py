"""One trainer rank and some replicas over memory: a publisher, and engines whose every byte can be compared."""

from fakes.memory_transport import MemoryFabric, MemoryTransport
from fakes.publish import KEY, DictSource, EndpointThread, PlainEngine
from slipstream.conf.schema import WeightSyncConfig
from slipstream.weight_sync.publish.publisher import Publisher


class Unhashed(WeightSyncConfig):
    verify_hashes = False


class World:
    """One trainer rank and some replicas."""

    def __init__(
        self, num_replicas: int, timeout_s: float = 10.0, verify_hashes: bool = True, num_ranks_of_last: int = 2
    ) -> None:
        self.fabric = MemoryFabric()
        num_ranks = [2] * (num_replicas - 1) + [num_ranks_of_last]
        self.engines = [PlainEngine([MemoryTransport(self.fabric) for _ in range(number)]) for number in num_ranks]
        self.endpoints = [EndpointThread(engine) for engine in self.engines]
        self.config = (WeightSyncConfig if verify_hashes else Unhashed)(watermark_bytes=1 << 16, timeout_s=timeout_s)
        self.new_publisher()

    def new_publisher(self) -> None:
        self.source = DictSource(0, num_ranks=1)
        self.transport = MemoryTransport(self.fabric)
        self.publisher = Publisher(
            self.source, self.transport, rank=0, world_size=1, group=None, config=self.config, key=KEY
        )

    @property
    def addresses(self) -> list[str]:
        return [endpoint.address for endpoint in self.endpoints]

    def connect(self) -> None:
        self.publisher.connect(self.addresses)

    def end(self, replica: int) -> None:
        """As the end of its process does."""
        self.endpoints[replica].close()
        for receiver in self.engines[replica].receivers:
            receiver.transport.close()

    def start(self, replica: int) -> str:
        """Again, or as the first of that number. Returns its address."""
        engine = PlainEngine([MemoryTransport(self.fabric) for _ in range(2)])
        self.engines[replica : replica + 1] = [engine]
        self.endpoints[replica : replica + 1] = [EndpointThread(engine)]
        return self.endpoints[replica].address

    def session(self, replica: int, rank: int = 0) -> str:
        return self.engines[replica].receivers[rank].describe().binding.session

    def close(self) -> None:
        self.publisher.close()
        for endpoint in self.endpoints:
            endpoint.close()
