"""What vLLM reads of the trainer's files: weights in block-FP8, and the scale of an adapter."""

from pathlib import Path

import pytest
import torch
from cases.tiny_models import make_decoder, trainer_config
from unit.trainer.weights.test_block_scales import as_bytes, exported, merged_in_float32
from unit.trainer.weights.test_stored_adapter import LLAMA, options, write_adapter

pytest.importorskip("vllm")

from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape, scaled_dequantize
from vllm.utils.deep_gemm import per_block_cast_to_fp8

from slipstream.trainer.adapter_io import load_adapter, save_adapter
from slipstream.trainer.weights.quantization import BLOCK, SCALE_SUFFIX

__all__ = ["exported"]  # a fixture


def test_vllm_reads_block_fp8_as_its_own_format(exported):
    """Its dequantization gives the weights back to half an FP8 step, and its own quantizer chooses the same scales."""
    rank, export = exported
    merged = merged_in_float32(rank)
    for name in ("model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.experts.3.gate_proj.weight"):
        weight, scales = export[name], export[name + SCALE_SUFFIX]
        with torch.compiler.set_stance("force_eager"):
            theirs, their_scales = per_block_cast_to_fp8(merged[name])
        assert torch.equal(scales, their_scales)
        # They multiply by 1 / scale: a value may fall to the neighbour, one code away.
        apart = (as_bytes(weight).astype(int) - as_bytes(theirs).astype(int)).__abs__()
        assert apart.max() <= 1
        assert (apart > 0).mean() < 1e-3
        rows, columns = (-(-size // BLOCK) * BLOCK for size in weight.shape)
        padded = torch.zeros(rows, columns).to(torch.float8_e4m3fn)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        back = scaled_dequantize(padded, scales, GroupShape(BLOCK, BLOCK))[: weight.shape[0], : weight.shape[1]]
        # Three bits of fraction: half a step is 2^-4 of the value; below the smallest normal, 2^-10 of the scale.
        bound = merged[name].abs() * 2.0**-4 + scales.max() * 2.0**-10
        assert ((back - merged[name]).abs() <= bound).all()


def test_what_we_write_of_an_rslora_adapter_has_its_scale_in_vllm(tmp_path: Path) -> None:
    """vLLM computes with `vllm_lora_scaling_factor` of adapter_config.json."""
    write_adapter(LLAMA, tmp_path / "peft", use_rslora=True)
    decoder = make_decoder(LLAMA, trainer_config(lora=options(tmp_path / "peft")), nonzero_b=False)
    load_adapter(decoder, tmp_path / "peft")
    save_adapter(decoder, tmp_path / "ours")
    read = [PEFTHelper.from_local_dir(str(tmp_path / one), None) for one in ("peft", "ours")]
    assert read[0].vllm_lora_scaling_factor == pytest.approx(16 / 6**0.5, rel=1e-9)
    assert read[1].vllm_lora_scaling_factor == pytest.approx(16 / 6**0.5, rel=1e-9)
