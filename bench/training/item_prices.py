"""What single roundings cost the trainer on shapes and lengths of which bench/numerics.py samples nothing.

Each shape of bench/parity_shapes.py is loaded once, with random weights and adapters. Then the items change places,
some rounds long: the attention's values by vLLM's kernel or the trainer's own (attention), the dense
activation rounded once or each time (dense_activation). A round is the median of some steps without
the optimizer; the layouts are one long sequence and many short ones.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.parity_shapes import ROWS

SHAPES = ("qwen3-30b-a3b-12", "qwen3-8b-8", "gpt-oss-20b-6", "glm-4.5-air-4", "deepseek-v3-3")
LAYOUTS = {"1 x 16384": (16384,), "64 x 256": (256,) * 64}
ROUNDS = 3
TINY_LAYOUTS = {"1 x 64": (64,), "4 x 16": (16,) * 4}


class Subject:
    """The product's TrainerRank with the model of a row, as in a run."""

    def __init__(self, shape: str, args: argparse.Namespace) -> None:
        from slipstream.conf import schema
        from slipstream.trainer.options import TrainerOptions
        from slipstream.trainer.rank import TrainerRank

        bfloat16 = schema.DType.bfloat16
        self.rank = TrainerRank(
            TrainerOptions(
                model=schema.ModelConfig(
                    init=schema.Init.random, hf_config=ROWS[shape].config(args.tiny), init_std=0.02, dtype=bfloat16
                ),
                trainer=schema.TrainerConfig(
                    lora=schema.LoraConfig(rank=args.rank, alpha=2.0 * args.rank),
                    numerics=schema.NumericsByPlace(own=schema.Roundings(attention=schema.AttentionValues.own)),
                    max_microbatch_tokens=16384,
                ),
                algorithm=schema.AlgorithmConfig(objective=schema.Objective.sft),
                sampling_temperature=1.0,
                weight_sync=schema.WeightSyncConfig(),
                seed=0,
                num_steps=1000,
                world_size=1,
                rendezvous="",
                device=args.device,
                hf_config=ROWS[shape].config(args.tiny),
                sync_key=b"slipstream-bench-numerics",
            )
        )
        self.rank.load()
        self.vocab = ROWS[shape].config(args.tiny)["vocab_size"]

    def variants(self, device: str) -> dict[str, Callable[[], None]]:
        """What changes the decoder into each variant; the first is the trainer without any item."""
        from slipstream.trainer.engine_ops.vllm_attention import VllmAttention
        from slipstream.trainer.model.dense_mlp import DenseMlp
        from slipstream.trainer.model.forward import Forward

        dense = [one for one in self.rank.decoder.modules() if isinstance(one, DenseMlp)]

        def choose(engine: Any, once: bool) -> None:
            self.rank.decoder.by = Forward(attention=engine)
            for mlp in dense:
                mlp.activates_once = once

        found = {"own, each": lambda: choose(None, False)}
        if dense:
            found["dense_activation=once"] = lambda: choose(None, True)
        if device == "cuda":
            kernel = VllmAttention()
            found["attention=engine"] = lambda: choose(kernel, False)
        return found

    def step(self, lengths: tuple[int, ...]) -> None:
        """Forward and backward of one microbatch."""
        import numpy as np

        from slipstream.trainer.types import Denominators, Sample

        draw = np.random.default_rng(0)
        samples = []
        for length in lengths:
            mask = np.arange(length) > 0
            samples.append(
                Sample(
                    token_ids=draw.integers(0, self.vocab, length).astype(np.int32),
                    loss_mask=mask,
                    rollout_logprobs=np.zeros(length, np.float32),
                    advantages=mask.astype(np.float32),
                    oldest_version=self.rank.policy_version,
                )
            )
        total = sum(lengths) - len(lengths)
        self.rank.forward_backward([samples], Denominators(total, len(lengths), self.rank.policy_version))


def measure(shape: str, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of each variant in each layout, one figure a round, and the largest memory."""
    import torch

    def seconds(lengths: tuple[int, ...]) -> float:
        times = []
        for _ in range(args.repeats):
            began = time.perf_counter()
            subject.step(lengths)
            if args.device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    subject = Subject(shape, args)
    found: dict[str, Any] = {}
    for layout, lengths in (TINY_LAYOUTS if args.tiny else LAYOUTS).items():
        variants = subject.variants(args.device)
        rates: dict[str, Any] = {name: {"tokens_per_s": [], "peak_gb": None} for name in variants}
        for number in range(1 + (1 if args.tiny else ROUNDS)):
            for name, choose in variants.items():
                choose()
                if args.device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                taken = seconds(lengths)
                if number:  # the first round compiles kernels
                    rates[name]["tokens_per_s"].append(round(sum(lengths) / taken, 1))
                if args.device == "cuda":
                    rates[name]["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
        found[layout] = rates
        print(shape, layout, json.dumps(rates), flush=True)
    return found


def import_seconds() -> float | None:
    """Seconds that importing vLLM's attention takes in a process that has torch; None where it has no kernels."""
    import torch  # noqa: F401 - imported before the clock starts

    began = time.perf_counter()
    try:
        import vllm.vllm_flash_attn  # noqa: F401
    except ImportError:
        return None
    return round(time.perf_counter() - began, 2)


def measure_prices(args: argparse.Namespace, report: dict[str, Any], out: Path) -> None:
    """Shape after shape; what there is is kept."""
    import torch

    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    report |= {"import_s": import_seconds(), "shapes": {}}
    for shape in args.price:
        try:
            report["shapes"][shape] = measure(shape, args)
        except torch.OutOfMemoryError as error:
            report["shapes"][shape] = {"failed": f"out of memory: {str(error).splitlines()[0]}"}
        out.write_text(json.dumps(report, indent=1) + "\n")
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
