"""The trainer's processes of bench/weight_sync.py: the product's decoder, weight source and Publisher, rank by rank.

Owns one rank's orders: connect and publish with one set of options, write over the bare wire, send the weights as the
NCCL peer does. Does not own engines nor figures. All weights are random and keep their place in memory; A and B of
every adapter are drawn anew before each publish. bench/adapter_sync.py uses the wire and the drawing of adapters from
here.
"""

import contextlib
import gc
import importlib
import statistics
import time
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.sync.engine_process import KEY

MIB = 1 << 20
POOL_BYTES = 1 << 30
NCCL_MODULE = "vllm.distributed.weight_transfer.nccl_engine"
"""Its module in vLLM 0.25.1."""


@dataclass(frozen=True)
class TrainerSpec:
    """One rank of a trainer. Example: TrainerSpec(hf_config, "cuda", rank=1, world_size=2, rendezvous="file:///x")."""

    hf_config: dict[str, Any]
    device: str
    rank: int
    world_size: int
    rendezvous: str
    lora_rank: int
    keeps_last: bool = False
    """Whether rows send changes."""
    merges: bool = False
    """Whether a row sends factors alone."""


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    watermark_bytes: int = 1 << 30
    warm_up: int = 2
    publishes: int = 10
    is_pair: bool = False
    """Also make as many publishes without hashes, alternating: on, off, off, on, on, off, ..."""
    sends: str = "merged"
    """Merged weights, the "base" without adapters, or "factors" alone, to engines that merge."""
    share: float | None = None
    """Change this share of all elements before every publish; None: draw all adapters anew."""
    delta_bytes: int = 0
    """weight_sync.delta_bytes."""
    chooses: bool = False
    """Send everything where that was quicker lately, as a run does; else changes whatever they cost."""
    trace: Path | None = None
    """File for the timeline of one more publish, the last one."""

    def turns(self) -> list[bool]:
        """Per publish after the warm-up, whether it has hashes."""
        return [index % 4 in (0, 3) for index in range(2 * self.publishes)] if self.is_pair else [True] * self.publishes


def run_rank(spec: TrainerSpec, pipe: Connection) -> None:
    """Carry out orders until told to end. Every answer is (error, result)."""
    rank = _Rank(spec)
    pipe.send((None, None))
    while (order := pipe.recv())[0] != "end":
        try:
            pipe.send((None, getattr(rank, order[0])(*order[1:])))
        except Exception as e:  # noqa: BLE001 - the bench gets any error of an order as its answer
            pipe.send((f"{type(e).__name__}: {e}", None))
    rank.control.leave()


def wait(device: Any) -> None:
    import torch

    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def draw_adapters(adapters: list[Any]) -> None:
    """Draw every A and B anew, as if the policy had changed."""
    import torch

    with torch.no_grad():
        for values in adapters:
            values.normal_(0.0, 0.02)


def perturb(factors: list[Any], scale: float) -> None:
    """Move every B by noise, as a step does."""
    import torch

    with torch.no_grad():
        for values in factors:
            values.add_(torch.randn_like(values), alpha=scale)


def measure_wire(transport: Any, endpoint: str, repeats: int, *, device: Any, rank: int = 0) -> dict[str, Any]:
    """GB/s of Mooncake's own synchronous write into an engine rank's largest parameter, by size."""
    import torch

    from slipstream.weight_sync.replica.clients import ReplicaClients
    from slipstream.weight_sync.replica.messages import ReplicaVerbs

    clients = ReplicaClients([endpoint], KEY)
    reply = clients.call(ReplicaVerbs.describe, {0: (clients.publisher,)}, {0: 60.0})[0]
    clients.close()
    if isinstance(reply, Exception):
        raise reply
    item = reply.ranks[rank % len(reply.ranks)]
    largest = max(item.layout.params, key=lambda param: param.num_bytes)
    source = torch.zeros(largest.num_bytes, dtype=torch.uint8, device=device)
    transport.register([source])
    figures: dict[str, float] = {}
    for size in sorted({min(size, largest.num_bytes) for size in (16 * MIB, 256 * MIB, 1024 * MIB)}):
        seconds = []
        for _ in range(repeats + 2):
            began = time.perf_counter()
            code = transport._engine.transfer_sync_write(
                item.binding.session, source.data_ptr(), item.binding.addresses[largest.name], size
            )
            seconds.append(time.perf_counter() - began)
            if code != 0:
                raise RuntimeError(f"the bare write failed with code {code}")
        figures[str(size)] = size / statistics.median(seconds[2:]) / 1e9
    return {"link": transport.link, "gb_per_s_by_bytes": figures, "gb_per_s": max(figures.values())}


def trainer_config(spec: TrainerSpec) -> Any:
    from slipstream.conf.schema import LoraConfig, TrainerConfig

    lora = LoraConfig(rank=spec.lora_rank, alpha=2.0 * spec.lora_rank)
    return TrainerConfig(num_ranks=spec.world_size, ep_size=spec.world_size, lora=lora)


class _Rank:
    def __init__(self, spec: TrainerSpec) -> None:
        import torch

        from slipstream.conf.architecture.families import read_config
        from slipstream.trainer.delivery.merged_source import TrainerWeightSource
        from slipstream.trainer.model.build_decoder import build_decoder
        from slipstream.trainer.parallel import ParallelLayout, local_part
        from slipstream.trainer.process_group import ControlGroup
        from slipstream.trainer.weights.factors import merges_of

        torch.set_num_threads(1)
        self.spec = spec
        self.device = torch.device(spec.device, 0) if spec.device == "cuda" else torch.device("cpu")
        self.control = ControlGroup(spec.rank, spec.world_size, spec.rendezvous, self.device)
        self.decoder = build_decoder(
            read_config(spec.hf_config),
            dtype=torch.bfloat16,
            device=self.device,
            trainer=trainer_config(spec),
            layout=ParallelLayout.create(spec.world_size, spec.world_size, spec.rank, self.device),
            rounding_seed=0,
        )
        torch.manual_seed(spec.rank)
        with torch.no_grad():
            for parameter in self.decoder.parameters():
                local = local_part(parameter)[0]
                if parameter.dim() == 1:  # every rank has the same whole one
                    local.fill_(1.0)
                else:
                    local.normal_(0.0, 0.02)
        self.adapters = [local_part(p)[0] for name, p in self.decoder.named_parameters() if "lora_" in name]
        self.b_factors = [local_part(p)[0] for name, p in self.decoder.named_parameters() if "lora_B" in name]
        self.sources = {"merged": TrainerWeightSource(self.decoder, rank=spec.rank, keeps_last=spec.keeps_last)}
        if spec.merges:
            merges = merges_of(self.decoder)
            self.sources["factors"] = TrainerWeightSource(self.decoder, rank=spec.rank, merges=merges)
            self.sources["base"] = TrainerWeightSource(self.decoder, rank=spec.rank, is_merged=False)
            self.frozen = TrainerWeightSource(self.decoder, rank=spec.rank, is_merged=False, merges=merges)
        self.version = 0
        self.scale: float | None = None
        """The size of the noise by which B moves before a publish; None: adapters are drawn anew."""
        self.sender: Any = None
        self.publisher: Any = None
        self.chooses = False
        self._row = contextlib.ExitStack()
        self._loads: list[Any] = []

    def link(self) -> Any:
        """A new transport for every row: memory that one row leaves registered would not be counted in the next."""
        from slipstream.weight_sync.transport.mooncake import MooncakeTransport

        return contextlib.closing(MooncakeTransport(device=self.spec.device))

    def settle_memory(self) -> None:
        """Free what the allocator keeps, before a baseline is measured."""
        import torch

        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            wait(self.device)

    def open_row(self, row: Row, endpoint: str) -> dict[str, Any]:
        """Connect with one set of options."""
        from slipstream.conf.schema import RemoteMerge, WeightSyncConfig
        from slipstream.weight_sync.gc_freeze import freeze_heap
        from slipstream.weight_sync.publish.publisher import Publisher

        transport = self._row.enter_context(self.link())
        self.publisher = Publisher(
            self.sources[row.sends],
            transport,
            rank=self.spec.rank,
            world_size=self.spec.world_size,
            group=self.control.group,
            config=WeightSyncConfig(
                watermark_bytes=row.watermark_bytes,
                delta_bytes=row.delta_bytes,
                remote_merge=RemoteMerge.gpu if row.sends == "factors" else RemoteMerge.none,
            ),
            key=KEY,
            device=self.device,
            base=self.frozen if row.sends == "factors" else None,
        )
        self._row.callback(self.publisher.close)
        began = time.perf_counter()
        summary = self.publisher.connect([endpoint])
        freeze_heap()
        self._loads = self.publisher._pipeline._slots.loads
        self.scale = None if row.share is None else self._scale_for(row.share)
        self.chooses = row.chooses
        return {"connect_s": time.perf_counter() - began, "num_tasks": summary.num_tasks, "num_loads": len(self._loads)}

    def publish(self, verify_hashes: bool, trace: Path | None) -> dict[str, Any]:
        """Change the policy, then publish once, with or without hashes; all else stays the same."""
        from slipstream.weight_sync.publish.bases import Costs

        publisher = self.publisher
        if not self.chooses:
            publisher._bases.costs = Costs(self.spec.world_size)
        type(publisher._config).verify_hashes = verify_hashes
        publisher._pipeline._slots.loads = (
            self._loads if verify_hashes else [replace(load, hashes=()) for load in self._loads]
        )
        if self.scale is None:
            draw_adapters(self.adapters)
        else:
            perturb(self.b_factors, self.scale)
        wait(self.device)
        began = time.monotonic()
        report = publisher.publish(self.version, trace=trace)
        self.version += 1
        if report.num_committed != 1:
            raise RuntimeError(report.replicas[0].error)
        changed = publisher._source.changed_fraction()
        return {"began": began, "verify_hashes": verify_hashes, **asdict(report), "changed_fraction": changed}

    def _scale_for(self, share: float) -> float:
        """The noise on B that changes this share of all elements."""
        source, scale = self.publisher._source, 1e-5
        draw_adapters(self.adapters)
        for _ in range(4):
            for moves in (False, True):
                if moves:
                    perturb(self.b_factors, scale)
                source.begin(self.version)
                source.end()
                self.version += 1
            scale *= share / max(source.changed_fraction(), share / 100)
        return scale

    def close_row(self) -> dict[str, float]:
        """Time packing and hashing alone, then close the publisher and its link."""
        try:
            return self._parts(self.publisher) if self.spec.world_size == 1 else {}
        finally:
            self._row.close()

    def _parts(self, publisher: Any) -> dict[str, float]:
        """Seconds of packing alone, of hashing alone, and of packing with marks of changes and of packing these: the
        host's, and until the device is done. (The last one's marks are those of the last load.)"""
        import torch

        pipeline, slots = publisher._pipeline, publisher._pipeline._slots
        works: dict[str, Any] = {
            "pack": lambda load: load.fills[0](),
            "hash": lambda load: [hashes.add_to(load.sums) for hashes in load.hashes[:1]],
        }
        if slots.changes is not None and publisher._bases.has_kept:
            works["mark"] = lambda load: slots.changes.fill(0, load.number)
            works["streams"] = lambda load: slots.changes.pack(0, load.number)
        figures: dict[str, float] = {}
        pipeline._source.begin(self.version)
        try:
            for name, work in works.items():
                for _ in range(2):
                    wait(self.device)
                    began = time.perf_counter()
                    with torch.no_grad():
                        for load in slots.loads:
                            work(load)
                    figures[f"{name}_host_s"] = time.perf_counter() - began
                    wait(self.device)
                    figures[f"{name}_s"] = time.perf_counter() - began
        finally:
            pipeline._source.end()
        return figures

    def wire(self, endpoint: str, repeats: int, dest_rank: int) -> dict[str, Any]:
        """Measure the bare link from this rank to one engine rank."""
        with self.link() as transport:
            return measure_wire(transport, endpoint, repeats, device=self.device, rank=dest_rank)

    def nccl_init(self, info: dict[str, Any]) -> None:
        """Meet the engine's ranks as vLLM's trainer side does."""
        nccl: Any = importlib.import_module(NCCL_MODULE)
        self.sender = nccl.NCCLWeightTransferEngine.trainer_init(info)

    def nccl_send(self, names: list[str], shapes: list[list[int]]) -> None:
        """Send every checkpoint tensor, packed. They are views of one pool of random bytes, so none is gathered or
        merged.
        """
        import torch

        nccl: Any = importlib.import_module(NCCL_MODULE)
        pool = torch.empty(POOL_BYTES // 2, dtype=torch.bfloat16, device=self.device).normal_(0.0, 0.02)

        def tensors() -> Any:
            for name, shape in zip(names, shapes, strict=True):
                num_elements = 1
                for size in shape:
                    num_elements *= size
                yield name, pool[:num_elements].view(shape)

        nccl.NCCLWeightTransferEngine.trainer_send_weights(
            tensors(), nccl.NCCLTrainerSendWeightsArgs(group=self.sender, packed=True)
        )
        wait(self.device)
