"""One real rollout worker fed by a real publisher, and the checkpoints that it serves; transformers is the oracle."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fakes.checkpoints import CheckpointSource
from fakes.readable_engine import ReadableEngine
from slipstream.conf.schema import Device, DType, RolloutConfig, WeightSyncConfig
from slipstream.orchestrator.inputs.character_tokenizer import save_character_tokenizer
from slipstream.rollout.types import Prompt, Rollout, WorkerOptions
from slipstream.rollout.worker import RolloutWorker
from slipstream.weight_sync.publish.publisher import Publisher
from slipstream.weight_sync.publish.report import PublishReport
from slipstream.weight_sync.source import WeightSource
from slipstream.weight_sync.transport.mooncake import MooncakeTransport

EOS = 2
MAX_LOGPROB_ERROR = 2e-5
"""float32 on both sides, through two layers and a softmax: 2.4e-6 was the largest seen."""


class Checkpoints:
    """A tiny Qwen3-MoE with one set of random weights per version; transformers is the oracle.

    Args:
        changes: Of its config.
    """

    def __init__(self, folder: Path, **changes: Any) -> None:
        from transformers import Qwen3MoeConfig

        self.folder = folder
        config_class: Any = Qwen3MoeConfig  # it takes more names than its dataclass declares
        self.config = config_class(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=32, moe_intermediate_size=64, norm_topk_prob=True, bos_token_id=1,
            rope_theta=10000.0, tie_word_embeddings=False, initializer_range=0.1, dtype="float32",
            **{"vocab_size": 64, "eos_token_id": EOS, "max_position_embeddings": 1024}
            | {"num_experts": 8, "num_experts_per_tok": 2}
            | changes,
        )  # fmt: skip
        self.config.architectures = ["Qwen3MoeForCausalLM"]
        self._tensors: dict[int, dict[str, torch.Tensor]] = {}
        self._models: dict[int, Any] = {}

    def model(self, version: int) -> Any:
        """The policy of a version, in float32."""
        from transformers import Qwen3MoeForCausalLM

        if version not in self._models:
            torch.manual_seed(100 + version)
            self._models[version] = Qwen3MoeForCausalLM(self.config).eval()
        return self._models[version]

    def saved(self, version: int) -> Path:
        """Its checkpoint folder, as transformers writes it."""
        folder = self.folder / f"v{version}"
        if not folder.exists():
            self.model(version).save_pretrained(folder)
        return folder

    def tensors(self, version: int) -> dict[str, torch.Tensor]:
        """Its checkpoint tensors, by Hugging Face name."""
        from safetensors.torch import load_file

        if version not in self._tensors:
            self._tensors[version] = load_file(self.saved(version) / "model.safetensors")
        return self._tensors[version]

    def logprobs(self, version: int, prompt: Prompt, rollout: Rollout) -> torch.Tensor:
        """Log-probability of each response token under a version, given everything before it."""
        ids = torch.tensor([[*prompt.token_ids, *rollout.token_ids]])
        with torch.no_grad():
            logits = self.model(version)(ids).logits[0].float()
        num_prompt = len(prompt.token_ids)
        scores = torch.log_softmax(logits[num_prompt - 1 : -1], dim=-1)
        return scores.gather(1, ids[0, num_prompt:, None])[:, 0]


@dataclass(kw_only=True)
class Served:
    """A worker, and the publisher of a trainer of one rank that feeds it."""

    checkpoints: Checkpoints
    source: CheckpointSource
    worker: RolloutWorker
    publisher: Publisher
    version: int = -1

    async def publish(self, version: int) -> PublishReport:
        """Publish the weights of `version`."""
        self.version = version
        self.source.tensors = self.checkpoints.tensors(version)
        return await asyncio.to_thread(self.publisher.publish, version)


@contextlib.asynccontextmanager
async def fed_worker(
    options: WorkerOptions, source: WeightSource, *, seed: int = 0, base: WeightSource | None = None
) -> AsyncIterator[tuple[RolloutWorker, Publisher]]:
    """A worker that has started, and the publisher of a trainer of one rank, which has met it. Nothing is published."""
    sync, device = options.weight_sync, options.device.value
    worker = RolloutWorker(options, seed=seed, make_engine=ReadableEngine)
    transport = MooncakeTransport(sync.transport, device=device, timeout_s=sync.timeout_s)
    publisher = Publisher(
        source, transport, rank=0, world_size=1, group=None, config=sync, key=options.key, device=device, base=base
    )
    try:
        await asyncio.to_thread(publisher.connect, [await worker.start()])
        yield worker, publisher
    finally:
        publisher.close()
        await worker.stop()
        transport.close()


@contextlib.asynccontextmanager
async def one_worker(folder: Path, checkpoints: Checkpoints, config: RolloutConfig) -> AsyncIterator[Served]:
    """A worker of such checkpoints, on a CPU, and its publisher. Nothing is published."""
    model_folder = folder / "model"
    model_folder.mkdir()
    (model_folder / "config.json").write_text(json.dumps(checkpoints.config.to_dict()))
    save_character_tokenizer(model_folder, vocab_size=checkpoints.config.vocab_size)
    source = CheckpointSource(checkpoints.tensors(0))
    options = WorkerOptions(
        folder=model_folder, config=config, weight_sync=WeightSyncConfig(watermark_bytes=1 << 20, timeout_s=30.0),
        dtype=DType.float32, device=Device.cpu, tensors=source.layout().tensors, key=b"k" * 32,
    )  # fmt: skip
    async with fed_worker(options, source, seed=7) as (worker, publisher):
        yield Served(checkpoints=checkpoints, source=source, worker=worker, publisher=publisher)
