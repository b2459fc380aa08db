"""DenseMlp: the modules of a SwiGLU (arXiv:2002.05202) or GELU feed-forward, [T, H] -> [T, H]."""

from torch import nn

from slipstream.conf.schema import Rounding
from slipstream.trainer.lora import Linear
from slipstream.trainer.model.build import Build


class DenseMlp(nn.Module):
    """A feed-forward for all tokens: gate and up of H columns, down of H rows."""

    def __init__(self, build: Build, width: int) -> None:
        super().__init__()
        hidden, lora = build.spec.hidden_size, None if build.lora is None else build.lora.for_mlp
        self.gate_proj = Linear(hidden, width, weight_dtype=build.weight_dtype, lora=lora)
        self.up_proj = Linear(hidden, width, weight_dtype=build.weight_dtype, lora=lora)
        self.down_proj = Linear(width, hidden, weight_dtype=build.weight_dtype, lora=lora)
        self.activates_once, self.has_gelu = build.numerics.dense_activation is Rounding.once, build.spec.has_gelu
