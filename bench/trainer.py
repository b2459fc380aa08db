"""One optimizer step of expert LoRA on one GPU: Slipstream's trainer, transformers + PEFT, and what the chip can do.

    python bench/trainer.py                                    Qwen3-30B-A3B's shape, r=64, 1k to 32k tokens, one H200
    python bench/trainer.py --tokens 4096 --rows ours-float32 peft-float32 --profile
    python bench/trainer.py --tokens 4096 --rows ours-int8 --memory      what is held at the peak
    python bench/trainer.py --tiny                             runs on a CPU

Both train the same random weights (bfloat16, drawn by name from one seed) on the same tokens, one sequence per step,
with LoRA on q, k, v, o and on gate, up and down of every expert (gate and up of an expert share one A, as in PEFT),
activation checkpointing, and AdamW with the same formats of adapters and moments. Each step is forward, backward and
update. Losses of the first steps are compared at the end: they are the same number, up to bfloat16. Each row is a
process of its own, which loads once for all lengths, and keeps each length's figures as it gets them:

    ours-float32    float32 adapters and moments            peft-float32     the same, torch.optim.AdamW(fused)
    ours-bfloat16   bfloat16 adapters and moments           peft-bfloat16    the same
    ours-offload    the same, and what layers keep for      ours-host        float32 adapters, moments in host memory
                    their backward waits in host memory
    ours-int8       bfloat16 adapters, 8-bit moments,
                    embeddings read from host memory
    unsloth-*       the same formats in Unsloth, if --unsloth names its packages (bench/training/unsloth_row.py)

MFU compares the model's multiplications (frozen weights forward and to activations, adapters three times, causal
attention), without those of recomputation, with the datasheet's 989 TFLOP/s. "of the roofline" counts recomputation,
too, and compares with a large matrix product measured in the same run. Writes bench/results/trainer-<device>.json and
docs/images/trainer-<device>.png; --plot draws an older JSON again.
"""

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from bench.environment import RESULTS, command_line, environment, write_report  # noqa: E402
from bench.shapes import add_shape_options, model_config, shrink  # noqa: E402
from bench.training.rows import Ours, Peft, fill_hf  # noqa: E402
from bench.training.table import do_losses_agree, plot, print_table  # noqa: E402
from bench.training.unsloth_row import Unsloth  # noqa: E402

OURS = ("ours-float32", "ours-bfloat16", "ours-offload", "ours-int8", "ours-host")
ROWS = (*OURS, "peft-float32", "peft-bfloat16", "unsloth-float32", "unsloth-bfloat16")
PEAK_TFLOPS = {"NVIDIA H200": 989.0, "NVIDIA H100 80GB HBM3": 989.0}
"""Dense bfloat16 FLOP/s, from the datasheets."""
PROFILED_TOKENS = 4096
"""Length for --profile and --memory if it is among --tokens; otherwise they use the first."""
KINDS = {
    "attention": ("sdpa", "flash", "fmha"),
    "optimizer": ("multi_tensor_apply", "adam", "lpnorm"),
    "head": ("_log_softmax", "_logits_gradient"),
    "MoE rows": ("_gather", "activate_", "_low_rank", "_weighted_sum", "_count", "_write_tiles", "_place", "_route"),
    "grouped GEMM": ("GroupProblem", "_product", "_gradient", "grouped"),
    "dense GEMM": ("nvjet", "gemm", "cutlass", "cublas", "splitK"),
    "norm and rotation": ("_rms_norm", "_norm_rotate"),
    "copies": ("Memcpy", "Memset"),
}
"""Kinds of kernels by parts of their names; the rest are elementwise."""


# ---- what a step multiplies ----


def flops_per_token(config: dict[str, Any], rank: int, num_tokens: int) -> tuple[float, float]:
    """(model, with full recomputation) FLOPs of one trained token in a sequence of `num_tokens`.

    A frozen weight costs 2 forward and 2 to its input's gradient; an adapter 2 + 2 + 2; causal attention 2 T per head
    and channel forward for scores and values together (half of 4 T), 2.5 times that backward.
    """
    hidden, width, heads, dim = (
        config[k] for k in ("hidden_size", "moe_intermediate_size", "num_attention_heads", "head_dim")
    )
    layers, top_k, kv_heads = (config[k] for k in ("num_hidden_layers", "num_experts_per_tok", "num_key_value_heads"))
    attention = 2 * hidden * heads * dim + 2 * hidden * kv_heads * dim
    experts = top_k * 3 * hidden * width
    head = hidden * config["vocab_size"]
    frozen = layers * (attention + experts + hidden * config["num_experts"])
    attention_lora = rank * (2 * (hidden + heads * dim) + 2 * (hidden + kv_heads * dim))
    expert_lora = top_k * rank * ((hidden + 2 * width) + (width + hidden))
    adapters = layers * (attention_lora + expert_lora)
    scores = layers * 2 * num_tokens * heads * dim
    forward = 2 * frozen + 2 * adapters + scores
    model = 4 * (frozen + head) + 6 * adapters + 3.5 * scores
    return float(model), float(model + forward)


def measured_limits(device: str) -> dict[str, float]:
    """TFLOP/s of a large bfloat16 product and GB/s of a large copy (bytes read and written)."""
    import torch

    size = 8192 if device == "cuda" else 512
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    big = torch.empty((4 << 30) if device == "cuda" else (64 << 20), dtype=torch.uint8, device=device)
    other = torch.empty_like(big)
    return {
        "matmul_tflops": 2 * size**3 / _seconds(lambda: a @ b, device) / 1e12,
        "copy_gb_per_s": 2 * big.numel() / _seconds(lambda: other.copy_(big), device) / 1e9,
    }


def _seconds(work: Any, device: str, repeats: int = 10) -> float:
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        _sync(device)
        began = time.perf_counter()
        work()
        _sync(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _sync(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


# ---- one row, in its own process ----


def run_row(name: str, args: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Measure all lengths of one row. After each, the results so far are written to `out`."""
    import numpy as np
    import torch

    kind, state = name.split("-")
    config = model_config(args)
    began = time.perf_counter()
    try:
        if kind == "unsloth":
            subject: Any = Unsloth(config, state, args, fill_hf)
        else:
            subject = (Ours if kind == "ours" else Peft)(config, state, args)
    except ImportError as error:
        if kind != "unsloth":
            raise
        print(f"{name} not run: {error}", flush=True)
        return {"row": name, "not_run": f"{type(error).__name__}: {error}"}
    row: dict[str, Any] = {"row": name, "load_s": time.perf_counter() - began, **subject.facts, "lengths": {}}
    limits = measured_limits(args.device)
    row["limits"] = limits
    for num_tokens, share in zip(args.tokens, args.gate_up_kept, strict=True):
        if kind == "ours":
            subject.begin_length(share if name == "ours-offload" else None)
        token_ids = np.random.default_rng(num_tokens).integers(0, args.vocab, num_tokens)
        cuda = args.device == "cuda"
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            losses, times = [], []
            for _ in range(args.warmup + args.repeats):
                _sync(args.device)
                started = time.perf_counter()
                losses.append(subject.step(token_ids))
                _sync(args.device)
                times.append(time.perf_counter() - started)
        except torch.OutOfMemoryError as error:
            row["lengths"][num_tokens] = {"failed": f"out of memory: {str(error).splitlines()[0]}"}
            break
        step_s = statistics.median(times[args.warmup :])
        model, executed = flops_per_token(config, args.rank, num_tokens)
        per_s = num_tokens / step_s
        peak = PEAK_TFLOPS.get(torch.cuda.get_device_name()) if cuda else None
        row["lengths"][num_tokens] = {
            "tokens_per_s": per_s,
            "step_s": step_s,
            "gate_up_kept": share if name == "ours-offload" else None,
            "min_s": min(times[args.warmup :]),
            "max_s": max(times[args.warmup :]),
            "first_loss": losses[0],
            "mfu": model * per_s / peak / 1e12 if peak else None,
            "of_roofline": executed * per_s / limits["matmul_tflops"] / 1e12,
            "peak_gb": (torch.cuda.max_memory_allocated() + (subject.graph_bytes if kind == "ours" else 0)) / 1e9
            if cuda
            else None,
            "tokens_per_dollar": per_s * 3600 / args.dollars_per_gpu_hour,
        }
        print(name, num_tokens, json.dumps(row["lengths"][num_tokens]), flush=True)
        if cuda and num_tokens == (PROFILED_TOKENS if PROFILED_TOKENS in args.tokens else args.tokens[0]):
            if args.memory:
                row["memory"] = memory_at_peak(subject, token_ids)
                print(name, json.dumps(row["memory"], indent=1), flush=True)
            if args.profile:
                row["kernels"] = profile(subject, token_ids)
        out.write_text(json.dumps(row))
    return row


def profile(subject: Any, token_ids: Any) -> list[dict[str, Any]]:
    """Device time of one step by kernel, longest first."""
    import torch
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        subject.step(token_ids)
        torch.cuda.synchronize()
    events = [e for e in profiler.key_averages() if e.self_device_time_total > 0]
    events.sort(key=lambda e: -e.self_device_time_total)
    return [
        {"kernel": e.key[:200], "kind": kind_of(e.key), "ms": e.self_device_time_total / 1e3, "calls": e.count}
        for e in events
    ]


def memory_at_peak(subject: Any, token_ids: Any) -> dict[str, Any]:
    """GB that one step holds on the device at its peak, by the line that allocated them.

    "before" is what was there when the step began: weights, moments, and libraries' memory.
    """
    import torch

    before = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, context="alloc", stacks="python")
    subject.step(token_ids)
    torch.cuda.synchronize()
    snapshot: dict[str, Any] = dict(torch.cuda.memory._snapshot())
    trace = next(trace for trace in snapshot["device_traces"] if trace)
    torch.cuda.memory._record_memory_history(enabled=None)
    live: dict[int, tuple[int, str]] = {}
    freed_before = total = peak = 0
    sites: dict[str, int] = {}
    where = ""
    for entry in trace:
        if entry["action"] == "alloc":
            live[entry["addr"]] = (entry["size"], _site(entry["frames"]))
            total += entry["size"]
            if total > peak:
                peak, where = total, _site(entry["frames"])
                sites = {"freed since": freed_before}
                for size, site in live.values():
                    sites[site] = sites.get(site, 0) + size
        elif entry["action"] == "free_completed":
            size = live.pop(entry["addr"], (0, ""))[0]
            freed_before -= 0 if size else entry["size"]
            total -= entry["size"]
    held = {"before": before} | dict(sorted(sites.items(), key=lambda item: -item[1]))
    return {"reached_at": where, "gb": {site: size / 1e9 for site, size in held.items() if abs(size) > 1e6}}


def _site(frames: Sequence[Any]) -> str:
    """The innermost lines of this tree in a stack."""
    own = [f for f in frames if f["filename"].startswith(str(ROOT)) and "/.venv/" not in f["filename"]]
    return " < ".join(f"{Path(f['filename']).name}:{f['line']} {f['name']}" for f in own[:2]) or "a library"


def kind_of(kernel: str) -> str:
    """The kind of a kernel: the first of KINDS that has a pattern in its name."""
    return next((kind for kind, patterns in KINDS.items() if any(one in kernel for one in patterns)), "elementwise")


# ---- all rows ----


def parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--gpus", type=int, default=1, help="rows that run side by side, each on a GPU of its own")
    parser.add_argument("--unsloth", type=Path, metavar="SITE", help="PYTHONPATH of the unsloth rows")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 2048, 4096, 8192, 16384, 32768])
    add_shape_options(parser, rank=64)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--gate-up-kept", nargs="+", type=float, default=[0.0], metavar="SHARE",
        help="trainer.gate_up_kept of ours-offload: one, or one for each of --tokens",
    )  # fmt: skip
    parser.add_argument("--dollars-per-gpu-hour", type=float, default=3.5, help="an H200 rented by the hour, 2026")
    parser.add_argument("--profile", action="store_true", help=f"device time by kernel, at {PROFILED_TOKENS} tokens")
    parser.add_argument("--memory", action="store_true", help="what is held at the peak of a step, by line of code")
    parser.add_argument("--tiny", action="store_true", help="two small layers, for a CPU")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the JSON of --out and end")
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tiny:
        shrink(args)
        args.tokens = [64, 128]
    if len(args.gate_up_kept) == 1:
        args.gate_up_kept *= len(args.tokens)
    if len(args.gate_up_kept) != len(args.tokens):
        parser.error(f"--gate-up-kept takes one share or {len(args.tokens)}, got {len(args.gate_up_kept)}")
    return args


def main() -> None:
    args = parse()
    import torch

    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    stem = "trainer-gpu" if args.device == "cuda" else "trainer-cpu"
    out: Path = args.out or RESULTS / f"{stem}.json"
    image: Path = args.plot or (out.with_suffix(".png") if args.out else ROOT / "docs" / "images" / f"{stem}.png")
    if args.plot:
        plot(json.loads(out.read_text()), image)
        return
    if args.row:  # the row's own process
        out.write_text(json.dumps(run_row(args.row, args, out)))
        return
    given = {k: v for k, v in vars(args).items() if k not in ("out", "plot", "row", "commit", "unsloth")}
    report: dict[str, Any] = {"environment": environment(args.commit), "arguments": given, "rows": {}}
    print(json.dumps(report["environment"]), flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    free: queue.Queue[str] = queue.Queue()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(args.gpus)))).split(",")
    for gpu in visible[: args.gpus]:
        free.put(gpu)

    def run(name: str) -> dict[str, Any]:
        part = out.with_suffix(f".{name}.part")
        command = [sys.executable, __file__, *sys.argv[1:], "--row", name, "--out", str(part)]
        packages = {"PYTHONPATH": str(args.unsloth)} if name.startswith("unsloth") and args.unsloth else {}
        gpu = free.get()
        seen = {"CUDA_VISIBLE_DEVICES": gpu} if args.gpus > 1 else {}
        done = subprocess.run(command, env=os.environ | packages | seen, check=False)
        free.put(gpu)
        row: dict[str, Any] = json.loads(part.read_text()) if part.exists() else {}
        part.unlink(missing_ok=True)
        return row | ({"failed": f"exit code {done.returncode}"} if done.returncode else {})

    with ThreadPoolExecutor(args.gpus) as pool:
        for name, row in zip(args.rows, pool.map(run, args.rows), strict=True):
            report["rows"][name] = row
            write_report(out, report)
    print_table(report)
    print(f"written: {out}")
    plot(report, image)
    if not do_losses_agree(report):
        sys.exit("the rows did not compute the same thing: first losses differ")


if __name__ == "__main__":
    main()
