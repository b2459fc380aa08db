"""trainer.engine_ops.vllm_adapters on a GPU: bits of a row, and what is computed.

The engine itself runs in bench/bitwise.py, in a process of its own.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.trainer.engine_ops.published import Factors
from slipstream.trainer.engine_ops.vllm_adapters import VllmAdapters

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

ROOT = Path(__file__).resolve().parents[2]
RANK, HIDDEN, EXPERTS, WIDTH, TOP_K, MOST = 8, 512, 64, 256, 4, 1100
SIZES = (1, 3, 7, 64, 127, 128, 300, MOST)
"""Rows of a call: below and above those at which vLLM's kernels change."""


def draw(*shape: int, std: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16) * std


def factors(columns: int, widths: tuple[int, ...], *lead: int, seed: int) -> Factors:
    return Factors(
        tuple(draw(1, *lead, RANK, columns, std=columns**-0.5, seed=seed + 2 * n) for n, _ in enumerate(widths)),
        tuple(draw(1, *lead, width, RANK, std=0.3, seed=seed + 2 * n + 1) for n, width in enumerate(widths)),
    )


@pytest.fixture(scope="module")
def adapters() -> VllmAdapters:
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    from slipstream.rollout.in_vllm.vllm_patches import keep_batch_invariance

    keep_batch_invariance()
    return VllmAdapters(RANK, torch.device("cuda"))


def assert_rows_are_alone(call: Callable[[slice], Tensor]) -> Tensor:
    whole = call(slice(0, MOST))
    for size in SIZES:
        for first in {0, MOST - size}:
            assert torch.equal(call(slice(first, first + size)), whole[first : first + size]), (size, first)
    return whole


@pytest.mark.parametrize("widths", [(HIDDEN,), (384, 128, 128)], ids=["one", "packed"])
def test_linears(adapters: VllmAdapters, widths: tuple[int, ...]) -> None:
    """Slices in their order."""
    x, base, given = draw(MOST, HIDDEN), draw(MOST, sum(widths), seed=9), factors(HIDDEN, widths, seed=1)
    whole = assert_rows_are_alone(lambda rows: adapters.add(base[rows].clone(), x[rows], given))
    low = [(x.float() @ a[0].float().t()).bfloat16().float() for a in given.a]
    added = torch.cat([part @ b[0].float().t() for part, b in zip(low, given.b, strict=True)], 1).bfloat16()
    assert float((whole == base + added).float().mean()) > 0.99  # another order of sums, the same roundings


@pytest.mark.parametrize("min_rows", [1, 128], ids=["engine", "trainer"])
def test_experts(adapters: VllmAdapters, min_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the engine's numbers of rows, with its patch, and as the trainer pads them."""
    monkeypatch.setattr("slipstream.trainer.engine_ops.vllm_adapters.MIN_ROWS", min_rows)
    x = draw(MOST, HIDDEN)
    gate_up = draw(EXPERTS, 2 * WIDTH, HIDDEN, std=0.06, seed=2)
    down = draw(EXPERTS, HIDDEN, WIDTH, std=0.06, seed=3)
    of_gate_up = factors(HIDDEN, (WIDTH, WIDTH), EXPERTS, seed=10)
    of_gate_up = Factors(of_gate_up.a[:1] * 2, of_gate_up.b)
    of_down = factors(WIDTH, (HIDDEN,), EXPERTS, seed=20)
    scores = draw(MOST, EXPERTS, seed=4).float()
    weights, chosen = scores.softmax(-1).topk(TOP_K)
    chosen = chosen.int()

    def call(rows: slice) -> Tensor:
        return adapters.experts(x[rows], (gate_up, down), (of_gate_up, of_down), weights[rows], chosen[rows])

    whole = assert_rows_are_alone(call)
    merged_gate_up = gate_up.float() + torch.cat(
        [b[0].float() @ a[0].float() for a, b in zip(*of_gate_up, strict=True)], 1
    )
    merged_down = down.float() + of_down.b[0][0].float() @ of_down.a[0][0].float()
    wanted = torch.zeros(64, HIDDEN, device="cuda")
    for choice in range(TOP_K):
        experts = chosen[:64, choice].long()
        gate, up = torch.einsum("th,tih->ti", x[:64].float(), merged_gate_up[experts]).chunk(2, -1)
        wanted += weights[:64, choice, None] * torch.einsum("ti,thi->th", F.silu(gate) * up, merged_down[experts])
    assert float((whole[:64].float() - wanted).norm() / wanted.norm()) < 0.01
