"""An engine rank whose memory a test writes, as a publisher would."""

from typing import Any

import torch
from fakes import publish
from fakes.memory_transport import MemoryFabric, MemoryTransport
from fakes.publish import engine_bytes, engine_layout, engine_params, repacked

from slipstream.weight_sync.integrity import hash_bytes
from slipstream.weight_sync.layout import DestLayout
from slipstream.weight_sync.replica.messages import Expected
from slipstream.weight_sync.replica.receiver import Receiver

DIGEST = "9f" * 32


def wire_bytes(version: int) -> dict[str, torch.Tensor]:
    """What the trainer sends to rank 0: engine bytes before the repacking, without derived parameters and fills."""
    held = engine_bytes(version, 0)
    held["w2"] = repacked(held["w2"])
    held["embed"] = held["embed"][:7]
    del held["absorbed"]
    return held


def sums_of(version: int) -> dict[str, tuple[int, int]]:
    return {name: (2 * t.numel(), hash_bytes(t)) for name, t in wire_bytes(version).items()}


def expected_of(version: int) -> Expected:
    return publish.expected_of(sums_of(version))


class Rank:
    """One receiver and its memory.

    Args:
        hooks: Of the receiver.
    """

    def __init__(self, layout: DestLayout | None = None, **hooks: Any) -> None:
        self.transport, self.params = MemoryTransport(MemoryFabric()), engine_params(0)
        usual = {
            "repack": lambda _, tensor: tensor.copy_(repacked(tensor.clone())),
            "recompute": lambda: self.params["absorbed"].copy_(self.params["norm"] * 2),
        }
        self.receiver = Receiver(self.params, layout or engine_layout(0), self.transport, **usual | hooks)

    def write(self, version: int, *, skip: tuple[str, ...] = ()) -> None:
        for name, data in wire_bytes(version).items():
            if name not in skip:
                self.params[name][: len(data)] = data

    def begin(self, version: int, epoch: int = 1, *, skip: tuple[str, ...] = ()) -> None:
        """And all is written."""
        self.receiver.begin(version, epoch, DIGEST)
        self.write(version, skip=skip)

    def verify(self, version: int, expected: Expected | None = None, epoch: int = 1) -> None:
        self.receiver.verify(version, epoch, DIGEST, expected or expected_of(version))

    def publish(self, version: int, epoch: int = 1) -> None:
        self.begin(version, epoch)
        self.verify(version, epoch=epoch)
        self.receiver.commit(version, epoch)
