"""Which checkpoint tensors engines load in block-FP8, and under which names. Pure data, no torch.

A Hugging Face config with `quantization_config: {quant_method: fp8, weight_block_size: [128, 128]}` (DeepSeek-V3's
format, which vLLM and transformers read) stores a projection as two tensors:

    NAME.weight              float8_e4m3fn   (N, K)
    NAME.weight_scale_inv    float32         (ceil(N/128), ceil(K/128));  value = weight * scale of its block

Invariant: a tensor is quantized here exactly if vLLM gives its layer FP8 parameters. If the two differ, recording an
engine's layout fails and names the tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import HfConfig, JsonObject, is_list
from slipstream.weight_sync.layout import TensorMeta
from slipstream.weight_sync.merging.factors import MERGE_ROWS, ROUNDED_ROWS

BLOCK = 128
"""Rows and columns of a block."""
WEIGHT_DTYPE, SCALE_DTYPE = "float8_e4m3fn", "float32"
SCALE_SUFFIX = "_scale_inv"
_NEVER = ("embed_tokens", "lm_head", "norm", "layernorm")
"""Ends of the names of modules that vLLM keeps in the model's own format."""


@dataclass(frozen=True, slots=True)
class BlockFp8:
    """Block-FP8 for every projection except those named."""

    skipped: frozenset[str] = frozenset()
    """Names of modules that stay as they are, as in quantization_config.modules_to_not_convert."""

    @staticmethod
    def from_hf_config(hf_config: HfConfig) -> BlockFp8 | None:
        """What `quantization_config` asks for; None without one, and for packed experts, which ModelSpec describes.
        Raises ConfigError for another quantization, another block, or static activation scales."""
        given = hf_config.get("quantization_config")
        if not given or given.get("quant_method") in ("compressed-tensors", "mxfp4"):
            return None
        for key, allowed in (
            ("quant_method", ("fp8",)),
            ("weight_block_size", ([BLOCK, BLOCK],)),
            ("activation_scheme", ("dynamic", None)),
            ("fmt", ("e4m3", None)),
        ):
            value = given.get(key)
            if (list(value) if isinstance(value, list | tuple) else value) not in allowed:
                raise ConfigError(
                    f"model: quantization_config.{key}={value!r} cannot be published merged; allowed: "
                    f"{' or '.join(repr(one) for one in allowed if one is not None)}"
                )
        skipped = given.get("modules_to_not_convert") or []
        if not is_list(skipped) or not all(isinstance(module, str) for module in skipped):
            raise ConfigError(
                f"model: quantization_config.modules_to_not_convert must be a list of names, got {skipped!r:.60}"
            )
        return BlockFp8(frozenset(skipped))

    @staticmethod
    def hf_entry(tensors: Iterable[TensorMeta]) -> JsonObject:
        """`quantization_config` for a model without one: every projection except the head and the routers."""
        modules = (meta.name.removesuffix(".weight") for meta in tensors)
        kept = [module for module in modules if module == "lm_head" or _stays_float(module)]
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": kept,
        }

    def quantizes(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a checkpoint tensor of this name is stored as FP8 with block scales."""
        if len(shape) != 2 or not name.endswith(".weight"):
            return False
        module = name.removesuffix(".weight")
        if module in self.skipped or _stays_float(module):
            return False
        return not module.rsplit(".", 1)[-1].endswith(_NEVER)

    def shapes(self, tensors: Iterable[TensorMeta]) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor that is quantized, in the order of the checkpoint."""
        return {meta.name: meta.shape for meta in tensors if self.quantizes(meta.name, meta.shape)}


def engine_tensors(tensors: Iterable[TensorMeta], quantization: BlockFp8 | None) -> list[TensorMeta]:
    """The checkpoint as engines load it: each quantized tensor in FP8, followed by its scales."""
    wanted: list[TensorMeta] = []
    for meta in tensors:
        if quantization is None or not quantization.quantizes(meta.name, meta.shape):
            wanted.append(meta)
            continue
        wanted.append(TensorMeta(meta.name, meta.shape, WEIGHT_DTYPE))
        wanted.append(TensorMeta(meta.name + SCALE_SUFFIX, scale_shape(meta.shape), SCALE_DTYPE))
    return wanted


def scale_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Blocks along rows and columns of a matrix; the last ones may be partial."""
    rows, columns = shape
    return -(-rows // BLOCK), -(-columns // BLOCK)


def owned_blocks(start: int, stop: int) -> range:
    """Rows of blocks whose first row lies in start .. stop - 1. Ranges that tile the rows give blocks that tile."""
    return range(-(-start // BLOCK), -(-stop // BLOCK))


def touched_blocks(start: int, stop: int) -> range:
    """Rows of blocks that rows start .. stop - 1 lie in."""
    return range(start // BLOCK, -(-stop // BLOCK))


def shared_blocks(ranges: Iterable[tuple[int, int]]) -> list[int]:
    """Rows of blocks that more than one range of rows touches."""
    touched = Counter(block for start, stop in ranges for block in touched_blocks(start, stop))
    return sorted(block for block, count in touched.items() if count > 1)


def held_bytes(num_scales: int, num_shared: int) -> int:
    """Bytes of the scales, of a mask of them, and of the blocks that several ranks touch."""
    return 5 * num_scales + 4 * num_shared


def scratch_bytes(num_blocks: Iterable[int], device: str) -> int:
    """Scratch of the largest step over matrices of these widths, in blocks; kernels on GPUs need none."""
    widest = max(num_blocks, default=0) if device != "cuda" else 0
    # Merged values and the base's, a scale for every block of a row, the numbers of the rows, and rounding.
    return MERGE_ROWS * (8 * widest * BLOCK + 4 * widest + 8) + rounding_bytes(widest * BLOCK) if widest else 0


def merge_scratch_bytes(in_features: int, rank: int) -> int:
    """Scratch of one merge on the host: the product, the block of B, an aligned copy of A, and rounding."""
    return 4 * (MERGE_ROWS * (in_features + rank) + rank * in_features) + rounding_bytes(in_features)


def marking_scratch_bytes(in_features: int) -> int:
    """Scratch of the marks of a merge on the host: some rows as they were published, and what differs."""
    return 4 * MERGE_ROWS * in_features


def rounding_bytes(num_columns: int) -> int:
    """Scratch of rounding some rows by thresholds on the host: ten tensors of four bytes a value."""
    return 40 * ROUNDED_ROWS * num_columns


def _stays_float(module: str) -> bool:
    """A router, the gate of a shared expert, and what engines join of an indexer."""
    return module.endswith(
        (".mlp.gate", ".block_sparse_moe.gate", ".shared_expert_gate", ".indexer.wk", ".indexer.weights_proj")
    )
