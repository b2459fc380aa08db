"""Do the trainer's GPUs add up? Tokens per second of 1, 2 and 4 ranks, and what the ranks wait for.

    python bench/scaling.py                              24 layers of Qwen3-30B-A3B's shape, r=32, four GPUs
    python bench/scaling.py --layouts 1x1 2x2 --tokens short
    python bench/scaling.py --layouts 2x2 --rows-travel      as where a token has fewer experts than ranks
    python bench/scaling.py --layouts 2x2 --by-layer         dense weights gathered in every layer
    python bench/scaling.py --layouts 1x1 2x2 --graph-tokens 0      no CUDA graphs
    python bench/scaling.py --tiny                       two small layers, for a CPU

A layout is RANKSxEP_SIZE: 2x2 has two ranks that share the experts and exchange rows of tokens, 2x1 two ranks whose
expert weights are sharded and gathered ahead of each layer. Each rank is a process of its own, and each layout loads
once. A step is forward, backward with activations computed again, and update. `long` has 16 sequences of 4,096 in
microbatches of 16,384, `short` 240 of 272 in microbatches of 8,192: 65,536 tokens in all, so that ranks share the work
of one (strong scaling). `weak-long` and `weak-short` have as many for each rank. Layouts that fit beside each other run
side by side.

Printed per row: the median step; tokens/s of all ranks and of one, also as a share of one rank's alone; of one profiled
step of rank 0 how long exchanges run on the device, what of that nothing overlaps, what the GPU idles, how often and
how long the host waits for it, and what else the host does, in seconds; the bytes that rank 0 sends outside of CUDA
graphs, and how long they take at the speed of a large all-to-all that is measured in the same processes. The loss and
the norm of the gradients of the first step are compared with one rank's. Writes bench/results/scaling-<device>.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from bench.environment import RESULTS, command_line, environment, write_report  # noqa: E402
from bench.shapes import add_shape_options, model_config, shrink  # noqa: E402
from bench.training.rank_processes import run_ranks  # noqa: E402
from bench.training.rows import Ours, Place  # noqa: E402
from bench.training.step_profile import profile, read_profile  # noqa: E402

LAYOUTS = ("1x1", "2x2", "2x1", "4x4", "4x1")
WORKLOADS = {"long": (16, 4096, 16384), "short": (240, 272, 8192)}
"""Sequences of a step, tokens of each, and the most of a microbatch."""
TINY = {"long": (8, 64, 128), "short": (24, 9, 64)}
WEAK = "weak-"
"""Before a workload's name: so many sequences for each rank."""
LOSS_TOLERANCE, NORM_TOLERANCE = 5e-4, 2e-2
"""Relative, of the mean over all tokens and of the norm of all gradients: layouts choose kernels by other numbers of
rows. A gradient that is lost would not change the first loss."""
LIMIT_S = 400
"""For one layout."""


# ---- one rank, in its own process ----


def run_rank(args: argparse.Namespace) -> None:
    """Measure every workload of a layout; rank 0 writes the figures after each."""
    import torch
    import torch.distributed as dist

    if args.rows_travel:
        from slipstream.trainer.moe import block

        block.gathers = lambda *_: False
    if args.by_layer:
        from slipstream.trainer.model import build_decoder

        build_decoder.WHOLE_SHARE = 0
    num_ranks, ep_size = sizes(args.layout)
    place = Place(num_ranks, ep_size, rank=args.rank_index, rendezvous=f"file://{args.out}.meet")
    if args.graph_tokens is not None:
        place = replace(place, options={"cuda_graph_tokens": args.graph_tokens})
    began = time.perf_counter()
    subject = Ours(model_config(args), "float32", args, place)
    report: dict[str, Any] = {"load_s": time.perf_counter() - began, **subject.facts, "workloads": {}}
    report["all_to_all_gb_per_s"] = exchange_speed(args.device) if num_ranks > 1 else None
    for name in args.tokens:
        if num_ranks == 1 and name.startswith(WEAK):
            continue
        batch = microbatches(args, name, num_ranks, args.rank_index)
        found, times = [], []
        if args.device == "cuda":
            torch.cuda.empty_cache()
        for _ in range(args.warmup + args.repeats):
            sync(args.device, num_ranks)
            began = time.perf_counter()
            found.append(step(subject, batch))
            sync(args.device, num_ranks)
            times.append(time.perf_counter() - began)
        loss = torch.tensor(found[0][0], dtype=torch.float64, device=args.device)
        if num_ranks > 1:
            dist.all_reduce(loss)
        row = {"step_s": statistics.median(times[args.warmup :]), "steps_s": times, "first_loss": float(loss)}
        row["first_norm"] = found[0][1]
        num_sequences, length, _ = workload(args, name, num_ranks)
        row["tokens"] = num_sequences * length
        row["replays"] = 0 if subject.rank.policy.graphs is None else subject.rank.policy.graphs.num_replays
        if args.device == "cuda":
            row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        row["sent_bytes"] = sent_bytes(subject, batch)
        row["profile"] = profile(partial(step, subject, batch)) if args.device == "cuda" else None
        report["workloads"][name] = row
        if args.rank_index == 0:
            args.out.write_text(json.dumps(report))


def workload(args: argparse.Namespace, name: str, num_ranks: int) -> tuple[int, int, int]:
    """Sequences of a step of all ranks, tokens of each, and the most of a microbatch."""
    num_sequences, length, max_tokens = args.workloads[name.removeprefix(WEAK)]
    return num_sequences * (num_ranks if name.startswith(WEAK) else 1), length, max_tokens


def microbatches(args: argparse.Namespace, name: str, num_ranks: int, rank: int) -> tuple[list[list[Any]], int]:
    """A rank's samples of a step, and the trained tokens of all ranks."""
    import numpy as np

    from slipstream.trainer.step.microbatches import pack
    from slipstream.trainer.types import Sample

    num_sequences, length, max_tokens = workload(args, name, num_ranks)
    mask = np.arange(length) > 0

    def sample(index: int) -> Sample:
        ids = np.random.default_rng(index).integers(0, args.vocab, length).astype(np.int32)
        zeros = np.zeros(length, np.float32)
        return Sample(
            token_ids=ids, loss_mask=mask, rollout_logprobs=zeros, advantages=mask.astype(np.float32), oldest_version=0
        )

    mine = pack([length] * num_sequences, num_ranks, max_tokens)[rank]
    return [[sample(index) for index in one] for one in mine], num_sequences * (length - 1)


def step(subject: Ours, batch: tuple[list[list[Any]], int]) -> tuple[float, float]:
    """Forward, backward, update. Returns this rank's share of the mean loss before the update, and the norm of all
    gradients."""
    from slipstream.trainer.types import Denominators

    samples, num_trained = batch
    version = subject.rank.policy_version
    current = [[replace(sample, oldest_version=version) for sample in one] for one in samples]
    num_sequences = num_trained // (len(samples[0][0].token_ids) - 1) if samples and samples[0] else 1
    stats = subject.rank.forward_backward(current, Denominators(num_trained, num_sequences, version))
    norm = subject.rank.optimizer_step().grad_norm
    return float(stats.sums["sft/nll_sum"]) / num_trained, norm


def exchange_speed(device: str) -> float:
    """GB/s that a rank sends to others in a large all-to-all."""
    import torch
    import torch.distributed as dist

    num_ranks = dist.get_world_size()
    sent = torch.empty(num_ranks * ((256 << 20) if device == "cuda" else (1 << 20)), dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    times = []
    for _ in range(8):
        sync(device, num_ranks)
        began = time.perf_counter()
        dist.all_to_all_single(received, sent)
        sync(device, num_ranks)
        times.append(time.perf_counter() - began)
    return sent.nbytes * (num_ranks - 1) / num_ranks / statistics.median(times[3:]) / 1e9


def sent_bytes(subject: Ours, batch: tuple[list[list[Any]], int]) -> int:
    """Bytes that this rank sends to others in the exchanges of experts of one step."""
    import torch.distributed as dist

    original, total = (dist.all_to_all_single, dist.all_gather_into_tensor), 0

    def counted(out: Any, rows: Any, receive: Any = None, send: Any = None, group: Any = None, **more: Any) -> Any:
        nonlocal total
        own = dist.get_rank(group)
        size = dist.get_world_size(group)
        rows_to_itself = send[own] if send else len(rows) // size
        total += (len(rows) - rows_to_itself) * rows[:1].nbytes
        return original[0](out, rows, receive, send, group=group, **more)

    def counted_gather(out: Any, rows: Any, group: Any = None, **more: Any) -> Any:
        nonlocal total
        total += out.nbytes - rows.nbytes
        return original[1](out, rows, group=group, **more)

    dist.all_to_all_single, dist.all_gather_into_tensor = counted, counted_gather
    try:
        step(subject, batch)
    finally:
        dist.all_to_all_single, dist.all_gather_into_tensor = original
    return total


def sync(device: str, num_ranks: int) -> None:
    """Wait for the device and for the other ranks."""
    import torch
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.synchronize()
    if num_ranks > 1:
        dist.barrier()
        if device == "cuda":
            torch.cuda.synchronize()


# ---- the whole table ----


def sizes(layout: str) -> tuple[int, int]:
    """Ranks and ep_size of a layout."""
    num_ranks, ep_size = map(int, layout.split("x"))
    return num_ranks, ep_size


def run_layout(layout: str, args: argparse.Namespace, gpus: Sequence[str], folder: Path) -> dict[str, Any]:
    """Start a layout's ranks and wait for them. Returns rank 0's figures."""
    words = [__file__, *sys.argv[1:], "--layout", layout]
    found = run_ranks(words, sizes(layout)[0], ",".join(gpus), folder / f"{layout}.json", LIMIT_S)
    codes = found.pop("exit_codes")
    failed = {"failed": f"exit codes {codes}"} if any(code != 0 for code in codes) else {}
    return {"workloads": {}} | found | failed


def run_all(args: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """All layouts, as many at a time as GPUs are free for. On a CPU one at a time."""
    free = args.gpus.split(",") if args.device == "cuda" else ["", "", "", ""]
    condition, results = threading.Condition(), {}

    def run(layout: str, gpus: list[str]) -> None:
        results[layout] = run_layout(layout, args, gpus, folder)
        with condition:
            free.extend(gpus)
            condition.notify()

    threads = []
    for layout in args.layouts:
        needed = sizes(layout)[0] if args.device == "cuda" else len(free)
        with condition:
            condition.wait_for(lambda needed=needed: len(free) >= needed)
            gpus = [free.pop(0) for _ in range(needed)]
        threads.append(threading.Thread(target=run, args=(layout, gpus)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return {layout: results[layout] for layout in args.layouts}


def print_table(rows: dict[str, dict[str, Any]], names: Sequence[str]) -> None:
    """One line per workload and layout."""
    heads = (
        "step s", "tok/s", "/rank", "of one", "peak GB", "exch s", "alone s", "idle s", "waits", "wait s", "host s",
        "replays", "sent GB", "wire s", "loss", "norm",
    )  # fmt: skip
    for name in names:
        one = rows.get("1x1", {}).get("workloads", {}).get(name.removeprefix(WEAK))
        print(f"\n{name:10}" + "".join(f"{head:>10}" for head in heads))
        for layout, row in rows.items():
            if (cell := row["workloads"].get(name)) is None:
                print(f"{layout:10}  {row.get('failed', 'not run')}")
                continue
            rate = cell["tokens"] / cell["step_s"]
            each, speed = rate / sizes(layout)[0], row["all_to_all_gb_per_s"]
            found = cell["profile"] or {"wall_s": 0.0, **read_profile([], 0.0)}
            waits, waited_s = (sum(one[key] for one in found["host_waits"].values()) for key in ("count", "total_s"))
            share = each / (one["tokens"] / one["step_s"]) if one else float("nan")
            wire = cell["sent_bytes"] / speed / 1e9 if speed else 0.0
            figures = (
                cell["step_s"], rate, each, share, cell.get("peak_gb", 0.0),
                found["kinds_s"].get("exchange", 0.0), found["exchange_alone_s"], found["idle_s"], waits, waited_s,
                found["wall_s"] - waited_s, cell["replays"], cell["sent_bytes"] / 1e9, wire, cell["first_loss"],
                cell["first_norm"],
            )  # fmt: skip
            print(f"{layout:10}" + "".join(f"{value:>10.4g}" for value in figures))


def do_agree(rows: dict[str, dict[str, Any]], names: Sequence[str]) -> bool:
    """Whether layouts that train the same sequences of a workload have one first loss and gradient."""
    found = [(name, row["workloads"][name]) for row in rows.values() for name in names if name in row["workloads"]]
    for name, num_tokens in dict.fromkeys((name, cell["tokens"]) for name, cell in found):
        cells = [cell for other, cell in found if (other, cell["tokens"]) == (name, num_tokens)]
        for key, tolerance in (("first_loss", LOSS_TOLERANCE), ("first_norm", NORM_TOLERANCE)):
            values = [cell[key] for cell in cells]
            if max(values) - min(values) > tolerance * abs(values[0]):
                print(f"layouts differ: {name} {key} {values}")
                return False
    return True


def parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), metavar="RANKSxEP_SIZE")
    names = [*WORKLOADS, *(WEAK + name for name in WORKLOADS)]
    parser.add_argument("--tokens", nargs="+", default=names, choices=names)
    parser.add_argument("--gpus", default="0,1,2,3", help="that may be used")
    add_shape_options(parser, rank=32)
    parser.set_defaults(layers=24)
    parser.add_argument("--rows-travel", action="store_true", help="a row per choice, not a token per rank, to compare")
    parser.add_argument("--by-layer", action="store_true", help="dense weights gathered in every layer, to compare")
    parser.add_argument("--graph-tokens", type=int, help="trainer.cuda_graph_tokens, instead of its default")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="two small layers, for a CPU")
    parser.add_argument("--layout", help=argparse.SUPPRESS)
    parser.add_argument("--rank-index", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.workloads = WORKLOADS
    if args.tiny:
        shrink(args)
        args.workloads = TINY
    return args


def main() -> None:
    """Run the layouts."""
    args = parse()
    import torch

    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.layout:
        run_rank(args)
        return
    out = args.out or RESULTS / f"scaling-{'gpu' if args.device == 'cuda' else 'cpu'}.json"
    given = {name: value for name, value in vars(args).items() if name not in ("out", "commit", "rank_index", "layout")}
    report = {"environment": environment(args.commit), "arguments": given}
    print(json.dumps(report["environment"]), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        rows = run_all(args, Path(folder))
    write_report(out, {**report, "rows": rows})
    print_table(rows, args.tokens)
    if not do_agree(rows, args.tokens) or any("failed" in row for row in rows.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
