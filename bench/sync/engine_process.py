"""The engine's process: a live vLLM rollout worker under load, or plain parameters.

Owns its start, the load, and the orders that a bench sends over a pipe. Does not own what is measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import tempfile
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.rollout.engine.vllm_engine import VllmEngine
    from slipstream.rollout.worker import RolloutWorker

KEY = b"slipstream-bench-weight-sync-key"
KV_CACHE_BYTES = 24 << 30
"""KV cache on a GPU: enough for the load, and small enough to leave room for a peer's allocations."""
COLOCATED_KV_CACHE_BYTES = 12 << 30
COLOCATED_MEMORY = 0.5
"""Part of a GPU that the engine may take if a trainer rank has the same GPU."""
SETTLE_S = 15.0
"""Longest wait for all requests to be decoding."""
FUSIONS = (
    (r"(.*)\.[qkv]_proj\.weight", r"\1.qkv_proj.weight"),
    (r"(.*\.experts)\.\d+\.(?:gate|up)_proj\.weight", r"\1.w13_weight"),
    (r"(.*\.experts)\.\d+\.down_proj\.weight", r"\1.w2_weight"),
    (r"(.*\.mlp)\.(?:gate|up)_proj\.weight", r"\1.gate_up_proj.weight"),
)
"""Checkpoint tensors that vLLM puts one below the other in one parameter."""


@dataclass(frozen=True)
class EngineSpec:
    """One engine. Example: EngineSpec("vllm", hf_config, "cuda", tp_size=2, expert_parallel=True, num_requests=256)."""

    kind: str
    hf_config: dict[str, Any]
    device: str
    tp_size: int = 1
    expert_parallel: bool = False
    num_requests: int = 0
    kv_cache_bytes: int = KV_CACHE_BYTES
    is_colocated: bool = False
    """A trainer rank has the same GPU."""
    delta_bytes: int = 0
    """weight_sync.delta_bytes."""

    @property
    def title(self) -> str:
        return f"{self.kind} TP={self.tp_size}" + (" EP" if self.expert_parallel else "")


def run_engine(spec: EngineSpec, pipe: Connection) -> None:
    asyncio.run(serve_plain(spec, pipe) if spec.kind == "plain" else serve_vllm(spec, pipe))


async def serve_plain(spec: EngineSpec, pipe: Connection) -> None:
    """Serve parameters in vLLM's layout behind an endpoint, without an engine."""
    import torch

    from slipstream.weight_sync.replica.endpoint import ReplicaEndpoint
    from slipstream.weight_sync.replica.receiver import Receiver
    from slipstream.weight_sync.transport.mooncake import MooncakeTransport

    layout = plain_layout(spec.hf_config)
    params = {p.name: torch.zeros(p.shape, dtype=torch.bfloat16, device=spec.device) for p in layout.params}
    synchronize = torch.cuda.synchronize if spec.device == "cuda" else None
    link = MooncakeTransport(device=spec.device)
    receiver = Receiver(params, layout, link, synchronize=synchronize, landing_bytes=spec.delta_bytes)
    endpoint = ReplicaEndpoint(PlainReplica(receiver), KEY)
    pipe.send(await endpoint.start())
    known: dict[str, Any] = {"tokens": 0, "settle": 0.0, "allocated": []}
    while (order := await asyncio.to_thread(pipe.recv))[0] != "end":
        if order[0] == "merge":
            await endpoint.close()
            receiver.close_landing()
            own = own_merge(spec, layout, params, order[1])
            receiver = Receiver(params | own.factors, own.layout, link, synchronize=synchronize, own_merge=own)
            endpoint = ReplicaEndpoint(PlainReplica(receiver), KEY)
            known["merge"] = await endpoint.start()
        pipe.send(known.get(order[0], RuntimeError("plain parameters have no loader")))
    await endpoint.close()


def own_merge(spec: EngineSpec, layout: Any, params: dict[str, Any], trainer: Any) -> Any:
    """Merges adapters into what the parameters hold, which was sent without them."""
    from slipstream.conf.architecture.families import read_config
    from slipstream.trainer.weights.factors import planned_merges
    from slipstream.weight_sync.replica.own_merge import OwnMerge

    merges = planned_merges(read_config(spec.hf_config), "bfloat16", trainer, 0)
    own = OwnMerge(layout, params, merges, on_device=True)
    held = {(load.tensor, load.region): load for load in layout.loads}

    def read(tensor: str, region: Any, out: Any) -> None:
        load = held[tensor, region]
        out.copy_(params[load.param].view(-1).as_strided(region.shape, load.stride, load.offset))

    own.read_base(read)
    return own


class PlainReplica:
    """ReplicaHandler over one Receiver; there is no engine to pause."""

    def __init__(self, receiver: Any) -> None:
        self._receiver = receiver

    async def describe(self) -> list[Any]:
        return [self._receiver.describe()]

    async def pause(self, version: int, epoch: int, digest: str) -> None:
        """See ReplicaHandler."""

    async def begin(self, version: int, epoch: int, digest: str) -> list[Any]:
        from slipstream.weight_sync.replica.messages import Bound

        binding = self._receiver.begin(version, epoch, digest)
        return [Bound(binding.session, holds=binding.holds)]

    async def verify(self, version: int, epoch: int, digest: str, expected: Any) -> None:
        self._receiver.verify(version, epoch, digest, expected[0])

    async def commit(self, version: int, epoch: int) -> None:
        self._receiver.commit(version, epoch)

    async def abort(self, epoch: int, reason: str) -> None:
        self._receiver.abort(epoch, reason)


def plain_layout(config: dict[str, Any]) -> Any:
    """The layout of vLLM's loader at tp_size=1: fused projections, stacked experts, all else as in the checkpoint."""
    from slipstream.conf.architecture.families import read_config
    from slipstream.weight_sync.layout import DestLayout, Load, Param, Region

    rows: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    loads = []
    for meta in read_config(config).checkpoint_tensors("bfloat16"):
        name = meta.name
        for pattern, fused in FUSIONS:
            name = re.sub(f"^{pattern}$", fused, name)
        first, row = rows.get(name, 0), meta.shape[1] if len(meta.shape) == 2 else 1
        stride = (row, 1) if len(meta.shape) == 2 else (1,)
        region = Region((0,) * len(meta.shape), meta.shape)
        loads.append(Load(meta.name, region, tuple(range(len(meta.shape))), name, first * row, stride))
        rows[name] = first + meta.shape[0]
        shapes[name] = (rows[name], *meta.shape[1:])
    return DestLayout(0, tuple(Param(name, shape, "bfloat16") for name, shape in shapes.items()), tuple(loads))


def engine_of(worker: RolloutWorker) -> VllmEngine:
    """The worker's engine, as more than a worker knows of it."""
    from slipstream.rollout.engine.vllm_engine import VllmEngine

    assert isinstance(worker.engine, VllmEngine)
    return worker.engine


async def serve_vllm(spec: EngineSpec, pipe: Connection) -> None:
    """Run a rollout worker, with spec.num_requests requests in flight from its first version on; orders come over the
    pipe."""
    from slipstream.conf.schema import Device
    from slipstream.rollout.engine.engine_options import engine_environment

    os.environ.update(engine_environment(Device(spec.device)))
    with tempfile.TemporaryDirectory() as folder:
        worker = build_worker(spec, Path(folder))
        address = await worker.start()
        await engine_of(worker).process.running().collective_rpc("start_measuring")
        tasks = [asyncio.create_task(keep_sampling(worker, index)) for index in range(spec.num_requests)]
        pipe.send(address)
        while (order := await asyncio.to_thread(pipe.recv))[0] != "end":
            try:
                pipe.send(await obey(worker, *order))
            except Exception as e:  # noqa: BLE001 - the bench gets any error of an order as its answer
                pipe.send(RuntimeError(f"{type(e).__name__}: {e}"))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await worker.stop()


def build_worker(spec: EngineSpec, folder: Path) -> RolloutWorker:
    """The product's rollout worker, with the bench's extension in its engine."""
    from slipstream.conf.architecture.families import read_config
    from slipstream.conf.schema import Device, DType, RolloutConfig, SamplingConfig, WeightSyncConfig
    from slipstream.orchestrator.inputs.character_tokenizer import save_character_tokenizer
    from slipstream.rollout.engine.vllm_engine import VllmEngine
    from slipstream.rollout.types import WorkerOptions
    from slipstream.rollout.worker import RolloutWorker

    (folder / "config.json").write_text(json.dumps(spec.hf_config))
    save_character_tokenizer(folder, vocab_size=64)
    is_gpu = spec.device == "cuda"
    memory: dict[str, Any] = {"kv_cache_bytes": spec.kv_cache_bytes} if is_gpu else {}
    if is_gpu and spec.is_colocated:
        memory = {"kv_cache_bytes": COLOCATED_KV_CACHE_BYTES, "gpu_memory_utilization": COLOCATED_MEMORY}
    options = WorkerOptions(
        folder=folder,
        config=RolloutConfig(
            max_model_len=2048 if is_gpu else 256, tp_size=spec.tp_size, enable_expert_parallel=spec.expert_parallel,
            sampling=SamplingConfig(max_tokens=768 if is_gpu else 32, stop_at_eos=False), **memory,
        ),
        weight_sync=WeightSyncConfig(delta_bytes=spec.delta_bytes), dtype=DType.bfloat16, device=Device(spec.device),
        tensors=read_config(spec.hf_config).checkpoint_tensors("bfloat16"), key=KEY,
    )  # fmt: skip
    worker = RolloutWorker(options, seed=0, make_engine=VllmEngine)
    engine_of(worker).process.arguments["worker_extension_cls"] = "bench.sync.engine_extension.MeasuredReceiver"
    if is_gpu:
        from vllm.config.weight_transfer import WeightTransferConfig

        engine_of(worker).process.arguments["weight_transfer_config"] = WeightTransferConfig(backend="nccl")
    return worker


async def keep_sampling(worker: RolloutWorker, index: int) -> None:
    """Sample one response after the other, of random lengths, while the worker serves."""
    from slipstream.rollout.errors import ReplicaNotServing
    from slipstream.rollout.types import Prompt

    draw, most = random.Random(index), worker._options.config.sampling.max_tokens
    prompt = Prompt(index, tuple((index * 7 + i) % 900 + 1 for i in range(128)), "")
    while True:
        try:
            sampling = replace(worker._options.config.sampling, max_tokens=draw.randint(most // 4, most))
            await worker.generate_group(prompt, 1, sampling=sampling)
        except ReplicaNotServing:
            await asyncio.sleep(0.01)


async def settle(worker: RolloutWorker, num_requests: int) -> float:
    """Wait until every present request has one more token. By then, those that a publish froze are prefilled again.

    Does not wait for requests that start meanwhile, because with many requests one always starts. Returns the seconds
    that it waited; returns at once before the first version.
    """
    began = time.monotonic()
    before = {request: len(stamps) for request, stamps in engine_of(worker)._stamps.items()}

    def is_settled() -> bool:
        now = engine_of(worker)._stamps
        late = sum(len(now[request]) <= tokens for request, tokens in before.items() if request in now)
        return not late and len(now) >= 0.9 * num_requests

    while worker.state.is_serving and not is_settled():
        if time.monotonic() > began + SETTLE_S:
            raise TimeoutError(f"{num_requests} requests were not at work within {SETTLE_S:g} s")
        await asyncio.sleep(0.01)
    return time.monotonic() - began


async def obey(worker: RolloutWorker, order: str, *args: Any) -> Any:
    """Carry out one order. A peer's update is timed from the engine's pause until it resumes, as a publish is."""
    from slipstream.conf.schema import PauseMode

    llm = engine_of(worker).process.running()
    if order == "allocated":
        return await llm.collective_rpc("allocated")
    if order == "settle":
        return await settle(worker, args[0])
    if order == "tokens":
        return worker.engine.num_generated_tokens
    if order == "nccl_init":
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        return await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=args[0]))
    if order not in ("nccl_update", "ipc_update"):
        raise ValueError(order)
    began = time.perf_counter()
    await worker.engine.pause(PauseMode.keep)
    await worker.engine.clear_cache()
    if order == "nccl_update":
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await llm.start_weight_update()
        await llm.update_weights(WeightTransferUpdateRequest(update_info=args[0]))
        await llm.finish_weight_update()
    else:
        await llm.collective_rpc("update_weights_from_ipc", args=(args[0],))
    await worker.engine.resume()
    return time.perf_counter() - began
