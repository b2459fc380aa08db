"""Kernels of everything around the routed experts beside their torch definitions; see kernel_cases.py."""

import itertools
from typing import Any

import torch

from cases.kernel_inputs import H, assert_near, draw, dtypes_of, is_tried
from slipstream.trainer.kernels.adamw_update import Codes, adamw_triton
from slipstream.trainer.kernels.elementwise import (
    residual_sum_torch,
    residual_sum_triton,
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
from slipstream.trainer.kernels.rms_norm import (
    add_rms_norm_torch,
    norm_rotate_torch,
    norm_rotate_triton,
    rms_norm_backward_triton,
    rms_norm_torch,
    rms_norm_triton,
    rotate_torch,
)


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
