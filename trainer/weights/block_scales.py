"""Block-FP8 of merged weights: one scale per 128 x 128 values, also if a block lies on several ranks.

    begin()   amax of |W + s B A| of every block this rank touches, in float32     a pass over the weights
              MAX over ranks, only for blocks that several of them touch          one small all-reduce
              scale = amax / 448, and 1 for a block of zeros
    read()    weight = float8_e4m3fn((W + s B A) / scale)                          rank-local
              by thresholds: float8_e4m3fn(float8_e4m3fn(W / scale) + ((W + s B A) - W) / scale)

The format is DeepSeek-V3's (inference/kernel.py): value = weight * weight_scale_inv of its block, as in weight_dequant.
The rule is act_quant's: divide by amax / 448, cast. vLLM's per_block_cast_to_fp8 and transformers' quantizer multiply
by the reciprocal of the same scale instead, which may choose the neighbouring FP8 value; they can read what is written
here. A correctly rounded division has the same bits on every device.

With thresholds (weight_sync.merging.rounding) the base is cast to nearest, and what the adapter adds to its code is
rounded by them: a weight that no adapter changes keeps the base's code, whose error is that of nearest.

As in merge.py there are two forms: on CUDA the kernels of fp8_kernels.py, one launch per parameter and per run of rows,
without scratch; elsewhere torch, chunk by chunk. Scales are valid between begin() and end().

Invariant: a value and its scale do not depend on how ranks cut rows, nor on which rectangle is asked for.

Shapes: R rows, N columns, B blocks along the columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.trainer.errors import LayoutError
from slipstream.trainer.weights.quantization import (
    BLOCK,
    SCALE_SUFFIX,
    held_bytes,
    owned_blocks,
    scale_shape,
    scratch_bytes,
    shared_blocks,
    touched_blocks,
)
from slipstream.trainer.weights.row_runs import RowRun, Rows, local_rows
from slipstream.trainer.weights.shards import HeldTensor
from slipstream.weight_sync.layout import Region, SourceShard
from slipstream.weight_sync.merging.factors import MERGE_ROWS
from slipstream.weight_sync.merging.merge import round_into
from slipstream.weight_sync.merging.rounding import FP8_MAX
from slipstream.weight_sync.publish.collectives import all_gather_bytes
from slipstream.weight_sync.typed_msgpack import pack, unpack


@dataclass(frozen=True, slots=True)
class _Stack:
    """One parameter with quantized rows, and its part of the flat buffer: (num_rows + 1, num_columns) scales.

    Rows that are not quantized write into the last row, which nobody reads.
    """

    run: RowRun
    """All its local rows."""
    row_block_R: Tensor
    """int32; the row of scales that each row belongs to."""
    offset: int
    num_rows: int
    num_columns: int

    def scales(self, flat: Tensor) -> Tensor:
        """A view of this parameter's scales in `flat`, where all parameters have theirs."""
        shape = (self.num_rows + 1, self.num_columns)
        return flat[self.offset : self.offset + shape[0] * shape[1]].view(shape)


@dataclass(frozen=True, slots=True)
class ScaleRun:
    """Rows of scales of one parameter that one copy writes. Neighbouring ones are joined, as in RowRun."""

    stack: _Stack
    rows: Rows
    columns: slice

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.rows), self.columns.stop - self.columns.start

    def joined(self, following: object) -> ScaleRun | None:
        """Join both, if `following` are the next rows of the same, or the next band of them; else None."""
        if (
            not isinstance(following, ScaleRun)
            or self.stack is not following.stack
            or self.columns != following.columns
        ):
            return None
        rows = self.rows.joined(following.rows)
        return None if rows is None else replace(self, rows=rows)


class BlockScales:
    """Scales of the quantized tensors that one rank holds. Construction is collective."""

    def __init__(self, held: Sequence[HeldTensor], shapes: dict[str, tuple[int, ...]]) -> None:
        """Lay out one flat buffer.

        Args:
            held: This rank's quantized rectangles, in the order of rows within a parameter.
            shapes: Of every quantized checkpoint tensor, in one order on all ranks.
        """
        self._stacks: dict[int, _Stack] = {}
        self._place: dict[str, tuple[_Stack, int, Region]] = {}
        self._device = held[0].base.device if held else torch.device("cpu")
        size = 0
        by_parameter: dict[int, list[HeldTensor]] = {}
        for one in held:
            by_parameter.setdefault(id(one.parameter), []).append(one)
        for parts in by_parameter.values():
            size += self._add_stack(parts, size)
        self._flat = torch.zeros(size, dtype=torch.float32, device=self._device)
        """Kept from publish to publish, because prepared kernel arguments hold its address."""
        self._is_computed = False
        self._share(shapes)

    @property
    def num_bytes(self) -> int:
        """What the scales take, with begin()'s mask and all-reduced blocks."""
        return held_bytes(len(self._flat), self._num_shared)

    @property
    def scratch_bytes(self) -> int:
        """What one step of compute() or a write takes, without the merge's own."""
        return scratch_bytes((stack.num_columns for stack in self._stacks.values()), self._device.type)

    def shards(self) -> list[SourceShard]:
        """The scales that this rank writes out: those of every block whose first row it holds."""
        return [
            SourceShard(name + SCALE_SUFFIX, Region((blocks.start, 0), (len(blocks), stack.num_columns)))
            for name, (stack, _, region) in self._place.items()
            if (blocks := owned_blocks(region.start[0], region.stop[0]))
        ]

    @torch.no_grad()
    def compute(self, gathered_a: dict[str, Tensor]) -> None:
        """Fill the buffer from the live weights. Collective."""
        flat = self._flat.zero_()
        for stack in self._stacks.values():
            self._measure(stack, gathered_a)
        if self._num_shared:
            shared = torch.zeros(self._num_shared, dtype=torch.float32, device=self._device)
            shared[self._at_shared] = flat[self._at_flat]
            dist.all_reduce(shared, dist.ReduceOp.MAX)
            flat[self._at_flat] = shared[self._at_shared]
        # torch multiplies a CUDA tensor by the reciprocal of a number, but divides by a tensor.
        flat.div_(torch.tensor(FP8_MAX, device=self._device))
        flat.masked_fill_(flat == 0, 1.0)
        self._is_computed = True

    def drop(self) -> None:
        self._is_computed = False

    def scale_run(self, tensor: str, region: Region) -> ScaleRun:
        """Where a rectangle of NAME.weight_scale_inv lies."""
        name = tensor.removesuffix(SCALE_SUFFIX)
        if name not in self._place:
            raise LayoutError(f"this rank holds no row of {name}, so it has no scale of it")
        stack, first_row, held = self._place[name]
        start = first_row + region.start[0] - held.start[0] // BLOCK
        return ScaleRun(stack, Rows(start, region.shape[0]), slice(region.start[1], region.stop[1]))

    @torch.no_grad()
    def write_scales(self, run: ScaleRun, out: Tensor) -> None:
        scales = run.rows.of(run.stack.scales(self._computed()))
        out.unflatten(0, scales.shape[:2]).copy_(scales[..., run.columns])

    def writer(self, run: RowRun, out_RN: Tensor, gathered_a: dict[str, Tensor]) -> Callable[[], object]:
        """A function that writes quantized rows into `out`, float8_e4m3fn of run.shape, any strides; callable while
        scales are computed, as long as parameters and gathered A stay where they are."""
        if out_RN.dtype != torch.float8_e4m3fn:
            raise LayoutError(f"a block-FP8 tensor is asked for as {out_RN.dtype}: the engine does not hold it in FP8")
        stack = self._stacks[id(run.parameter)]
        if self._device.type != "cuda":
            return partial(self._write_on_host, stack, run, out_RN, gathered_a)
        from slipstream.trainer.weights import fp8_kernels  # needs Triton, which a CPU host may lack

        out_GRN = out_RN.view(run.rows.num_bands, run.rows.height, out_RN.shape[1])
        row_block_GR = run.rows.of(stack.row_block_R)
        return fp8_kernels.caster(run.operands(gathered_a), row_block_GR, stack.scales(self._flat), FP8_MAX, out_GRN)

    def _measure(self, stack: _Stack, gathered_a: dict[str, Tensor]) -> None:
        """Raise a parameter's scales, zeros, to the largest absolute value of each block."""
        scales = stack.scales(self._flat)
        if self._device.type == "cuda":
            from slipstream.trainer.weights import fp8_kernels

            fp8_kernels.measurer(stack.run.operands(gathered_a), stack.row_block_R[None], scales)()
            return
        for _, _, rows, merged_RBK in self._merged(stack, stack.run, gathered_a):
            amax_RB = merged_RBK.abs_().amax(-1)
            scales.scatter_reduce_(0, rows[:, None].expand_as(amax_RB), amax_RB, "amax")

    @torch.no_grad()
    def _write_on_host(self, stack: _Stack, run: RowRun, out_RN: Tensor, gathered_a: dict[str, Tensor]) -> None:
        assert run.columns is not None
        blocks = slice(run.columns.start // BLOCK, -(-run.columns.stop // BLOCK))
        scales_RB = stack.scales(self._computed())[:, blocks]
        skipped = run.columns.start - blocks.start * BLOCK
        for first, part, rows, merged_RBK in self._merged(stack, run, gathered_a):
            scales_RB1 = scales_RB[rows].unsqueeze(-1)
            key = None if part.delta is None else part.delta.rounding_key
            if key is not None:
                base_RBK = self._padded(replace(part, delta=None), gathered_a)
                update_RBK = merged_RBK.sub_(base_RBK).div_(scales_RB1)
                codes_RBK = base_RBK.div_(scales_RB1).clamp_(-FP8_MAX, FP8_MAX).to(out_RN.dtype).float()
                merged_RBK = codes_RBK.add_(update_RBK)
            else:
                merged_RBK.div_(scales_RB1)
            values_RN = merged_RBK.clamp_(-FP8_MAX, FP8_MAX).flatten(1)[:, skipped : skipped + out_RN.shape[1]]
            out = out_RN[first : first + len(rows)]
            if key is None:
                out.copy_(values_RN)
            else:
                round_into(out, values_RN, key, part.stack_rows(), run.columns.start)

    def _computed(self) -> Tensor:
        if not self._is_computed:
            raise LayoutError("block scales are read outside begin() and end()")
        return self._flat

    def _merged(
        self, stack: _Stack, run: RowRun, gathered_a: dict[str, Tensor]
    ) -> Iterator[tuple[int, RowRun, Tensor, Tensor]]:
        """Per chunk of rows: rows before it, its rows, row of scales of each of them, and merged values of the
        caller."""
        for first, rows in run.rows.parts(MERGE_ROWS):
            part = replace(run, rows=rows)
            yield first, part, rows.of(stack.row_block_R).flatten().long(), self._padded(part, gathered_a)

    def _padded(self, run: RowRun, gathered_a: dict[str, Tensor]) -> Tensor:
        """Merged values in float32, as (R, B, BLOCK). Columns that were not asked for are zeros."""
        columns = run.columns
        assert columns is not None
        first_block, stop_block = columns.start // BLOCK, -(-columns.stop // BLOCK)
        num_blocks = stop_block - first_block
        values = torch.zeros(len(run.rows), num_blocks * BLOCK, dtype=torch.float32, device=self._device)
        run.write(values[:, columns.start - first_block * BLOCK : columns.stop - first_block * BLOCK], gathered_a)
        return values.view(len(run.rows), num_blocks, BLOCK)

    def _add_stack(self, parts: list[HeldTensor], offset: int) -> int:
        """Give each held tensor of one parameter its rows of scales. Returns how many scales they take."""
        first = parts[0]
        num_local, width = local_rows(first.parameter).shape
        row_block = torch.full((num_local,), -1, dtype=torch.int32)
        num_rows = 0
        starts: list[int] = []
        for one in parts:
            start, stop = one.region.start[0], one.region.stop[0]
            blocks = touched_blocks(start, stop)
            starts.append(num_rows)
            numbers = torch.arange(start, stop, dtype=torch.int32) // BLOCK - blocks.start + num_rows
            row_block[one.first_row : one.first_row + stop - start] = numbers
            num_rows += len(blocks)
        row_block[row_block < 0] = num_rows
        num_columns = scale_shape((1, width))[1]
        run = RowRun(first.parameter, first.delta, Rows(0, num_local), slice(0, width))
        stack = _Stack(run, row_block.to(self._device), offset, num_rows, num_columns)
        self._stacks[id(first.parameter)] = stack
        for one, start in zip(parts, starts, strict=True):
            self._place[one.tensor] = (stack, start, one.region)
        return (num_rows + 1) * num_columns

    def _share(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Number the blocks that several ranks touch, in the same way on every rank. Collective."""
        mine = {name: (place[2].start[0], place[2].stop[0]) for name, place in self._place.items()}
        ranks: list[dict[str, tuple[int, int]]] = [mine]
        if dist.is_initialized() and dist.get_world_size() > 1:
            ranks = [unpack(dict[str, tuple[int, int]], data) for data in all_gather_bytes(pack(mine), None)]
        at_flat: list[Tensor] = []
        at_shared: list[Tensor] = []
        self._num_shared = 0
        for name, shape in shapes.items():
            num_columns = scale_shape(shape)[1]
            for block in shared_blocks([held[name] for held in ranks if name in held]):
                if name in mine and block in touched_blocks(*mine[name]):
                    stack, first, region = self._place[name]
                    row = first + block - region.start[0] // BLOCK
                    columns = torch.arange(num_columns)
                    at_flat.append(stack.offset + row * num_columns + columns)
                    at_shared.append(self._num_shared + columns)
                self._num_shared += num_columns
        empty = [torch.empty(0, dtype=torch.int64)]
        self._at_flat = torch.cat(at_flat or empty).to(self._device)
        self._at_shared = torch.cat(at_shared or empty).to(self._device)


def dequantized(weight_RN: Tensor, scales: Tensor, region: Region) -> Tensor:
    """Float32 values of a rectangle of a block-FP8 tensor; `scales` are those of all its blocks."""
    rows, columns = (torch.arange(a, b) // BLOCK for a, b in zip(region.start, region.stop, strict=True))
    return weight_RN.float().mul_(scales.float()[rows][:, columns])
