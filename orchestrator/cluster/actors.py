# pyright: strict, reportUnknownMemberType=false
# Ray has types for a part of what it offers.
"""What runs inside the processes of a run: a Ray actor around one trainer rank, and one around one rollout worker.

Owns: nothing but the wrapping; the wrapped classes know nothing of Ray. Invariant: torch and vLLM are imported here
only when an actor starts, in its own process. `ray.method` tells type checkers what a call takes and returns.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from orchestrator.cluster import nodes
from weight_sync.gc_freeze import frozen_imports

if TYPE_CHECKING:
    from conf.schema import (
        AlgorithmConfig,
        Device,
        DType,
        ModelConfig,
        ParityConfig,
        RolloutConfig,
        SamplingConfig,
        TrainerConfig,
        WeightSyncConfig,
    )
    from rollout.types import AdapterSlotsSpec, Progress, Prompt, Rollout, RoutingShape
    from rollout.worker import RolloutWorker
    from trainer.rank import TrainerRank
    from trainer.types import Denominators, LossStats, OptimStats, Sample, Scores
    from weight_sync.layout import TensorMeta
    from weight_sync.publish.report import PublishReport
    from weight_sync.replica.recovery import Offer, Pulled


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions:
    """What every trainer rank of a run is built from (trainer.rank.TrainerRank has the meanings)."""

    model: ModelConfig
    trainer: TrainerConfig
    algorithm: AlgorithmConfig
    sampling_temperature: float
    weight_sync: WeightSyncConfig
    seed: int
    num_updates: int
    world_size: int
    rendezvous: str
    device: str
    hf_config: dict[str, Any]
    sync_key: bytes
    parity: ParityConfig
    engine_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What every rollout worker of a run is built from (rollout.worker.RolloutWorker has the meanings)."""

    folder: Path
    config: RolloutConfig
    weight_sync: WeightSyncConfig
    dtype: DType
    device: Device
    tensors: Sequence[TensorMeta]
    key: bytes
    adapters: AdapterSlotsSpec | None
    routing: RoutingShape | None
    keep_special_tokens: bool


class TrainerActor:
    """Runs inside the actor's process: holds one TrainerRank, which imports torch only there."""

    def __init__(self, name: str) -> None:
        _log_to_stderr(name)
        self._started: TrainerRank | None = None
        self._reserved: socket.socket | None = None

    @property
    def _rank(self) -> TrainerRank:
        assert self._started is not None, "start() comes first"
        return self._started

    @ray.method
    def pick_rendezvous(self, is_only_node: bool) -> str:
        """A free port of this node, where rank 0 will listen and all ranks meet.

        It stays bound until this rank has joined: importing torch takes seconds, in which the engines take dozens of
        ports. Rank 0 can listen on it all the same, because both sockets set SO_REUSEADDR and this one never listens.
        """
        host = nodes.address_of_this_node(is_only=is_only_node)
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind((host, 0))
        return f"tcp://{host}:{self._reserved.getsockname()[1]}"

    @ray.method
    def prepare(self) -> None:
        """Import what a rank needs, PyTorch above all."""
        with frozen_imports():
            import_module("trainer.rank")

    @ray.method
    def join(self, rank: int, options: TrainerOptions, is_only_node: bool) -> None:
        """Build the rank; it meets the others."""
        from trainer.rank import TrainerRank

        host = nodes.address_of_this_node(is_only=is_only_node)
        nodes.meet_over(host)
        self._started = TrainerRank(
            model=options.model,
            trainer=options.trainer,
            algorithm=options.algorithm,
            sampling_temperature=options.sampling_temperature,
            weight_sync=options.weight_sync,
            seed=options.seed,
            num_steps=options.num_updates,
            rank=rank,
            world_size=options.world_size,
            rendezvous=options.rendezvous,
            device=options.device,
            hf_config=options.hf_config,
            sync_key=options.sync_key,
            host=host,
            parity=options.parity,
            engine_ranks=options.engine_ranks,
        )
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None

    @ray.method
    def load(self) -> dict[str, Any]:
        """TrainerRank.load."""
        return self._rank.load()

    @ray.method
    def warm_up(self, lengths: list[int]) -> dict[str, float]:
        """TrainerRank.warm_up."""
        return self._rank.warm_up(lengths)

    @ray.method
    def forward_backward(self, microbatches: list[list[Sample]], denominators: Denominators) -> LossStats:
        """TrainerRank.forward_backward."""
        return self._rank.forward_backward(microbatches, denominators)

    @ray.method
    def evaluate(self, microbatches: list[list[Sample]], denominators: Denominators) -> LossStats:
        """TrainerRank.evaluate."""
        return self._rank.evaluate(microbatches, denominators)

    @ray.method
    def score(self, microbatches: list[list[Sample]], policy_version: int) -> list[list[Scores]]:
        """TrainerRank.score."""
        return self._rank.score(microbatches, policy_version)

    @ray.method
    def optimizer_step(self, ends_version: bool) -> OptimStats:
        """TrainerRank.optimizer_step."""
        return self._rank.optimizer_step(ends_version=ends_version)

    @ray.method
    def connect(self, endpoints: list[str], adapter_endpoints: list[str]) -> dict[str, Any]:
        """Delivery.connect."""
        return self._rank.delivery.connect(endpoints, None, adapter_endpoints)

    @ray.method
    def publish(self, exclude: Sequence[int], trace: Path | None) -> PublishReport:
        """Delivery.publish, of the current policy version."""
        return self._rank.delivery.publish(self._rank.policy_version, exclude=exclude, trace=trace)

    @ray.method
    def disconnect(self, replicas: Sequence[int]) -> None:
        """Delivery.disconnect."""
        self._rank.delivery.disconnect(replicas)

    @ray.method
    def reconnect(self, replica: int, endpoint: str, base_endpoint: str) -> None:
        """Delivery.reconnect."""
        self._rank.delivery.reconnect(replica, endpoint, base_endpoint)

    @ray.method
    def save_adapter(self, folder: Path) -> None:
        """TrainerRank.save_adapter."""
        self._rank.save_adapter(folder)

    @ray.method
    def save_merged(self, folder: Path) -> None:
        """TrainerRank.save_merged."""
        self._rank.save_merged(folder)

    @ray.method
    def save_state(self, folder: Path) -> None:
        """TrainerRank.save_state."""
        self._rank.save_state(folder)

    @ray.method
    def load_state(self, folder: Path) -> None:
        """TrainerRank.load_state."""
        self._rank.load_state(folder)

    @ray.method
    def shutdown(self) -> None:
        """TrainerRank.shutdown."""
        self._rank.shutdown()


class RolloutActor:
    """Runs inside the actor's process: holds one RolloutWorker. Asynchronous, so that groups overlap."""

    def __init__(self, name: str) -> None:
        _log_to_stderr(name)
        self._began_at = time.time()
        self._made: RolloutWorker | None = None

    @property
    def _worker(self) -> RolloutWorker:
        assert self._made is not None, "prepare() comes first"
        return self._made

    @ray.method
    async def start_phase(self) -> str:
        """RolloutWorker.start_phase, also before it is made."""
        return "importing" if self._made is None else self._made.start_phase

    @ray.method
    async def prepare(self, options: WorkerOptions, seed: int, is_only_node: bool) -> None:
        """Make the worker and do what needs no device."""
        from rollout.worker import RolloutWorker

        self._made = RolloutWorker(
            options.folder,
            config=options.config,
            weight_sync=options.weight_sync,
            dtype=options.dtype,
            device=options.device,
            seed=seed,
            tensors=options.tensors,
            key=options.key,
            host=nodes.address_of_this_node(is_only=is_only_node),
            adapters=options.adapters,
            routing=options.routing,
            keep_special_tokens=options.keep_special_tokens,
        )
        await self._worker.prepare()

    @ray.method
    async def start(self) -> str:
        """Start the engine; returns the address where publishers reach this replica."""
        return await self._worker.start()

    @ray.method
    def started_at(self) -> dict[str, float]:
        """How far the start has come, and when, in seconds since 1970 (RolloutWorker.started_at)."""
        return {"process_up": self._began_at, **self._worker.started_at}

    @ray.method
    def node(self) -> str:
        """Ray's id of this node."""
        return ray.get_runtime_context().get_node_id()

    @ray.method
    def processes(self) -> list[nodes.ProcessId]:
        """This process and its engine's, to be ended even when they answer no more."""
        return nodes.own_tree()

    @ray.method
    async def adapter_endpoint(self) -> str:
        """RolloutWorker.adapter_endpoint."""
        return await self._worker.adapter_endpoint()

    @ray.method
    async def generate_group(
        self, prompt: Prompt, n: int, sampling: SamplingConfig | None, version: int | None
    ) -> list[Rollout]:
        """RolloutWorker.generate_group."""
        return await self._worker.generate_group(prompt, n, sampling, version)

    @ray.method
    async def keep_version(self, version: int | None) -> bool:
        """RolloutWorker.keep_version."""
        return await self._worker.keep_version(version)

    @ray.method
    async def progress(self) -> Progress:
        """RolloutWorker.progress."""
        return await self._worker.progress()

    @ray.method
    async def score(self, token_ids: Sequence[int], version: int) -> list[float] | None:
        """RolloutWorker.score."""
        return await self._worker.score(token_ids, version)

    @ray.method
    async def offer(self) -> list[Offer]:
        """RolloutWorker.offer."""
        return await self._worker.offer()

    @ray.method
    async def pull(self, offers: Sequence[Offer]) -> Pulled:
        """RolloutWorker.pull."""
        return await self._worker.pull(offers)

    @ray.method
    async def adopt(self, version: int, epoch: int) -> None:
        """RolloutWorker.adopt."""
        await self._worker.adopt(version, epoch)

    @ray.method
    async def release(self, offers: Sequence[Offer]) -> None:
        """RolloutWorker.release."""
        await self._worker.release(offers)

    @ray.method
    async def base_wanted_at(self) -> str:
        """RolloutWorker.base_wanted_at."""
        return await self._worker.base_wanted_at()

    @ray.method
    async def stop(self) -> None:
        """RolloutWorker.stop, of one that was made."""
        if self._made is not None:
            await self._made.stop()


def _log_to_stderr(name: str) -> None:
    """Ray writes the stderr of an actor into a file of its own."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s %(levelname).1s [{name}] %(name)s: %(message)s")
