"""Fill the first weights: this rank's slices of safetensors files, or values drawn from a seed, equal for any layout.

Invariant: a value depends on its tensor's name, its place and the seed, never on the number of ranks. Adapters start at
B = 0 and A ~ U(-1/sqrt(in), 1/sqrt(in)), which is kaiming-uniform with a = sqrt(5). A counter-based generator draws
each element of A: a function of (seed, parameter, index in the whole parameter), with the same bits on every kind of
device.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slipstream.conf.architecture.model_spec import ModelSpec
from slipstream.conf.architecture.tensors import Start
from slipstream.conf.errors import ConfigError
from slipstream.conf.schema import Init, ModelConfig
from slipstream.trainer.errors import CheckpointError
from slipstream.trainer.lora import Adapted
from slipstream.trainer.moe.experts import Experts
from slipstream.trainer.parallel import local_part
from slipstream.trainer.weights.block_scales import dequantized
from slipstream.trainer.weights.packed_experts import packed_tensors
from slipstream.trainer.weights.quantization import SCALE_SUFFIX
from slipstream.trainer.weights.shards import local_shards
from slipstream.weight_sync.disk.language_model import language_model_tensors
from slipstream.weight_sync.disk.safetensors_files import read_index
from slipstream.weight_sync.integrity import splitmix64_
from slipstream.weight_sync.layout import Region

if TYPE_CHECKING:
    from slipstream.trainer.model.decoder import Decoder

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WEIGHTS_A_WORD = 8
INT4_RMS, E2M1_RMS = 4.64, 2.93
"""The root mean square of random codes, per format."""
E8M0_BIAS = 127
BLOCK_ELEMENTS = 1 << 22
"""The most elements that random weights draw from one seed (at least a row): more than an expert's matrix has."""
CHUNK_ELEMENTS = {"cpu": 1 << 14, "cuda": 1 << 22}
"""Adapter elements drawn together, with 16 bytes of scratch each: on a CPU few enough for a core's cache and for one
thread; on a GPU so many that few launches are needed."""


class TensorReader(Protocol):
    """Where checkpoint tensors come from."""

    def read(self, tensor: str, region: Region) -> Tensor:
        """One rectangle, of any float dtype and device."""
        ...

    def names(self) -> set[str] | None:
        """Every tensor on offer; None when any name can be made."""
        ...


@dataclass(frozen=True, slots=True)
class LoadReport:
    num_tensors: int
    num_bytes: int
    """Bytes of base weights filled on this rank, packed ones included."""
    num_packed_bytes: int
    """Bytes of packed experts among them."""
    ignored: tuple[str, ...]
    """Tensors on offer that the model has no place for, without those of multi-token prediction."""
    num_mtp_tensors: int
    """Tensors on offer of multi-token prediction layers, which are not part of the policy."""


class CheckpointReader:
    """Slices of the safetensors files in a Hugging Face checkpoint folder. Reads from disk only what is asked for."""

    def __init__(self, folder: Path | str, spec: ModelSpec) -> None:
        self._folder = Path(folder)
        self._shapes = {meta.name: meta.shape for meta in spec.checkpoint_tensors("float32")}
        self._files: dict[Path, Any] = {}
        try:
            self._stored = language_model_tensors(read_index(self._folder, "model.path"), self._shapes)
        except ConfigError as error:  # this machine's files are bad; the controller checked its own before
            raise CheckpointError(str(error)) from error

    def names(self) -> set[str]:
        return set(self._stored)

    def read(self, tensor: str, region: Region) -> Tensor:
        """One rectangle, on the CPU, in the file's dtype; block-FP8 as float32."""
        if tensor not in self._stored:
            raise CheckpointError(f"{self._folder} has no tensor {tensor}, which the model in its config.json needs")
        stored, expected = self._stored[tensor], self._shapes[tensor]
        if stored.shape != expected:
            raise CheckpointError(f"{self._folder}: {tensor} has shape {stored.shape}, the model needs {expected}")
        matrix, first = stored.inside or (None, 0)
        rows, *columns = (slice(a, b) for a, b in zip(region.start, region.stop, strict=True))
        index = (slice(first + rows.start, first + rows.stop), *columns)
        whole = self._open(stored.path).get_slice(stored.name)
        values = whole[index if matrix is None else (matrix, *index)]
        if values.dtype != torch.float8_e4m3fn:
            return values
        scales = tensor + SCALE_SUFFIX
        if scales not in self._stored:
            raise CheckpointError(f"{self._folder}: {tensor} is FP8 without {scales}; only block-FP8 can be read")
        stored = self._stored[scales]
        return dequantized(values, self._open(stored.path).get_tensor(stored.name), region)

    def _open(self, file: Path) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(file, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file} cannot be read as safetensors: {error}") from error
        return self._files[file]


class RandomReader:
    """Normal weights of standard deviation `std`, norms 1, biases and logarithms of decays 0; packed experts of random
    bits, with scales that give the same deviation.

    Values are drawn in blocks of whole rows, each from a seed of its own: (seed, tensor, number of the block). So
    reading a slice draws its own rows and at most two more blocks, and every rank gets the same values for it. The
    device that will hold the values draws them; devices of another kind draw other values.
    """

    def __init__(self, spec: ModelSpec, *, seed: int, std: float, device: torch.device | str) -> None:
        self._parameters, self._seed, self._std, self._device = spec.parameters(), seed, std, torch.device(device)

    def names(self) -> None: ...

    def read(self, tensor: str, region: Region) -> Tensor:
        """One rectangle, float32; packed experts in the stored format."""
        start_with = self._parameters[tensor].start
        if start_with in (Start.ones, Start.zeros):
            return torch.full(region.shape, float(start_with is Start.ones), device=self._device)
        if start_with is Start.int4_shape:
            rows, columns = self._parameters[tensor.removesuffix("shape") + "packed"].shape
            return torch.tensor([rows, columns * WEIGHTS_A_WORD])
        num_rows, *row_shape = self._parameters[tensor].shape
        block_rows = max(1, BLOCK_ELEMENTS // math.prod(row_shape))
        first, stop = region.start[0], region.stop[0]
        blocks: list[Tensor] = []
        for start in range(first - first % block_rows, stop, block_rows):
            generator = named_generator(self._seed, f"{tensor}/{start // block_rows}", self._device)
            shape = (min(block_rows, num_rows - start), *row_shape)
            blocks.append(self._draw(start_with, shape, generator)[max(first - start, 0) : stop - start])
        columns = tuple(slice(a, b) for a, b in zip(region.start[1:], region.stop[1:], strict=True))
        rows = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
        return rows[(slice(None), *columns)]

    def _draw(self, start: Start, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """A block of a tensor."""
        device, std = self._device, self._std
        match start:
            case Start.int4_words:
                return self._draw(Start.mxfp4_blocks, (*shape[:-1], shape[-1] * 4), generator).view(torch.int32)
            case Start.int4_scales:
                spread = torch.rand(shape, generator=generator, device=device).add_(0.5)
                return spread.mul_(std / INT4_RMS).to(torch.bfloat16)
            case Start.mxfp4_blocks:
                return torch.randint(0, 256, shape, generator=generator, device=device, dtype=torch.uint8)
            case Start.mxfp4_scales:
                high = E8M0_BIAS + round(math.log2(std / E2M1_RMS)) + 1 if std > 0 else 1
                return torch.randint(max(high - 2, 0), high, shape, generator=generator, device=device).byte()
            case _:
                return torch.normal(0.0, std, shape, generator=generator, device=device)


def open_reader(model: ModelConfig, spec: ModelSpec, *, seed: int, device: torch.device | str) -> TensorReader:
    if model.init is Init.random:
        return RandomReader(spec, seed=seed, std=model.init_std, device=device)
    assert model.path is not None  # ModelConfig checks it
    return CheckpointReader(model.path, spec)


@torch.no_grad()
def load_weights(decoder: Decoder, reader: TensorReader, *, seed: int) -> LoadReport:
    """Fill every local base parameter, then start the adapters, before the decoder is used. No communication. Raises
    CheckpointError if a tensor is missing or has another shape."""
    num_tensors = num_bytes = num_packed_bytes = 0
    for packed in packed_tensors(decoder):
        packed.fill(reader.read(packed.tensor, packed.region))
        num_tensors, num_packed_bytes = num_tensors + 1, num_packed_bytes + packed.num_bytes
    for held in local_shards(decoder):
        values = reader.read(held.tensor, held.region)
        if values.dtype not in FLOAT_DTYPES:
            raise CheckpointError(f"{held.tensor} is stored as {values.dtype}, which cannot be read as weights")
        if values.device != held.parameter.device:
            values = values.to(held.parameter.dtype)  # cast before the copy, which would cast on the host
        held.fill(values)
        num_tensors, num_bytes = num_tensors + 1, num_bytes + held.region.num_elements * held.parameter.element_size()
    init_adapters(decoder, seed=seed)
    offered = reader.names() or set()
    needed = {meta.name for meta in decoder.spec.checkpoint_tensors("float32")}
    needed |= {name + SCALE_SUFFIX for name in needed}
    if decoder.spec.tie_embeddings:
        needed.add("lm_head.weight")  # a copy of the embedding table, as the controller has checked
    num_layers, num_mtp_layers = decoder.spec.num_layers, decoder.spec.num_mtp_layers
    mtp = ("mtp.", *(f"model.layers.{layer}." for layer in range(num_layers, num_layers + num_mtp_layers)))
    mtp_tensors = {name for name in offered if name.startswith(mtp)}
    return LoadReport(
        num_tensors,
        num_bytes + num_packed_bytes,
        num_packed_bytes,
        tuple(sorted(offered - needed - mtp_tensors)),
        len(mtp_tensors),
    )


@torch.no_grad()
def init_adapters(decoder: Decoder, *, seed: int) -> None:
    """Draw every A and zero every B, so that the adapted policy starts as the base policy."""
    for name, module in decoder.named_modules():
        if not isinstance(module, Adapted) or module.lora is None:
            continue
        first_expert = module.first_expert if isinstance(module, Experts) else 0
        for leaf, parameter in module.named_parameters(recurse=False):
            if leaf.endswith("lora_A"):
                local, start = local_part(parameter)
                first_element = (first_expert + start) * math.prod(local.shape[1:])
                bound, key = 1.0 / math.sqrt(local.shape[-1]), stream_key(seed, f"{name}.{leaf}")
                fill_uniform(local, bound=bound, key=key, first_element=first_element)
            elif leaf.endswith("lora_B"):
                local_part(parameter)[0].zero_()


def stream_key(seed: int, name: str) -> int:
    """63 bits for the random numbers that belong to (seed, name)."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little") >> 1


def named_generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    """A generator whose stream belongs to (seed, name) alone."""
    return torch.Generator(device).manual_seed(stream_key(seed, name))


def fill_uniform(out: Tensor, *, bound: float, key: int, first_element: int) -> None:
    """Numbers first_element, first_element + 1, ... of the stream `key`, uniform in [-bound, bound).

    Number i is the upper 24 bits, signed, of splitmix64(key + i), times 2^-23 bound: exact up to one float32 product.
    `out` is contiguous, of any float dtype.
    """
    flat = out.view(-1)
    first = first_element
    for part in flat.split(CHUNK_ELEMENTS[out.device.type]):
        bits = torch.arange(first, first + part.numel(), device=out.device).add_(key)
        splitmix64_(bits).bitwise_right_shift_(40)
        part.copy_(bits.to(torch.float32).mul_(bound * 2.0**-23))
        first += part.numel()
