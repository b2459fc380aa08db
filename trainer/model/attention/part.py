"""Attention: what every kind of attention gives a layer.

Owns parameter names, which are the checkpoint's; the kind's spec lists their shapes (conf/architecture). Every
projection is a Linear, so adapters, merging and publishing need not know the kind.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import nn

from slipstream.conf.architecture.attention_spec import AttentionSpec
from slipstream.trainer.lora import Linear
from slipstream.trainer.model.attention.attend import AttentionBackend
from slipstream.trainer.model.build import Build
from slipstream.trainer.model.operations import Operation


class Attention(nn.Module, ABC):
    """One layer's attention: its parameters, and the order of its operations up to the heads' projection."""

    gives = "attn"
    """What the heads' projection takes, by its name below the attention."""
    backend: AttentionBackend | None = None
    """Kernel of the softmax; None: there is none."""
    output_name = "o_proj"

    def __init__(self, own: AttentionSpec, build: Build) -> None:
        super().__init__()
        given = build.lora
        for shape in own.linears(build.spec.hidden_size):
            lora = given.for_attention if given is not None and given.adapts_attention(shape.name) else None
            linear = Linear(
                shape.in_features, shape.out_features, bias=shape.bias, weight_dtype=build.weight_dtype, lora=lora
            )
            self.add_module(shape.name, linear)

    @property
    def output(self) -> Linear:
        return self.linear(self.output_name)

    def linear(self, name: str) -> Linear:
        linear = self.get_submodule(name)
        assert isinstance(linear, Linear)
        return linear

    @abstractmethod
    def operations(self, x: str, prefix: str) -> Iterator[Operation]:
        """From the norm of the stream, named x, to what `gives` names."""
