"""Tiny checkpoints on disk, as Hugging Face writes them: config.json, shards, an index."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fakes.checkpoints import CONFIGS
from slipstream.conf.architecture.families import read_config
from slipstream.weight_sync.disk.safetensors_files import INDEX_NAME

TINY: dict[str, Any] = {**CONFIGS["qwen3_moe"], "num_experts": 4, "torch_dtype": "bfloat16"}


def save_checkpoint(folder: Path, config: dict[str, Any], *, seed: int, num_files: int = 2) -> None:
    """Random weights in several shards. Norms are float32, so that a publish must cast."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        meta.name: (torch.randn(meta.shape, generator=generator) * 0.1).to(
            torch.float32 if "norm" in meta.name else torch.bfloat16
        )
        for meta in read_config(config).checkpoint_tensors("bfloat16")
    }
    weight_map: dict[str, str] = {}
    names = list(tensors)
    for number in range(num_files):
        file = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        mine = names[number * len(names) // num_files : (number + 1) * len(names) // num_files]
        save_file({name: tensors[name] for name in mine}, folder / file)
        weight_map |= dict.fromkeys(mine, file)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
