"""Prompts of bench/parity.py, and its trained model: Python's own source code, byte by byte."""

import argparse
import gc
import random
import sysconfig
import time
from pathlib import Path
from typing import Any

from bench.parity_shapes import SEED, Row

TEXT_BYTES = 8 << 20
WINDOW = 512
"""Bytes of one sequence in training."""


def prompts_of(row: Row, hf_config: dict[str, Any], count: int) -> list[list[int]]:
    """Random tokens; of the trained model, text that it was not trained on."""
    draw = random.Random(SEED)
    if not row.is_trained:
        vocab = hf_config["vocab_size"]
        return [[draw.randrange(vocab) for _ in range(row.prompt_tokens)] for _ in range(count)]
    held_out = real_text()[-(TEXT_BYTES // 64) :]
    starts = [draw.randrange(len(held_out) - row.prompt_tokens) for _ in range(count)]
    return [list(held_out[start : start + row.prompt_tokens]) for start in starts]


def real_text() -> bytes:
    """Python's standard library, in the order of its file names, as it ships with every Python."""
    parts, size = [], 0
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        parts.append(file.read_bytes())
        size += len(parts[-1])
        if size >= TEXT_BYTES:
            break
    return b"".join(parts)


def train_on_text(hf_config: dict[str, Any], folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Full training by the product's trainer rank, from random weights, into a checkpoint."""
    import numpy as np

    from slipstream.conf import schema
    from slipstream.trainer.options import TrainerOptions
    from slipstream.trainer.rank import TrainerRank
    from slipstream.trainer.types import Denominators, Sample

    num_steps, batch = (4, 2) if args.tiny else (100_000, 64)
    rank = TrainerRank(
        TrainerOptions(
            model=schema.ModelConfig(init=schema.Init.random, hf_config=hf_config, dtype=schema.DType.bfloat16),
            trainer=schema.TrainerConfig(
                mode=schema.TrainMode.full,
                optim=schema.OptimConfig(lr=1e-3, warmup_steps=20),
                activations=schema.Activations.keep,
            ),
            algorithm=schema.AlgorithmConfig(objective=schema.Objective.sft),
            sampling_temperature=1.0,
            weight_sync=schema.WeightSyncConfig(),
            seed=SEED,
            num_steps=num_steps,
            world_size=1,
            rendezvous="",
            device=args.device,
            hf_config=hf_config,
            sync_key=b"slipstream-bench-parity",
        )
    )
    rank.load()
    text = np.frombuffer(real_text()[: -(TEXT_BYTES // 64)], np.uint8).astype(np.int32)
    draw = np.random.default_rng(SEED)
    mask = np.arange(WINDOW) > 0
    began, losses = time.perf_counter(), []
    for _ in range(num_steps):
        starts = draw.integers(0, len(text) - WINDOW, batch)
        samples = [
            Sample(
                token_ids=text[start : start + WINDOW],
                loss_mask=mask,
                rollout_logprobs=np.zeros(WINDOW, np.float32),
                advantages=mask.astype(np.float32),
                oldest_version=rank.policy_version,
            )
            for start in starts
        ]
        count = batch * int(mask.sum())
        stats = rank.forward_backward([samples], Denominators(count, batch, rank.policy_version))
        rank.optimizer_step()
        losses.append(stats.sums["sft/nll_sum"] / count)
        if time.perf_counter() - began > args.train_s:
            break
    rank.states.save_merged(folder)
    seconds = time.perf_counter() - began
    rank.shutdown()
    gc.collect()
    return {"steps": len(losses), "seconds": seconds, "first_nll": losses[0], "last_nll": float(np.mean(losses[-10:]))}
