"""Measures what each step towards packed grouped kernels gains: one batch of unequal sequences, one GPU, our trainer.

    python bench/ladder.py            Qwen3-30B-A3B's shape, r=64, one H200
    python bench/ladder.py --tiny     runs on a CPU

Rungs, each in addition to the ones before (tokens per second count only real tokens):

    loop        a loop of one product per expert and projection; every sequence padded to the longest; padded attention
    grouped     experts through grouped products, with the backend that the trainer picks for the device
    attention   the fastest attention of the device (cuDNN's, or varlen)
    no pads     every sequence a microbatch of its own length
    packed      all sequences in one microbatch, without pads

The rows of bench/trainer.py are the last rung, for one sequence of each length. Writes
bench/results/trainer-ladder-<device>.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import numpy as np  # noqa: E402
import torch  # noqa: E402

from bench.environment import environment  # noqa: E402
from bench.shapes import add_shape_options, model_config, shrink  # noqa: E402
from bench.training.rows import Ours  # noqa: E402
from slipstream.trainer.model.attend import AttentionBackend  # noqa: E402
from slipstream.trainer.moe.experts import Experts  # noqa: E402
from slipstream.trainer.moe.grouped import GroupedBackend  # noqa: E402
from slipstream.trainer.types import Denominators, Sample  # noqa: E402

SEED = 5
RUNGS = ("loop", "grouped", "attention", "no pads", "packed")


def draw_lengths(count: int, longest: int) -> list[int]:
    """Draw lengths log-uniformly over four octaves, including the longest."""
    drawn = 2 ** np.random.default_rng(SEED).uniform(-4, 0, count - 1) * longest
    return [*(max(2, int(length)) for length in drawn), longest]


def microbatches(rung: str, lengths: list[int], vocab: int, version: int) -> list[list[Sample]]:
    """The microbatches of this rung. Pads are tokens that do not count in the loss."""
    is_padded = rung in ("loop", "grouped", "attention")
    samples = []
    for index, length in enumerate(lengths):
        size = max(lengths) if is_padded else length
        mask = (np.arange(size) > 0) & (np.arange(size) < length)
        samples.append(
            Sample(
                token_ids=np.random.default_rng(index).integers(0, vocab, size).astype(np.int32),
                loss_mask=mask,
                rollout_logprobs=np.zeros(size, np.float32),
                advantages=mask.astype(np.float32),
                oldest_version=version,
            )
        )
    return [[sample] for sample in samples] if rung == "no pads" else [samples]


def set_backends(ours: Ours, rung: str, chosen: dict[str, str]) -> None:
    """Set the rung's kernels instead of those chosen at construction."""
    experts = GroupedBackend.native if rung == "loop" else GroupedBackend(chosen["experts"])
    is_plain = rung in ("loop", "grouped")
    attention = AttentionBackend.padded if is_plain else AttentionBackend(chosen["attention"])
    for module in ours.decoder.modules():
        if isinstance(module, Experts):
            module.backend = experts
        elif isinstance(getattr(module, "backend", None), AttentionBackend):
            module.backend = attention


def measure(ours: Ours, rung: str, lengths: list[int], args: argparse.Namespace) -> dict[str, Any]:
    """Median of the repeats: forward, backward and update of the whole batch."""
    is_cuda = args.device == "cuda"
    times = []
    if is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(1 + args.repeats):
        batch = microbatches(rung, lengths, args.vocab, ours.rank.policy_version)
        counted = sum(int(sample.loss_mask.sum()) for micro in batch for sample in micro)
        began = time.perf_counter()
        ours.rank.forward_backward(batch, Denominators(counted, len(lengths), ours.rank.policy_version))
        ours.rank.optimizer_step()
        if is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    step_s = statistics.median(times[1:])
    peak_gb = torch.cuda.max_memory_allocated() / 1e9 if is_cuda else None
    return {"rung": rung, "tokens_per_s": sum(lengths) / step_s, "step_s": step_s, "peak_gb": peak_gb}


def main() -> None:
    """Measure the rungs in order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape_options(parser, rank=64)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--commit", help="commit of this tree, where it is not a git checkout")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true", help="two small layers, for a CPU")
    args = parser.parse_args()
    if args.tiny:
        shrink(args)
        args.longest = 64
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    ours = Ours(model_config(args), "float32", args)
    chosen = dict(ours.facts["backends"])
    lengths = draw_lengths(args.sequences, args.longest)
    report: dict[str, Any] = {
        "environment": environment(args.commit),
        "backends": chosen,
        "lengths": lengths,
        "rungs": [],
    }
    print(f"{len(lengths)} sequences of {sum(lengths)} tokens, the longest {max(lengths)}; {chosen}")
    print(f"{'rung':12}{'tok/s':>10}{'step s':>10}{'peak GB':>10}")
    for rung in RUNGS:
        set_backends(ours, rung, chosen)
        row = measure(ours, rung, lengths, args)
        report["rungs"].append(row)
        peak = "-" if row["peak_gb"] is None else f"{row['peak_gb']:.1f}"
        print(f"{rung:12}{row['tokens_per_s']:>10.0f}{row['step_s']:>10.3f}{peak:>10}", flush=True)
    label = "gpu" if args.device == "cuda" else "cpu"
    out: Path = args.out or ROOT / "bench" / "results" / f"trainer-ladder-{label}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written: {out}")


if __name__ == "__main__":
    main()
