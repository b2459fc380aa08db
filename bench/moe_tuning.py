"""What the MoE block is tuned by: its kernels under other tile sizes than their fixed ones, and the host's time.

    python bench/moe_tuning.py [--tables tilings host] [--tiny] [--out FILE]

    tilings   every kernel that an adapter touches under some tilings, the shortest first; and what trying them took
    host      what Python spends on launching one forward + backward
    products  what the host spends on launching one product of experts, by kernel and with an adapter

Shape, routing and clock are those of bench/moe_block.py. `--tiny` is for a machine without a GPU, where Triton's
products fail, and say so.
"""

from __future__ import annotations

import cProfile
import json
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # instead of this folder, where trainer.py hides the package trainer

from bench.moe_block import (  # noqa: E402
    QWEN3,
    REPEATS,
    TINY,
    Rows,
    block_calls,
    make_experts,
    parse,
    routing_of,
    show,
    timed,
)
from bench.runs import environment  # noqa: E402
from conf.schema import DType  # noqa: E402
from trainer.architecture.activation import SWIGLU  # noqa: E402
from trainer.kernels import gather, grouped_gemm, low_rank, swiglu  # noqa: E402
from trainer.kernels.launch import Tiling  # noqa: E402
from trainer.moe import grouped  # noqa: E402
from trainer.moe.dispatch import plan_dispatch  # noqa: E402
from trainer.moe.grouped import GroupedBackend  # noqa: E402

TABLES = ("tilings", "host", "products")


def tilings_table(shape: dict[str, int], num_tokens: int, device: torch.device) -> Rows:
    """Each kernel that an adapter touches under each of some tilings; the shortest of a case comes first."""
    hidden, width, num_experts = shape["hidden_size"], shape["intermediate_size"], shape["num_experts"]
    product_tilings = (
        (Tiling(128, 256, 8, 3), 2), (Tiling(128, 256, 8, 3), 8), (Tiling(128, 128, 8, 3), 2),
        (Tiling(128, 128, 4, 3), 2), (Tiling(64, 256, 8, 3), 2), (Tiling(64, 128, 4, 4), 1),
    )  # fmt: skip
    row_tilings = (
        Tiling(64, 32, 4, 3), Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(32, 64, 2, 2), Tiling(32, 64, 2, 3),
        Tiling(16, 64, 1, 2), Tiling(16, 64, 1, 3),
    )  # fmt: skip
    gradient_tilings = (Tiling(64, 128, 4, 2), Tiling(64, 128, 4, 3), Tiling(64, 128, 4, 4), Tiling(128, 128, 4, 3))
    add_tilings = (
        Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 4), Tiling(64, 128, 4, 2), Tiling(64, 128, 8, 3), Tiling(128, 64, 8, 3),
        Tiling(32, 128, 4, 3),
    )  # fmt: skip
    gather_tilings = (Tiling(64, 128, 4, 2), Tiling(64, 128, 4, 3), Tiling(64, 64, 4, 3), Tiling(32, 128, 4, 3))

    def draw(*size: int) -> Tensor:
        return torch.randn(size, device=device, dtype=torch.bfloat16) * 0.05

    wgu, wd = draw(num_experts, 2 * width, hidden), draw(num_experts, hidden, width)
    rows: Rows = []
    experts_TK = routing_of(num_tokens, shape, device)
    plan = plan_dispatch(experts_TK, num_experts, None)
    groups, num_rows, source = plan.groups, experts_TK.numel(), plan.token_of_row_S
    x, sorted_x, gu, h, w = (
        draw(num_tokens, hidden), draw(num_rows, hidden), draw(num_rows, 2 * width), draw(num_rows, width),
        torch.rand(num_rows, device=device),
    )  # fmt: skip

    def products(low: Any, factors: Any) -> dict[str, Callable[[], Any]]:
        operands = {
            "Xp Wgu^T": (sorted_x, wgu.transpose(1, 2)), "h Wd^T": (h, wd.transpose(1, 2)),
            "g Wd": (sorted_x, wd), "dgu Wgu": (gu, wgu),
        }  # fmt: skip
        return {
            name: lambda pair=pair, p=p: grouped_gemm.grouped_product_triton(*pair, groups, low, p)
            for (name, pair), p in zip(operands.items(), factors, strict=True)
        }

    cases: list[tuple[str, int, Any, Any, tuple[Any, ...], Callable[[], Any]]] = []
    for name, run in products(None, (None,) * 4).items():
        cases.append((name, 0, grouped_gemm, "product_tiling", product_tilings[:1], run))
    for rank in (16, 64):
        low = draw(num_rows, rank)
        a_gu, b_gu, a_d, b_d = (
            draw(num_experts, rank, hidden), draw(num_experts, 2 * width, rank), draw(num_experts, rank, width),
            draw(num_experts, hidden, rank),
        )  # fmt: skip
        inner = swiglu.InnerAdapter(b_gu, a_d, 2.0)
        for name, run in products(low, (b_gu, b_d, a_d.transpose(1, 2), a_gu.transpose(1, 2))).items():
            cases.append((name, rank, grouped_gemm, "product_tiling", product_tilings, run))
        forward = lambda inner=inner, low=low: swiglu.activate(gu, low, inner, None, groups, SWIGLU)  # noqa: E731
        backward = lambda inner=inner, low=low: swiglu.activate_backward(  # noqa: E731
            gu, low, inner, None, h, low, w, groups, SWIGLU, True
        )
        cases.append(("activate", rank, swiglu, "ADAPTED", row_tilings, forward))
        cases.append(("activate_backward", rank, swiglu, "ADAPTED_BACKWARD", row_tilings, backward))
        project = lambda a=a_gu: gather.gather_project(x, source, a, groups)  # noqa: E731
        cases.append(("gather_project", rank, gather, "PROJECT", gather_tilings, project))
        # neighbours take the same part of every expert's rows when tokens are more bytes than these: all, none
        cases.append(("gather_project, abreast from bytes", rank, gather, "CACHE_BYTES", (0, 1 << 62), project))
        add = lambda b=b_d, low=low: low_rank.add_low_rank(sorted_x, low, b, None, groups)  # noqa: E731
        cases.append(("add the product of down", rank, low_rank, "ADD", add_tilings, add))
        for name, right, out, more in (
            ("gradient of A, gate|up", x, a_gu, {"source_S": source}),
            ("gradient of A, gate|up, sorted rows", sorted_x, a_gu, {}),
            ("gradient of B, gate|up", gu, b_gu.transpose(1, 2), {}),
            ("gradient of B, down", x, b_d.transpose(1, 2), {"source_S": source, "weights_S": w}),
            ("gradient of A, down", h, a_d, {}),
        ):
            run = lambda r=right, o=out, low=low, m=more: low_rank.low_rank_gradient(  # noqa: E731
                low, r, groups, o, **m
            )
            cases.append((name, rank, low_rank, "GRADIENT", gradient_tilings, run))
    for name, rank, module, attribute, candidates, run in cases:
        found: Rows = []
        for candidate in candidates:
            given: Any = {2048: candidate} if isinstance(candidate, Tiling) else candidate
            given = (lambda *_, c=candidate: c) if attribute == "product_tiling" else given
            row = {"tokens": num_tokens, "kernel": name, "rank": rank, "tiling": str(candidate)}
            began = time.perf_counter()
            with mock.patch.object(module, attribute, given):
                try:
                    row["us"] = timed(run, device) * 1e6
                except Exception as e:  # a tiling that does not fit this device is no choice
                    row["us"], row["failed"] = float("inf"), str(e).splitlines()[0][:80]
            found.append({**row, "tuning_s": time.perf_counter() - began})
        rows += sorted(found, key=lambda row: row["us"])
    return rows


def host_table(shape: dict[str, int], num_tokens: int, device: torch.device) -> Rows:
    """Milliseconds of Python in one forward + backward, by function, the longest first."""
    experts = make_experts(shape, 16, device, lora_dtype=DType.bfloat16)
    _, both = block_calls([experts], routing_of(num_tokens, shape, device), shape, device)
    timed(both, device)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(REPEATS):
        both()
    profiler.disable()
    stats: Any = pstats.Stats(profiler)
    rows = [
        {"function": f"{Path(where[0]).name}:{where[1]} {where[2]}", "calls": calls / REPEATS,
         "own_s": own / REPEATS, "total_s": total / REPEATS}
        for where, (_, calls, own, total, _) in stats.stats.items()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: -row["own_s"])[:30]


def products_table(shape: dict[str, int], device: torch.device) -> Rows:
    """Microseconds of the host for a launch; few tokens, so that the device never makes it wait."""
    hidden, width, num_experts = shape["hidden_size"], shape["intermediate_size"], shape["num_experts"]
    num_tokens, rank = 64, 16
    plan = plan_dispatch(routing_of(num_tokens, shape, device), num_experts, None)
    num_rows = num_tokens * shape["top_k"]
    x, down, low, b_down = (
        torch.randn(*size, device=device, dtype=torch.bfloat16)
        for size in ((num_rows, width), (num_experts, hidden, width), (num_rows, rank), (num_experts, hidden, rank))
    )
    rows: Rows = []
    for backend in (GroupedBackend.grouped_mm, *([GroupedBackend.triton] if device.type == "cuda" else [])):
        for adapter in ({}, {"low_SR": low, "p_ENR": b_down}):
            run = lambda b=backend, more=adapter: grouped.grouped_product(  # noqa: E731
                x, down.transpose(1, 2), plan.groups, b, **more
            )
            samples = []
            with mock.patch.object(grouped, "has_fast_grouped_mm", lambda *_: False):  # Triton's whatever their size
                for _ in range(REPEATS):
                    run()
                    if device.type == "cuda":
                        torch.cuda.synchronize()
                    began = time.perf_counter()
                    for _ in range(REPEATS):
                        run()
                    samples.append((time.perf_counter() - began) / REPEATS * 1e6)
            rows.append({"backend": str(backend), "rank": rank if adapter else 0, "us": statistics.median(samples)})
    return rows


def main() -> None:
    """See the module's docstring."""
    options = parse(__doc__, TABLES)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape, token_counts = (TINY, [32]) if options.tiny else (QWEN3, [4096, 16384])
    report: dict[str, Any] = {"environment": environment(options.commit), "shape": shape}
    print(json.dumps(report["environment"]))
    if "tilings" in options.tables:
        report["tilings"] = [row for count in token_counts for row in tilings_table(shape, count, device)]
        show("tilings", report["tilings"])
        print(f"tuning took {sum(row['tuning_s'] for row in report['tilings']):.0f} s")
    if "host" in options.tables:
        report["host"] = host_table(shape, token_counts[0], device)
        show("Python, forward + backward", report["host"])
    if "products" in options.tables:
        report["products"] = products_table(shape, device)
        show("the host's time of a product's launch", report["products"])
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
