"""The MoE block alone on one GPU: every kernel compared with the machine's limits, adapters with the frozen block.

    python bench/moe_block.py [--tables block profile ...] [--tiny] [--out FILE]

Prints its environment, the copy bandwidth and a large matrix product measured in the same run, then its tables:

    block     forward + backward at the shape of Qwen3-30B-A3B: frozen, rank 16, rank 64, even and skewed routing
    profile   the device's time for that, by kernel, beside the frozen block's
    dequant   unpacking of one layer's experts at the shape of one GPU's part of Kimi-K2
    kernels   each kernel alone: time, GB/s or TFLOP/s, share of the measured limit; other ways to add an adapter
    packed    layers of packed experts, forward + backward

`--tiny` is for a machine without a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from bench.environment import environment  # noqa: E402
from slipstream.conf.architecture.activation import SWIGLU  # noqa: E402
from slipstream.conf.architecture.model_spec import ExpertFormat  # noqa: E402
from slipstream.conf.schema import DType, LoraConfig  # noqa: E402
from slipstream.trainer.kernels.experts.combine import weighted_sum  # noqa: E402
from slipstream.trainer.kernels.experts.counting_sort import sort_by_expert  # noqa: E402
from slipstream.trainer.kernels.experts.dequant import dequantize_int4, dequantize_mxfp4  # noqa: E402
from slipstream.trainer.kernels.experts.gather import gather_project, gather_rows  # noqa: E402
from slipstream.trainer.kernels.experts.low_rank import add_low_rank, low_rank_gradient  # noqa: E402
from slipstream.trainer.kernels.experts.swiglu import InnerAdapter, activate, activate_backward  # noqa: E402
from slipstream.trainer.moe import grouped  # noqa: E402
from slipstream.trainer.moe.bank import UnpackBuffers  # noqa: E402
from slipstream.trainer.moe.dispatch import plan_dispatch  # noqa: E402
from slipstream.trainer.moe.experts import Experts  # noqa: E402
from slipstream.trainer.moe.grouped import GroupedBackend, choose_grouped_backend, grouped_gradient, grouped_product  # noqa: E402

QWEN3 = {"hidden_size": 2048, "intermediate_size": 768, "num_experts": 128, "top_k": 8}
KIMI_PART = {"hidden_size": 7168, "intermediate_size": 2048, "num_experts": 48, "top_k": 8}
TINY = {"hidden_size": 64, "intermediate_size": 32, "num_experts": 8, "top_k": 2}
CASES = ((0, "frozen"), (16, "float32"), (16, "bfloat16"), (64, "float32"), (64, "bfloat16"))
"""Rank and format of the adapters."""
TABLES = ("block", "profile", "dequant", "kernels", "packed")
Rows = list[dict[str, Any]]
REPEATS = 10
"""Steps of a profile."""


def timed(run: Callable[[], Any], device: torch.device, *, before: Callable[[], Any] | None = None) -> float:
    """Median seconds that the device takes for one call, after warming up."""
    if device.type != "cuda":
        run()
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    samples = []
    for step in range(25):
        if before is not None:
            before()
        torch.cuda._sleep(4_000_000)  # about 2 ms, in which the host gets ahead, so that only the device's time counts
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        samples.append((start, end))
        if step == 4:
            torch.cuda.synchronize()
            samples.clear()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in samples) / 1e3


def limits(device: torch.device, tiny: bool) -> dict[str, float]:
    """The limits of this device: bytes per second of a copy (read + written), FLOP per second of a product."""
    size, side = (1 << 16, 64) if tiny else (1 << 31, 8192)
    a, b = torch.empty(size, dtype=torch.uint8, device=device), torch.empty(size, dtype=torch.uint8, device=device)
    copy = 2 * size / timed(lambda: b.copy_(a), device)
    x, y = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    return {"copy_gb_s": copy / 1e9, "matmul_tflop_s": 2 * side**3 / timed(lambda: x @ y, device) / 1e12}


def routing_of(num_tokens: int, shape: dict[str, int], device: torch.device, *, skewed: bool = False) -> Tensor:
    """Every token's experts, drawn uniformly, or with a maximum of about twice the mean rows per expert."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(num_tokens, shape["num_experts"], generator=generator)
    if skewed:
        scores += torch.linspace(0, 0.15, shape["num_experts"])
    return scores.topk(shape["top_k"]).indices.to(device)


def make_experts(shape: dict[str, int], rank: int, device: torch.device, *, lora_dtype: Any = None, **more: Any) -> Any:
    """Experts with random weights; rank 0: frozen, without adapters."""
    lora = LoraConfig(rank=rank, alpha=2.0 * rank, dtype=lora_dtype or DType.float32) if rank else None
    with torch.device(device):
        experts = Experts(
            hidden_size=shape["hidden_size"],
            intermediate_size=shape["intermediate_size"],
            first_expert=0,
            num_local_experts=shape["num_experts"],
            compute_dtype=torch.bfloat16,
            weight_dtype=torch.bfloat16,
            lora=lora,
            device=device,
            **more,
        )
    for name, parameter in experts.named_parameters():
        parameter.requires_grad_("lora_" in name)
        with torch.no_grad():
            parameter.normal_(0, 0.02)
    for buffer in experts.buffers():
        if buffer.dtype is torch.bfloat16:
            buffer.normal_(0, 0.002)
        else:
            buffer.random_(0, 100)
    return experts


def block_calls(
    experts: list[Any], experts_TK: Tensor, shape: dict[str, int], device: torch.device
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Functions for forward alone, and for forward + backward."""
    num_tokens = experts_TK.shape[0]
    x = torch.randn(num_tokens, shape["hidden_size"], device=device, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.rand(experts_TK.shape, device=device).bfloat16().requires_grad_()
    grad_out = torch.randn_like(x)

    def forward() -> Tensor:
        out = x
        for bank in experts:
            out = bank(out, weights, plan_dispatch(experts_TK, shape["num_experts"], None))
        return out

    def both() -> None:
        forward().backward(grad_out)
        x.grad = weights.grad = None
        for bank in experts:
            bank.zero_grad(set_to_none=True)

    return forward, both


def block_seconds(
    experts: list[Any], experts_TK: Tensor, shape: dict[str, int], device: torch.device
) -> dict[str, float]:
    """Seconds of forward, of forward + backward, and of the host to launch them; peak bytes beyond the initial ones."""
    forward, both = block_calls(experts, experts_TK, shape, device)
    results = {"forward_s": timed(forward, device), "both_s": timed(both, device)}
    if device.type == "cuda":
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        both()
        results["launch_s"] = time.perf_counter() - start
        torch.cuda.synchronize()
        results["peak_bytes"] = torch.cuda.max_memory_allocated() - base
    return results


def block_table(shape: dict[str, int], token_counts: list[int], device: torch.device) -> Rows:
    """The block with adapters compared with the frozen block, with the same routing."""
    rows: Rows = []
    for skewed in (False, True):
        for num_tokens in token_counts:
            experts_TK = routing_of(num_tokens, shape, device, skewed=skewed)
            frozen = 0.0
            for rank, adapters in CASES:
                experts = make_experts(shape, rank, device, lora_dtype=DType(adapters) if rank else None)
                seconds = block_seconds([experts], experts_TK, shape, device)
                frozen = frozen or seconds["both_s"]
                counts = experts_TK.flatten().bincount()
                rows.append(
                    {
                        "tokens": num_tokens,
                        "rank": rank,
                        "adapters": adapters,
                        "max_over_mean_rows": round(float(counts.max() / counts.float().mean()), 2),
                        "backend": str(experts.backend),
                        **seconds,
                        "overhead": seconds["both_s"] / frozen - 1,
                    }
                )
    return rows


def profile_table(shape: dict[str, int], token_counts: list[int], device: torch.device) -> Rows:
    """The device's microseconds by kernel, forward + backward; columns are CASES."""
    rows: Rows = []
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    for num_tokens in token_counts:
        experts_TK = routing_of(num_tokens, shape, device)
        found: dict[str, dict[str, float]] = {}
        for rank, adapters in CASES:
            experts = make_experts(shape, rank, device, lora_dtype=DType(adapters) if rank else None)
            _, both = block_calls([experts], experts_TK, shape, device)
            timed(both, device)
            with torch.profiler.profile(activities=[activity]) as profiler:
                for _ in range(REPEATS):
                    both()
                if device.type == "cuda":
                    torch.cuda.synchronize()
            for event in profiler.key_averages():
                spent = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
                cells = found.setdefault(event.key[:120], {})
                cells[f"{adapters} {rank}"] = cells.get(f"{adapters} {rank}", 0.0) + spent / REPEATS
        names = sorted(found, key=lambda name: -max(found[name].values()))
        rows += [{"tokens": num_tokens, "kernel": name, **found[name]} for name in names]
        total = {f"{adapters} {rank}": 0.0 for rank, adapters in CASES}
        for cells in found.values():
            for case, spent in cells.items():
                total[case] += spent
        rows.append({"tokens": num_tokens, "kernel": "sum", **total})
    return rows


def packed_table(shape: dict[str, int], num_tokens: int, num_layers: int, device: torch.device) -> Rows:
    """Layers of packed experts, unpacked one layer ahead, compared with plain ones."""
    rows: Rows = []
    experts_TK = routing_of(num_tokens, shape, device)
    for expert_format in ExpertFormat:
        unpacked = UnpackBuffers(torch.bfloat16)
        layers = [
            make_experts(shape, 16, device, expert_format=expert_format, unpacked=unpacked) for _ in range(num_layers)
        ]
        seconds = block_seconds(layers, experts_TK, shape, device)
        rows.append({"format": str(expert_format), "layers": num_layers, "tokens": num_tokens, **seconds})
        del layers, unpacked
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def kernel_table(
    shape: dict[str, int], num_tokens: int, rank: int, device: torch.device, limit: dict[str, float]
) -> Rows:
    """Each kernel of the block by itself, with the bytes or operations that it needs at least."""
    hidden, width, num_experts = shape["hidden_size"], shape["intermediate_size"], shape["num_experts"]
    experts_TK = routing_of(num_tokens, shape, device)
    plan = plan_dispatch(experts_TK, num_experts, None)
    groups, num_rows = plan.groups, experts_TK.numel()

    def draw(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(size, device=device, dtype=dtype) * 0.05

    x, weights = draw(num_tokens, hidden), torch.rand(experts_TK.shape, device=device).bfloat16()
    rows_SH, gu, h, low = draw(num_rows, hidden), draw(num_rows, 2 * width), draw(num_rows, width), draw(num_rows, rank)
    w_S = weights.flatten()[plan.choice_of_row_S]
    f32 = torch.float32
    a_gate_up, b_gate_up = draw(num_experts, rank, hidden, dtype=f32), draw(num_experts, 2 * width, rank, dtype=f32)
    a_down, b_down = draw(num_experts, rank, width, dtype=f32), draw(num_experts, hidden, rank, dtype=f32)
    inner = InnerAdapter(b_gate_up, a_down, 2.0)
    inner_bytes = 4 * (b_gate_up.numel() + a_down.numel())
    source = plan.token_of_row_S
    wide, half, thin = (2 * num_rows * n for n in (hidden, width, rank))
    tokens = 2 * num_tokens * hidden
    memory: list[tuple[str, Callable[[], Any], int]] = [
        ("sort_by_expert", lambda: sort_by_expert(experts_TK.flatten(), num_experts), 24 * num_rows),
        ("gather_rows", lambda: gather_rows(x, source), tokens + wide),
        ("gather_project (A)", lambda: gather_project(x, source, a_gate_up, groups), tokens + wide + thin + 4 * a_gate_up.numel()),  # noqa: E501
        ("gather_project (B^T)", lambda: gather_project(x, source, b_down.transpose(1, 2), groups), tokens + wide + thin + 4 * b_down.numel()),  # noqa: E501
        ("activate, frozen", lambda: activate(gu, None, None, groups, SWIGLU), 3 * half),
        ("activate, adapter", lambda: activate(gu, low, inner, groups, SWIGLU), 3 * half + 2 * thin + inner_bytes),
        ("activate_backward, frozen", lambda: activate_backward(gu, None, None, h, None, w_S, groups, SWIGLU, False), 5 * half),  # noqa: E501
        ("activate_backward, adapter", lambda: activate_backward(gu, low, inner, h, low, w_S, groups, SWIGLU, True), 6 * half + 3 * thin + inner_bytes),  # noqa: E501
        ("add_low_rank (B of down)", lambda: add_low_rank(rows_SH, low, b_down, None, groups), 2 * wide + thin + 4 * b_down.numel()),  # noqa: E501
        ("add_low_rank (A of gate|up)", lambda: add_low_rank(rows_SH, low, a_gate_up.transpose(1, 2), None, groups), 2 * wide + thin + 4 * a_gate_up.numel()),  # noqa: E501
        ("gradient of A, gate|up", lambda: low_rank_gradient(low, rows_SH, groups, torch.empty_like(a_gate_up)), wide + thin + 4 * a_gate_up.numel()),  # noqa: E501
        ("gradient of B, gate|up", lambda: low_rank_gradient(low, gu, groups, torch.empty_like(b_gate_up).transpose(1, 2)), 2 * half + thin + 4 * b_gate_up.numel()),  # noqa: E501
        ("gradient of A, down", lambda: low_rank_gradient(low, h, groups, torch.empty_like(a_down)), half + thin + 4 * a_down.numel()),  # noqa: E501
        ("gradient of B, down", lambda: low_rank_gradient(low, rows_SH, groups, torch.empty_like(b_down).transpose(1, 2)), wide + thin + 4 * b_down.numel()),  # noqa: E501
        ("weighted_sum", lambda: weighted_sum(rows_SH, weights, plan.row_of_choice_TK), wide + tokens),
    ]  # fmt: skip
    table: Rows = []
    for name, run, num_bytes in memory:
        seconds = timed(run, device)
        rate = num_bytes / seconds / 1e9
        table.append({"kernel": name, "us": seconds * 1e6, "gb_s": rate, "share": rate / limit["copy_gb_s"]})

    chosen = choose_grouped_backend(device, torch.bfloat16, (hidden, width, 2 * width))
    backends = [GroupedBackend.grouped_mm, GroupedBackend.triton] if device.type == "cuda" else [chosen]
    wgu, wd = draw(num_experts, 2 * width, hidden), draw(num_experts, hidden, width)
    folded = draw(num_experts, 2 * width + rank, hidden)
    wide_cat = draw(num_rows, hidden + rank)
    folded_down = draw(num_experts, hidden + rank, width)
    for backend in backends:
        products: list[tuple[str, Callable[[], Any], int, int]] = [
            ("Xp Wgu^T", lambda b=backend: grouped_product(rows_SH, wgu.transpose(1, 2), groups, b), hidden, 2 * width),
            ("Xp [Wgu;A]^T", lambda b=backend: grouped_product(rows_SH, folded.transpose(1, 2), groups, b), hidden, 2 * width),  # noqa: E501
            ("h Wd^T", lambda b=backend: grouped_product(h, wd.transpose(1, 2), groups, b), width, hidden),
            ("h [Wd;A]^T", lambda b=backend: grouped_product(h, folded_down.transpose(1, 2), groups, b), width, hidden),
            ("g Wd", lambda b=backend: grouped_product(rows_SH, wd, groups, b), hidden, width),
            ("[g|db] [Wd;A]", lambda b=backend: grouped_product(wide_cat, folded_down, groups, b), hidden, width),
            ("dgu Wgu", lambda b=backend: grouped_product(gu, wgu, groups, b), 2 * width, hidden),
            ("low-rank product, N = r", lambda b=backend: grouped_product(rows_SH, a_gate_up.bfloat16().transpose(1, 2), groups, b), hidden, rank),  # noqa: E501
            ("dW, dense", lambda b=backend: grouped_gradient(gu, rows_SH, groups, b), 2 * width, hidden),
        ]  # fmt: skip
        for name, run, inner_size, out_size in products:
            with mock.patch.object(grouped, "has_fast_grouped_mm", lambda *_: False):  # Triton's for any size
                seconds = timed(run, device)
            rate = 2 * num_rows * inner_size * out_size / seconds / 1e12
            share = rate / limit["matmul_tflop_s"]
            table.append({"kernel": f"{name} [{backend}]", "us": seconds * 1e6, "tflop_s": rate, "share": share})
    a_16, b_16 = a_gate_up.bfloat16(), b_gate_up.bfloat16()
    merge = timed(lambda: torch.baddbmm(wgu, b_16, a_16, alpha=2.0), device)
    table.append({"kernel": "W + BA of gate|up (not used)", "us": merge * 1e6})
    return [{"tokens": num_tokens, "rank": rank, **row} for row in table]


def dequant_table(shape: dict[str, int], device: torch.device, limit: dict[str, float]) -> Rows:
    """Unpacking of one layer's experts."""
    table: Rows = []
    experts, hidden, width = shape["num_experts"], shape["hidden_size"], shape["intermediate_size"]
    for name, num_rows, columns in (("gate|up", 2 * width, hidden), ("down", hidden, width)):
        out = torch.empty(experts, num_rows, columns, dtype=torch.bfloat16, device=device)
        words = torch.randint(0, 2**31 - 1, (experts, num_rows, columns // 8), device=device, dtype=torch.int32)
        scale = torch.rand(experts, num_rows, columns // 32, device=device).bfloat16()
        e8m0 = torch.randint(110, 130, scale.shape, device=device, dtype=torch.uint8)
        blocks = words.view(torch.uint8).view(experts, num_rows, columns // 32, 16)
        sizes = words.numel() * 4 + out.numel() * 2
        cases = (
            ("int4", lambda w=words, s=scale, o=out: dequantize_int4(w, s, o), sizes + scale.numel() * 2),
            ("mxfp4", lambda w=blocks, s=e8m0, o=out: dequantize_mxfp4(w, s, o), sizes + e8m0.numel()),
        )
        for kind, run, num_bytes in cases:
            seconds = timed(run, device)
            rate = num_bytes / seconds / 1e9
            shape_text = f"{experts} x {num_rows} x {columns}"
            table.append(
                {"kernel": f"dequantize {kind} {name} {shape_text}", "us": seconds * 1e6, "gb_s": rate,
                 "share": rate / limit["copy_gb_s"]}
            )  # fmt: skip
    return table


def show(title: str, rows: Rows) -> None:
    """Print a table; seconds as milliseconds, bytes as GB, shares as percent."""
    print(f"\n{title}")
    for row in rows:
        cells = []
        for key, value in row.items():
            if key.endswith("_s") and not key.endswith(("gb_s", "tflop_s")):
                cells.append(f"{key[:-2]} {value * 1e3:.3f} ms")
            elif key.endswith("_bytes"):
                cells.append(f"{key[:-6]} {value / 1e9:.2f} GB")
            elif key in ("share", "overhead"):
                cells.append(f"{key} {value:.1%}")
            else:
                cells.append(f"{key} {value:.1f}" if isinstance(value, float) else f"{key} {value}")
        print("  " + "  ".join(cells))


def parse(description: str | None, tables: Sequence[str]) -> argparse.Namespace:
    """Options of a script of tables."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", choices=tables, default=list(tables))
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, for a machine without a GPU")
    parser.add_argument("--commit", help="commit of this tree, where it is not a git checkout")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    return parser.parse_args()


def main() -> None:
    """See the module's docstring."""
    options = parse(__doc__, TABLES)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    qwen3, kimi, token_counts = (TINY, TINY, [32]) if options.tiny else (QWEN3, KIMI_PART, [4096, 16384])
    limit = limits(device, options.tiny)
    facts = environment(options.commit) | limit
    print(json.dumps(facts))
    report: dict[str, Any] = {"environment": facts, "shapes": {"block": qwen3, "packed": kimi}}
    if "block" in options.tables:
        report["block"] = block_table(qwen3, token_counts, device)
        show("block, forward + backward", report["block"])
    if "profile" in options.tables:
        report["profile"] = profile_table(qwen3, token_counts, device)
        show("microseconds of the device by kernel, forward + backward", report["profile"])
    if "dequant" in options.tables:
        report["dequant"] = dequant_table(kimi, device, limit)
        show("unpacking", report["dequant"])
    if "kernels" in options.tables:
        report["kernels"] = []
        for num_tokens in token_counts:
            for rank in (16, 64):
                report["kernels"] += kernel_table(qwen3, num_tokens, rank, device, limit)
        show("kernels", report["kernels"])
    if "packed" in options.tables:
        report["packed"] = packed_table(kimi, 8192 if not options.tiny else 32, 4, device)
        show("packed experts, forward + backward", report["packed"])
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
