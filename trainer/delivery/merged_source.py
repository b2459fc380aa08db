"""What this trainer rank can write out, rectangle by rectangle: the trainer's side of a publish.

Owns the gathered LoRA factors, and block scales during one publish.

Invariant: `read` never communicates, so ranks may read in any order and any number of times. Only `begin` is
collective, for two reasons: under FSDP2 a rank holds the rows of B that belong to its rows of W, but only a part of A;
and a block of FP8 values may lie on several ranks.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from slipstream.trainer.delivery.probes import ChangedShare, UpdateProbe
from slipstream.trainer.errors import LayoutError
from slipstream.trainer.model.decoder import Decoder
from slipstream.trainer.parallel import gather_wholes, local_part, where_they_lie
from slipstream.trainer.weights.block_scales import BlockScales, ScaleRun
from slipstream.trainer.weights.factors import factor_shards
from slipstream.trainer.weights.fused_experts import FusedRun, FusedTensor
from slipstream.trainer.weights.quantization import (
    BLOCK,
    SCALE_SUFFIX,
    BlockFp8,
    engine_tensors,
    marking_scratch_bytes,
    merge_scratch_bytes,
    scale_shape,
)
from slipstream.trainer.weights.row_runs import RowRun
from slipstream.trainer.weights.shards import HeldTensor, local_shards, sharded_lora_a
from slipstream.weight_sync.layout import Region, SourceLayout, SourceShard
from slipstream.weight_sync.merging.factors import Merge, factor_tensors
from slipstream.weight_sync.pipeline.packing import CompiledMarks, CompiledReads, FillSlot, PackedRead, view_as

AnyRun = RowRun | FusedRun | ScaleRun
K = TypeVar("K")
M = TypeVar("M")
R = TypeVar("R", bound="Joining")
H = TypeVar("H", bound="HasRegion")


class HasRegion(Protocol):
    @property
    def region(self) -> Region: ...


class Joining(Protocol):
    """Rows that one copy or one merge writes."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def joined(self, following: object) -> Self | None:
        """One run of both, if `following` holds the next rows; else None."""
        ...


@dataclass(slots=True)
class PackedRun(Generic[R]):
    """Rows, and where they go in a slot: row-major from the read's offset, or as the read permutes them."""

    run: R
    read: PackedRead
    """The first of those that joined."""
    stop_bytes: int
    """Where the last one ends in the slot."""

    def out(self, slot: Tensor) -> Tensor:
        """The part of the slot, seen with the shape of the run."""
        if not self.read.is_row_major:
            return self.read.view(slot)
        return view_as(slot, self.read.offset_bytes, self.read.dtype, self.run.shape)


def joined_reads(reads: Sequence[PackedRead], run_of: Callable[[str, Region], R]) -> list[PackedRun[R]]:
    """Join into one run the reads that follow each other in the slot and, maybe at a pitch, in a parameter."""
    joined: list[PackedRun[R]] = []
    for read in reads:
        run, last = run_of(read.tensor, read.region), joined[-1] if joined else None
        if (
            last is not None
            and last.read.is_row_major
            and read.is_row_major
            and last.read.dtype == read.dtype
            and last.stop_bytes == read.offset_bytes
            and (both := last.run.joined(run)) is not None
        ):
            last.run, last.stop_bytes = both, last.stop_bytes + read.num_bytes
        else:
            joined.append(PackedRun(run, read, read.offset_bytes + read.num_bytes))
    return joined


def holder_of(held: Mapping[str, Sequence[H]], rank: int, tensor: str, region: Region) -> H:
    """The held rectangle of which `region` is a part."""
    for one in held.get(tensor, ()):
        if one.region.intersect(region) == region:
            return one
    holds = [one.region for one in held.get(tensor, ())]
    raise LayoutError(f"rank {rank} cannot read {region} of {tensor}: it holds {holds or 'none of it'}")


class TrainerWeightSource:
    """WeightSource over the shards of one rank's decoder. Construction is collective."""

    def __init__(
        self,
        decoder: Decoder,
        rank: int,
        quantization: BlockFp8 | None = None,
        *,
        is_merged: bool = True,
        keeps_last: bool = False,
        merges: Sequence[Merge] = (),
    ) -> None:
        """List what this rank holds.

        Args:
            decoder: Loaded and sharded; no packed experts.
            quantization: The format that engines want projections in; None: the decoder's own.
            is_merged: False: the frozen base alone, without its adapters.
            keeps_last: Keep the factors that were published last, so that changes alone can be sent.
            merges: Of the whole decoder, if factors can be read too, for engines that merge for themselves.
        """
        self._decoder = decoder
        self._rank = rank
        self._held: dict[str, list[HeldTensor | FusedTensor]] = defaultdict(list)
        shards: list[SourceShard] = []
        merge_bytes = 0
        tensors = decoder.spec.checkpoint_tensors(str(decoder.dtype).removeprefix("torch."))
        shapes = {} if quantization is None else quantization.shapes(tensors)
        quantized: list[HeldTensor] = []
        for shard in local_shards(decoder):
            held = shard if is_merged else replace(shard, delta=None)
            self._held[held.tensor].append(held)
            shards.append(SourceShard(held.tensor, held.region))
            if held.tensor in shapes:
                if isinstance(held, FusedTensor):
                    raise LayoutError(f"{held.tensor} is a fused stack of experts, which cannot be published in FP8")
                quantized.append(held)
            if held.delta is not None and not held.base.is_cuda:  # its kernel needs none
                num_columns = held.base.shape[-1]
                scratch = marking_scratch_bytes(num_columns) if keeps_last else 0
                merge_bytes = max(merge_bytes, merge_scratch_bytes(num_columns, held.delta.rank) + scratch)
        self._scales = BlockScales(quantized, shapes) if shapes else None
        if self._scales is not None:
            shards.extend(self._scales.shards())
        self._layout = SourceLayout(rank, tuple(engine_tensors(tensors, quantization)), tuple(shards))
        self._quantized = frozenset(shapes)
        self._sharded_a = sharded_lora_a(decoder) if is_merged else {}
        self._gathered_a = {key: local_part(a)[0].new_empty(a.shape) for key, a in self._sharded_a.items()}
        """Kept from publish to publish, as staging is, because prepared kernel arguments hold its addresses."""
        self._gathered_bytes = sum(a.numel() * a.element_size() for a in self._gathered_a.values())
        self._is_begun = False
        self._keeps_last = keeps_last
        self._last_own: dict[nn.Parameter, Tensor] = {}
        self._last_gathered: dict[str, Tensor] = {}
        """The factors that were published last; empty before keep()."""
        adapted = [one for of in self._held.values() for one in of if one.delta is not None]
        self.knows_last = keeps_last and bool(adapted)
        """Whether what was published last is computed again, from the base and the factors that are kept."""
        self._probe = UpdateProbe([one for one in adapted if isinstance(one, HeldTensor)], self._added)
        everything = [one for of in self._held.values() for one in of]
        dtypes = {meta.name: meta.dtype for meta in self._layout.tensors}
        self._changed = ChangedShare(everything, dtypes, self.compile_reads)
        if merges:
            self._add_factors(merges)
        self.temporary_bytes = self._gathered_bytes + merge_bytes
        """Gathered A factors, block scales, and the scratch of the largest merge and cast, in bytes."""
        if self._scales is not None:
            self.temporary_bytes += self._scales.num_bytes + self._scales.scratch_bytes

    def _add_factors(self, merges: Sequence[Merge]) -> None:
        """Have the factors in the layout, as they are."""
        shards = list(self._layout.shards)
        for held in factor_shards(self._decoder):
            self._held[held.tensor].append(held)
            shards.append(SourceShard(held.tensor, held.region))
        tensors = (*self._layout.tensors, *factor_tensors(merges))
        self._layout = SourceLayout(self._rank, tensors, tuple(shards))

    def layout(self) -> SourceLayout:
        return self._layout

    @torch.no_grad()
    def begin(self, version: int) -> int:
        """Gather every sharded A and scale every block, in the same order on every rank. Returns the bytes held."""
        if self._is_begun:
            raise LayoutError(f"rank {self._rank}: begin({version}) before the end of the publish in progress")
        self._is_begun = True
        gather_wholes(list(self._sharded_a.values()), list(self._gathered_a.values()))
        num_bytes = self._gathered_bytes
        if self._scales is not None:
            self._scales.compute(self._gathered_a)
            num_bytes += self._scales.num_bytes
        self._probe.look(version, self._gathered_a)
        self._changed.look(version)
        return num_bytes

    def update_error(self) -> float | None:
        return self._probe.error()

    def changed_fraction(self) -> float | None:
        return self._changed.share()

    @torch.no_grad()
    def read(self, tensor: str, region: Region, out: Tensor) -> None:
        self._check_begun()
        self._writer(tensor, self._run(tensor, region), out)()

    def compile_reads(self, reads: Sequence[PackedRead]) -> CompiledReads:
        """Join reads that follow each other in a parameter's rows and in the slot; one kernel does the joined ones. See
        weight_sync/pipeline/packing.py.

        Example: the gate, up, gate, up, ... of 40 experts in an engine's w13 are one run of rows of gate_up_proj, and
        a TP rank's parts of them one run of 80 bands.

        Kernel arguments are made once per slot, and again if a storage moved.
        """
        compiled: Callable[[Tensor, None], FillSlot] = self._compiled(
            reads, lambda item, slot, _: self._writer(item.read.tensor, item.run, item.out(slot))
        )
        return lambda slot: compiled(slot, None)

    def compile_marked_reads(self, reads: Sequence[PackedRead]) -> CompiledMarks:
        return self._compiled(reads, self._marker)

    @torch.no_grad()
    def keep(self) -> None:
        """Keep the present factors as those that were published. Nothing waits for the device."""
        if not self._keeps_last:
            return
        own = {p: p for of in self._held.values() for one in of if one.delta for p in one.delta.parameters}
        for parameter in own:
            _copy_into(self._last_own, parameter, local_part(parameter)[0])
        for key, whole in self._gathered_a.items():
            _copy_into(self._last_gathered, key, whole)

    def _compiled(
        self, reads: Sequence[PackedRead], writer_of: Callable[[PackedRun[AnyRun], Tensor, M], Callable[[], object]]
    ) -> Callable[[Tensor, M], FillSlot]:
        """(slot, marks) -> a function that calls every run's writer."""
        runs = self.joined(reads)
        parameters = [one for item in runs if isinstance(item.run, RowRun) for one in item.run.parameters]

        def filling(slot: Tensor, marks: M) -> FillSlot:
            write = where_they_lie(parameters, lambda: [writer_of(item, slot, marks) for item in runs])

            def fill() -> None:
                self._check_begun()
                write()

            return fill

        return filling

    def _writer(self, tensor: str, run: AnyRun, out: Tensor) -> Callable[[], object]:
        """A function that writes a run's present values in the engine's format: merged, and quantized if `tensor` is;
        callable at every publish."""
        if isinstance(run, FusedRun):
            return partial(run.write, out, self._gathered_a)
        if isinstance(run, RowRun) and tensor not in self._quantized:
            return run.writer(out, self._gathered_a)
        assert self._scales is not None
        if isinstance(run, ScaleRun):
            return partial(self._scales.write_scales, run, out)
        return self._scales.writer(run, out, self._gathered_a)

    def _marker(self, item: PackedRun[AnyRun], slot: Tensor, marks: Tensor) -> Callable[[], object]:
        """As _writer, and marks what changed; where that is not known, everything."""
        run, read, out = item.run, item.read, item.out(slot)
        if getattr(torch, read.dtype) is not torch.bfloat16:  # goes whole
            return self._writer(read.tensor, run, out)
        own_marks = replace(item, read=replace(read, dtype="uint8", offset_bytes=read.offset_bytes // 2)).out(marks)
        if isinstance(run, RowRun) and (run.delta is not None or not run.parameter.requires_grad):
            return run.marker(out, own_marks, self._gathered_a, (self._last_gathered, self._last_own))
        write = self._writer(read.tensor, run, out)
        return lambda: (write(), own_marks.fill_(1))

    def joined(self, reads: Sequence[PackedRead]) -> list[PackedRun[AnyRun]]:
        return joined_reads(reads, self._run)

    def end(self) -> None:
        self._is_begun = False
        if self._scales is not None:
            self._scales.drop()

    def _added(self, held: HeldTensor, region: Region) -> Tensor:
        """What engines get of a rectangle (in one row of blocks), less what they would get of the base; float32."""
        parts = [replace(held.run(region), delta=delta) for delta in (held.delta, None)]
        is_quantized = held.tensor in self._quantized
        dtype = torch.float8_e4m3fn if is_quantized else self._decoder.dtype
        sent = [torch.empty(region.shape, dtype=dtype, device=held.base.device) for _ in parts]
        for run, out in zip(parts, sent, strict=True):
            self._writer(held.tensor, run, out)()
        added = sent[0].float().sub_(sent[1].float())
        if not is_quantized:
            return added
        assert self._scales is not None
        blocks = Region((region.start[0] // BLOCK, 0), (1, scale_shape(region.shape)[1]))
        scales = torch.empty(blocks.shape, device=added.device)
        self._scales.write_scales(self._scales.scale_run(held.tensor + SCALE_SUFFIX, blocks), scales)
        return added.mul_(scales.repeat_interleave(BLOCK, 1)[:, : region.shape[1]])

    def _check_begun(self) -> None:
        if not self._is_begun:
            raise LayoutError(f"rank {self._rank}: read outside begin() and end()")

    def _run(self, tensor: str, region: Region) -> AnyRun:
        if (
            self._scales is not None
            and tensor.removesuffix(SCALE_SUFFIX) in self._quantized
            and tensor not in self._held
        ):
            return self._scales.scale_run(tensor, region)
        return holder_of(self._held, self._rank, tensor, region).run(region)


def _copy_into(kept: dict[K, Tensor], key: K, values: Tensor) -> None:
    """Copy to where an earlier copy is, because prepared kernel arguments hold its address."""
    if key in kept:
        kept[key].copy_(values)
    else:
        kept[key] = values.detach().clone()
