"""The engine's process of bench/adapter_sync.py: one rollout worker in adapter mode, its requests, their tokens' times.

Owns: the requests that keep the worker busy, flips without a publish, and the figures of a phase. bench/adapter_sync.py
controls it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import os
import random
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.rollout.adapters.slot_leases import SlotTable
    from slipstream.rollout.types import WorkerOptions
    from slipstream.rollout.worker import RolloutWorker

from bench.sync.engine_process import engine_of
from bench.sync.trainer_process import KEY

WATCH_S = 0.005
"""How often the delay of the worker's event loop is measured."""
FIRST_FLIP = 1_000_000
"""Versions of flips. No publish has them, so no prefix block is shared."""
SETTLE_S = 0.02
"""How often to check which versions requests read."""


def slots_of(config: dict[str, Any], args: argparse.Namespace) -> Any:
    """The engine's adapter slots."""
    from slipstream.conf.architecture.families import read_config
    from slipstream.conf.schema import LoraConfig
    from slipstream.rollout.types import AdapterSlotsSpec
    from slipstream.trainer.weights.adapter_names import adapter_tensors, target_modules

    tensors = read_config(config).checkpoint_tensors("bfloat16")
    lora = LoraConfig(rank=args.rank, alpha=2.0 * args.rank)
    return AdapterSlotsSpec(
        args.slots, lora.slot_rank, tuple(target_modules(tensors, lora)), tuple(adapter_tensors(tensors, lora))
    )


def capture_sizes(num_requests: int) -> list[int]:
    """Batch sizes with a CUDA graph, in tokens: every 8th near the number of requests, which decode; every 32nd up to
    twice as many, for batches with prefills; a few smaller ones, for the time in which requests begin. As in vLLM's own
    list, larger batches have no graph."""
    few = [1, *(num_requests * quarter // 4 for quarter in (1, 2, 3))]
    decodes = range(num_requests * 7 // 8, num_requests, 8)
    return sorted({*few, *decodes, *range(num_requests, 2 * num_requests + 1, 32)} - {0})


class Load:
    """Requests in flight, and the time of each of their tokens."""

    def __init__(self, worker: RolloutWorker, args: argparse.Namespace) -> None:
        self._worker = worker
        self._args = args
        self._tasks: list[asyncio.Task[None]] = []
        self._last: dict[str, float] = {}
        self._gaps: list[float] = []
        self._versions: set[int] = set()
        self._num_before, self._began = 0, 0.0
        self._flipping: asyncio.Task[None] | None = None
        self._late, self._collected, self._collection_began = [0.0], [0.0], 0.0
        self._flips = itertools.count(FIRST_FLIP)
        client: Any = engine_of(worker).process.running().engine_core
        inner = client.get_output_async

        async def timed() -> Any:
            outputs = await inner()
            now = time.monotonic()
            for output in outputs.outputs:
                if output.new_token_ids:
                    last = self._last.get(output.request_id)
                    if last is not None:
                        self._gaps.append(now - last)
                    self._last[output.request_id] = now
                if output.finish_reason is not None:
                    self._last.pop(output.request_id, None)
            return outputs

        client.get_output_async = timed
        self._watching = asyncio.create_task(self._watch())
        gc.callbacks.append(self._note_collection)

    async def start(self, has_adapter: bool) -> None:
        """Start requests of random lengths, each followed by another. Returns when all are in flight."""
        await self.stop()
        before = self._worker.engine.num_generated_tokens
        self._tasks = [asyncio.create_task(self._keep_sampling(i, has_adapter)) for i in range(self._args.requests)]
        while self._worker.engine.num_generated_tokens - before < 2 * self._args.requests * self._args.max_tokens:
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks, self._last = [], {}

    def _table(self) -> SlotTable:
        assert self._worker.adapter_replica is not None, "the worker is in adapter mode"
        return self._worker.adapter_replica._table

    async def close(self) -> None:
        """End the requests and the measuring of delays."""
        await self.stop()
        self._watching.cancel()
        gc.callbacks.remove(self._note_collection)

    async def settle(self) -> None:
        """Return when all requests that began under older versions have ended; with flips, all present requests."""
        table = self._table()
        others = set(table.num_readers)
        if self._flipping is None and table.newest is not None:
            others.discard(table.newest.version)
        while others & set(table.num_readers):
            await asyncio.sleep(SETTLE_S)

    def begin(self, flip_every_s: float | None) -> None:
        """Begin a phase, with flips or (None) without."""
        if flip_every_s is not None:
            self._flipping = asyncio.create_task(self._flip(flip_every_s))
        self._gaps, self._versions, self._late, self._collected = [], set(), [0.0], [0.0]
        self._num_before, self._began = self._worker.engine.num_generated_tokens, time.monotonic()

    def end(self) -> dict[str, Any]:
        """End the phase. Returns its figures."""
        if self._flipping is not None:
            self._flipping.cancel()
            self._flipping = None
        seconds = time.monotonic() - self._began
        num_tokens = self._worker.engine.num_generated_tokens - self._num_before
        gaps, late = sorted(self._gaps), sorted(self._late)
        at = {f"itl_p{p}_ms": 1000 * gaps[min(len(gaps) - 1, len(gaps) * p // 100)] for p in (50, 99)} if gaps else {}
        failed = [str(task.exception()) for task in self._tasks if task.done() and not task.cancelled()]
        return {
            "seconds": seconds,
            "num_tokens": num_tokens,
            "tokens_per_s": num_tokens / seconds,
            **at,
            "itl_max_ms": 1000 * gaps[-1] if gaps else None,
            "loop_late_p99_ms": 1000 * late[len(late) * 99 // 100],
            "loop_late_max_ms": 1000 * late[-1],
            "collection_max_ms": 1000 * max(self._collected),
            "versions": sorted(self._versions),
            "failed": failed,
        }

    async def _watch(self) -> None:
        """Measure the delay of the worker's event loop, which delays every message of a publish."""
        while True:
            due = time.monotonic() + WATCH_S
            await asyncio.sleep(WATCH_S)
            self._late.append(time.monotonic() - due)

    def _note_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collection_began = time.monotonic()
        else:
            self._collected.append(time.monotonic() - self._collection_began)

    async def _flip(self, every_s: float) -> None:
        """Flip slots as a publish does, but send no bytes."""
        table = self._table()
        while True:
            await asyncio.sleep(every_s)
            slot = table.free()
            if slot is not None:
                table.write(slot)
                table.commit(slot, next(self._flips))

    async def _keep_sampling(self, index: int, has_adapter: bool) -> None:
        from slipstream.conf.schema import SamplingConfig
        from slipstream.rollout.types import Prompt

        draw = random.Random(index)
        most = self._args.max_tokens
        while True:
            tokens = tuple(draw.randrange(1, self._args.vocab) for _ in range(self._args.prompt_tokens))
            sampling = SamplingConfig(max_tokens=draw.randint(most // 2, most), stop_at_eos=False)
            if has_adapter:
                (rollout,) = await self._worker.generate_group(Prompt(index, tokens, ""), 1, sampling=sampling)
                self._versions |= set(rollout.policy_versions)
            else:
                await self._worker.engine.generate_group(tokens, 1, sampling)


def run_engine(config: dict[str, Any], device: str, args: argparse.Namespace, pipe: Connection) -> None:
    asyncio.run(serve(config, device, args, pipe))


async def serve(config: dict[str, Any], device: str, args: argparse.Namespace, pipe: Connection) -> None:
    """Orders: ("start", has_adapter), ("begin", seconds from flip to flip or None), ("settle",), ("end",),
    ("stop",)."""
    from slipstream.conf.architecture.families import read_config
    from slipstream.conf.schema import (
        Device,
        DType,
        PauseMode,
        RolloutConfig,
        SamplingConfig,
        SyncMode,
        WeightSyncConfig,
    )
    from slipstream.orchestrator.inputs.character_tokenizer import save_character_tokenizer
    from slipstream.rollout.engine.engine_options import engine_environment
    from slipstream.rollout.engine.vllm_engine import VllmEngine
    from slipstream.rollout.worker import RolloutWorker

    os.environ.update(engine_environment(Device(device)))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        save_character_tokenizer(Path(folder), vocab_size=64)
        options = WorkerOptions(
            folder=Path(folder),
            config=RolloutConfig(max_model_len=2048, sampling=SamplingConfig(max_tokens=1024, stop_at_eos=False)),
            weight_sync=WeightSyncConfig(mode=SyncMode.adapter, pause_mode=PauseMode(args.pause_mode)),
            dtype=DType.bfloat16, device=Device(device), tensors=read_config(config).checkpoint_tensors("bfloat16"),
            key=KEY, adapters=slots_of(config, args),
        )  # fmt: skip
        worker = RolloutWorker(options, seed=0, make_engine=VllmEngine)
        if device == "cuda":
            engine_of(worker).process.arguments["compilation_config"] = {
                "cudagraph_capture_sizes": capture_sizes(args.requests)
            }
        began = time.monotonic()
        address = await worker.start()
        compilation = engine_of(worker).process.running().vllm_config.compilation_config
        started = {
            "engine_start_s": time.monotonic() - began,
            "cudagraph_mode": str(compilation.cudagraph_mode),
            "cudagraph_capture_sizes": compilation.cudagraph_capture_sizes,
        }
        pipe.send((address, await worker.adapter_endpoint(), started))
        load = Load(worker, args)
        while (call := await asyncio.to_thread(pipe.recv))[0] != "stop":
            if call[0] == "start":
                await load.start(call[1])
                pipe.send(None)
            elif call[0] == "begin":
                load.begin(call[1])
                pipe.send(None)
            elif call[0] == "settle":
                await load.settle()
                pipe.send(None)
            else:
                pipe.send(load.end())
        await load.close()
        await worker.stop()
        pipe.send(None)
