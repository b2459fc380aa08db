"""A trainer rank that publishes changes to engines that mirror its checkpoint."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self
from unittest.mock import Mock

import pytest
from fakes.memory_transport import MemoryFabric, MemoryTransport
from fakes.publish import EndpointThread
from fakes.ranked_engine import MirrorEngine

from cases.rank_helpers import SYNC_KEY, count, make_rank, make_samples
from slipstream.conf.schema import DType, OptimConfig, TrainMode, WeightSyncConfig
from slipstream.trainer.rank import TrainerRank
from slipstream.weight_sync.replica.receiver import Receiver
from slipstream.weight_sync.replica.recovery import make_offer, pull

ZONE_BYTES = 1 << 16
STAGES = (
    "pipeline.lanes.Replay.replay", "publish.transaction.Transaction.begin", "publish.transaction.Transaction.finish",
    "publish.bases.Bases.end",
)  # fmt: skip
"""Where a publisher dies: before its first write, before it asks engines to begin, before it asks them to commit, and
once all have."""


class World:
    """A trainer rank, and engines to which it publishes."""

    def __init__(
        self,
        tmp_path: Path,
        num_engines: int = 1,
        lr: float = 1e-4,
        zone: int = ZONE_BYTES,
        mode: TrainMode = TrainMode.lora,
        **options: int,
    ) -> None:
        self.folder = tmp_path
        self.rank: TrainerRank = make_rank(
            dtype=DType.bfloat16,
            mode=mode,
            optim=OptimConfig(lr=lr),
            weight_sync=WeightSyncConfig(**{"delta_bytes": ZONE_BYTES, **options}),
        )
        self.fabric = MemoryFabric()
        self.links = [MemoryTransport(self.fabric) for _ in range(num_engines)]
        metas = self.rank.delivery.source.layout().tensors
        self.engines = [MirrorEngine(metas, link, zone) for link in self.links]
        self.endpoints = [EndpointThread(engine, key=SYNC_KEY) for engine in self.engines]
        addresses = [endpoint.address for endpoint in self.endpoints]
        self.zone = zone
        self.whole_bytes = self.rank.delivery.connect(addresses, MemoryTransport(self.fabric))["num_bytes"]

    def add_engines(self, num_engines: int) -> None:
        """With zones of `zone` bytes. The last one comes first, so that there is room for all of them at once."""
        metas = self.rank.delivery.source.layout().tensors
        for _ in range(num_engines):
            self.links.append(MemoryTransport(self.fabric))
            self.engines.append(MirrorEngine(metas, self.links[-1], self.zone))
            self.endpoints.append(EndpointThread(self.engines[-1], key=SYNC_KEY))
        for number in range(len(self.engines))[: -num_engines - 1 : -1]:
            self.rank.delivery.reconnect(number, self.endpoints[number].address)

    def step(self) -> None:
        version = self.rank.policy_version
        samples = make_samples(version=version)
        self.rank.forward_backward([samples], count(samples, version))
        assert self.rank.optimizer_step().is_finite

    def publish(self, **options: object):
        return self.rank.delivery.publish(self.rank.policy_version, **options)

    def stepped(self) -> Self:
        """Once a first version was published and the next one made."""
        self.publish()
        self.step()
        return self

    def all_hold_it(self) -> bool:
        folder = self.folder / str(self.rank.policy_version)
        self.rank.states.save_merged(folder)
        return all(engine.holds(folder) for engine in self.engines)

    def close(self) -> None:
        self.rank.shutdown()
        for endpoint in self.endpoints:
            endpoint.close()


def before_writes(
    world: World, monkeypatch: pytest.MonkeyPatch, note: Callable[[int, Sequence[int], float], None]
) -> None:
    """Call this with the engine, the addresses and the seconds that it may take before each write."""
    real, sessions = MemoryTransport.write, [link.session for link in world.links]

    def write(self, session, sources, places, sizes, *, timeout_s):
        note(sessions.index(session), places, timeout_s)
        real(self, session, sources, places, sizes, timeout_s=timeout_s)

    monkeypatch.setattr(MemoryTransport, "write", write)


def die_at(stage: str, publish: Callable[[], object]) -> None:
    """Publish until the publisher dies there."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(f"slipstream.weight_sync.{stage}", Mock(side_effect=KeyboardInterrupt))
        publish()


def fill_from_peer(receivers: Sequence[Receiver], peers: Sequence[Receiver]) -> None:
    """Read and serve what another engine serves, rank by rank."""
    for receiver, peer in zip(receivers, peers, strict=True):
        offer = make_offer(peer)
        pull(receiver, offer, timeout_s=60.0)
        receiver.adopt(offer.version, offer.epoch)
