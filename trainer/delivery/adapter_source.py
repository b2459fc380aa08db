"""What this trainer rank can write out of its adapter: the trainer's side of a publish into engine slots.

Sharded LoRA factors become the rectangles of trainer/weights/adapter_names.py: cast to the engine's dtype, B then
multiplied by alpha / rank *in that dtype*. This is what vLLM does when it loads an adapter from disk, so a slot holds
the same bytes either way, whatever alpha / rank is. (The trainer scales after the product. The two agree to the bit
when alpha / rank is a power of two, and to a rounding of B otherwise.)

Invariant: nothing here communicates, not even `begin`: FSDP2 shards A and B by rows, experts are held whole, and every
rank publishes the rows that it holds. Over all ranks, the rectangles of one factor are disjoint and cover it: the rank
that holds the last rows of A also writes the zero rows that pad it to the slot's rank.

    rows of one read        first_row .. first_row + count of a parameter's local rows
    a run                   reads at equal distance in the parameter, next to each other in the slot: one copy for the
                            gate rows (or the up rows) of all experts that this rank holds

Shapes: R rows, K columns in the slot, N blocks of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from slipstream.conf.schema import LoraConfig
from slipstream.trainer.delivery.merged_source import PackedRun, holder_of, joined_reads
from slipstream.trainer.errors import LayoutError
from slipstream.trainer.lora import Linear
from slipstream.trainer.model.decoder import Decoder
from slipstream.trainer.moe.experts import Experts
from slipstream.trainer.parallel import local_part, where_they_lie
from slipstream.trainer.weights.adapter_names import adapter_tensors, factor_names
from slipstream.trainer.weights.row_runs import Rows, local_rows
from slipstream.weight_sync.layout import Region, SourceLayout, SourceShard
from slipstream.weight_sync.pipeline.packing import CompiledReads, PackedRead

_EXPERT_PARTS = (("gate_proj", "gate_up", 0), ("up_proj", "gate_up", 1), ("down_proj", "down", 0))
"""Checkpoint name, stack of trainer/moe/experts.py, and which part of the stack's rows of B it is."""


@dataclass(frozen=True, slots=True)
class HeldFactor:
    """A rectangle of one factor that this rank holds, padding included."""

    region: Region
    """In the factor as the slot has it: rank R, not the trainer's."""
    parameter: nn.Parameter
    first_row: int
    """Index of the rectangle's first row among this rank's rows of the parameter."""
    num_rows: int
    """Rows of the rectangle that the parameter has; the rest is zero."""
    num_columns: int
    """Columns of the rectangle that the parameter has."""
    scale: float
    """alpha / rank for B, 1 for A."""

    def run(self, region: Region) -> FactorRun:
        """Where a part of the rectangle lies in the parameter."""
        start = region.start[0] - self.region.start[0]
        stop = min(start + region.shape[0], self.num_rows)
        return FactorRun(
            self.parameter,
            self.scale,
            Rows(self.first_row + start, max(0, stop - start)),
            slice(region.start[1], max(region.start[1], min(region.stop[1], self.num_columns))),
            region.shape,
        )


@dataclass(frozen=True, slots=True)
class FactorRun:
    """Equal blocks of rows of one parameter, at equal distances; each is written as a block of `block`, padded."""

    parameter: nn.Parameter
    scale: float
    rows: Rows
    """A band for each block."""
    columns: slice
    block: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows.num_bands * self.block[0], self.block[1]

    def joined(self, following: object) -> FactorRun | None:
        """One run of both, if `following` is the next block; else None."""
        if not isinstance(following, FactorRun) or self.parameter is not following.parameter:
            return None
        rows = self.rows
        pitch = following.rows.start - rows.start - (rows.num_bands - 1) * rows.pitch
        is_next = (
            (self.scale, rows.height, self.columns, self.block)
            == (following.scale, following.rows.height, following.columns, following.block)
            and pitch > 0
            and rows.pitch in (0, pitch)
        )
        return replace(self, rows=replace(rows, num_bands=rows.num_bands + 1, pitch=pitch)) if is_next else None

    def held(self) -> Tensor:
        """A live view of the blocks in the parameter, (blocks, rows, columns), without padding."""
        return self.rows.of(local_rows(self.parameter))[..., self.columns]


class FactorCopies:
    """Runs and where they go, as lists of views: one Python call per run would take longer than the copy itself.

    Args:
        pairs: Runs, each with its target, of run.shape with any strides.
    """

    def __init__(self, pairs: Iterable[tuple[FactorRun, Tensor]]) -> None:
        self._padded: list[Tensor] = []
        self._copied: dict[bool, tuple[list[Tensor], list[Tensor]]] = {True: ([], []), False: ([], [])}
        """Targets and sources, by whether both have the same strides and no gaps. A GPU copies many such pairs in one
        kernel; one other pair in the list would give every pair a kernel of its own."""
        self._scaled: dict[float, list[Tensor]] = {}
        for run, out in pairs:
            held, blocks = run.held(), out.unflatten(0, (run.rows.num_bands, run.block[0]))
            if held.shape != blocks.shape:
                self._padded.append(out)
            if held.numel():
                target = blocks[:, : held.shape[1], : held.shape[2]]
                targets, sources = self._copied[held.is_contiguous() and held.stride() == target.stride()]
                targets.append(target)
                sources.append(held)
                if run.scale != 1.0:
                    self._scaled.setdefault(run.scale, []).append(target)

    @torch.no_grad()
    def run(self) -> None:
        """Fill all targets, cast to their dtype, B then multiplied in that dtype."""
        for padded in self._padded:
            padded.zero_()
        for targets, sources in self._copied.values():
            if targets:
                torch._foreach_copy_(targets, sources)
        for scale, targets in self._scaled.items():
            torch._foreach_mul_(targets, scale)


class AdapterSource:
    """WeightSource over the LoRA factors of one rank's decoder."""

    temporary_bytes = 0
    """Values go from the float32 parameter straight into the slot."""

    def __init__(self, decoder: Decoder, rank: int, lora: LoraConfig) -> None:
        self._rank = rank
        self._held: dict[str, list[HeldFactor]] = {}
        for name, factor in held_factors(decoder, lora.slot_rank):
            if factor.region.num_elements:
                self._held.setdefault(name, []).append(factor)
        dtype = str(decoder.dtype).removeprefix("torch.")
        tensors = tuple(adapter_tensors(decoder.spec.unpacked().checkpoint_tensors(dtype), lora))
        known = {meta.name for meta in tensors}
        unknown = sorted(set(self._held) - known)
        if unknown:
            raise LayoutError(
                f"rank {rank}: {len(unknown)} adapter factors have no name for an engine ({unknown[0]}, ...); "
                "set weight_sync.mode=merged"
            )
        shards = tuple(SourceShard(name, one.region) for name, held in self._held.items() for one in held)
        self._layout = SourceLayout(rank, tensors, shards)

    def layout(self) -> SourceLayout:
        return self._layout

    def begin(self, version: int) -> int:
        """Nothing to gather."""
        return 0

    def read(self, tensor: str, region: Region, out: Tensor) -> None:
        FactorCopies([(self._run(tensor, region), out)]).run()

    def compile_reads(self, reads: Sequence[PackedRead]) -> CompiledReads:
        """Join reads that lie at equal distances in a parameter and follow each other in the slot; see
        weight_sync/pipeline/packing.py."""
        runs = self.joined(reads)
        parameters = [item.run.parameter for item in runs]

        def copies_into(slot: Tensor) -> list[Callable[[], None]]:
            return [FactorCopies((item.run, item.out(slot)) for item in runs).run]

        return lambda slot: where_they_lie(parameters, lambda: copies_into(slot))

    def joined(self, reads: Sequence[PackedRead]) -> list[PackedRun[FactorRun]]:
        return joined_reads(reads, self._run)

    def end(self) -> None: ...

    def _run(self, tensor: str, region: Region) -> FactorRun:
        return holder_of(self._held, self._rank, tensor, region).run(region)


def held_factors(decoder: Decoder, slot_rank: int) -> Iterator[tuple[str, HeldFactor]]:
    """Every rectangle that this rank holds, in the order of the modules. Kinds of modules may differ in rank."""
    for name, module in decoder.named_modules():
        if isinstance(module, Experts) and module.lora is not None:
            yield from _expert_factors(name, module, module.lora, slot_rank)
        elif isinstance(module, Linear) and module.lora is not None:
            a, b = factor_names(f"{name}.weight")
            yield a, _held_a(module.lora_A, module.lora, slot_rank)
            yield b, _held_b(module.lora_B, module.lora, slot_rank)


def _held_a(parameter: nn.Parameter, lora: LoraConfig, slot_rank: int) -> HeldFactor:
    """Rows of A. The rank that has the last row also has the padding below it."""
    local, start = local_part(parameter)
    num_rows, columns = local.shape
    has_last = num_rows > 0 and start + num_rows == lora.rank
    region = Region((start, 0), (num_rows + (slot_rank - lora.rank if has_last else 0), columns))
    return HeldFactor(region, parameter, 0, num_rows, columns, 1.0)


def _held_b(parameter: nn.Parameter, lora: LoraConfig, slot_rank: int) -> HeldFactor:
    local, start = local_part(parameter)
    region = Region((start, 0), (local.shape[0], slot_rank))
    return HeldFactor(region, parameter, 0, local.shape[0], lora.rank, lora.scale)


def _expert_factors(name: str, bank: Experts, lora: LoraConfig, slot_rank: int) -> Iterator[tuple[str, HeldFactor]]:
    """An expert is held whole, with its own A and B. Gate and up publish the same A under two names."""
    num_held, start = local_part(bank.down_lora_A)[0].shape[0], local_part(bank.down_lora_A)[1]
    for index in range(num_held):
        for leaf, stack, part in _EXPERT_PARTS:
            a, b = getattr(bank, f"{stack}_lora_A"), getattr(bank, f"{stack}_lora_B")
            columns, rows_of_b = a.shape[2], b.shape[1]
            num_rows = bank.intermediate_size if stack == "gate_up" else rows_of_b
            a_name, b_name = factor_names(f"{name}.{bank.first_expert + start + index}.{leaf}.weight")
            whole_a = Region((0, 0), (slot_rank, columns))
            whole_b = Region((0, 0), (num_rows, slot_rank))
            yield a_name, HeldFactor(whole_a, a, index * lora.rank, lora.rank, columns, 1.0)
            first_row = index * rows_of_b + part * num_rows
            yield b_name, HeldFactor(whole_b, b, first_row, num_rows, lora.rank, lora.scale)
