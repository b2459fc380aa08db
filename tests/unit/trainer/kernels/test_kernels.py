"""Promise of trainer/kernels: every Triton kernel computes its torch definition, under Triton's interpreter.

One process runs all cases, because the interpreter is chosen when Triton is imported; natively they run in tests/gpu.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases.kernel_cases import CASES

from slipstream.conf.schema import CombineMode
from slipstream.trainer.kernels import log_softmax
from slipstream.trainer.kernels.experts.combine import weighted_sum
from slipstream.trainer.kernels.experts.dequant import dequantize_int4, dequantize_mxfp4
from slipstream.trainer.kernels.experts.gather import PROJECT
from slipstream.trainer.kernels.experts.low_rank import ADD, GRADIENT
from slipstream.trainer.kernels.experts.swiglu import ADAPTED, ADAPTED_BACKWARD, BACKWARD, FORWARD, TABLE_ROWS
from slipstream.trainer.kernels.launch import Tiling, tiling_of


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    """Name of a case -> traceback, "" when it passed."""
    paths = os.pathsep.join(str(folder) for folder in Path(__file__).parents[3:5])  # of `cases` and of the product
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-m", "cases.kernel_cases"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_its_torch_definition(results: dict[str, str], name: str) -> None:
    assert results[name] == "", results[name]


def test_int4_is_compressed_tensors_to_the_bit() -> None:
    """Every nibble in every place, against every finite bfloat16 scale."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    bits = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    scale = bits[bits.isfinite()].view(-1, 1)  # one group a row
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-8, 8, (scale.shape[0], 32), generator=generator)
    values[0] = torch.arange(-8, 8).repeat(2)
    shifts = torch.arange(0, 32, 4)
    packed = ((values + 8).view(-1, 4, 8) << shifts).sum(-1).to(torch.int64)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    theirs = unpack_from_int32(packed, 4, torch.Size(values.shape))
    assert torch.equal(theirs.to(torch.int64), values)
    out = dequantize_int4(packed, scale, torch.empty(values.shape, dtype=torch.bfloat16))
    wanted = theirs.to(torch.bfloat16) * scale
    assert torch.equal(out.view(torch.int16), wanted.view(torch.int16))


def test_int4_is_what_compressed_tensors_decompresses() -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    generator = torch.Generator().manual_seed(1)
    scale = (torch.rand(24, 4, generator=generator) / 8).bfloat16()
    values = torch.randint(-8, 8, (24, 128), generator=generator)
    weight = (values.bfloat16().view(24, 4, 32) * scale[..., None]).view(24, 128)
    arguments = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    stored = compressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    wanted = compressor.decompress(dict(stored), scheme)["weight"]
    out = torch.empty(24, 128, dtype=torch.bfloat16)
    assert torch.equal(dequantize_int4(stored["weight_packed"], stored["weight_scale"], out), wanted)
    assert bool((wanted != 0).any())


def test_mxfp4_is_transformers_to_the_bit() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(2)
    blocks = torch.randint(0, 256, (3, 40, 2, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(0, 255, (3, 40, 2), generator=generator).to(torch.uint8)
    wanted = convert_moe_packed_tensors(blocks.clone(), scales.clone()).transpose(1, 2)
    out = dequantize_mxfp4(blocks, scales, torch.empty(3, 40, 64, dtype=torch.bfloat16))
    assert torch.equal(out.view(torch.int16), wanted.contiguous().view(torch.int16))


@pytest.mark.parametrize("top_k", [4, 8])
def test_the_combine_modes_round_where_they_say(top_k: int) -> None:
    """Against transformers' loop of index_add_ (hf_eager), and products rounded before a sum (vllm_like)."""
    generator = torch.Generator().manual_seed(3)
    num_tokens, hidden = 40, 64
    experts = torch.stack([torch.randperm(16, generator=generator)[:top_k] for _ in range(num_tokens)])
    row_of_choice = torch.empty_like(experts)
    order = experts.flatten().argsort(stable=True)
    row_of_choice.view(-1)[order] = torch.arange(order.numel())
    rows = torch.randn(num_tokens * top_k, hidden, generator=generator).bfloat16()
    weights = torch.rand(num_tokens, top_k, generator=generator).bfloat16()
    eager = torch.zeros(num_tokens, hidden, dtype=torch.bfloat16)
    for expert in range(16):
        token, slot = torch.where(experts == expert)
        eager.index_add_(0, token, rows[row_of_choice[token, slot]] * weights[token, slot, None])
    assert torch.equal(weighted_sum(rows, weights, row_of_choice, CombineMode.hf_eager), eager)
    products = rows[row_of_choice] * weights[..., None]
    in_order = torch.zeros(num_tokens, hidden)
    exact = torch.zeros(num_tokens, hidden)
    for slot in range(top_k):
        in_order += products[:, slot].float()
        exact += rows[row_of_choice[:, slot]].float() * weights[:, slot, None].float()
    assert torch.equal(weighted_sum(rows, weights, row_of_choice, CombineMode.vllm_like), in_order.bfloat16())
    once = weighted_sum(rows, weights, row_of_choice)
    assert torch.equal(once, exact.bfloat16())
    assert not torch.equal(once, eager) and not torch.equal(in_order.bfloat16(), eager)


def test_more_rows_of_logits_than_the_second_axis_of_a_grid_holds() -> None:
    """CUDA's limits; the interpreter has none."""
    first, second = log_softmax.gradient_grid(num_rows=70_000, num_columns=163_840)
    assert 70_000 <= first < 1 << 31
    assert 0 < second < 1 << 16


@pytest.mark.parametrize("tilings", [ADAPTED, ADAPTED_BACKWARD, {0: FORWARD}, {0: BACKWARD}])
def test_the_activations_tiles_divide_those_of_its_table(tilings: dict[int, Tiling]) -> None:
    assert all(TABLE_ROWS % tiling.rows == 0 for tiling in tilings.values())


@pytest.mark.parametrize("rank", [1, 16, 33, 64])
def test_narrow_ranks_have_the_tilings_that_were_measured(rank: int) -> None:
    """In bfloat16, on an H200 (docs/LOG.md)."""
    is_narrow = rank <= 16
    assert tiling_of(ADAPTED, rank, 2) == Tiling(64, 64 if is_narrow else 32, warps=4, stages=3)
    rows, warps = (16, 1) if is_narrow else (64, 4)
    assert tiling_of(ADAPTED_BACKWARD, rank, 2) == Tiling(rows, 64, warps=warps, stages=2)
    assert tiling_of(ADD, rank, 2) == Tiling(64, 64, warps=4, stages=3)
    assert tiling_of(GRADIENT, rank, 2) == Tiling(64, 128, warps=4, stages=2 if is_narrow else 3)
    assert tiling_of(PROJECT, rank, 2) == Tiling(64, 128, warps=4, stages=2)
