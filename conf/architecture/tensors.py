"""What a checkpoint consists of: named tensors of some format. Pure data, no torch."""

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int32": 4, "uint8": 1, "int64": 8}
"""Size of one element, in bytes, of every dtype that can be published."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A checkpoint tensor. Example: TensorMeta("model.embed_tokens.weight", (151936, 2048), "bfloat16")."""

    name: str
    shape: tuple[int, ...]
    dtype: str
