"""Each Triton kernel beside its torch definition: one function a case, which asserts.

tests/unit/trainer/test_kernels.py runs them on the CPU under Triton's interpreter (in a process of its own, because
the switch is read at import: `python kernel_cases.py`), tests/gpu/test_kernels_cuda.py natively.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from fractions import Fraction
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from conf.schema import CombineMode
from trainer import merge
from trainer.kernels import gather
from trainer.kernels.adamw import Codes, adamw_triton
from trainer.kernels.combine import weighted_sum_torch, weighted_sum_triton
from trainer.kernels.counting_sort import sort_by_expert_torch, sort_by_expert_triton
from trainer.kernels.dequant import (
    dequantize_int4_torch,
    dequantize_int4_triton,
    dequantize_mxfp4_torch,
    dequantize_mxfp4_triton,
)
from trainer.kernels.gather import (
    gather_project_torch,
    gather_project_triton,
    gather_rows_torch,
    gather_rows_triton,
)
from trainer.kernels.grouped_gemm import grouped_gradient_triton, grouped_product_triton
from trainer.kernels.groups import RowGroups
from trainer.kernels.latent import _LatentHeads, latent_heads_torch
from trainer.kernels.log_softmax import (
    log_softmax_torch,
    log_softmax_triton,
    logits_gradient_torch,
    logits_gradient_triton,
)
from trainer.kernels.low_rank import (
    add_low_rank_torch,
    add_low_rank_triton,
    low_rank_gradient_torch,
    low_rank_gradient_triton,
)
from trainer.kernels.norm import (
    norm_rotate_triton,
    rms_norm_backward_triton,
    rms_norm_torch,
    rms_norm_triton,
    rotate_torch,
)
from trainer.kernels.route import route_backward_triton, route_torch, route_triton
from trainer.kernels.swiglu import (
    InnerAdapter,
    activate_backward_torch,
    activate_backward_triton,
    activate_torch,
    activate_triton,
)
from trainer.merge_kernel import merger
from trainer.moe.activation import CLAMPED_SWIGLU, SWIGLU
from trainer.moe.grouped import GroupedBackend, grouped_gradient, grouped_product
from trainer.runs import Rows

TILE_ROWS = 64
COUNTS = (3, 0, 2 * TILE_ROWS + 5, 1)
"""An expert without rows, one of more than a tile of any kernel, one of a single row."""
H, WIDTH = 96, 72
"""Neither is a multiple of a block."""
WIDE_RANK = 300
"""Of the last tilings in float32 and the ones before them in two bytes; no power of two."""
ACTIVATION_CASES = (
    (0, False, SWIGLU), (4, False, SWIGLU), (64, True, CLAMPED_SWIGLU), (WIDE_RANK, False, SWIGLU),
)  # fmt: skip
"""Rank, bias, activation."""


def dtypes_of(device: str) -> tuple[torch.dtype, torch.dtype]:
    """A wide and a narrow one; numpy, which the interpreter computes with, has no bfloat16."""
    return torch.float32, torch.float16 if device == "cpu" else torch.bfloat16


def groups_of(counts: tuple[int, ...], device: str) -> RowGroups:
    return RowGroups(torch.tensor(counts, device=device), sum(counts))


def draw(*shape: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def assert_near(actual: Tensor | None, expected: Tensor | None, what: str) -> None:
    """float32: sums in another order. Narrow: one rounding (bfloat16 2^-8, float16 2^-11) may fall the other way."""
    assert (actual is None) == (expected is None), what
    if actual is None or expected is None:
        return
    assert actual.dtype == expected.dtype, what
    tolerance = {torch.bfloat16: 2**-7, torch.float16: 2**-9, torch.float32: 3e-5}[actual.dtype]
    bound = tolerance * (expected.float().abs() + expected.float().abs().mean())
    worst = ((actual.float() - expected.float()).abs() - bound).max() if actual.numel() else torch.zeros(())
    assert bool(worst <= 0), f"{what}: off by {float(worst)} beyond the tolerance"


def case_tiles(device: str) -> None:
    """Tiles cover every row once, inside one expert."""
    for counts in (COUNTS, (0, 0), (TILE_ROWS, 2 * TILE_ROWS, 0)):
        covered = torch.zeros(sum(counts), dtype=torch.int64)
        expert_of_row = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        for expert, first, stop in groups_of(counts, device).tiles(TILE_ROWS).tolist():
            assert stop - first <= TILE_ROWS
            covered[first:stop] += 1
            assert bool((expert_of_row[first:stop] == expert).all())
        assert bool((covered == 1).all())


def case_tiles_abreast(device: str) -> None:
    """The same tiles, by how far along their expert's rows they lie, then by expert; many experts, many tiles."""
    skewed = (torch.arange(130) * 7919 % 97).tolist()
    for counts in (COUNTS, (0, 0), (TILE_ROWS, 7 * TILE_ROWS, 0, 3 * TILE_ROWS - 1), skewed):
        groups = groups_of(counts, device)
        by_expert, abreast = (groups.tiles(TILE_ROWS, abreast=one).tolist() for one in (False, True))
        num_tiles = [-(-count // TILE_ROWS) for count in counts]
        starts = torch.tensor(counts).cumsum(0) - torch.tensor(counts)

        def along(tile: list[int], num_tiles=num_tiles, starts=starts) -> tuple[Fraction, int]:
            expert, first, _ = tile
            return Fraction((first - int(starts[expert])) // TILE_ROWS, num_tiles[expert]), expert

        assert abreast[: sum(num_tiles)] == sorted(by_expert[: sum(num_tiles)], key=along)
        assert all(first == stop for _, first, stop in abreast[sum(num_tiles) :])


def case_gather(device: str) -> None:
    for dtype in dtypes_of(device):
        for num_columns in (H, 300):
            x = draw(7, num_columns, device=device, dtype=dtype)
            source = torch.tensor([3, 3, 0, 6, 1] * 9, device=device)
            for one in (x, x[:, : num_columns - 8]):
                for tiling in (gather.GATHER, gather.GATHER_FROM_HOST):  # either place of x may take either
                    with mock.patch.multiple(gather, GATHER=tiling, GATHER_FROM_HOST=tiling):
                        assert torch.equal(gather_rows_triton(one, source), gather_rows_torch(one, source))


def case_gather_project(device: str) -> None:
    groups, num_rows = groups_of(COUNTS, device), sum(COUNTS)
    source = torch.randint(0, 11, (num_rows,), generator=torch.Generator().manual_seed(1)).to(device)
    for dtype in dtypes_of(device):
        for rank in (0, 4, 16, 64, WIDE_RANK):  # 0: the dots alone, for a bias without an adapter
            x = draw(11, H, device=device, dtype=dtype)
            b_ENR, v_EK = draw(4, H, rank, device=device), draw(4, H, device=device, dtype=dtype)
            arguments = (x, source, b_ENR.transpose(1, 2), groups, 0.7, v_EK)
            for one, other in zip(gather_project_triton(*arguments), gather_project_torch(*arguments), strict=True):
                assert_near(one, other, f"{dtype} rank {rank}")


def activation_inputs(device: str, dtype: torch.dtype, rank: int, has_bias: bool) -> tuple:
    groups, num_rows = groups_of(COUNTS, device), sum(COUNTS)
    # Spread over the clamps of gpt-oss at 7.
    gu = draw(num_rows, 2 * WIDTH, device=device, dtype=dtype) * 4
    adapter, xa = None, None
    if rank:
        adapter = InnerAdapter(draw(4, 2 * WIDTH, rank, device=device), draw(4, rank, WIDTH, device=device), 0.5)
        xa = draw(num_rows, rank, device=device, dtype=dtype)
    bias = draw(4, 2 * WIDTH, device=device, dtype=dtype) if has_bias else None
    return gu, xa, adapter, bias, groups


def case_activate(device: str) -> None:
    for dtype in dtypes_of(device):
        for rank, has_bias, activation in ACTIVATION_CASES:
            gu, xa, adapter, bias, groups = activation_inputs(device, dtype, rank, has_bias)
            arguments = (xa, adapter, bias, groups, activation)
            for one, other in zip(activate_triton(gu, *arguments), activate_torch(gu, *arguments), strict=True):
                assert_near(one, other, f"{dtype} rank {rank}")


def case_activate_backward(device: str) -> None:
    for dtype in dtypes_of(device):
        for rank, has_bias, activation in ACTIVATION_CASES:
            gu, xa, adapter, bias, groups = activation_inputs(device, dtype, rank, has_bias)
            num_rows = sum(COUNTS)
            dh, w = draw(num_rows, WIDTH, device=device, dtype=dtype), draw(num_rows, device=device).abs()
            db = draw(num_rows, rank, device=device, dtype=dtype) if rank else None
            for needs_h in (True, False):
                rest = (db, w, groups, activation, needs_h)
                mine = activate_backward_triton(gu.clone(), xa, adapter, bias, dh.clone(), *rest)
                wanted = activate_backward_torch(gu, xa, adapter, bias, dh, *rest)
                for name, one, other in zip(("dgu", "hw", "dw", "dba"), mine, wanted, strict=True):
                    assert_near(one, other, f"{name} {dtype} rank {rank}")


def case_add_low_rank(device: str) -> None:
    groups, num_rows = groups_of(COUNTS, device), sum(COUNTS)
    for dtype in dtypes_of(device):
        for rank in (12, WIDE_RANK):
            rows, low = (draw(num_rows, n, device=device, dtype=dtype) for n in (H, rank))
            factor, bias = draw(4, H, rank, device=device), draw(4, H, device=device, dtype=dtype)
            by_columns = draw(4, rank, H, device=device).transpose(1, 2)
            for arguments in ((low, factor, None), (low, by_columns, bias), (None, None, bias)):
                mine = add_low_rank_triton(rows.clone(), *arguments, groups)
                wanted = add_low_rank_torch(rows.clone(), *arguments, groups)
                assert_near(mine, wanted, f"{dtype} rank {rank}")


def case_low_rank_gradient(device: str) -> None:
    for counts in (COUNTS, (0, 0, 0, 0)):
        groups, num_rows = groups_of(counts, device), sum(counts)
        for dtype in dtypes_of(device):
            for rank in (1, 12, 64, WIDE_RANK):
                left = draw(num_rows, rank, device=device, dtype=dtype)
                right = draw(max(num_rows, 1), H, device=device, dtype=dtype)
                source = torch.arange(num_rows, device=device) * 7 % max(num_rows // 3, 1)
                weights = draw(num_rows, device=device, dtype=dtype)
                for more in ((), (source,), (None, weights), (source, weights)):
                    straight = torch.full((4, rank, H), torch.nan, device=device)
                    turned = torch.full((4, H, rank), torch.nan, device=device).transpose(1, 2)
                    wanted = low_rank_gradient_torch(left, right, groups, torch.empty_like(straight), *more)
                    for out in (straight, turned):
                        mine = low_rank_gradient_triton(left, right, groups, out, *more)
                        assert_near(mine, wanted, f"{dtype} rank {rank}")


def case_weighted_sum(device: str) -> None:
    for dtype in dtypes_of(device):
        for num_tokens, top_k in ((5, 3), (4, 8)):
            rows = draw(num_tokens * top_k, H, device=device, dtype=dtype)
            order = torch.randperm(num_tokens * top_k, generator=torch.Generator().manual_seed(2))
            row_of_slot, weights = order.view(num_tokens, top_k).to(device), draw(num_tokens, top_k, device=device)
            for mode in CombineMode:
                for one in (weights, None):
                    mine = weighted_sum_triton(rows, one, row_of_slot, mode)
                    wanted = weighted_sum_torch(rows, one, row_of_slot, mode)
                    assert_near(mine, wanted, f"{mode} {dtype}")


def case_sort_by_expert(device: str) -> None:
    for num_ids, num_experts in ((0, 4), (1, 1), (300, 5), (1000, 128)):
        ids = torch.randint(0, num_experts, (num_ids,), generator=torch.Generator().manual_seed(num_ids)).to(device)
        for one, other in zip(
            sort_by_expert_triton(ids, num_experts, 4), sort_by_expert_torch(ids, num_experts, 4), strict=True
        ):
            assert one.dtype is other.dtype
            assert torch.equal(one, other), (num_ids, num_experts)


def case_dequantize_int4(device: str) -> None:
    """All nibbles in all places against many scales, and a number of words that no program divides."""
    generator = torch.Generator().manual_seed(3)
    packed = torch.randint(-(2**31), 2**31, (3, 43, 8), generator=generator).to(torch.int32).to(device)
    scale = torch.randn(3, 43, 2, generator=generator).to(torch.bfloat16).to(device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    out, wanted = (torch.empty(3, 43, 64, dtype=dtype, device=device) for _ in range(2))
    assert torch.equal(dequantize_int4_triton(packed, scale, out), dequantize_int4_torch(packed, scale, wanted))


def case_dequantize_mxfp4(device: str) -> None:
    generator = torch.Generator().manual_seed(4)
    blocks = torch.randint(0, 256, (3, 43, 2, 16), generator=generator).to(torch.uint8).to(device)
    scales = torch.randint(0, 255, (3, 43, 2), generator=generator).to(torch.uint8).to(device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    out, wanted = (torch.empty(3, 43, 64, dtype=dtype, device=device) for _ in range(2))
    assert torch.equal(dequantize_mxfp4_triton(blocks, scales, out), dequantize_mxfp4_torch(blocks, scales, wanted))


def case_grouped_gemm(device: str) -> None:
    for counts in (COUNTS, (0, 0, 700, 30), (1500, 1, 2595, 0), (0, 0, 0, 0)):
        groups, num_rows = groups_of(counts, device), sum(counts)
        for dtype in dtypes_of(device):
            x, weight = draw(num_rows, H, device=device, dtype=dtype), draw(4, WIDTH, H, device=device, dtype=dtype)
            low = draw(num_rows, 12, device=device, dtype=dtype)
            for matrices in (weight.transpose(1, 2), draw(4, H, 40, device=device, dtype=dtype)):
                p = draw(4, matrices.shape[2], 12, device=device)
                wide = (x.float(), matrices.float(), groups, GroupedBackend.native)
                plain = grouped_product(*wide).to(dtype)
                assert_near(grouped_product_triton(x, matrices, groups, None, None), plain, str(dtype))
                adapted = grouped_product(*wide, low_SR=low.float(), p_ENR=p.to(dtype)).to(dtype)
                assert_near(grouped_product_triton(x, matrices, groups, low, p), adapted, f"adapted {dtype}")
                wide_low, wide_p = (draw(*one.shape[:-1], WIDE_RANK, device=device, dtype=dtype) for one in (low, p))
                more = {"low_SR": wide_low.float(), "p_ENR": wide_p.float()}
                beside = grouped_product(x, matrices, groups, GroupedBackend.triton, low_SR=wide_low, p_ENR=wide_p)
                assert_near(beside, grouped_product(*wide, **more).to(dtype), f"wide {dtype}")
            left = draw(num_rows, WIDTH, device=device, dtype=dtype)
            wanted = grouped_gradient(left, x, groups, GroupedBackend.native)
            assert_near(grouped_gradient_triton(left, x, groups), wanted, str(dtype))


def case_rms_norm(device: str) -> None:
    """With and without a sum before it; rows that lie apart; the gradients are autograd's of the definition."""
    for dtype in dtypes_of(device):
        wide_x, delta, weight, dout, dtotal = (
            draw(*shape, device=device, dtype=dtype, seed=seed)
            for seed, shape in enumerate([(5, H + 9), (5, H), (H,), (5, H), (5, H)])
        )
        x = wide_x[:, 3 : 3 + H]
        for one in (None, delta):
            total, out = rms_norm_triton(x, one, weight, 1e-2)
            start = (x if one is None else x + one).detach()
            assert_near(total, None if one is None else start, f"sum {dtype}")
            assert_near(out, rms_norm_torch(start, weight, 1e-2), f"norm {dtype}")
            exact = start.float().requires_grad_()
            (wanted,) = torch.autograd.grad(rms_norm_torch(exact, weight.float(), 1e-2), exact, dout.float())
            given = None if one is None else dtotal
            wanted = (wanted if given is None else wanted + given.float()).to(dtype)
            assert_near(rms_norm_backward_triton(start, weight, dout, given, 1e-2), wanted, f"gradient {dtype}")


def case_norm_rotate(device: str) -> None:
    """All dims turn, or some; with a norm before, or without; heads of a slice, as a latent's keys are."""
    for dtype in dtypes_of(device):
        for num_heads, dim, half in (((3, 1), 16, 8), ((9, 10), 24, 4), ((1, 2), 64, 32)):
            angles = draw(5, 1, half, device=device)
            cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
            wide, weights, douts = (
                [draw(*shape, device=device, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]
                for shapes in ([(5, n, dim + 8) for n in num_heads], [(dim,)] * 2, [(5, n, dim) for n in num_heads])
            )
            heads = [x[..., 8:] for x in wide]
            for given in ([None, None], weights):
                outs = norm_rotate_triton(heads, given, 1e-2, cos, sin)
                mine = norm_rotate_triton(heads, given, 1e-2, cos, sin, douts)
                for i, (x, one) in enumerate(zip(heads, given, strict=True)):
                    start = x if one is None else rms_norm_torch(x, one, 1e-2)
                    assert_near(outs[i], rotate_torch(start, cos, sin), f"{dtype} {one is None} {i}")
                    exact = x.float().requires_grad_()
                    start = exact if one is None else rms_norm_torch(exact, one.float(), 1e-2)
                    turned = rotate_torch(start, cos.float(), sin.float())
                    (wanted,) = torch.autograd.grad(turned, exact, douts[i].float())
                    assert_near(mine[i], wanted.to(dtype), f"gradient {dtype} {one is None} {i}")


def case_latent_heads(device: str) -> None:
    """Heads that no program divides, widths that are no powers of two, the shared part a slice; gradients that lie
    in other orders, as attention kernels give them. Forward is the definition to the bit."""
    for dtype in dtypes_of(device):
        for interleaved, heads, fixed, half, values in (
            (True, 3, 16, 4, 24),
            (False, 9, 24, 6, 12),
            (True, 16, 8, 8, 8),
        ):
            shapes = [(5, heads, fixed + 2 * half), (5, heads, fixed + values), (5, 2 * half + 7)]
            q, kv, beside = (draw(*shape, device=device, dtype=dtype).requires_grad_() for shape in shapes)
            angles = draw(5, 1, half, device=device)
            cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
            mine = _LatentHeads.apply(q, kv, beside[:, 7:], cos, sin, interleaved)
            wanted = latent_heads_torch(q, kv, beside[:, 7:], cos, sin, interleaved=interleaved)
            for one, other, what in zip(mine, wanted, "qkv", strict=True):
                assert torch.equal(one, other), f"{what} {dtype} {interleaved}"
            exact = [x.detach().float().requires_grad_() for x in (q, kv, beside)]
            start = latent_heads_torch(
                exact[0], exact[1], exact[2][:, 7:], cos.float(), sin.float(), interleaved=interleaved
            )
            douts = [draw(5, *x.shape[:0:-1], device=device, dtype=dtype, seed=1).transpose(1, 2) for x in wanted]
            wide = [x.float() for x in douts]
            wanted = torch.autograd.grad(start, exact, wide)
            for one, other, what in zip(
                torch.autograd.grad(mine, (q, kv, beside), douts), wanted, ("dq", "dkv", "dturning"), strict=True
            ):
                assert_near(one, other.to(dtype), f"{what} {dtype} {interleaved}")


def case_log_softmax(device: str) -> None:
    """Rows longer than a block, and a largest logit in every place."""
    for dtype in dtypes_of(device):
        for rows, columns in ((3, 40), (4, 4096 + 77), (0, 40)):
            logits = 4 * draw(rows, columns, device=device, dtype=dtype)
            targets = torch.arange(rows, device=device) * 11 % columns
            for temperature in (1.0, 0.7):
                wanted = log_softmax_torch(logits.clone(), targets, temperature)
                mine = log_softmax_triton(logits, targets, temperature)
                for one, other, what in zip(mine, wanted, ("logprobs", "normalizers", "entropy"), strict=True):
                    assert_near(one, other, f"{what} {dtype}")
                grads = draw(rows, device=device)
                wanted_grad = logits_gradient_torch(logits.clone(), targets, wanted[1], grads, temperature)
                mine_grad = logits_gradient_triton(logits.clone(), targets, wanted[1], grads, temperature)
                assert_near(mine_grad, wanted_grad, f"gradient {dtype}")


def case_adamw(device: str) -> None:
    """Every format of moments against torchao's update in eager mode; a size that no program divides."""
    from torchao.optim.adam import single_param_adam
    from torchao.optim.subclass_8bit import OptimState8bit

    numbers = {"lr": 0.05, "weight_decay": 0.1, "eps": 1e-6}
    betas = (0.9, 0.99)
    for state in (torch.float32, torch.float16, torch.uint8):
        size = 4096 if state is torch.uint8 else 1300
        sizes = (size, 2 * size, size, size)  # one launch for three, one of them out of line
        starts = [draw(one + 1, device=device, seed=one)[int(i == 3) :][:one] for i, one in enumerate(sizes)]
        wanted, mine = [p.clone() for p in starts], list(starts)
        starts = [p.clone() for p in starts]
        kept: list[list[list[Any]]] = [[], []]
        for one in (*wanted, *mine):
            if state is torch.uint8:
                pair = [OptimState8bit.zeros(one.shape, signed, 256, device) for signed in (True, False)]
            else:
                pair = [torch.zeros(one.shape, dtype=state, device=device) for _ in range(2)]
            kept[len(kept[0]) >= len(sizes)].append(pair)
        for step in range(1, 4):
            grads = [draw(one, device=device, seed=10 * step + i) for i, one in enumerate(sizes)]
            for p, grad, pair in zip(wanted, grads, kept[0], strict=True):
                single_param_adam(
                    p,
                    grad,
                    torch.tensor(float(step)),
                    *pair,
                    max_exp_avg_sq=None,
                    lr=torch.tensor(numbers["lr"]),
                    beta1=betas[0],
                    beta2=betas[1],
                    weight_decay=numbers["weight_decay"],
                    eps=numbers["eps"],
                    IS_ADAMW=True,
                    BF16_STOCHASTIC_ROUND=False,
                )
            moments, squares = (
                [Codes(m.codes, m.scale, m.qmap) if isinstance(m, OptimState8bit) else m for m in of_one]
                for of_one in zip(*kept[1], strict=True)
            )
            adamw_triton(mine, grads, moments, squares, betas=betas, num_updates=step, seed=step, **numbers)
        for p, one, other, start in zip(mine, wanted, range(len(sizes)), starts, strict=True):
            if state is torch.uint8:  # a value between two codes may fall to the other one
                for a, b in zip(kept[0][other], kept[1][other], strict=True):
                    assert ((a.codes.int() - b.codes.int()).abs() > 1).sum() == 0
                    assert (a.codes != b.codes).float().mean() < 0.01
                assert (p - one).norm() < 1e-3 * (one - start).norm()
            else:
                assert_near(p, one, f"parameters {state}")
    if device != "cpu":  # numpy has no bfloat16
        p = [torch.full((1 << 16,), 1.0, device=device, dtype=torch.bfloat16) for _ in range(2)]
        zeros = [[torch.zeros(one.shape, device=device) for one in p] for _ in range(2)]
        ones = [torch.ones_like(one) for one in p]
        adamw_triton(p, ones, *zeros, lr=1e-3, betas=betas, eps=1e-8, weight_decay=0.0, num_updates=1, seed=1)
        for one in p:
            assert abs(float((1 - one.float()).mean()) - 1e-3) < 1e-4  # a unit below 1 is 2^-8: most stay
        assert not torch.equal(*p)  # each has random numbers of its own


def case_route(device: str) -> None:
    """Choice and weights, with ties (coarse logits), with a row that is not a number; the gradient is autograd's."""
    for dtype in dtypes_of(device):
        for num_tokens, num_experts, top_k in ((37, 128, 8), (5, 12, 2), (3, 20, 20)):
            logits = draw(num_tokens, num_experts, device=device, dtype=dtype).mul_(2)
            dweights = draw(num_tokens, top_k, device=device, dtype=dtype, seed=1)
            for does_normalize in (False, True):
                exact = logits.clone().requires_grad_()
                wanted, wanted_experts = route_torch(exact, top_k, does_normalize)
                weights, experts = route_triton(logits, top_k, does_normalize)
                assert_near(weights, wanted.detach(), f"weights {dtype}")
                assert torch.equal(logits.gather(1, experts), logits.gather(1, wanted_experts))
                assert all(row.unique().numel() == top_k for row in experts)
                (grad,) = torch.autograd.grad(wanted, exact, dweights)
                mine = route_backward_triton(logits, wanted_experts, dweights, does_normalize)
                assert_near(mine, grad, f"gradient {dtype}")
    coarse = draw(9, 16, device=device).round()
    coarse[4] = torch.nan
    _, experts = route_triton(coarse, 4, True)
    in_order = coarse.argsort(dim=-1, descending=True, stable=True)[:, :4]
    is_number = torch.arange(9, device=device) != 4
    assert torch.equal(experts[is_number], in_order[is_number])
    assert bool(((experts >= 0) & (experts < 16)).all())


def merged_bands(base: Tensor, b: Tensor, a: Tensor, rows: Rows, columns: slice) -> Tensor:
    """Rows of the kernel's merge, into columns one after the other."""
    rows_a_factor = len(base) // len(a)
    base_GRN = rows.of(base)[..., columns]
    out_GRN = torch.full_like(base_GRN.transpose(1, 2), torch.nan).transpose(1, 2)
    skipped, first_row = divmod(rows.start, rows_a_factor)
    merger(base_GRN, rows.of(b), a[skipped:, :, columns], 0.7, out_GRN, first_row, rows_a_factor, rows.pitch)()
    return out_GRN


def case_merge(device: str) -> None:
    """One band under several A, and bands of one A each: near the torch form, and bitwise what the whole stack has."""
    num_factors, rows_a_factor = 3, 2 * TILE_ROWS + 22
    for dtype in dtypes_of(device):
        base = draw(num_factors * rows_a_factor, WIDTH, device=device, dtype=dtype)
        b = draw(num_factors * rows_a_factor, 4, device=device, seed=1)
        a = draw(num_factors, 4, WIDTH, device=device, seed=2)
        everything = slice(0, WIDTH)
        whole = merged_bands(base, b, a, Rows(0, len(base)), everything)[0]
        wanted = torch.empty(base.shape, dtype=dtype)
        bands = (base.cpu()[None], b.cpu()[None], a.cpu(), 0.7, wanted[None])
        merge.merger(*bands, first_row=0, rows_a_factor=rows_a_factor)()
        assert_near(whole.cpu(), wanted, f"whole {dtype}")
        for rows, columns in (
            (Rows(TILE_ROWS, 2 * rows_a_factor), everything),  # from amid one A to amid another
            (Rows(rows_a_factor + 5, 70), slice(7, 40)),
            (Rows(3, 70, 6, rows_a_factor // 2), everything),  # a TP rank's part of gate and of up
            (Rows(rows_a_factor // 2, 75, 4, rows_a_factor // 2), slice(8, 9)),
            (Rows(5, rows_a_factor - 5, 3, rows_a_factor), everything),
            (Rows(9, 64, 2, 2 * rows_a_factor), slice(0, 33)),
        ):
            merged = merged_bands(base, b, a, rows, columns)
            assert torch.equal(merged, rows.of(whole)[..., columns]), (rows, columns, dtype)


CASES: dict[str, Callable[[str], None]] = {
    name.removeprefix("case_"): case for name, case in list(globals().items()) if name.startswith("case_")
}


def main() -> None:
    """Run every case on the CPU; one JSON object of name -> traceback, "" when it passed."""
    results = {}
    for name, case in CASES.items():
        try:
            case("cpu")
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
