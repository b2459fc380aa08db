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
from slipstream.trainer.kernels.experts.swiglu import ADAPTED, ADAPTED_BACKWARD, BACKWARD, FORWARD, TABLE_ROWS
from slipstream.trainer.kernels.launch import Tiling


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


def test_int4_is_what_compressed_tensors_decompresses_to_the_bit() -> None:
    """Every nibble in every place, against every finite bfloat16 scale; four groups a row."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    bits = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    scale = bits[bits.isfinite()].view(-1, 4)
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-8, 8, (scale.shape[0], 128), generator=generator, dtype=torch.int8)
    values[0] = torch.arange(-8, 8).repeat(8)
    arguments = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    packed, shape = pack_to_int32(values, 4), torch.tensor(values.shape)
    stored = {"weight_packed": packed, "weight_scale": scale, "weight_shape": shape}
    wanted = BaseCompressor.get_value_from_registry("pack-quantized").decompress(stored, scheme)["weight"]
    out = dequantize_int4(packed, scale, torch.empty(values.shape, dtype=torch.bfloat16))
    assert torch.equal(out.view(torch.int16), wanted.view(torch.int16))


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
