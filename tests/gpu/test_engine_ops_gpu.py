"""trainer.engine_ops and trainer.numerics against vLLM's own kernels on a GPU.

The engine itself runs in bench/bitwise.py, in a process of its own.
"""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cases.tiny_configs import MOE
from torch import Tensor

from slipstream.conf.architecture.activation import SWIGLU
from slipstream.conf.architecture.families import read_config
from slipstream.conf.checks.model import BITWISE_HEAD_DIMS
from slipstream.conf.schema import CombineMode
from slipstream.trainer.engine_ops.vllm_operations import VllmOperations
from slipstream.trainer.kernels.elementwise import silu_product
from slipstream.trainer.kernels.experts.combine import weighted_sum
from slipstream.trainer.kernels.experts.route import route
from slipstream.trainer.kernels.rms_norm import add_rms_norm, norm_rotate, rms_norm
from slipstream.trainer.model.packed_sequences import PackedSequences

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

ROOT = Path(__file__).resolve().parents[2]
HEADS, KV_HEADS, DIM, HIDDEN, EXPERTS, WIDTH, TOP_K = 8, 2, 64, 512, 16, 128, 4
SIZES = (1, 7, 64, 255, 300, 1100)
"""Rows of a call: below and above those at which vLLM's kernels change, or are said to."""


def draw(*shape: int, std: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16) * std


@pytest.fixture(scope="module")
def operations() -> VllmOperations:
    spec = read_config({**MOE, "head_dim": DIM, "hidden_size": HIDDEN, "num_attention_heads": HEADS})
    return VllmOperations(spec, torch.bfloat16, torch.device("cuda"))


def packed(*lengths: int) -> PackedSequences:
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return PackedSequences.from_cu_seqlens(starts, int(starts[-1]), torch.device("cuda"))


def test_a_rows_bits_do_not_depend_on_the_number_of_rows(operations: VllmOperations) -> None:
    """The engine has other rows beside a token than the trainer has."""
    most = max(SIZES)
    x, weight = draw(most, HIDDEN), 1 + draw(HIDDEN, std=0.1)
    matrix, router = draw(768, HIDDEN, std=0.06), draw(EXPERTS, HIDDEN, std=0.06)
    gate_up, down = draw(EXPERTS, 2 * WIDTH, HIDDEN, std=0.06), draw(EXPERTS, HIDDEN, WIDTH, std=0.06)
    targets = torch.arange(most, device="cuda") % 768

    def everything(rows: slice) -> list[Tensor]:
        logits = operations.linear(x[rows], matrix)
        chosen = operations.route(x[rows], operations.linear(x[rows], router), TOP_K, True)
        return [
            operations.norm(x[rows], weight, 1e-6),
            logits,
            *chosen,
            operations.experts(x[rows].contiguous(), gate_up, down, *chosen),
            operations.silu_and_mul(logits),
            operations.token_logprobs(logits, targets[rows]),
        ]

    whole = everything(slice(0, most))
    for size in SIZES:
        for first in {0, most - size}:
            for mine, other in zip(everything(slice(first, first + size)), whole, strict=True):
                assert torch.equal(mine, other[first : first + size]), (size, first)


def test_a_sequences_bits_do_not_depend_on_its_neighbours(operations: VllmOperations) -> None:
    lengths = (300, 1, 130)
    q, k, v = draw(431, HEADS, DIM), draw(431, KV_HEADS, DIM, seed=1), draw(431, KV_HEADS, DIM, seed=2)
    turned = operations.rotate(q, k, packed(*lengths))
    out = operations.attend(*turned, v, packed(*lengths), DIM**-0.5)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        alone = operations.rotate(q[rows], k[rows], packed(length))
        for mine, other in zip(alone, turned, strict=True):
            assert torch.equal(mine, other[rows])
        assert torch.equal(operations.attend(*alone, v[rows], packed(length), DIM**-0.5), out[rows])
        start += length


@pytest.mark.parametrize("head_dim", BITWISE_HEAD_DIMS)
def test_attention_of_decode_and_prefill_is_the_trainers(head_dim: int) -> None:
    """The engine reads keys from pages, and decodes one query at a time."""
    attention = import_module("vllm.v1.attention.backends.fa_utils")
    spec = read_config({**MOE, "head_dim": head_dim, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS})
    operations, page, scale = VllmOperations(spec, torch.bfloat16, torch.device("cuda")), 16, head_dim**-0.5
    for length in (5, 128, 129, 200, 700):
        q, k, v = (draw(length, heads, head_dim, seed=n) for n, heads in enumerate((HEADS, KV_HEADS, KV_HEADS)))
        mine = operations.attend(q, k, v, packed(length), scale)
        num_pages = -(-length // page)
        pages = [F.pad(x, (0, 0, 0, 0, 0, num_pages * page - length)).unflatten(0, (num_pages, page)) for x in (k, v)]
        table = torch.arange(num_pages, dtype=torch.int32, device="cuda")[None]
        for num_queries in (1, length):
            ends = torch.tensor([0, num_queries], dtype=torch.int32, device="cuda")
            theirs = attention.flash_attn_varlen_func(
                q[-num_queries:], *pages, max_seqlen_q=num_queries, cu_seqlens_q=ends, max_seqlen_k=length,
                seqused_k=torch.full((1,), length, dtype=torch.int32, device="cuda"), block_table=table,
                softmax_scale=scale, causal=True, num_splits=1, fa_version=3,
            )  # fmt: skip
            assert torch.equal(theirs, mine[-num_queries:]), (length, num_queries)


def share_of_equal(mine: Tensor, other: Tensor) -> float:
    return float((mine == other).float().mean())


def test_norms_round_as_vllms_kernels_do(operations: VllmOperations) -> None:
    """Rounded in the same places two kernels differ where they add in another order: in one number of a thousand.
    Rounded in other places they differ in one of four."""
    from vllm import _custom_ops as ops

    x, delta, weight = draw(500, HIDDEN), draw(500, HIDDEN, seed=1), 1 + draw(HIDDEN, std=0.1, seed=2)
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, 1e-6)
    assert share_of_equal(rms_norm(x, weight, 1e-6, True), out) > 0.99
    assert share_of_equal(rms_norm(x, weight, 1e-6, False), out) < 0.9
    theirs, total = delta.clone(), x.clone()
    ops.fused_add_rms_norm(theirs, total, weight, 1e-6)
    assert torch.equal(add_rms_norm(x, delta, weight, 1e-6, True)[0], total)
    assert share_of_equal(rms_norm(total, weight, 1e-6, True), theirs) > 0.99  # not compiled, it rounds the sum first


def test_weights_and_sums_round_as_vllms_kernels_do(operations: VllmOperations) -> None:
    from vllm import _custom_ops as ops

    x = draw(500, HIDDEN)
    logits = draw(500, EXPERTS, std=2.0)
    weights, experts = route(logits, TOP_K, True, True)
    wanted, chosen = operations.route(x, logits, TOP_K, True)
    same = (experts == chosen).all(1)
    assert share_of_equal(same, torch.ones_like(same)) > 0.9  # bfloat16 logits have ties
    torch.testing.assert_close(weights[same], wanted[same], rtol=1e-5, atol=1e-7)
    rows, row_of_choice = draw(500 * TOP_K, HIDDEN), torch.arange(500 * TOP_K, device="cuda").view(500, TOP_K)
    summed = torch.empty(500, HIDDEN, dtype=torch.bfloat16, device="cuda")
    ops.moe_sum(rows.view(500, TOP_K, HIDDEN), summed)
    ones = torch.ones(500, TOP_K, device="cuda")
    assert torch.equal(weighted_sum(rows, ones, row_of_choice, CombineMode.vllm_like), summed)


def test_the_rotation_rounds_as_vllms_kernel_does(operations: VllmOperations) -> None:
    """One of the two ways is vLLM's."""
    sequences = packed(200)
    q, k = draw(200, HEADS, DIM), draw(200, KV_HEADS, DIM, seed=1)
    angles = torch.arange(200, device="cuda")[:, None] * 10000.0 ** (-torch.arange(0, DIM, 2, device="cuda") / DIM)
    cos, sin = angles.cos().bfloat16()[:, None], angles.sin().bfloat16()[:, None]
    theirs = operations.rotate(q, k, sequences)
    shares = [
        min(map(share_of_equal, norm_rotate(q, k, None, None, 1e-6, cos, sin, once), theirs)) for once in (False, True)
    ]
    assert max(shares) > 0.99, shares


def test_the_experts_activation_is_vllms(operations: VllmOperations) -> None:
    from dataclasses import replace

    from slipstream.trainer.kernels.experts.groups import RowGroups
    from slipstream.trainer.kernels.experts.swiglu import activate

    gu, groups = draw(64, 2 * WIDTH), RowGroups(torch.tensor([40, 24], device="cuda"), 64)
    mine, _ = activate(gu, None, None, groups, replace(SWIGLU, rounds_each=True))
    assert share_of_equal(mine, operations.silu_and_mul(gu)) > 0.999


def test_the_dense_activation_is_vllms_compiled_or_eager(operations: VllmOperations) -> None:
    """A compiled engine runs `forward_native` through torch.compile, an eager one calls a kernel of its own."""
    from vllm.model_executor.layers.activation import SiluAndMul

    gu = draw(500, 2 * WIDTH)
    gate, up = gu.chunk(2, -1)
    compiled = torch.compile(SiluAndMul.forward_native)(gu)
    assert share_of_equal(silu_product(gate, up, True), compiled) > 0.999
    assert share_of_equal(silu_product(gate, up, False), operations.silu_and_mul(gu)) > 0.999
    assert share_of_equal(silu_product(gate, up, False), compiled) < 0.9


@pytest.mark.parametrize("weights", ["--width 128 --experts 16", "--weights adapter --width 256 --experts 64"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_every_log_ratio_is_zero(family: str, weights: str, tmp_path: Path) -> None:
    """An engine with CUDA graphs, adapters that learn, publishes in place or into the next slot, 1 to 16 requests."""
    sizes = f"--layers 2 --hidden 512 {weights} --heads 8 --head-dim 128 --vocab 4096 --prompts 16"
    command = (
        f"{sys.executable} bench/bitwise.py --family {family} {sizes} --steps 4 --tokens 40 --rank 8 --out {tmp_path}"
    )
    environment = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{ROOT}"}
    done = subprocess.run(command.split(), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
