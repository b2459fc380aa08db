"""DenseMlp: the modules of a SwiGLU (arXiv:2002.05202) or GELU feed-forward, [T, H] -> [T, H]."""

import torch
from torch import nn

from slipstream.conf.schema import LoraConfig
from slipstream.trainer.lora import Linear


class DenseMlp(nn.Module):
    """Gate and up of H columns, down of H rows."""

    def __init__(
        self,
        hidden: int,
        width: int,
        *,
        weight_dtype: torch.dtype,
        lora: LoraConfig | None,
        activates_once: bool,
        has_gelu: bool = False,
    ) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, width, weight_dtype=weight_dtype, lora=lora)
        self.up_proj = Linear(hidden, width, weight_dtype=weight_dtype, lora=lora)
        self.down_proj = Linear(width, hidden, weight_dtype=weight_dtype, lora=lora)
        self.activates_once, self.has_gelu = activates_once, has_gelu
