"""Sequences that one GPU does not hold: ranks that share the tokens of each sequence (trainer.cp_size).

    python bench/long_context.py                         32k, 64k, 128k tokens, Qwen3-30B-A3B's shape, on 1, 2, 4 GPUs
    python bench/long_context.py --layers 12 --tokens 32768 --ranks 1 2
    python bench/long_context.py --tiny                  two small layers, for a CPU

With R ranks, cp_size = ep_size = R. Each step is forward, backward with activations computed again, and update, of one
sequence. Layouts run one after the other, each rank in a process of its own. Before the steps all ranks compute the
gradients of a short sequence, and those of several ranks are compared with one rank's by the norm of each adapter's:
in bfloat16 kernels round other products, so they agree to a few per cent. Printed per row: the median step, tokens/s of
all ranks and of one, the peak memory of rank 0, the loss before the first update; and of one more, profiled step what
the device did, and what of it were exchanges that nothing overlaps. A length that does not fit is told.
Writes bench/results/long_context-<device>.json.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from bench.environment import RESULTS, command_line, environment, write_report  # noqa: E402
from bench.shapes import add_shape_options, model_config, shrink  # noqa: E402
from bench.training.rank_processes import run_ranks  # noqa: E402
from bench.training.rows import Ours, Place  # noqa: E402
from bench.training.step_profile import profile  # noqa: E402

LIMIT_S = 540
"""For one number of ranks."""
SHORT = 1500
"""Tokens of the sequence whose gradients are compared; odd chunks."""
NORM_TOLERANCE = 0.05


def run_rank(args: argparse.Namespace) -> None:
    """Measure every length; rank 0 writes the figures after each."""
    import numpy as np
    import torch

    size = args.size
    place = Place(size, size, size, args.rank_index, f"file://{args.out}.meet")
    subject = Ours(model_config(args), args.state, args, place)
    is_cuda = args.device == "cuda"
    report: dict[str, Any] = {
        **subject.facts,
        "norms": norms(subject, draw(args, min(SHORT, *args.tokens))),
        "rows": {},
    }
    for length in args.tokens:
        if is_cuda:
            torch.cuda.empty_cache()
        token_ids, losses, times = draw(args, length), list[float](), list[float]()
        try:
            for _ in range(args.warmup + args.repeats):
                began = time.perf_counter()
                losses.append(subject.step(token_ids))  # ends with a value that the host reads
                times.append(time.perf_counter() - began)
        except torch.OutOfMemoryError:
            report["rows"][length] = {"failed": "out of memory"}
            write(args, report)
            os._exit(0)  # the other ranks wait in an exchange
        row: dict[str, Any] = {"step_s": statistics.median(times[args.warmup :]), "steps_s": times}
        row["first_loss"] = losses[0]
        assert np.isfinite(losses).all()
        if is_cuda:
            row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
            row["profile"] = profile(partial(subject.step, token_ids))
        report["rows"][length] = row
        write(args, report)


def write(args: argparse.Namespace, report: dict[str, Any]) -> None:
    """Rank 0's figures; those of another rank where it alone ran out of memory."""
    if args.rank_index == 0 or any("failed" in row for row in report["rows"].values()):
        args.out.write_text(json.dumps(report))


def draw(args: argparse.Namespace, length: int) -> Any:
    """Token ids, the same on every rank."""
    import numpy as np

    return np.random.default_rng(length).integers(0, args.vocab, length).astype(np.int32)


def norms(subject: Ours, token_ids: Any) -> dict[str, float]:
    """Norm of each trained parameter's gradient over all ranks, by name. Drops the gradients."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from slipstream.trainer.parallel import sharded_rows
    from slipstream.trainer.types import Denominators, Sample

    mask = np.arange(len(token_ids)) > 0
    zeros = np.zeros(len(token_ids), np.float32)
    sample = Sample(token_ids, mask, zeros, mask.astype(np.float32), subject.rank.policy_version)
    subject.rank.forward_backward([[sample]], Denominators(int(mask.sum()), 1, subject.rank.policy_version))
    trained = [(name, param) for name, param in subject.decoder.named_parameters() if param.requires_grad]
    squares = torch.stack([sharded_rows(name, param.grad).double().square().sum() for name, param in trained])
    if dist.is_initialized():
        dist.all_reduce(squares)
    subject.rank.learner.drop_gradients()
    return dict(zip([name for name, _ in trained], squares.sqrt().tolist(), strict=True))


def print_table(results: dict[int, dict[str, Any]], args: argparse.Namespace) -> None:
    """One line per length and number of ranks."""
    print(
        "".join(
            f"{head:>11}"
            for head in ("tokens", "ranks", "step s", "tok/s", "/rank", "peak GB", "loss", "exchange", "idle")
        )
    )
    for length in args.tokens:
        for size, result in results.items():
            row = result["rows"].get(str(length), {"failed": "not run"})
            if "failed" in row:
                print(f"{length:>11}{size:>11}  {row['failed']} {result['exit_codes']}")
                continue
            rate = length / row["step_s"]
            figures = (row["step_s"], rate, rate / size, row.get("peak_gb", 0.0), row["first_loss"])
            where = row.get("profile", {})
            figures += (where.get("exchange_alone_s", 0.0), where.get("idle_s", 0.0))
            print(f"{length:>11}{size:>11}" + "".join(f"{value:>11.4g}" for value in figures))


def worst_norms(results: dict[int, dict[str, Any]]) -> dict[int, float]:
    """By number of ranks, the largest relative difference of a norm from the first row's. Adapters whose gradient is
    none there (A, while B is 0) are left out."""
    first, *others = results.items()
    found = {}
    for size, result in others:
        pairs = [(result["norms"].get(name, 0.0), norm) for name, norm in first[1]["norms"].items() if norm > 0]
        found[size] = max((abs(norm / one - 1) for norm, one in pairs), default=float("nan"))
    return found


def parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--tokens", nargs="+", type=int, default=[32768, 65536, 131072])
    parser.add_argument("--gpus", default="0,1,2,3", help="that may be used")
    parser.add_argument("--state", default="bfloat16", help="formats of adapters and moments, as in bench/trainer.py")
    add_shape_options(parser, rank=32)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="two small layers, for a CPU")
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank-index", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tiny:
        shrink(args)
        args.tokens, args.ranks = [65, 128], [1, 2]
    return args


def main() -> None:
    args = parse()
    import torch

    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.size:
        run_rank(args)
        return
    out = args.out or RESULTS / f"long_context-{'gpu' if args.device == 'cuda' else 'cpu'}.json"
    given = {name: value for name, value in vars(args).items() if name not in ("out", "commit", "rank_index", "size")}
    report = {"environment": environment(args.commit), "arguments": given}
    print(json.dumps(report["environment"]), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        results = {}
        for size in args.ranks:
            words = [__file__, *sys.argv[1:], "--size", str(size)]
            gpus = ",".join(args.gpus.split(",")[:size])
            found = run_ranks(words, size, gpus, Path(folder, f"{size}.json"), LIMIT_S)
            results[size] = {"rows": {}, "norms": {}} | found
    worst = worst_norms(results)
    write_report(out, {**report, "ranks": results, "worst_norms": worst})
    print_table(results, args)
    print("largest difference of a gradient's norm from the first row's:", worst)
    if not all(one <= NORM_TOLERANCE for one in worst.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
