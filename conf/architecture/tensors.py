"""What a checkpoint consists of: named tensors of some format. Pure data, no torch."""

from dataclasses import dataclass
from enum import Enum, auto

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int32": 4, "uint8": 1, "int64": 8}
"""Size of one element, in bytes, of every dtype that can be published."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A checkpoint tensor. Example: TensorMeta("model.embed_tokens.weight", (151936, 2048), "bfloat16")."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class Start(Enum):
    """What a model of random weights starts with."""

    normal = auto()
    ones = auto()
    zeros = auto()
    int4_words = auto()
    int4_scales = auto()
    int4_shape = auto()
    mxfp4_blocks = auto()
    mxfp4_scales = auto()


@dataclass(frozen=True, slots=True)
class Parameter:
    """A tensor that a part of the decoder has in a checkpoint. Example: Parameter((64,), "float32", Start.zeros)."""

    shape: tuple[int, ...]
    dtype: str | None = None
    """None: the model's."""
    start: Start = Start.normal


Parameters = dict[str, Parameter]
"""By name, in the checkpoint's order."""


def below(prefix: str, parameters: Parameters) -> Parameters:
    """The same parameters, of a module with this name."""
    return {f"{prefix}.{name}": parameter for name, parameter in parameters.items()}


def norm_weight(size: int, *, adds_one: bool = False) -> Parameter:
    return Parameter((size,), start=Start.zeros if adds_one else Start.ones)
