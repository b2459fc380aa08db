"""What every trainer rank would hold, from options and config.json alone: no torch, no process, no GPU.

Owns: the placement rules of parallel.py and shards.py, restated as arithmetic, and the sizes that follow from them.
Those two files decide the rules; a test compares every layout with what real ranks report.

    dense tensors    FSDP2 over all ranks: ceil(rows / num_ranks) rows each, the last ones short or empty
    frozen vectors   whole on every rank
    experts          ep_rank = rank % ep_size holds n of them (expert_placement.py), and each of the ranks with the
                     same ep_rank holds ceil(n / (num_ranks / ep_size)) whole experts of these
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from typing import ClassVar

from conf.architecture.model_spec import CORRECTION_BIAS, ModelSpec
from conf.schema import Device, LoraConfig, TrainerConfig, TrainMode
from trainer.moe.expert_placement import expert_shares
from trainer.weights.adapter_names import adapter_tensors
from trainer.weights.quantization import (
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
from weight_sync.layout import DTYPE_BYTES, Region, SourceLayout, SourceShard, TensorMeta

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_FUSED_EXPERTS = re.compile(r"\.experts\.(gate_up|down)_proj(_bias|_blocks|_scales)?$")
_ROUTER = (".mlp.gate.weight", ".mlp.router.weight", ".mlp.router.bias", ".block_sparse_moe.gate.weight")
_PACKED = re.compile(r"\.experts\..*(weight_packed|weight_scale|_proj_blocks|_proj_scales)$")


def source_layouts(
    spec: ModelSpec, dtype: str, trainer: TrainerConfig, quantization: BlockFp8 | None = None
) -> tuple[SourceLayout, ...]:
    """The layout that each rank's TrainerWeightSource would report, shards in checkpoint order."""
    held, own = _held_shards(spec, trainer), spec.checkpoint_tensors(dtype)
    tensors = tuple(engine_tensors(own, quantization))
    if quantization is not None:
        shapes = quantization.shapes(own)
        held = [tuple(one for shard in shards for one in _with_scales(shard, shapes)) for shards in held]
    return tuple(SourceLayout(rank, tensors, shards) for rank, shards in enumerate(held))


@lru_cache(maxsize=1)
def _held_shards(spec: ModelSpec, trainer: TrainerConfig) -> Sequence[tuple[SourceShard, ...]]:
    """What each rank holds of its own decoder's tensors, in any dtype. Cached: a plan asks for it three times."""
    shards: list[list[SourceShard]] = [[] for _ in range(trainer.num_ranks)]

    @cache
    def holders_of(layer: int) -> list[int]:
        return _expert_holders(spec, trainer, layer)

    for meta in spec.checkpoint_tensors("float32"):
        expert = expert_of(meta.name)
        whole = _region(meta.shape, 0, meta.shape[0])
        if _FUSED_EXPERTS.search(meta.name):
            for rank, (first, count) in enumerate(_experts_of_ranks(spec, trainer, _layer_of(meta.name))):
                if count:
                    region = _region(meta.shape, first, first + count)
                    shards[rank].append(SourceShard(meta.name, region))
            continue
        if expert is not None:
            shards[holders_of(_layer_of(meta.name))[expert]].append(SourceShard(meta.name, whole))
            continue
        if meta.name.endswith(CORRECTION_BIAS) or (trainer.mode is TrainMode.lora and len(meta.shape) == 1):
            for held in shards:
                held.append(SourceShard(meta.name, whole))
            continue
        for rank, (start, stop) in enumerate(_rows(meta.shape[0], trainer.num_ranks)):
            if stop > start:
                shards[rank].append(SourceShard(meta.name, _region(meta.shape, start, stop)))
    return [tuple(held) for held in shards]


@cache
def _region(shape: tuple[int, ...], start: int, stop: int) -> Region:
    """Rows of a tensor. Layers and experts are alike, so a few objects serve hundreds of thousands of shards."""
    return Region((start, *(0,) * len(shape[1:])), (stop - start, *shape[1:]))


@cache
def _scales_of(region: Region, shape: tuple[int, ...]) -> Region | None:
    """The scales that the rank with this region writes out; None if it has no block's first row."""
    blocks = owned_blocks(region.start[0], region.stop[0])
    return _region(scale_shape(shape), blocks.start, blocks.stop) if blocks else None


def _with_scales(shard: SourceShard, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[SourceShard]:
    """A shard, and the scales that its rank writes out."""
    yield shard
    shape = shapes.get(shard.tensor)
    scales = None if shape is None else _scales_of(shard.region, shape)
    if scales is not None:
        yield SourceShard(shard.tensor + SCALE_SUFFIX, scales)


def adapter_source_layouts(spec: ModelSpec, dtype: str, trainer: TrainerConfig) -> tuple[SourceLayout, ...]:
    """The layout that each rank's AdapterSource would report, shards in checkpoint order."""
    tensors = tuple(adapter_tensors(spec.checkpoint_tensors(dtype), trainer.lora))
    shards: list[list[SourceShard]] = [[] for _ in range(trainer.num_ranks)]

    @cache
    def holders_of(layer: int) -> list[int]:
        return _expert_holders(spec, trainer, layer)

    for meta in tensors:
        expert = expert_of(meta.name)
        if expert is not None:
            rank = holders_of(_layer_of(meta.name))[expert]
            shards[rank].append(SourceShard(meta.name, Region((0, 0), meta.shape)))
            continue
        lora = trainer.lora.for_attention if ".self_attn." in meta.name else trainer.lora.for_mlp
        assert lora is not None
        is_a = meta.name.endswith(".lora_A.weight")
        num_rows = lora.rank if is_a else meta.shape[0]
        for rank, (start, stop) in enumerate(_rows(num_rows, trainer.num_ranks)):
            if stop == num_rows and stop > start:
                stop = meta.shape[0]  # the rank with the last rows also has the padding below them
            if stop > start:
                region = Region((start, 0), (stop - start, meta.shape[1]))
                shards[rank].append(SourceShard(meta.name, region))
    return tuple(SourceLayout(rank, tensors, tuple(held)) for rank, held in enumerate(shards))


def expert_of(tensor: str) -> int | None:
    """Which routed expert a checkpoint tensor belongs to: 3 for "model.layers.0.mlp.experts.3.up_proj.weight"."""
    found = _EXPERT.search(tensor)
    return int(found[1]) if found else None


def temporary_bytes(
    spec: ModelSpec, trainer: TrainerConfig, device: Device, quantization: BlockFp8 | None = None
) -> int:
    """TrainerWeightSource.temporary_bytes of the fullest rank.

    Gathered A factors (several ranks), the merge's scratch (CPU), block scales and the scratch of the cast (FP8).
    """
    scales = 0 if quantization is None else _scale_bytes(spec, trainer, device, quantization)
    if trainer.mode is not TrainMode.lora:
        return scales
    gathered = scratch = 0
    for adapter in _adapters(spec, trainer.lora):
        rank = adapter.rank
        if not adapter.is_expert and trainer.num_ranks > 1:
            gathered += DTYPE_BYTES[trainer.lora.dtype] * rank * adapter.in_features
        if device is Device.cpu:
            scratch = max(scratch, merge_scratch_bytes(adapter.in_features, rank))
    return gathered + scratch + scales


def _scale_bytes(spec: ModelSpec, trainer: TrainerConfig, device: Device, quantization: BlockFp8) -> int:
    """Block scales of the fullest rank, and the scratch of computing and using them."""
    shapes = quantization.shapes(spec.checkpoint_tensors("float32"))
    widths = {name: scale_shape(shape)[1] for name, shape in shapes.items()}
    # A rank's experts of a layer share one parameter, gate and up together; it has one spare row.
    banks = {
        name: _EXPERT.sub(".experts.", name).replace("gate_proj", "up_proj")
        for name in shapes
        if expert_of(name) is not None
    }
    touched: dict[str, list[tuple[int, int]]] = {name: [] for name in shapes if name not in banks}
    fullest = 0
    for shards in _held_shards(spec, trainer):
        scales = 0
        seen: set[str | None] = set()
        for shard in shards:
            width = widths.get(shard.tensor)
            if width is None:
                continue
            first = shard.region.start[0]
            rows = (first, first + shard.region.shape[0])
            bank = banks.get(shard.tensor)
            if bank is None:
                touched[shard.tensor].append(rows)
            if bank not in seen:
                scales += width  # the spare row
            if bank is not None:
                seen.add(bank)
            scales += len(touched_blocks(*rows)) * width
        fullest = max(fullest, scales)
    shared = sum(len(shared_blocks(rows)) * widths[name] for name, rows in touched.items() if len(rows) > 1)
    return held_bytes(fullest, shared) + scratch_bytes(widths.values(), device.value)


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """Estimated bytes on one trainer rank, without activations, gathered FSDP2 units and the allocator's slack."""

    weights: int
    """Frozen weights in model.dtype (LoRA), or all weights in float32 (full). Packed experts as stored, and the two
    layers of them that are unpacked at a time.
    """
    adapters: int
    """A and B in trainer.lora.dtype; 0 in full training."""
    gradients: int
    """Float32, of what is trained."""
    optimizer: int
    """Two float32 moments of what is trained."""

    FORMULA: ClassVar[str] = (
        "weights: elements held x bytes of model.dtype (LoRA) or 4 (full), packed experts as stored on every rank that "
        "computes them + two layers of them in model.dtype; adapters: r x (in + out) elements "
        "of trainer.lora.dtype, one A for gate and up of an expert; gradients 4 and AdamW moments 8 bytes a trained "
        "element"
    )

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.adapters + self.gradients + self.optimizer


def trainer_memory(spec: ModelSpec, dtype: str, trainer: TrainerConfig) -> TrainerMemory:
    """The fullest rank's share. See TrainerMemory.FORMULA."""
    tensors = {meta.name: meta for meta in spec.checkpoint_tensors(dtype)}
    layouts = source_layouts(spec, dtype, trainer)
    if trainer.mode is TrainMode.full:
        held = max(sum(shard.region.num_elements for shard in one.shards) for one in layouts)
        frozen = sum(_frozen_elements(meta, trainer.train_router) for meta in tensors.values())
        trained = held - frozen // trainer.num_ranks
        return TrainerMemory(4 * held, 0, 4 * trained, 8 * trained)
    packed_bytes, packed = _packed_bytes(spec, dtype, trainer.ep_size, tensors.values())
    width = {name: 0 if name in packed else DTYPE_BYTES[meta.dtype] for name, meta in tensors.items()}
    held_bytes = packed_bytes + max(
        sum(shard.region.num_elements * width[shard.tensor] for shard in one.shards) for one in layouts
    )
    trained = -(-adapter_elements(spec, trainer.lora) // trainer.num_ranks)
    return TrainerMemory(held_bytes, DTYPE_BYTES[trainer.lora.dtype] * trained, 4 * trained, 8 * trained)


def _packed_bytes(
    spec: ModelSpec, dtype: str, ep_size: int, tensors: Iterable[TensorMeta]
) -> tuple[int, frozenset[str]]:
    """Bytes of packed experts on every rank, and the names of their tensors. FSDP2 does not shard integers
    (trainer/moe/bank.py)."""
    packed = [meta for meta in tensors if _PACKED.search(meta.name)]
    if spec.moe is None or not packed:
        return 0, frozenset()
    stored = sum(prod(meta.shape) * DTYPE_BYTES[meta.dtype] for meta in packed) // ep_size
    a_layer = 3 * spec.moe.num_experts // ep_size * spec.hidden_size * spec.moe.intermediate_size
    return stored + 2 * a_layer * DTYPE_BYTES[dtype], frozenset(meta.name for meta in packed)


def adapter_elements(spec: ModelSpec, lora: LoraConfig) -> int:
    """Elements of all adapters of the model."""
    return sum(
        adapter.rank * (adapter.in_features + adapter.out_features) * adapter.count for adapter in _adapters(spec, lora)
    )


@dataclass(frozen=True, slots=True)
class _Adapter:
    """One A and B, `count` times."""

    rank: int
    in_features: int
    out_features: int
    is_expert: bool = False
    count: int = 1


def _adapters(spec: ModelSpec, lora: LoraConfig) -> Iterator[_Adapter]:
    """Every adapter of the model; those of experts per layer, with their count."""
    hidden, attention, mlp, experts = spec.hidden_size, lora.for_attention, lora.for_mlp, lora.for_experts
    for layer in range(spec.num_layers):
        if attention is not None:
            for linear in spec.attention.linears(hidden):
                yield _Adapter(attention.rank, linear.in_features, linear.out_features)
        width = spec.intermediate_size
        if spec.moe is not None and spec.is_moe_layer(layer):
            width = spec.moe.shared_intermediate_size
            if experts is not None:
                rank, num_experts, expert_width = experts.rank, spec.moe.num_experts, spec.moe.intermediate_size
                yield _Adapter(rank, hidden, 2 * expert_width, is_expert=True, count=num_experts)
                yield _Adapter(rank, expert_width, hidden, is_expert=True, count=num_experts)
        if mlp is not None and width:
            yield _Adapter(mlp.rank, hidden, width)
            yield _Adapter(mlp.rank, hidden, width)
            yield _Adapter(mlp.rank, width, hidden)


def _layer_of(tensor: str) -> int:
    found = _LAYER.search(tensor)
    assert found is not None  # experts are in layers
    return int(found[1])


def _expert_holders(spec: ModelSpec, trainer: TrainerConfig, layer: int) -> list[int]:
    """The one rank that holds each expert of a layer."""
    assert spec.moe is not None
    num_data_ranks = trainer.num_ranks // trainer.ep_size
    holders: list[int] = []
    for ep_rank, share in enumerate(expert_shares(spec.moe.num_experts, trainer.ep_size, layer)):
        experts_a_rank = -(-len(share) // num_data_ranks)
        holders += [index // experts_a_rank * trainer.ep_size + ep_rank for index in range(len(share))]
    return holders


def _experts_of_ranks(spec: ModelSpec, trainer: TrainerConfig, layer: int) -> Iterator[tuple[int, int]]:
    """First expert and number of experts of each rank."""
    holders = _expert_holders(spec, trainer, layer)
    for rank in range(trainer.num_ranks):
        count = holders.count(rank)
        yield (holders.index(rank) if count else 0), count


def _rows(num_rows: int, num_ranks: int) -> Iterator[tuple[int, int]]:
    """Start and stop of each rank's rows, cut as torch.chunk does; ranks that it leaves out get empty ones."""
    rows_a_rank = -(-num_rows // num_ranks)
    for rank in range(num_ranks):
        yield min(rank * rows_a_rank, num_rows), min((rank + 1) * rows_a_rank, num_rows)


def _frozen_elements(meta: TensorMeta, train_router: bool) -> int:
    """Elements that full training does not change."""
    is_router = meta.name.endswith(_ROUTER) and not train_router
    return prod(meta.shape) if is_router or meta.name.endswith(CORRECTION_BIAS) else 0
