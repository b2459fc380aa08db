"""On a GPU too, what a publish packs is bitwise the merged export, however the reads are cut and joined."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream.conf.architecture.families import read_config
from slipstream.conf.schema import LoraConfig, TrainerConfig
from slipstream.trainer.adapter_io import save_merged
from slipstream.trainer.delivery.merged_source import TrainerWeightSource
from slipstream.trainer.model.build_decoder import build_decoder
from slipstream.weight_sync.layout import Region
from slipstream.weight_sync.pipeline.packing import PackedRead

pytestmark = pytest.mark.gpu

CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 1000,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "moe_intermediate_size": 192,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}


@pytest.mark.parametrize("num_cuts", [1, 3])
def test_packed_bytes_are_bitwise_the_merged_export(tmp_path: Path, num_cuts: int) -> None:
    torch.manual_seed(0)
    decoder = build_decoder(
        read_config(CONFIG),
        dtype=torch.bfloat16,
        device="cuda",
        trainer=TrainerConfig(lora=LoraConfig(rank=8, alpha=16.0)),
    )
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(0.0, 0.2)
    save_merged(decoder, tmp_path, dict(CONFIG))
    export = load_file(tmp_path / "model.safetensors")

    source = TrainerWeightSource(decoder, rank=0)
    reads: list[PackedRead] = []
    offset = 0
    for meta in source.layout().tensors:
        rows = -(-meta.shape[0] // num_cuts)
        for first in range(0, meta.shape[0], rows):
            shape = (min(rows, meta.shape[0] - first), *meta.shape[1:])
            region = Region((first,) + (0,) * (len(shape) - 1), shape)
            is_last = first + rows >= meta.shape[0]
            axes = tuple(reversed(range(len(shape)))) if num_cuts > 1 and is_last else tuple(range(len(shape)))
            reads.append(PackedRead(meta.name, region, axes, "bfloat16", offset))
            offset += reads[-1].num_bytes
    slot = torch.zeros(offset, dtype=torch.uint8, device="cuda")
    source.begin(0)
    source.compile_reads(reads)(slot)()
    source.end()
    for read in reads:
        window = tuple(slice(a, b) for a, b in zip(read.region.start, read.region.stop, strict=True))
        assert torch.equal(read.view(slot).cpu(), export[read.tensor][window]), read
    layer: Any = decoder.model.layers[0]
    base = layer.mlp.experts.gate_up_proj[0, :192].cpu()
    assert not torch.equal(export["model.layers.0.mlp.experts.0.gate_proj.weight"], base)
