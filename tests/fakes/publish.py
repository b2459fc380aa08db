"""A tiny model at both ends of a publish: a dict of tensors as the trainer, plain tensors as the engine.

Two trainer ranks hold overlapping halves; an engine replica has two ranks (tensor parallel), with every difficulty of
a real one: fused rows, column slices (strided source), a replicated vector, a padded embedding, odd bfloat16 offsets,
a repacked and a derived parameter. `engine_bytes` says what must be in memory, by direct slicing, independently of the
plan.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from slipstream.weight_sync.calls.loop_thread import LoopThread
from slipstream.weight_sync.layout import (
    DestLayout,
    Fill,
    Load,
    Param,
    PostLoad,
    Region,
    SourceLayout,
    SourceShard,
    TensorMeta,
)
from slipstream.weight_sync.publish.report import PublishReport
from slipstream.weight_sync.replica.endpoint import ReplicaEndpoint
from slipstream.weight_sync.replica.messages import Bound, EngineRank, Expected, Planned
from slipstream.weight_sync.replica.receiver import Receiver
from slipstream.weight_sync.transport.base import Transport

KEY = b"0123456789abcdef-test-key"
WIDTH = 5
NUM_ENGINE_RANKS = 2
Q, K, NORM, EMBED = "layers.0.q.weight", "layers.0.k.weight", "norm.weight", "embed.weight"
UP = [f"layers.0.mlp.experts.{e}.up.weight" for e in range(2)]
DOWN = [f"layers.0.mlp.experts.{e}.down.weight" for e in range(2)]
SHAPES: dict[str, tuple[int, ...]] = {
    Q: (6, WIDTH),
    K: (2, WIDTH),
    NORM: (WIDTH,),
    EMBED: (7, WIDTH),
    **dict.fromkeys(UP, (8, WIDTH)),
    **dict.fromkeys(DOWN, (WIDTH, 8)),
}
METAS = tuple(TensorMeta(name, shape, "bfloat16") for name, shape in SHAPES.items())


def checkpoint(version: int) -> dict[str, torch.Tensor]:
    """The whole model at a version; every element differs from version to version."""
    generator = torch.Generator().manual_seed(1000 + version)
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in SHAPES.items()}


class DictSource:
    """WeightSource over whole tensors, of which this rank declares the dense ones' halves and one expert."""

    def __init__(self, rank: int, num_ranks: int = 2, temporary_bytes: int = 0) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.temporary_bytes = temporary_bytes
        self.version = -1
        self.tensors: dict[str, torch.Tensor] = {}
        self.begin_error: Exception | None = None
        self.num_ends = 0
        self.num_reads = 0
        self.before_read: Callable[[str], None] = lambda tensor: None
        self.undeclared_bytes = 0

    def layout(self) -> SourceLayout:
        """Rows split over the ranks, experts whole on one rank each, the norm on all of them."""
        shards: list[SourceShard] = []
        for name, shape in SHAPES.items():
            if ".experts." in name:
                if int(name.split(".experts.")[1].split(".")[0]) % self.num_ranks == self.rank:
                    shards.append(SourceShard(name, Region((0,) * len(shape), shape)))
            elif name == NORM:
                shards.append(SourceShard(name, Region((0,), shape)))
            else:
                rows = -(-shape[0] // self.num_ranks)
                start, stop = self.rank * rows, min(shape[0], (self.rank + 1) * rows)
                shards.append(SourceShard(name, Region((start, 0), (stop - start, shape[1]))))
        return SourceLayout(self.rank, METAS, tuple(shards))

    def begin(self, version: int) -> int:
        if self.begin_error is not None:
            raise self.begin_error
        self.version = version
        self.tensors = checkpoint(version)
        return self.temporary_bytes + self.undeclared_bytes

    def read(self, tensor: str, region: Region, out: torch.Tensor) -> None:
        assert tuple(out.shape) == region.shape
        self.before_read(tensor)
        self.num_reads += 1
        index = tuple(slice(a, b) for a, b in zip(region.start, region.stop, strict=True))
        out.copy_(self.tensors[tensor][index])

    def end(self) -> None:
        self.num_ends += 1
        self.tensors = {}


def engine_layout(rank: int) -> DestLayout:
    """What the engine's loader would do on one rank."""
    params = (
        Param("qk", (4, WIDTH), "bfloat16"),
        Param("norm", (WIDTH,), "bfloat16"),
        Param("embed", (8, WIDTH), "bfloat16"),
        Param("w13", (2, 4, WIDTH), "bfloat16"),
        Param("w2", (2, WIDTH, 4), "bfloat16", PostLoad.repack),
        Param("absorbed", (WIDTH,), "bfloat16", PostLoad.derived),
    )
    loads = [
        Load(Q, Region((3 * rank, 0), (3, WIDTH)), (0, 1), "qk", 0, (WIDTH, 1)),
        Load(K, Region((rank, 0), (1, WIDTH)), (0, 1), "qk", 3 * WIDTH, (WIDTH, 1)),
        Load(NORM, Region((0,), (WIDTH,)), (0,), "norm", 0, (1,)),
        Load(EMBED, Region((0, 0), (7, WIDTH)), (0, 1), "embed", 0, (WIDTH, 1)),
    ]
    for expert in range(2):
        offset = expert * 4 * WIDTH
        loads.append(Load(UP[expert], Region((4 * rank, 0), (4, WIDTH)), (0, 1), "w13", offset, (WIDTH, 1)))
        loads.append(Load(DOWN[expert], Region((0, 4 * rank), (WIDTH, 4)), (0, 1), "w2", offset, (4, 1)))
    return DestLayout(rank, params, tuple(loads), (Fill("embed", 7 * WIDTH, WIDTH),))


def engine_bytes(version: int, rank: int) -> dict[str, torch.Tensor]:
    """What one engine rank must hold after a commit of `version`."""
    full = checkpoint(version)
    rows = slice(4 * rank, 4 * rank + 4)
    return {
        "qk": torch.cat([full[Q][3 * rank : 3 * rank + 3], full[K][rank : rank + 1]]),
        "norm": full[NORM],
        "embed": torch.cat([full[EMBED], torch.zeros(1, WIDTH, dtype=torch.bfloat16)]),
        "w13": torch.stack([full[name][rows] for name in UP]),
        "w2": repacked(torch.stack([full[name][:, rows] for name in DOWN])),
        "absorbed": full[NORM] * 2,
    }


def repacked(tensor: torch.Tensor) -> torch.Tensor:
    """The engine's own format of w2: all bytes in reverse order."""
    return tensor.reshape(-1).flip(0).reshape(tensor.shape)


def expected_of(
    sums: Mapping[str, tuple[int, int]], *, sizes: Mapping[str, int] | None = None, has_hashes: bool = True
) -> Expected:
    """Bytes and hash sums by parameter, as a publisher says them that planned for `sizes`, or for those bytes."""
    planned = Planned.of({name: size for name, (size, _) in sums.items()} if sizes is None else sizes)
    hashes = np.array([value for _, value in sums.values()], np.uint64).view(np.int64)
    counts = np.array([size for size, _ in sums.values()], np.int64)
    return planned.write(counts, hashes if has_hashes else None)


def engine_params(rank: int) -> dict[str, torch.Tensor]:
    """Freshly allocated parameters of one rank, all zero."""
    return {p.name: torch.zeros(p.shape, dtype=torch.bfloat16) for p in engine_layout(rank).params}


class PlainEngine:
    """A ReplicaHandler over plain tensors: one Receiver a rank."""

    def __init__(self, transports: Sequence[Transport], *, landing_bytes: int = 0) -> None:
        self.params = [engine_params(rank) for rank in range(len(transports))]
        self.receivers = [
            Receiver(
                params,
                engine_layout(rank),
                transport,
                repack=lambda _name, tensor: tensor.copy_(repacked(tensor.clone())),
                recompute=lambda params=params: params["absorbed"].copy_(params["norm"] * 2),
                landing_bytes=landing_bytes,
            )
            for rank, (params, transport) in enumerate(zip(self.params, transports, strict=True))
        ]
        self.calls: list[str] = []
        self.aborted = threading.Event()
        self.abort_reasons: list[str] = []
        self.fail_on: dict[str, Exception] = {}

    def _note(self, verb: str) -> None:
        self.calls.append(verb)
        if verb in self.fail_on:
            raise self.fail_on.pop(verb)

    async def describe(self) -> list[EngineRank]:
        self._note("describe")
        return [receiver.describe() for receiver in self.receivers]

    async def pause(self, version: int, epoch: int, digest: str) -> None:
        self._note("pause")

    async def begin(self, version: int, epoch: int, digest: str) -> list[Bound]:
        self._note("begin")
        bindings = [receiver.begin(version, epoch, digest) for receiver in self.receivers]
        return [Bound(binding.session, holds=binding.holds) for binding in bindings]

    async def verify(self, version: int, epoch: int, digest: str, expected: Sequence[Expected]) -> None:
        self._note("verify")
        for receiver, mine in zip(self.receivers, expected, strict=True):
            receiver.verify(version, epoch, digest, mine)

    async def commit(self, version: int, epoch: int) -> None:
        self._note("commit")
        for receiver in self.receivers:
            receiver.commit(version, epoch)

    async def abort(self, epoch: int, reason: str) -> None:
        self._note("abort")
        for receiver in self.receivers:
            receiver.abort(epoch, reason)
        self.abort_reasons.append(reason)
        self.aborted.set()

    def wrong_params(self, version: int) -> list[str]:
        """Parameters, as rank:name, whose bytes are not those of `version`."""
        return [
            f"{rank}:{name}"
            for rank, params in enumerate(self.params)
            for name, wanted in engine_bytes(version, rank).items()
            if not torch.equal(params[name].view(torch.int16), wanted.contiguous().view(torch.int16))
        ]


class EndpointThread:
    """A ReplicaEndpoint on an event loop of its own, so that a blocking Publisher can run in the test's thread."""

    def __init__(self, handler: Any, key: bytes = KEY) -> None:
        self._thread, self.handler = LoopThread("endpoint"), handler
        self.endpoint = ReplicaEndpoint(handler, key)
        self.address = self.run(self.endpoint.start())

    def run(self, coroutine):
        """Run a coroutine on the endpoint's loop and wait for it."""
        return self._thread.run(coroutine, 60)

    def close(self) -> None:
        """Stop serving and end the loop."""
        self.run(self.endpoint.close())
        self._thread.close()


def committed(report: PublishReport) -> list[bool]:
    return [replica.committed for replica in report.replicas]
