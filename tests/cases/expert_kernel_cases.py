"""Kernels of the routed experts beside their torch definitions; see kernel_cases.py."""

import itertools
from dataclasses import replace
from fractions import Fraction
from unittest import mock

import torch

from cases.kernel_inputs import (
    COUNTS,
    TILE_ROWS,
    WIDE_RANK,
    WIDTH,
    H,
    assert_near,
    draw,
    dtypes_of,
    groups_of,
    is_tried,
)
from slipstream.conf.architecture.activation import CLAMPED_SWIGLU, GELU_TANH, SWIGLU
from slipstream.conf.schema import CombineMode
from slipstream.trainer.kernels.experts import gather, low_rank
from slipstream.trainer.kernels.experts.combine import weighted_sum_torch, weighted_sum_triton
from slipstream.trainer.kernels.experts.counting_sort import sort_by_expert_torch, sort_by_expert_triton
from slipstream.trainer.kernels.experts.dequant import (
    dequantize_int4_torch,
    dequantize_int4_triton,
    dequantize_mxfp4_torch,
    dequantize_mxfp4_triton,
)
from slipstream.trainer.kernels.experts.gather import (
    gather_project_torch,
    gather_project_triton,
    gather_rows_torch,
    gather_rows_triton,
)
from slipstream.trainer.kernels.experts.grouped_gemm import grouped_gradient_triton, grouped_product_triton
from slipstream.trainer.kernels.experts.groups import RowGroups
from slipstream.trainer.kernels.experts.low_rank import (
    add_dense_low_rank,
    add_dense_low_rank_torch,
    add_dense_low_rank_triton,
    add_low_rank,
    add_low_rank_torch,
    add_low_rank_triton,
    low_rank_gradient_torch,
    low_rank_gradient_triton,
)
from slipstream.trainer.kernels.experts.swiglu import (
    InnerAdapter,
    activate_backward_torch,
    activate_backward_triton,
    activate_torch,
    activate_triton,
)
from slipstream.trainer.moe.grouped import GroupedBackend, grouped_gradient, grouped_product

ACTIVATION_CASES = (
    (0, SWIGLU), (4, SWIGLU), (64, CLAMPED_SWIGLU), (WIDE_RANK, SWIGLU),
    (4, replace(SWIGLU, rounds_each=True)), (0, replace(CLAMPED_SWIGLU, rounds_each=True)),
    (4, replace(GELU_TANH, rounds_each=True)),
)  # fmt: skip
"""Rank, activation."""
GRADIENT_RANKS = (1, 12, 64, WIDE_RANK)


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


def case_gather_up_to_the_last_end(device: str) -> None:
    x, source = draw(7, H, device=device), torch.tensor([3, 3, 0, 6, 1] * 19, device=device)
    ends = torch.tensor([5, 41], dtype=torch.int32, device=device)
    for tiling in (gather.GATHER, gather.GATHER_FROM_HOST):
        with mock.patch.multiple(gather, GATHER=tiling, GATHER_FROM_HOST=tiling):
            assert torch.equal(gather_rows_triton(x, source, ends)[:41], x[source[:41]])


def case_room_beyond_the_last_row(device: str) -> None:
    """Rows that no expert has may hold anything, and change nothing."""
    tight = groups_of(COUNTS, device)
    wide = RowGroups(tight.counts_E, tight.num_rows + 3 * TILE_ROWS + 7, expected_rows=tight.num_rows)
    for dtype in dtypes_of(device)[device == "cpu" :]:
        found, wanted = (_forward_and_backward(groups, dtype, device) for groups in (wide, tight))
        for name, value in wanted.items():
            assert torch.equal(found[name], value), (name, dtype)


def _forward_and_backward(groups: RowGroups, dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    """Results of the kernels that walk groups, where rows that no expert has are not numbers."""
    num_rows = sum(COUNTS)

    def rows_of(*shape: int) -> torch.Tensor:
        drawn = draw(num_rows, *shape, device=device, dtype=dtype)
        return torch.cat([drawn, drawn.new_full((groups.num_rows - num_rows, *shape), torch.nan)])

    adapter = InnerAdapter(draw(4, 2 * WIDTH, 4, device=device), draw(4, 4, WIDTH, device=device), 0.5)
    x, source = draw(11, H, device=device, dtype=dtype), torch.arange(groups.num_rows, device=device) % 11
    p_ERK, matrices = draw(4, 4, H, device=device), draw(4, H, WIDTH, device=device, dtype=dtype)
    v_EK, p_ENR = draw(4, H, device=device, dtype=dtype), draw(4, WIDTH, 4, device=device)
    rows, low, dots = gather_project_triton(x, source, p_ERK, groups, 0.7, v_EK)
    assert dots is not None
    out = {"rows": rows, "low": low, "dots": dots}
    out["product"] = grouped_product_triton(rows, matrices, groups, low, p_ENR)
    xa, db, dh, w = rows_of(4), rows_of(4), rows_of(WIDTH), rows_of()
    for name, value in zip(("h", "ha"), activate_triton(rows_of(2 * WIDTH), xa, adapter, groups, SWIGLU), strict=True):
        out[name] = value  # type: ignore[assignment]
    grads = activate_backward_triton(rows_of(2 * WIDTH), xa, adapter, dh, db, w, groups, SWIGLU, True)
    out |= zip(("dgu", "hw", "dw", "dba"), grads, strict=True)  # type: ignore[arg-type]
    out = {name: value[:num_rows] for name, value in out.items()}
    out["added"] = add_low_rank_triton(rows_of(WIDTH), low, p_ENR, None, groups)[:num_rows]
    out["low gradient"] = low_rank_gradient_triton(low, x, groups, torch.empty_like(p_ERK), source, rows_of())
    with mock.patch.object(low_rank, "CUT_FROM_ROWS", 0):
        out["cut"] = low_rank_gradient_triton(low, x, groups, torch.empty_like(p_ERK), source)
    if device == "cuda":  # of bfloat16 by grouped_mm
        out["chosen gradient"] = grouped_gradient(rows, rows_of(WIDTH), groups, GroupedBackend.triton)
        out["chosen product"] = grouped_product(rows, matrices, groups, GroupedBackend.triton)[:num_rows]
    out["gradient"] = grouped_gradient_triton(rows, rows_of(WIDTH), groups)
    return out


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


def activation_inputs(device: str, dtype: torch.dtype, rank: int) -> tuple:
    groups, num_rows = groups_of(COUNTS, device), sum(COUNTS)
    # Spread over the clamps of gpt-oss at 7.
    gu = draw(num_rows, 2 * WIDTH, device=device, dtype=dtype) * 4
    adapter, xa = None, None
    if rank:
        adapter = InnerAdapter(draw(4, 2 * WIDTH, rank, device=device), draw(4, rank, WIDTH, device=device), 0.5)
        xa = draw(num_rows, rank, device=device, dtype=dtype)
    return gu, xa, adapter, groups


def case_activate(device: str) -> None:
    for i, dtype in enumerate(dtypes_of(device)):
        for j, (rank, activation) in enumerate(ACTIVATION_CASES):
            if not is_tried(device, i, 1 if activation.rounds_each else j):
                continue
            gu, xa, adapter, groups = activation_inputs(device, dtype, rank)
            arguments = (xa, adapter, groups, activation)
            for one, other in zip(activate_triton(gu, *arguments), activate_torch(gu, *arguments), strict=True):
                assert_near(one, other, f"{dtype} rank {rank}")


def case_activate_backward(device: str) -> None:
    for i, dtype in enumerate(dtypes_of(device)):
        for j, (rank, activation) in enumerate(ACTIVATION_CASES):
            if not is_tried(device, i, 1 if activation.rounds_each else j):
                continue
            gu, xa, adapter, groups = activation_inputs(device, dtype, rank)
            num_rows = sum(COUNTS)
            dh, w = draw(num_rows, WIDTH, device=device, dtype=dtype), draw(num_rows, device=device).abs()
            db = draw(num_rows, rank, device=device, dtype=dtype) if rank else None
            for k, (needs_h, overwrites) in enumerate(((True, True), (True, False), (False, True))):
                if not is_tried(device, j, k, one_of=3):
                    continue
                rest = (db, w, groups, activation, needs_h)
                given, grad = gu.clone(), dh.clone()
                mine = activate_backward_triton(given, xa, adapter, grad, *rest, may_overwrite_gu=overwrites)
                assert torch.equal(given, gu) != overwrites
                wanted = activate_backward_torch(gu, xa, adapter, dh.clone(), *rest)
                for name, one, other in zip(("dgu", "hw", "dw", "dba"), mine, wanted, strict=True):
                    assert_near(one, other, f"{name} {dtype} rank {rank}")


def case_add_low_rank(device: str) -> None:
    groups, num_rows = groups_of(COUNTS, device), sum(COUNTS)
    for i, dtype in enumerate(dtypes_of(device)):
        for j, rank in enumerate((12, WIDE_RANK)):
            rows, low = (draw(num_rows, n, device=device, dtype=dtype) for n in (H, rank))
            factor, bias = draw(4, H, rank, device=device), draw(4, H, device=device, dtype=dtype)
            by_columns = draw(4, rank, H, device=device).transpose(1, 2)
            for k, arguments in enumerate(((low, factor, None), (low, by_columns, bias), (None, None, bias))):
                if not is_tried(device, i, j, k):
                    continue
                mine = add_low_rank_triton(rows.clone(), *arguments, groups)
                wanted = add_low_rank_torch(rows.clone(), *arguments, groups)
                assert_near(mine, wanted, f"{dtype} rank {rank}")


def case_add_dense_low_rank(device: str) -> None:
    """One factor for all rows; the narrow side may be columns of a wider tensor."""
    for dtype in dtypes_of(device):
        for rank in (12, WIDE_RANK):
            rows, low = (draw(100, n, device=device, dtype=dtype) for n in (H, rank + 4))
            for factor in (draw(H, rank, device=device, dtype=dtype), draw(rank, H, device=device, dtype=dtype).t()):
                mine = add_dense_low_rank_triton(rows.clone(), low[:, :rank], factor, 0.5)
                wanted = add_dense_low_rank_torch(rows.clone(), low[:, :rank], factor, 0.5)
                assert_near(mine, wanted, f"{dtype} rank {rank}")


def case_updates_far_below_a_step_of_bfloat16_arrive(device: str) -> None:
    """In the mean; without a product rows stay as they are. By kernels on CUDA alone: see dtypes_of."""
    rows = draw(512, 256, device=device, dtype=torch.bfloat16)
    low = draw(512, 16, device=device, dtype=torch.bfloat16)
    factor = (draw(1, 256, 16, device=device) * 2e-3).bfloat16()
    groups = groups_of((512,), device)
    added = low.double() @ factor[0].double().t()
    for got in (
        add_dense_low_rank(rows.clone(), low, factor[0], 1.0),
        add_low_rank(rows.clone(), low, factor, None, groups),
    ):
        kept = ((got.double() - rows.double()) * added).sum() / added.square().sum()
        assert abs(float(kept) - 1) < 0.05
        assert not torch.equal(got, rows)
    assert torch.equal(add_dense_low_rank(rows.clone(), low, torch.zeros_like(factor[0]), 1.0), rows)


def case_low_rank_gradient(device: str) -> None:
    _gradients(device)


def case_low_rank_gradient_of_long_experts(device: str) -> None:
    """They are cut into parts; under the interpreter, which takes seconds, with two ranks, of one block and of two."""
    with mock.patch.object(low_rank, "CUT_FROM_ROWS", 0):
        _gradients(device, (12, 72) if device == "cpu" else GRADIENT_RANKS)


def _gradients(device: str, ranks: tuple[int, ...] = GRADIENT_RANKS) -> None:
    for counts in (COUNTS, (0, 0, 0, 0)):
        groups, num_rows = groups_of(counts, device), sum(counts)
        for i, dtype in enumerate(dtypes_of(device)):
            for j, rank in enumerate(ranks):
                left = draw(num_rows, rank, device=device, dtype=dtype)
                right = draw(max(num_rows, 1), H, device=device, dtype=dtype)
                source = torch.arange(num_rows, device=device) * 7 % max(num_rows // 3, 1)
                weights = draw(num_rows, device=device, dtype=dtype)
                for k, more in enumerate(((), (source,), (None, weights), (source, weights))):
                    if not is_tried(device, i, j, k // 2):
                        continue
                    straight = torch.full((4, rank, H), torch.nan, device=device)
                    turned = torch.full((4, H, rank), torch.nan, device=device).transpose(1, 2)
                    wanted = low_rank_gradient_torch(left, right, groups, torch.empty_like(straight), *more)
                    outs = [out for place, out in enumerate((straight, turned)) if is_tried(device, j, k, place)]
                    for out in outs:
                        mine = low_rank_gradient_triton(left, right, groups, out, *more)
                        assert_near(mine, wanted, f"{dtype} rank {rank}")


def case_weighted_sum(device: str) -> None:
    for i, dtype in enumerate(dtypes_of(device)):
        for j, (num_tokens, top_k) in enumerate(((5, 3), (4, 8))):
            rows = draw(num_tokens * top_k, H, device=device, dtype=dtype)
            order = torch.randperm(num_tokens * top_k, generator=torch.Generator().manual_seed(2))
            row_of_choice, weights = order.view(num_tokens, top_k).to(device), draw(num_tokens, top_k, device=device)
            row_of_choice[0], row_of_choice[1, 0] = -1, -1  # of other ranks; torch would take the last row
            for mode in CombineMode:
                formats = itertools.product((weights, None), (dtype, torch.float32))
                for one, out_dtype in [each for k, each in enumerate(formats) if is_tried(device, i, j, k // 2, k)]:
                    mine, wanted = (rows.new_empty(num_tokens, H, dtype=out_dtype) for _ in range(2))
                    weighted_sum_triton(rows, one, row_of_choice, mode, mine)
                    weighted_sum_torch(rows, one, row_of_choice, mode, wanted)
                    assert_near(mine, wanted, f"{mode} {dtype} {out_dtype}")
                    assert not mine[0].any()


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
    # The tiling is that of the rows that are expected: few, 64 and more, 1,024 and more an expert.
    long = 2 * TILE_ROWS + 5
    cases = (COUNTS, None), ((0, 0, long, 30), 4 * 64), ((long, 47), 2 * 1024), ((0, 0, 0, 0), None)
    for i, (counts, expected_rows) in enumerate(cases):
        groups, num_rows, num_experts = groups_of(counts, device, expected_rows), sum(counts), len(counts)
        for j, dtype in enumerate(dtypes_of(device)):
            x = draw(num_rows, H, device=device, dtype=dtype)
            weight = draw(num_experts, WIDTH, H, device=device, dtype=dtype)
            low = draw(num_rows, 12, device=device, dtype=dtype)
            by_columns = draw(num_experts, H, 40, device=device, dtype=dtype)
            for k, matrices in enumerate((weight.transpose(1, 2), by_columns)):
                if not is_tried(device, i, j, k):
                    continue
                p = draw(num_experts, matrices.shape[2], 12, device=device)
                wide = (x.float(), matrices.float(), groups, GroupedBackend.native)
                plain = grouped_product(*wide).to(dtype)
                assert_near(grouped_product_triton(x, matrices, groups), plain, str(dtype))
                adapted = grouped_product(*wide, low_SR=low.float(), p_ENR=p.to(dtype)).to(dtype)
                assert_near(grouped_product_triton(x, matrices, groups, low, p), adapted, f"adapted {dtype}")
                bias, weights = draw(num_experts, p.shape[1], device=device, dtype=dtype), draw(num_rows, device=device)
                biased = grouped_product(*wide, low_SR=low.float(), p_ENR=p.to(dtype), bias_EN=bias.float())
                weighed = grouped_product_triton(x, matrices, groups, low, p, bias, weights)
                assert_near(weighed, (biased * weights[:, None]).to(dtype), f"biased and weighed {dtype}")
                if not is_tried(device, i):
                    continue
                wide_low, wide_p = (draw(*one.shape[:-1], WIDE_RANK, device=device, dtype=dtype) for one in (low, p))
                more = {"low_SR": wide_low.float(), "p_ENR": wide_p.float()}
                beside = grouped_product(x, matrices, groups, GroupedBackend.triton, low_SR=wide_low, p_ENR=wide_p)
                assert_near(beside, grouped_product(*wide, **more).to(dtype), f"wide {dtype}")
            left = draw(num_rows, WIDTH, device=device, dtype=dtype)
            wanted = grouped_gradient(left, x, groups, GroupedBackend.native)
            assert_near(grouped_gradient_triton(left, x, groups), wanted, str(dtype))
