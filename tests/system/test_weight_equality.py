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

from slipstream.conf.load import load_run_config
from slipstream.conf.schema import Device, RunConfig
from slipstream.orchestrator.inputs.character_tokenizer import save_character_tokenizer

KEY = b"k" * 32
NUM_RANKS = 2


def config_of_run() -> RunConfig:
    """The quick start, with a vocabulary that the engine pads, in bfloat16."""
    changes = ["model.hf_config.vocab_size=500", "model.dtype=bfloat16", "model.init_std=0.1"]
    return load_run_config(["experiment=quickstart", *changes])


def run_rank(rank: int, rendezvous: str, pipe: Connection) -> None:
    """One trainer rank: obeys (method, arguments) until told to stop."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    from cases.rank_helpers import draw

    from slipstream.trainer.options import TrainerOptions
    from slipstream.trainer.rank import TrainerRank

    config = config_of_run()
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
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            rendezvous = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(NUM_RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=run_rank, args=(rank, rendezvous, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def call(self, method: str, *args: Any) -> Any:
        """The same call to every rank; rank 0's result."""
        for pipe in self._pipes:
            pipe.send((method, *args))
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


@pytest.fixture
def trainer() -> Iterator[TrainerProcesses]:
    """Both ranks, which load while the engine starts."""
    processes = TrainerProcesses()
    yield processes
    processes.close()


async def test_a_publish_leaves_what_vllms_loader_makes_of_the_export(
    trainer: TrainerProcesses, tmp_path: Path
) -> None:
    from slipstream.conf.architecture.families import read_config
    from slipstream.rollout.engine.vllm_engine import VllmEngine
    from slipstream.rollout.worker import RolloutWorker

    config = config_of_run()
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config.model.hf_config))
    save_character_tokenizer(folder, vocab_size=64)
    tensors = tuple(read_config(config.model.hf_config).checkpoint_tensors("bfloat16"))
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
    expected = await asyncio.to_thread(vllm_loads, tmp_path / "merged", "bfloat16")
    assert first == expected
    assert again == expected
