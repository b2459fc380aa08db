"""Rollout workers over an engine that only notes what it is asked, and the steps of a publish to them."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fakes.model_engine import BINDING, ModelEngine

from slipstream.conf.schema import Device, DType, RolloutConfig, SamplingConfig, WeightSyncConfig
from slipstream.orchestrator.inputs.character_tokenizer import save_character_tokenizer
from slipstream.rollout.engine.vllm_engine import VllmEngine
from slipstream.rollout.types import AdapterSlotsSpec, Prompt, WorkerOptions
from slipstream.rollout.worker import RolloutWorker
from slipstream.weight_sync.layout import TensorMeta
from slipstream.weight_sync.replica.messages import Bound, Expected, PublishId

PROMPT = Prompt(0, (1, 5), "a")
EXPECTED = Expected("9f", bytes(8), bytes(8))


def make(folder: Path, adapters: AdapterSlotsSpec | None = None, **more: Any) -> tuple[RolloutWorker, ModelEngine]:
    engine: Any = ModelEngine()
    save_character_tokenizer(folder, vocab_size=64)
    return worker_of(folder, adapters, make_engine=lambda *_, **__: engine, **more), engine


def worker_of(
    folder: Path,
    adapters: AdapterSlotsSpec | None = None,
    *,
    keep_special_tokens: bool = False,
    num_versions_kept: int = 0,
    make_engine: Callable[..., Any] = VllmEngine,
    **sync: Any,
) -> RolloutWorker:
    options = WorkerOptions(
        folder=folder, config=RolloutConfig(sampling=SamplingConfig(max_tokens=8)),
        weight_sync=WeightSyncConfig(**sync), dtype=DType.float32, device=Device.cpu,
        tensors=[TensorMeta("w", (2,), "float32")], key=b"k" * 16, adapters=adapters,
        keep_special_tokens=keep_special_tokens, num_versions_kept=num_versions_kept,
    )  # fmt: skip
    return RolloutWorker(options, seed=0, make_engine=make_engine)


async def begin(worker: RolloutWorker, version: int, epoch: int) -> None:
    await worker.base.endpoint.describe("test")
    begun = await worker.base.endpoint.begin(PublishId("test", version, epoch, "digest"))
    assert list(begun.bindings) == [Bound(BINDING.session)] * 2


async def commit(worker: RolloutWorker, version: int, epoch: int) -> None:
    await worker.base.endpoint.commit(PublishId("test", version, epoch, "digest"), (EXPECTED,) * 2)


async def publish(worker: RolloutWorker, version: int, epoch: int) -> None:
    await begin(worker, version, epoch)
    await asyncio.sleep(0)  # bytes arrive
    await commit(worker, version, epoch)
