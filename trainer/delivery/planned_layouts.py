"""What every trainer rank would hold, from one decoder on torch's meta device: no process, no GPU, no weights.

The rules are those of ranks that exist: which parameters are whole on every rank (build_decoder.py), rows of a rank
(parallel.py), experts of a rank (moe/block.py), names and rectangles (shards.py, adapter_source.py). A rank is
not built for each one that is planned: FSDP2 over Kimi-K2 takes seconds a rank. A test compares every layout with what
real ranks report.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from slipstream.conf.architecture.model_spec import ModelSpec
from slipstream.conf.schema import Device, OptimState, TrainerConfig, TrainMode
from slipstream.trainer.delivery.adapter_source import held_factors
from slipstream.trainer.lora import Linear
from slipstream.trainer.model.build_decoder import WHOLE_SHARE, build_whole, replicated_parameters, sharded_dense
from slipstream.trainer.model.whole_weights import extra_bytes
from slipstream.trainer.moe.block import expert_shares
from slipstream.trainer.moe.experts import Experts
from slipstream.trainer.parallel import rows_of_rank
from slipstream.trainer.weights.adapter_names import adapter_tensors
from slipstream.trainer.weights.factors import merges_of
from slipstream.trainer.weights.fused_experts import FusedTensor
from slipstream.trainer.weights.quantization import (
    SCALE_SUFFIX,
    BlockFp8,
    engine_tensors,
    held_bytes,
    merge_scratch_bytes,
    owned_blocks,
    scale_shape,
    scratch_bytes,
    shared_blocks,
    touched_blocks,
)
from slipstream.trainer.weights.shards import HeldTensor, local_shards
from slipstream.weight_sync.layout import Region, SourceLayout, SourceShard
from slipstream.weight_sync.merging.factors import Merge

_Held = tuple[HeldTensor | FusedTensor, Region]
"""A tensor of the whole decoder, and the part of it that a rank holds."""
_MOMENT_BYTES = {OptimState.float32: 8, OptimState.bfloat16: 4, OptimState.int8: 2, OptimState.host: 8}
"""Bytes that both moments of an element take."""


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """Estimated bytes on one trainer rank, without activations, layers that are gathered, and the allocator's slack."""

    weights: int
    """Frozen weights in model.dtype (LoRA; without a table that is on the host), or all weights in float32 (full).
    Packed experts as stored, and the two layers of them that are unpacked at a time."""
    adapters: int
    """A and B in trainer.lora.dtype; 0 in full training."""
    gradients: int
    """As large as what is trained."""
    optimizer: int
    """Two moments of what is trained, in the format of trainer.optim.state."""
    host_moments: int
    """The same in host memory, in place of the GPU's: trainer.optim.state=host."""
    reference: int
    """What training starts from, as large as what is trained; 0 where nothing compares with it, or it is the base."""
    whole: int
    """Other ranks' rows of dense parameters and of their gradients: on top, on GPUs of least_device_bytes or more."""

    FORMULA: ClassVar[str] = (
        "weights: elements held x bytes of model.dtype (LoRA) or 4 (full), packed experts as stored on every rank that "
        "computes them + two layers of them in model.dtype; adapters: r x (in + out) elements "
        "of trainer.lora.dtype, one A for gate and up of an expert; gradients as large as what is trained; AdamW "
        "moments 8 bytes a trained element (trainer.optim.state=bfloat16: 4, int8: 2, host: none on the GPU)"
    )

    @property
    def total(self) -> int:
        """What a GPU holds however dense parameters are gathered: all but `whole`."""
        return self.weights + self.adapters + self.gradients + self.optimizer + self.reference

    @property
    def state(self) -> int:
        """Bytes of a rank's state: parameters that are trained, and their moments."""
        return self.gradients + self.optimizer + self.host_moments

    @property
    def least_device_bytes(self) -> int:
        """Memory of a GPU with which dense parameters are gathered once a step; with less, layer by layer."""
        return int(self.whole / WHOLE_SHARE)


class PlannedTrainer:
    """The ranks of a trainer, from the options alone."""

    def __init__(self, spec: ModelSpec, dtype: str, trainer: TrainerConfig) -> None:
        """Build the decoder on meta, whole. With packed experts, its memory can be asked for and nothing else."""
        self._spec, self._dtype, self._trainer = spec, dtype, trainer
        self._decoder = build_whole(spec, dtype, trainer)
        self._holders: dict[int, list[int]] = {}
        """By id of an expert bank's parameter: the rank that holds each expert."""
        for number, layer in enumerate(self._decoder.model.layers):
            for bank in (module for module in layer.modules() if isinstance(module, Experts)):
                holders = self._expert_holders(bank.num_local_experts, number)
                self._holders |= dict.fromkeys(map(id, bank.parameters()), holders)
        self._on_every_rank = set(map(id, replicated_parameters(self._decoder)))

    def layouts(self, quantization: BlockFp8 | None = None) -> tuple[SourceLayout, ...]:
        """What each rank's TrainerWeightSource would report."""
        own = self._spec.checkpoint_tensors(self._dtype)
        shapes = {} if quantization is None else quantization.shapes(own)
        tensors = tuple(engine_tensors(own, quantization))
        found: list[SourceLayout] = []
        for rank, held in enumerate(self._held):
            shards = [SourceShard(one.tensor, region) for one, region in held]
            scaled = [shard for shard in shards if shard.tensor in shapes]
            scales = ((one.tensor + SCALE_SUFFIX, _scales_of(one.region, shapes[one.tensor])) for one in scaled)
            shards += [SourceShard(name, region) for name, region in scales if region is not None]
            found.append(SourceLayout(rank, tensors, tuple(shards)))
        return tuple(found)

    def adapter_layouts(self) -> tuple[SourceLayout, ...]:
        """What each rank's AdapterSource would report."""
        lora = self._trainer.lora
        tensors = tuple(adapter_tensors(self._spec.checkpoint_tensors(self._dtype), lora))
        shards: list[list[SourceShard]] = [[] for _ in range(self._trainer.num_ranks)]
        for name, factor in held_factors(self._decoder, lora.slot_rank):
            for rank, region in self._parts(factor.parameter, factor.first_row, factor.region, factor.num_rows):
                shards[rank].append(SourceShard(name, region))
        return tuple(SourceLayout(rank, tensors, tuple(held)) for rank, held in enumerate(shards))

    def merges(self) -> tuple[Merge, ...]:
        """Every merge, as engines are told of them, but for the keys of thresholds."""
        return merges_of(self._decoder)

    def temporary_bytes(self, device: Device, quantization: BlockFp8 | None = None) -> int:
        """TrainerWeightSource.temporary_bytes of the fullest rank.

        Gathered A factors (several ranks), the merge's scratch (CPU), block scales and the scratch of the cast (FP8).
        """
        adapted = [one for one in local_shards(self._decoder) if one.delta is not None]
        scratch = max(
            (merge_scratch_bytes(one.region.shape[1], one.delta.rank) for one in adapted if one.delta is not None),
            default=0,
        )
        scales = 0 if quantization is None else self._scale_bytes(device, quantization)
        return self._gathered_bytes() + (scratch if device is Device.cpu else 0) + scales

    def kept_bytes(self) -> int:
        """On the fullest rank, what TrainerWeightSource keeps of the last publish so that changes alone can be sent."""
        gathered = self._gathered_bytes()  # whole, in place of the rank's own part
        return self.memory().adapters + gathered - gathered // self._trainer.num_ranks

    def _gathered_bytes(self) -> int:
        """Whole A factors of which several ranks hold parts."""
        modules = [module for module in self._decoder.modules() if isinstance(module, Linear) and module.lora]
        return sum(module.lora_A.nbytes for module in modules) if self._trainer.num_ranks > 1 else 0

    def memory(self, *, needs_reference: bool = False) -> TrainerMemory:
        """The fullest rank's share. `needs_reference`: AlgorithmConfig.needs_reference."""
        num_ranks, trainer = self._trainer.num_ranks, self._trainer
        weights, adapters, elements_trained, trained = (np.zeros(num_ranks, np.int64) for _ in range(4))
        for name, parameter in self._decoder.named_parameters():
            if name == "model.embed_tokens.weight" and trainer.embedding_on_host:
                continue
            elements = self._rows(parameter) * (parameter.numel() // parameter.shape[0])
            num_bytes = elements * parameter.element_size()
            if parameter.requires_grad:
                elements_trained += elements
                trained += num_bytes
            if "lora_" in name.rpartition(".")[2]:
                adapters += num_bytes
            else:
                weights += num_bytes
        moments = _MOMENT_BYTES[trainer.optim.state] * int(elements_trained.max())
        is_on_host = trainer.optim.state is OptimState.host
        starts_from_base = trainer.mode is TrainMode.lora and trainer.lora.init_from is None
        return TrainerMemory(
            weights=int(weights.max()) + self._packed_bytes(),
            adapters=int(adapters.max()),
            gradients=int(trained.max()),
            optimizer=0 if is_on_host else moments,
            host_moments=moments if is_on_host else 0,
            reference=int(trained.max()) if needs_reference and not starts_from_base else 0,
            whole=extra_bytes(sharded_dense(self._decoder), num_ranks),
        )

    def _packed_bytes(self) -> int:
        """Packed experts of a rank, which FSDP2 does not shard (trainer/moe/bank.py), and two layers unpacked."""
        banks = [one.packed for one in self._decoder.modules() if isinstance(one, Experts) and one.packed is not None]
        if not banks:
            return 0
        a_layer = sum(np.prod(shape) for shape in banks[0].shapes.values()) * getattr(torch, self._dtype).itemsize
        return int(sum(bank.num_bytes for bank in banks) + 2 * a_layer) // self._trainer.ep_size

    @cached_property
    def _held(self) -> Sequence[Sequence[_Held]]:
        """By rank."""
        held: list[list[_Held]] = [[] for _ in range(self._trainer.num_ranks)]
        for one in local_shards(self._decoder):
            first_row = one.first_row if isinstance(one, HeldTensor) else None
            for rank, region in self._parts(one.parameter, first_row, one.region, one.region.shape[0]):
                held[rank].append((one, region))
        return held

    def _parts(
        self, parameter: nn.Parameter, first_row: int | None, region: Region, num_rows: int
    ) -> Iterator[tuple[int, Region]]:
        """Who holds which part of a rectangle.

        Args:
            parameter: The whole parameter that it lies in.
            first_row: Its first row there; None: it is a fused stack of all experts.
            num_rows: Its rows that the parameter has; the rank with the last of them has the padding below, too.
        """
        ranks, holders = range(self._trainer.num_ranks), self._holders.get(id(parameter))
        if holders is not None and first_row is not None:
            yield holders[first_row // parameter.shape[1]], region
        elif holders is not None:
            for rank in dict.fromkeys(holders):
                first = holders.index(rank)
                yield rank, _rows_of(region.shape, first, first + holders.count(rank))
        elif id(parameter) in self._on_every_rank:
            yield from ((rank, region) for rank in ranks)
        else:
            for rank in ranks:
                start, stop = rows_of_rank(num_rows, rank, len(ranks))
                if stop > start:
                    yield rank, _rows_of(region.shape, start, region.shape[0] if stop == num_rows else stop)

    def _rows(self, parameter: nn.Parameter) -> np.ndarray:
        """How many rows, or experts, of a parameter each rank holds."""
        num_ranks, num_rows = self._trainer.num_ranks, parameter.shape[0]
        if id(parameter) in self._holders:
            return np.bincount(self._holders[id(parameter)], minlength=num_ranks)
        if id(parameter) in self._on_every_rank:
            return np.full(num_ranks, num_rows)
        return np.array(
            [stop - start for start, stop in (rows_of_rank(num_rows, r, num_ranks) for r in range(num_ranks))]
        )

    def _expert_holders(self, num_experts: int, layer: int) -> list[int]:
        """The one rank that holds each expert of a layer."""
        ep_size = self._trainer.ep_size
        num_data_ranks = self._trainer.num_ranks // ep_size
        holders: list[int] = []
        for ep_rank, share in enumerate(expert_shares(num_experts, ep_size, layer)):
            for data_rank in range(num_data_ranks):
                start, stop = rows_of_rank(len(share), data_rank, num_data_ranks)
                holders += [data_rank * ep_size + ep_rank] * (stop - start)
        return holders

    def _scale_bytes(self, device: Device, quantization: BlockFp8) -> int:
        """Block scales of the fullest rank, and the scratch of computing and using them."""
        shapes = quantization.shapes(self._spec.checkpoint_tensors(self._dtype))
        widths = {name: scale_shape(shape)[1] for name, shape in shapes.items()}
        touched: Mapping[str, list[tuple[int, int]]] = defaultdict(list)
        fullest = 0
        for held in self._held:
            scales = 0
            parameters: dict[int, int] = {}
            for one, region in held:
                if one.tensor not in widths:
                    continue
                rows = (region.start[0], region.start[0] + region.shape[0])
                if id(one.parameter) not in self._holders:
                    touched[one.tensor].append(rows)
                parameters[id(one.parameter)] = widths[one.tensor]  # each has one spare row
                scales += len(touched_blocks(*rows)) * widths[one.tensor]
            fullest = max(fullest, scales + sum(parameters.values()))
        shared = sum(len(shared_blocks(rows)) * widths[name] for name, rows in touched.items())
        return held_bytes(fullest, shared) + scratch_bytes(widths.values(), device.value)


@cache
def _rows_of(shape: tuple[int, ...], start: int, stop: int) -> Region:
    """Rows of a tensor. Layers are alike, so a few objects serve hundreds of thousands of shards."""
    return Region((start, *(0,) * len(shape[1:])), (stop - start, *shape[1:]))


@cache
def _scales_of(region: Region, shape: tuple[int, ...]) -> Region | None:
    """The scales that the rank with this region writes out; None if it has no block's first row."""
    blocks = owned_blocks(region.start[0], region.stop[0])
    return _rows_of(scale_shape(shape), blocks.start, blocks.stop) if blocks else None
