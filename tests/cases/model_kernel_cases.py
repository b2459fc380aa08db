"""Kernels of everything around the routed experts beside their torch definitions; see kernel_cases.py."""

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cases.kernel_inputs import TILE_ROWS, WIDTH, H, assert_near, draw, dtypes_of, is_tried
from slipstream.trainer.kernels.adamw_update import Codes, adamw_triton
from slipstream.trainer.kernels.dense_activation import (
    silu_product_backward_triton,
    silu_product_torch,
    silu_product_triton,
)
from slipstream.trainer.kernels.experts.route import (
    route_backward_triton,
    route_torch,
    route_triton,
    weigh_torch,
    weigh_triton,
)
from slipstream.trainer.kernels.latent import _LatentHeads, latent_heads_torch
from slipstream.trainer.kernels.log_softmax import (
    log_softmax_torch,
    log_softmax_triton,
    logits_gradient_torch,
    logits_gradient_triton,
)
from slipstream.trainer.kernels.residual import residual_sum_torch, residual_sum_triton
from slipstream.trainer.kernels.rms_norm import (
    add_rms_norm_torch,
    norm_rotate_torch,
    norm_rotate_triton,
    rms_norm_backward_triton,
    rms_norm_torch,
    rms_norm_triton,
    rotate_torch,
)
from slipstream.trainer.weights import fp8_kernels
from slipstream.trainer.weights.quantization import BLOCK
from slipstream.trainer.weights.row_runs import Rows
from slipstream.weight_sync.hash_kernel import BLOCKS_A_PROGRAM, add_hashes
from slipstream.weight_sync.integrity import _tables, _within_keys, hash_with_torch
from slipstream.weight_sync.merging import merge, merge_kernel
from slipstream.weight_sync.merging.merge import round_into
from slipstream.weight_sync.merging.merge_operands import MergeOperands
from slipstream.weight_sync.merging.rounding import dithered, thresholds


def case_rms_norm(device: str) -> None:
    """With and without a sum before it; rows that lie apart; the gradients are autograd's of the definition."""
    for dtype in dtypes_of(device):
        wide_x, delta, weight, dout, dtotal = (
            draw(*shape, device=device, dtype=dtype, seed=seed)
            for seed, shape in enumerate([(5, H + 9), (5, H), (H,), (5, H), (5, H)])
        )
        x = wide_x[:, 3 : 3 + H]
        for one, once in itertools.product((None, delta), (False, True)):
            total, out = rms_norm_triton(x, one, weight, 1e-2, once)
            start = (x if one is None else x + one).detach()
            assert_near(total, None if one is None else start, f"sum {dtype}")
            wanted = rms_norm_torch(x, weight, 1e-2, once)
            wanted = wanted if one is None else add_rms_norm_torch(x, one, weight, 1e-2, once)[1]
            assert_near(out, wanted, f"norm {dtype} once {once}")
            exact = start.float().requires_grad_()
            (wanted,) = torch.autograd.grad(rms_norm_torch(exact, weight.float(), 1e-2), exact, dout.float())
            given = None if one is None else dtotal
            wanted = (wanted if given is None else wanted + given.float()).to(dtype)
            assert_near(rms_norm_backward_triton(start, weight, dout, given, 1e-2), wanted, f"gradient {dtype}")


def case_norm_of_an_unrounded_sum(device: str) -> None:
    """A norm that is given its input in float32, too."""
    for dtype in dtypes_of(device):
        wide, weight = (draw(*shape, device=device, seed=seed) for seed, shape in enumerate([(5, H), (H,)]))
        x, weight = wide.to(dtype), weight.to(dtype)
        out = rms_norm_triton(wide, None, weight, 1e-2, True)[1]
        assert_near(out, rms_norm_torch(x, weight, 1e-2, True, wide), f"norm {dtype}")


def case_residual_sum(device: str) -> None:
    """A size that no program divides, with and without shared experts and a factor; the definition to the bit where
    nothing is multiplied."""
    for dtype in dtypes_of(device):
        x, attended, fed, shared = (draw(7, 1000, device=device, dtype=dtype, seed=seed) for seed in range(4))
        for one, scale in itertools.product((None, shared), (1.0, 2.5)):
            mine, wanted = (f(x, attended, fed, one, scale) for f in (residual_sum_triton, residual_sum_torch))
            for name, a, b in zip(("sum", "wide"), mine, wanted, strict=True):
                assert_near(a, b, f"{name} {dtype} shared {one is not None} scale {scale}")
                assert scale != 1.0 or torch.equal(a, b), f"{name} {dtype}"


def case_norm_rotate(device: str) -> None:
    """All dims turn, or some; with a norm before, or without; heads of a slice, as a latent's keys are."""
    shapes = ((3, 1), 16, 8), ((9, 10), 24, 4), ((1, 2), 64, 32)
    for i, dtype in enumerate(dtypes_of(device)):
        for j, (num_heads, dim, half) in enumerate(shapes):
            angles = draw(3, 1, half, device=device)
            wide, weights, douts = (
                [draw(*shape, device=device, dtype=dtype, seed=seed) for seed, shape in enumerate(drawn)]
                for drawn in ([(3, n, dim + 8) for n in num_heads], [(dim,)] * 2, [(3, n, dim) for n in num_heads])
            )
            heads = [x[..., 8:] for x in wide]
            for (k, given), once in itertools.product(enumerate(([None, None], weights)), (False, True)):
                if not is_tried(device, i, j, k, once):
                    continue
                cos, sin = (x if once else x.to(dtype) for x in (angles.cos(), angles.sin()))
                outs = norm_rotate_triton(heads, given, 1e-2, cos, sin, once=once)
                mine = norm_rotate_triton(heads, given, 1e-2, cos, sin, douts)
                for i, (x, one) in enumerate(zip(heads, given, strict=True)):
                    wanted = norm_rotate_torch(x, one, 1e-2, cos, sin, once)
                    assert_near(outs[i], wanted, f"{dtype} {one is None} {i} once {once}")
                    exact = x.float().requires_grad_()
                    start = exact if one is None else rms_norm_torch(exact, one.float(), 1e-2)
                    turned = rotate_torch(start, cos.float(), sin.float())
                    (wanted,) = torch.autograd.grad(turned, exact, douts[i].float())
                    assert_near(mine[i], wanted.to(dtype), f"gradient {dtype} {one is None} {i}")


def case_silu_product(device: str) -> None:
    """Sizes that no program divides; the gradients are autograd's of the definition in float32."""
    for dtype in dtypes_of(device):
        for shape in ((5, 3 * H), (7, 1000), (1, 8)):
            gate, up, dh = (draw(*shape, device=device, dtype=dtype, seed=seed) for seed in range(3))
            for once in (False, True):
                mine = silu_product_triton(4 * gate, up, once)
                assert_near(mine, silu_product_torch(4 * gate, up, once), f"{dtype} once {once}")
            exact_gate, exact_up = (4 * gate).float().requires_grad_(), up.float().requires_grad_()
            product = silu_product_torch(exact_gate, exact_up, True)
            wanted = torch.autograd.grad(product, (exact_gate, exact_up), dh.float())
            grads = silu_product_backward_triton(4 * gate, up, dh)
            for one, other, what in zip(grads, wanted, ("dgate", "dup"), strict=True):
                assert_near(one, other.to(dtype), f"{what} {dtype}")


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
                entropy = (wanted[2], draw(rows, device=device, seed=2))
                wanted_grad = logits_gradient_torch(logits.clone(), targets, wanted[1], grads, temperature, entropy)
                mine_grad = logits_gradient_triton(logits.clone(), targets, wanted[1], grads, temperature, entropy)
                assert_near(mine_grad, wanted_grad, f"gradient with entropy {dtype}")


def case_adamw(device: str) -> None:
    """Every format of moments against torchao's update in eager mode; a size that no program divides."""
    from torchao.optim.adam import single_param_adam
    from torchao.optim.subclass_8bit import OptimState8bit

    numbers = {"lr": 0.05, "weight_decay": 0.1, "eps": 1e-6}
    betas = (0.9, 0.99)
    for state in (torch.float32, torch.float16, torch.uint8):
        size = 1024 if state is torch.uint8 else 1300
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
        for step in range(1, 3):
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
    """Choice and weights, with ties (coarse logits), with a row that is not a number; the gradient is autograd's. Given
    experts get the bits that chosen ones get."""
    for i, dtype in enumerate(dtypes_of(device)):
        for j, (num_tokens, num_experts, top_k) in enumerate(((11, 128, 8), (5, 12, 2), (3, 20, 20))):
            logits = draw(num_tokens, num_experts, device=device, dtype=dtype).mul_(2)
            dweights = draw(num_tokens, top_k, device=device, dtype=dtype, seed=1)
            for does_normalize in (False, True):
                if not is_tried(device, i, j, does_normalize):
                    continue
                exact = logits.clone().requires_grad_()
                wanted, wanted_experts = route_torch(exact, top_k, does_normalize)
                weights, experts = route_triton(logits, top_k, does_normalize)
                wide, _ = route_triton(logits, top_k, does_normalize, True)
                assert_near(wide, route_torch(logits, top_k, does_normalize, True)[0], "wide weights")
                assert torch.equal(wide.to(dtype), weights)
                assert_near(weights, wanted.detach(), f"weights {dtype}")
                assert torch.equal(logits.gather(1, experts), logits.gather(1, wanted_experts))
                assert all(row.unique().numel() == top_k for row in experts)
                (grad,) = torch.autograd.grad(wanted, exact, dweights)
                mine = route_backward_triton(logits, wanted_experts, dweights, does_normalize)
                assert_near(mine, grad, f"gradient {dtype}")
                assert torch.equal(weigh_triton(logits, experts, does_normalize), weights)
                given = draw(num_tokens, num_experts, device=device, seed=2).argsort()[:, :top_k]
                wanted = weigh_torch(exact, given, does_normalize)
                assert_near(weigh_triton(logits, given, does_normalize), wanted.detach(), f"given {dtype}")
                (grad,) = torch.autograd.grad(wanted, exact, dweights)
                mine = route_backward_triton(logits, given, dweights, does_normalize)
                assert_near(mine, grad, f"gradient of given {dtype}")
    coarse = draw(9, 16, device=device).round()
    coarse[4] = torch.nan
    _, experts = route_triton(coarse, 4, True)
    in_order = coarse.argsort(dim=-1, descending=True, stable=True)[:, :4]
    is_number = torch.arange(9, device=device) != 4
    assert torch.equal(experts[is_number], in_order[is_number])
    assert bool(((experts >= 0) & (experts < 16)).all())


def merged_bands(
    base: Tensor, b: Tensor, a: Tensor, scale: float, rows: Rows, columns: slice, key: int | None = None
) -> Tensor:
    """Rows of the kernel's merge, into columns one after the other; and, by thresholds, in place, as engines merge."""
    rows_a_factor = len(base) // len(a)
    base_GRN = rows.of(base)[..., columns]
    out_GRN = torch.full_like(base_GRN.transpose(1, 2), torch.nan).transpose(1, 2)
    skipped, first_row = divmod(rows.start, rows_a_factor)
    operands = MergeOperands(
        base_GRN, rows.of(b), a[skipped:], scale, first_row, rows_a_factor, rows.pitch, columns.start, key,
        500 + skipped * rows_a_factor,
    )  # fmt: skip
    merge_kernel.merger(operands, out_GRN)()
    if key is not None:
        live_GRN = base_GRN.clone(memory_format=torch.contiguous_format)
        merge_kernel.merger(replace(operands, base_GRN=live_GRN), live_GRN)()
        assert torch.equal(live_GRN, out_GRN)
    return out_GRN


def case_hashes_of_ranges(device: str) -> None:
    """Ranges that begin and end anywhere, read 16, 4 or 1 bytes at a time by one program or several: each has the hash
    of its torch form, and one without bytes adds nothing."""
    bytes_a_program = BLOCKS_A_PROGRAM * 4096
    data = torch.randint(0, 256, (bytes_a_program + 30_000,), generator=torch.Generator().manual_seed(1))
    data = data.to(torch.uint8).to(device)
    data = data[-data.data_ptr() % 64 :]
    places = (
        (0, 4096, 0), (16, 16, 16), (4, 8, 4), (1, 4999, 4095), (0, 0, 8), (16, 20_000, 8192 - 16),
        (32, bytes_a_program + 16, 0), (3, 1, 4096 * 9), (8, 12_288, 4096 + 4),
    )  # fmt: skip
    ranges = [(data[start : start + size], offset) for start, size, offset in places]
    tables = _tables(ranges)
    assert sorted((table.alignment, len(table.rows)) for table in tables) == [(1, 2), (4, 2), (16, 4)]
    sums = torch.zeros(len(ranges), dtype=torch.int64, device=device)
    for table in tables:
        add_hashes(
            sums, table.rows, _within_keys(sums.device), table.across,
            alignment=table.alignment, max_blocks=table.max_blocks,
        )  # fmt: skip
    assert sums.tolist() == [int(hash_with_torch(one, offset_bytes=offset)) for one, offset in ranges]
    assert sums[4] == 0


def case_merge(device: str) -> None:
    """One band under several A, and bands of one A each: near the torch form, and bitwise what the whole stack has.

    On a CPU the inputs are integers and the scale is 1/2, so that sums are exact in any order: the interpreter of
    Triton multiplies with the BLAS library, which picks its kernel, and so its order of a sum, by CPU and by shape. It
    cuts off what bfloat16 does not hold.
    """
    num_factors, rows_a_factor = 3, 2 * TILE_ROWS + 22
    shapes = [(num_factors * rows_a_factor, WIDTH), (num_factors * rows_a_factor, 4), (num_factors, 4, WIDTH)]
    drawn = [draw(*shape, device=device, seed=seed) for seed, shape in enumerate(shapes)]
    scale = 0.7
    if device == "cpu":
        drawn, scale = [(20 * values).round() for values in drawn], 0.5
    formats = itertools.product((torch.float32, torch.bfloat16), (None, 2**31 - 7))
    for i, (dtype, key) in enumerate(formats):
        base, b, a = drawn[0].to(dtype), *drawn[1:]
        everything = slice(0, WIDTH)
        whole = merged_bands(base, b, a, scale, Rows(0, len(base)), everything, key)[0]
        wanted = torch.empty(base.shape, dtype=dtype)
        operands = MergeOperands(
            base.cpu()[None], b.cpu()[None], a.cpu(), scale, 0, rows_a_factor, key=key, stack_row=500
        )  # fmt: skip
        merge.merger(operands, wanted[None])()
        assert_near(whole.cpu(), wanted, f"whole {dtype}")
        if dtype is torch.bfloat16:  # of equal float32 values, equal bits
            exact = merged_bands(base.float(), b, a, scale, Rows(0, len(base)), everything)[0].cpu()
            cut = (exact.view(torch.int32) & -(1 << 16)).view(torch.float32)
            wanted = (cut if device == "cpu" else exact).to(dtype)
            if key is not None:
                round_into(wanted, exact, key, torch.arange(500, 500 + len(base)), 0)
                assert not torch.equal(wanted, exact.to(dtype)) and not torch.equal(wanted, cut.to(dtype))
            assert torch.equal(whole.cpu(), wanted)
        bands = (
            (Rows(TILE_ROWS, 2 * rows_a_factor), everything),  # from amid one A to amid another
            (Rows(rows_a_factor + 5, 70), slice(7, 40)),
            (Rows(3, 70, 6, rows_a_factor // 2), everything),  # a TP rank's part of gate and of up
            (Rows(rows_a_factor // 2, 75, 4, rows_a_factor // 2), slice(8, 9)),
            (Rows(5, rows_a_factor - 5, 3, rows_a_factor), everything),
            (Rows(9, 64, 2, 2 * rows_a_factor), slice(0, 33)),
        )
        for rows, columns in [band for j, band in enumerate(bands) if is_tried(device, i, j, one_of=3)]:
            merged = merged_bands(base, b, a, scale, rows, columns, key)
            assert torch.equal(merged, rows.of(whole)[..., columns]), (rows, columns, dtype)


def case_block_fp8(device: str) -> None:
    """Scales of blocks, and the cast to FP8, of the merge kernel's own values: the bits of torch's operations.

    Rows of blocks are of 50 rows here, so that tiles begin, end and lie amid them; some rows are in no block. On a CPU
    the inputs are small integers, as in case_merge, and neither quotients nor codes are cast: Triton's interpreter
    forgets the carry of a rounding to FP8.
    """
    num_factors, rows_a_factor, width = 2, TILE_ROWS + 22, BLOCK + 40
    shapes = [(num_factors * rows_a_factor, width), (num_factors * rows_a_factor, 4), (num_factors, 4, width)]
    drawn = [draw(*shape, device=device, seed=seed) for seed, shape in enumerate(shapes)]
    scale = 0.7
    if device == "cpu":
        drawn, scale = [(2 * values).round() for values in drawn], 0.5
    b, a = drawn[1:]
    row_block = torch.arange(num_factors * rows_a_factor, dtype=torch.int32, device=device) // 50
    num_blocks = int(row_block[-1]) + 1
    row_block[100:130] = num_blocks
    for (place, dtype), rank in itertools.product(enumerate(dtypes_of(device)), (4, 0)):
        if not is_tried(device, place, rank // 4):
            continue
        base = drawn[0].to(dtype, copy=True)
        base[50:100, BLOCK:] = 0.0
        operands = MergeOperands(base[None], b[None, :, :rank], a[:, :rank], scale, 0, rows_a_factor)
        merged = torch.empty(base.shape, device=device)
        merge_kernel.merger(operands, merged[None])()
        scales = torch.zeros(num_blocks + 1, -(-width // BLOCK), device=device)
        fp8_kernels.measurer(operands, row_block[None], scales)()
        wanted = torch.zeros_like(scales)
        for block, columns in enumerate(merged.abs().split(BLOCK, dim=1)):
            wanted[:, block].scatter_reduce_(0, row_block.long(), columns.amax(1), "amax")
        assert torch.equal(scales[:-1], wanted[:-1]), (dtype, rank)
        assert not scales[-1].any()
        scales = (scales / torch.tensor(448.0, device=device)).masked_fill_(scales == 0, 1.0)
        quotients = merged / scales[row_block.long()].repeat_interleave(BLOCK, 1)[:, :width]
        values = quotients.clamp_(-448.0, 448.0).to(torch.float32 if device == "cpu" else torch.float8_e4m3fn)
        for rows, first_column in (
            (Rows(0, len(base)), 0),
            (Rows(TILE_ROWS + 9, rows_a_factor), BLOCK - 3),
            (Rows(3, 30, 4, rows_a_factor // 2), 17),
        ):
            skipped, first_row = divmod(rows.start, rows_a_factor)
            part = MergeOperands(
                rows.of(base)[..., first_column:], rows.of(b)[..., :rank], a[skipped:, :rank], scale, first_row,
                rows_a_factor, rows.pitch, first_column,
            )  # fmt: skip
            out = torch.zeros(part.base_GRN.transpose(1, 2).shape, dtype=values.dtype, device=device).transpose(1, 2)
            fp8_kernels.caster(part, rows.of(row_block), scales, 448.0, out)()
            wanted = rows.of(values.float())[..., first_column:]
            assert torch.equal(out.float(), wanted), (rows, first_column, dtype, rank)
            fp8_kernels.caster(
                replace(part, key=99, stack_row=skipped * rows_a_factor), rows.of(row_block), scales, 448.0, out
            )()
            scales_RN = scales[row_block.long()].repeat_interleave(BLOCK, 1)[:, :width]
            codes = (base.float() / scales_RN).clamp_(-448.0, 448.0).to(values.dtype).float()
            sums = (codes + (merged - base.float()) / scales_RN).clamp_(-448.0, 448.0).cpu()
            drawn_RN = thresholds(99, torch.arange(len(base)), range(width))
            wanted = rows.of(dithered(sums, drawn_RN, torch.float8_e4m3fn).to(device))[..., first_column:]
            assert torch.equal(out.float(), wanted), ("dithered", rows, first_column, dtype, rank)
