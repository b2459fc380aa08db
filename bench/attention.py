"""Latent attention's kernels on one GPU: which ones take heads of 192 (values 128), how fast, how exact.

    python bench/attention.py            prints a table; writes bench/results/attention-gpu.json
    python bench/attention.py --tiny     the packed rows of a CPU, to show that it runs

Kimi-K2-Thinking's 64 heads, causal, one sequence of 8,192 tokens and four of 2,048. A candidate that raises is a row
with its message. Padding to a width that a kernel wants, and the copies that it asks for, are in its time. TFLOP/s
count the products over what a causal mask leaves, 2 forward and 5 backward, at the true widths. Errors are the largest
difference from float32 products of the same bfloat16 inputs, over the largest magnitude, on the first and last head.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # instead of this folder, where trainer.py hides the package trainer

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._functorch import config as functorch  # noqa: E402

from bench.runs import environment  # noqa: E402
from trainer.model.attend import (  # noqa: E402
    PackedSequences,
    cudnn_attention,
    flex_attention,
    padded_attention,
    varlen_attention,
)

Kernel = Callable[..., Tensor]
"""(q, k, v, sequences, scale) -> out."""


def widened(kernel: Kernel, wide_qk: int, wide_v: int) -> Kernel:
    """The same with zeros on the right of queries and keys, and of values."""

    def run(q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences, scale: float) -> Tensor:
        q, k = (F.pad(x, (0, wide_qk - x.shape[2])) for x in (q, k))
        return kernel(q, k, F.pad(v, (0, wide_v - v.shape[2])), sequences, scale)[..., : v.shape[2]]

    return run


def in_one_call(q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences, scale: float) -> Tensor:
    """cuDNN over sequences of one length as a batch."""
    shape = (sequences.num_sequences, sequences.max_length)
    q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in (q, k, v))
    return (
        torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False, scale=scale)[0]
        .transpose(1, 2)
        .flatten(0, 1)
    )


def ragged(q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences, scale: float) -> Tensor:
    """cuDNN over packed rows, forward alone."""
    starts, length = sequences.cu_seqlens, sequences.max_length
    forward = torch.ops.aten._cudnn_attention_forward
    return forward(q, k, v, None, starts, starts, length, length, True, 0.0, True, False, scale=scale)[0]


def candidates(with_flex: bool) -> dict[str, Kernel]:
    """By name."""
    made: dict[str, Kernel] = {
        "varlen (flash 2), values padded": varlen_attention,
        "cudnn 192/128": cudnn_attention,
        "cudnn 192/192": widened(cudnn_attention, 192, 192),
        "cudnn 256/256": widened(cudnn_attention, 256, 256),
        "cudnn 192/128 as a batch": in_one_call,
        "cudnn 192/128 ragged": ragged,
    }
    return made | ({"flex": partial(flex_attention, window=None, sinks_N=None)} if with_flex else {})


def reference(qkv: tuple[Tensor, ...], dout: Tensor, lengths: tuple[int, ...], scale: float) -> list[Tensor]:
    """Output and gradients of the first and the last head, in float32, sequence by sequence."""
    heads = [0, dout.shape[1] - 1]
    made: list[list[Tensor]] = [[], [], [], []]
    start = 0
    for length in lengths:
        parts = [x[start : start + length, heads].float().transpose(0, 1).detach().requires_grad_() for x in qkv]
        q, k, v = parts
        hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        out = (q @ k.transpose(1, 2) * scale).masked_fill(hidden, -torch.inf).softmax(-1) @ v
        grads = torch.autograd.grad(out, parts, dout[start : start + length, heads].float().transpose(0, 1))
        for store, value in zip(made, (out, *grads), strict=True):
            store.append(value.detach().transpose(0, 1))
        start += length
    return [torch.cat(one) for one in made]


def milliseconds(work: Callable[[], Any], repeats: int) -> float:
    """Median, by CUDA's clock."""
    if not torch.cuda.is_available():
        work()
        return float("nan")
    times = []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:])


def measure(
    kernel: Kernel, qkv: tuple[Tensor, ...], dout: Tensor, sequences: PackedSequences, scale: float, repeats: int
) -> dict[str, Any]:
    """Milliseconds, TFLOP/s and errors of one candidate; its message when it raises."""
    row: dict[str, Any] = {}
    lengths = tuple(b - a for a, b in zip(sequences.starts, sequences.starts[1:], strict=False))
    wanted = reference(qkv, dout, lengths, scale)
    heads, (dim_qk, dim_v) = [0, dout.shape[1] - 1], (qkv[0].shape[2], qkv[2].shape[2])
    visible = dout.shape[1] * sum(n * (n + 1) / 2 for n in lengths)

    def error(mine: Tensor, other: Tensor) -> float:
        return float((mine[:, heads].float() - other).abs().max() / other.abs().max())

    try:
        with torch.no_grad():
            out = kernel(*qkv, sequences, scale)
            row["error_out"] = error(out, wanted[0])
            row["forward_ms"] = milliseconds(lambda: kernel(*qkv, sequences, scale), repeats)
        row["forward_tflops"] = 2 * visible * (dim_qk + dim_v) / row["forward_ms"] / 1e9
        leaves = tuple(x.detach().requires_grad_() for x in qkv)
        out = kernel(*leaves, sequences, scale)
        grads = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        row |= {name: error(*pair) for name, pair in zip(("error_dq", "error_dk", "error_dv"),
                                                         zip(grads, wanted[1:], strict=True), strict=True)}  # fmt: skip
        row["backward_ms"] = milliseconds(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), repeats)
        row["backward_tflops"] = 2 * visible * (3 * dim_qk + 2 * dim_v) / row["backward_ms"] / 1e9
    except Exception as problem:  # a kernel that does not take these widths is a result
        row["raised"] = f"{type(problem).__name__}: {str(problem).splitlines()[0][:160]}"
    return row


def main() -> None:
    """All candidates on both workloads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--flex", action="store_true", help="also flex_attention, which is compiled first")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--commit", help="commit of this tree, where it is not a git checkout")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "attention-gpu.json")
    args = parser.parse_args()
    device = torch.device("cpu" if args.tiny else "cuda")
    heads, tokens = (2, 64) if args.tiny else (64, 8192)
    found = {name: importlib.util.find_spec(name) is not None for name in ("flash_attn", "flash_attn_3", "cudnn")}
    report: dict[str, Any] = {"environment": environment(args.commit), "cudnn": torch.backends.cudnn.version()}
    report |= {"packages": found, "rows": []}
    print(json.dumps(report))
    functorch.donated_buffer = False  # flex's backward is timed by running it again on one graph
    kernels = {"padded": padded_attention} if args.tiny else candidates(args.flex)
    generator = torch.Generator(device).manual_seed(1)

    def draw(width: int) -> Tensor:
        return torch.randn(tokens, heads, width, generator=generator, device=device).bfloat16()

    qkv, dout, scale = (draw(192), draw(192), draw(128)), draw(128), 192**-0.5
    print(f"{'kernel':34}{'sequences':>10}{'fwd ms':>9}{'TFLOP/s':>9}{'bwd ms':>9}{'TFLOP/s':>9}"
          f"{'out':>9}{'dq':>9}{'dk':>9}{'dv':>9}")  # fmt: skip
    for name, kernel in kernels.items():
        for count in (1, 4):
            starts = torch.arange(0, tokens + 1, tokens // count)
            sequences = PackedSequences.from_cu_seqlens(starts, tokens, device)
            row = measure(kernel, qkv, dout, sequences, scale, args.repeats)
            report["rows"].append({"kernel": name, "lengths": [tokens // count] * count} | row)
            numbers = (row.get(key, float("nan")) for key in ("forward_ms", "forward_tflops", "backward_ms",
                       "backward_tflops", "error_out", "error_dq", "error_dk", "error_dv"))  # fmt: skip
            texts = [f"{value:9.2f}" if i < 4 else f"{value:9.1e}" for i, value in enumerate(numbers)]
            print(f"{name:34}{f'{count}x{tokens // count}':>10}" + "".join(texts) + row.get("raised", ""), flush=True)
    if not args.tiny:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
        print(f"written: {args.out}")


if __name__ == "__main__":
    main()
