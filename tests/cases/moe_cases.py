"""A tiny bank of experts with seeded values, run alone or as one rank of an expert-parallel group."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cases.processes import run_processes
from slipstream.conf.schema import CombineMode, LoraConfig
from slipstream.trainer.moe import dispatch
from slipstream.trainer.moe.dispatch import plan_dispatch, plan_gathered
from slipstream.trainer.moe.experts import Experts

HIDDEN, WIDTH, NUM_EXPERTS, TOP_K, RANK = 64, 32, 8, 3, 8
NUM_TOKENS = 37
WAYS = [
    (is_full, *way) for is_full in (False, True) for way in (("rows", 0), ("tokens", 1 << 30), ("tokens, counted", 0))
]
"""Whether all is trained; what travels; dispatch.BOUND_BYTES."""


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def make_experts(
    *,
    first: int = 0,
    count: int = NUM_EXPERTS,
    dtype: torch.dtype = torch.float32,
    rank: int = RANK,
    is_full: bool = False,
    **more: Any,
) -> Experts:
    """Experts first..first+count of one fixed set; frozen with adapters, or (is_full) trainable without."""
    lora = None if is_full or not rank else LoraConfig(rank=rank, alpha=2.0 * rank)
    experts = Experts(
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        first_expert=first,
        num_local_experts=count,
        compute_dtype=dtype,
        weight_dtype=dtype,
        lora=lora,
        device=torch.device("cpu"),
        **more,
    )
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(sorted(experts.named_parameters())):
            whole = draw(NUM_EXPERTS, *parameter.shape[1:], seed=seed, scale=0.3)
            parameter.copy_(whole[first : first + count])
            parameter.requires_grad_(is_full or "lora_" in name)
    experts.compute_dtype = dtype  # type: ignore[assignment]  # for `run`
    return experts.double() if dtype is torch.float64 else experts


def make_batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x_TH, weights_TK, experts_TK (one expert is nobody's choice) and the gradient of the output."""
    scores = draw(NUM_TOKENS, NUM_EXPERTS, seed=100)
    scores[:, 5] = -100.0
    weights, experts = scores.softmax(-1).topk(TOP_K)
    x = draw(NUM_TOKENS, HIDDEN, seed=101, dtype=dtype)
    return (
        x.requires_grad_(),
        weights.to(dtype).detach().requires_grad_(),
        experts,
        draw(*x.shape, seed=102, dtype=dtype),
    )


def run(
    experts: Experts,
    group: dist.ProcessGroup | None = None,
    rows: slice = slice(None),
    shares: list[int] | None = None,
    most_tokens: int | None = None,
) -> dict[str, Tensor]:
    """Output and every gradient, for the tokens in `rows`. With `most_tokens` tokens are gathered."""
    x, weights, ids, grad_out = make_batch(experts.compute_dtype)  # type: ignore[arg-type]
    x, weights = x.detach()[rows].requires_grad_(), weights.detach()[rows].requires_grad_()
    shares = shares or equal_shares(1 if group is None else group.size())
    if group is None or most_tokens is None:
        plan, receive_x = plan_dispatch(ids[rows], NUM_EXPERTS, group, shares), None
    else:
        plan, receive_x = plan_gathered(x, ids[rows], weights, group, shares, most_tokens)
    out = experts(x, weights, plan, receive_x=receive_x)
    out.backward(grad_out[rows])
    grads = {name: p.grad for name, p in experts.named_parameters() if p.grad is not None}
    assert x.grad is not None and weights.grad is not None
    return {"out": out.detach(), "x": x.grad, "weights": weights.grad, **grads}


def rows_of(rank: int, world_size: int) -> slice:
    """Unequal shares of the tokens; the last rank of several has none."""
    cuts = {1: [0, NUM_TOKENS], 2: [0, 29, NUM_TOKENS], 4: [0, 5, 30, NUM_TOKENS, NUM_TOKENS]}[world_size]
    return slice(cuts[rank], cuts[rank + 1])


def equal_shares(world_size: int) -> list[int]:
    """Experts of each rank."""
    return [NUM_EXPERTS // world_size] * world_size


def shares_of(world_size: int) -> list[int]:
    """Experts of each rank; those of four are unequal."""
    return [3, 1, NUM_EXPERTS - 6, 2] if world_size == 4 else equal_shares(world_size)


def _main(rank: int, world_size: int, folder: str, dtypes: list[torch.dtype]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    try:
        shares = shares_of(world_size)
        results: dict[Any, Any] = {}
        rows = [rows_of(one, world_size) for one in range(world_size)]
        most_tokens = max(one.stop - one.start for one in rows)
        for dtype in dtypes:
            for is_full, way, bound in WAYS:
                dispatch.BOUND_BYTES = bound
                experts = make_experts(
                    first=sum(shares[:rank]), count=shares[rank], dtype=dtype, is_full=is_full, has_bias=is_full
                )
                most = None if way == "rows" else most_tokens
                found = run(experts, dist.group.WORLD, rows[rank], shares, most)
                results[dtype, is_full, way] = found
            for is_full in (False, True):
                for mode in CombineMode:
                    experts = make_experts(
                        first=sum(shares[:rank]), count=shares[rank], dtype=dtype, is_full=is_full, has_bias=True,
                        combine_mode=mode,
                    )  # fmt: skip
                    results[dtype, is_full, mode] = run(experts, dist.group.WORLD, rows[rank], shares)
        torch.save(results, f"{folder}/rank{rank}.pt")
    finally:
        dist.destroy_process_group()


def run_expert_parallel(world_size: int, folder: Path, dtypes: list[torch.dtype]) -> list[dict[Any, Any]]:
    """Results of every rank, by dtype, whether all is trained (with biases), and way; and with biases of rows that
    travel, by mode of combining in place of the way."""
    run_processes(_main, (world_size, str(folder), dtypes), world_size)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(world_size)]
