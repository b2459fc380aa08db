"""After a publish every engine parameter holds, byte for byte, what vLLM's own loader makes of the exported checkpoint.

Two trainer ranks (FSDP2, experts split over both) with non-zero adapters publish to a real engine over Mooncake and
ZMQ, before and after all engine parameters were zeroed; the oracle is a second engine that loads `save_merged`'s folder
by itself. The vocabulary is 500 of 512, so that padding rows count too.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from fakes.vllm_oracle import vllm_loads

from conf.load import load_run_config
from conf.schema import Device, RunConfig
from orchestrator.inputs.character_tokenizer import save_character_tokenizer

KEY = b"k" * 32
NUM_RANKS = 2


def config_of(model: str) -> RunConfig:
    """The quick start, with a vocabulary that the engine pads, in bfloat16."""
    ep_size = NUM_RANKS if model == "tiny_qwen3_moe" else 1
    changes = ["model.hf_config.vocab_size=500", "model.dtype=bfloat16", "model.init_std=0.1"]
    return load_run_config(["experiment=quickstart", f"model={model}", f"trainer.ep_size={ep_size}", *changes])


def run_ranks(rank: int, pipe: Connection) -> None:
    """A process that is a trainer rank of one model after the other."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    while (job := pipe.recv()) is not None:
        model, rendezvous = job
        run_rank(rank, model, rendezvous, pipe)


def run_rank(rank: int, model: str, rendezvous: str, pipe: Connection) -> None:
    """One trainer rank: obeys (method, arguments) until told to stop."""
    from cases.rank_helpers import draw

    from trainer.options import TrainerOptions
    from trainer.rank import TrainerRank

    config = config_of(model)
    trainer = TrainerRank(
        TrainerOptions(
            model=config.model,
            trainer=config.trainer,
            algorithm=config.algorithm,
            sampling_temperature=1.0,
            weight_sync=config.weight_sync,
            seed=3,
            num_steps=4,
            world_size=NUM_RANKS,
            rendezvous=rendezvous,
            device="cpu",
            hf_config=config.model.hf_config,
            sync_key=KEY,
        ),
        rank=rank,
    )
    trainer.load()
    draw(trainer, 11 + rank, std=0.05)  # adapters start at B = 0, which would merge to nothing
    while (call := pipe.recv()) is not None:
        match call:
            case "connect", endpoints:
                trainer.delivery.connect(endpoints)
                pipe.send(None)
            case ("publish",):
                report = trainer.delivery.publish(trainer.policy_version)
                pipe.send([replica.error for replica in report.replicas])
            case "save_merged", folder:
                trainer.save_merged(folder)
                pipe.send(None)
    trainer.shutdown()


class TrainerProcesses:
    """Both ranks; a call runs on both at once."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(NUM_RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=run_ranks, args=(rank, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def tell(self, message: Any) -> None:
        """The same to every rank."""
        for pipe in self._pipes:
            pipe.send(message)

    def begin(self, model: str) -> None:
        """Load a model on ranks that know nothing of earlier ones."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.tell((model, f"tcp://127.0.0.1:{probe.getsockname()[1]}"))

    def call(self, method: str, *args: Any) -> Any:
        """The same call to every rank; rank 0's result."""
        self.tell((method, *args))
        replies = []
        for pipe in self._pipes:
            assert pipe.poll(120), f"{method} did not return within 120 s"
            replies.append(pipe.recv())
        return replies[0]

    def close(self) -> None:
        """End both processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process.is_alive():
                pipe.send(None)
            process.join(120)
            process.kill()


@pytest.fixture(scope="module")
def trainer() -> Iterator[TrainerProcesses]:
    """The processes, which import the trainer once for all models."""
    processes = TrainerProcesses()
    yield processes
    processes.close()


@pytest.mark.parametrize("model", ["tiny_qwen3_moe", "tiny_qwen3"])
async def test_a_publish_leaves_what_vllms_loader_makes_of_the_export(
    trainer: TrainerProcesses, model: str, tmp_path: Path
) -> None:
    from conf.architecture.families import read_config
    from rollout.engine.vllm_engine import VllmEngine
    from rollout.worker import RolloutWorker

    config = config_of(model)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config.model.hf_config))
    save_character_tokenizer(folder, vocab_size=64)
    tensors = tuple(read_config(config.model.hf_config).checkpoint_tensors("bfloat16"))
    trainer.begin(model)
    worker = RolloutWorker(
        folder, config=config.rollout, weight_sync=config.weight_sync, dtype=config.model.dtype, device=Device.cpu,
        seed=1, tensors=tensors, key=KEY,
        make_engine=VllmEngine,
    )  # fmt: skip
    try:
        address = await worker.start()
        await asyncio.to_thread(trainer.call, "connect", [address])
        assert await asyncio.to_thread(trainer.call, "publish") == [None]
        (first,) = await worker.engine.call_ranks("slipstream_read_params")
        await worker.engine.call_ranks("slipstream_zero_params")
        (zeroed,) = await worker.engine.call_ranks("slipstream_read_params")
        assert not set(zeroed.items()) & set(first.items()), "zeroing left a parameter as it was"
        assert await asyncio.to_thread(trainer.call, "publish") == [None]
        (again,) = await worker.engine.call_ranks("slipstream_read_params")
        await asyncio.to_thread(trainer.call, "save_merged", tmp_path / "merged")
    finally:
        await worker.stop()
        trainer.tell(None)
    expected = await asyncio.to_thread(vllm_loads, tmp_path / "merged", "bfloat16")
    assert first == expected
    assert again == expected
