"""Promises of TrainerWeightSource.compile_marked_reads: slots are filled as without marks, and marks say which elements
differ from what was published last, for any cut, order and layout of ranks.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases.packed_reads import Reads, drawn_reads
from cases.rank_helpers import draw, fill_adapters, make_rank, spawn
from hypothesis import given, settings, strategies as st
from torch.distributed.tensor import DTensor

from slipstream.conf.schema import DType
from slipstream.trainer.delivery.merged_source import TrainerWeightSource
from slipstream.trainer.rank import TrainerRank
from slipstream.trainer.weights.row_runs import RowRun, Rows
from slipstream.weight_sync.layout import TensorMeta
from slipstream.weight_sync.merging.merge import marker, merger
from slipstream.weight_sync.merging.merge_operands import MergeOperands
from slipstream.weight_sync.pipeline.packing import PackedRead


def move(rank: TrainerRank, scale: float) -> None:
    """Move adapters a little."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in rank.decoder.named_parameters():
            if "lora_" in name:
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                local.add_(torch.randn(local.shape, generator=generator), alpha=scale)


def source_of(rank: TrainerRank, world_size: int = 1) -> TrainerWeightSource:
    fill_adapters(rank, world_size)
    return TrainerWeightSource(rank.decoder, rank.decoder.layout.rank, keeps_last=True)


def slots_of(source: TrainerWeightSource, rank: TrainerRank, reads: Reads):
    """What the slot held at the first version, what it holds at the second, and its marks."""
    before, plain, marked = (torch.zeros(reads.num_bytes, dtype=torch.uint8) for _ in range(3))
    marks = torch.full((reads.num_bytes // 2,), 7, dtype=torch.uint8)
    source.begin(0)
    source.compile_reads(reads)(before)()
    source.end()
    source.keep()
    move(rank, 1e-3)
    source.begin(1)
    source.compile_reads(reads)(plain)()
    source.compile_marked_reads(reads)(marked, marks)()
    source.end()
    assert torch.equal(plain, marked)
    return before, marked, marks


def is_marked_right(read: PackedRead, before: torch.Tensor, now: torch.Tensor, marks: torch.Tensor) -> bool:
    window = slice(read.offset_bytes // 2, (read.offset_bytes + read.num_bytes) // 2)
    differs = before.view(torch.int16)[window] != now.view(torch.int16)[window]
    return torch.equal(marks[window], differs.to(torch.uint8))


@pytest.fixture(scope="module")
def rank() -> TrainerRank:
    return make_rank(dtype=DType.bfloat16)


@settings(max_examples=30)
@given(data=st.data())
def test_marks_of_any_reads_are_where_their_bytes_differ(rank, data):
    draw(rank, 0, 0.2)
    source = source_of(rank)
    reads = drawn_reads(data, source.layout().tensors)
    before, now, marks = slots_of(source, rank, reads)
    assert all(is_marked_right(read, before, now, marks) for read in reads)


def work(rank: int, world_size: int, rendezvous: str, _: Path, ep_size: int) -> dict[str, tuple[bool, int]]:
    """Tensor -> whether its marks are right, and how many there are; of one of several ranks."""
    trainer = make_rank(rank, world_size, rendezvous, ep_size=ep_size, dtype=DType.bfloat16)
    source = source_of(trainer, world_size)
    reads = Reads()
    metas = {meta.name: meta for meta in source.layout().tensors}
    for shard in source.layout().shards:
        reads.add(metas[shard.tensor], shard.region, align=64)
    before, now, marks = slots_of(source, trainer, reads)
    found = {}
    for read in reads:
        window = slice(read.offset_bytes // 2, (read.offset_bytes + read.num_bytes) // 2)
        found[read.tensor] = is_marked_right(read, before, now, marks), int(marks[window].sum())
    trainer.shutdown()
    return found


def test_marks_are_right_on_every_rank_whatever_the_layout(tmp_path):
    for parts in spawn(work, 2, tmp_path, [(2,), (1,)]):
        for found in parts:
            assert all(is_right for is_right, _ in found.values()), found
            assert found["model.layers.0.self_attn.o_proj.weight"][1] > 0, "an A that is gathered"
            assert found["model.norm.weight"][1] == 0


def test_what_is_trained_without_an_adapter_is_marked_whole():
    """Its published values are not kept."""
    rank = make_rank(dtype=DType.bfloat16)
    gate = rank.decoder.get_parameter("model.layers.0.mlp.gate.weight")
    gate.requires_grad_(True)
    source = source_of(rank)
    reads = Reads()
    reads.add(TensorMeta("model.layers.0.mlp.gate.weight", tuple(gate.shape), "bfloat16"))
    _, _, marks = slots_of(source, rank, reads)
    assert bool(marks.all())


def test_a_convolution_that_lies_permuted_is_written_and_unmarked():
    """(channels, 1, width) in the checkpoint, rows of width in the run."""
    kernel = torch.nn.Parameter(torch.randn(6, 1, 4).bfloat16(), requires_grad=False)
    out, marks = torch.zeros(4, 4, 1, dtype=torch.bfloat16), torch.full((4, 4, 1), 7, dtype=torch.uint8)
    run = RowRun(kernel, None, Rows(1, 4), slice(0, 4))
    run.marker(out.transpose(1, 2), marks.transpose(1, 2), {}, ({}, {}))()
    assert torch.equal(out, kernel[1:5].transpose(1, 2))
    assert not marks.any()


def test_marks_of_bands_with_more_rows_than_are_merged_at_once_are_those_of_their_rows():
    """Two bands of 300 rows, the first from row 37 of its A's 400 on; where a row is decides its rounding."""
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(2, 300, 6, generator=generator).bfloat16()
    b, a = torch.randn(2, 300, 3, generator=generator), torch.randn(2, 3, 6, generator=generator)
    last = MergeOperands(base, b, a, 0.7, first_row=37, rows_a_factor=400, pitch=400, key=12345)
    before, now, marks = torch.empty_like(base), torch.empty_like(base), torch.zeros(base.shape, dtype=torch.uint8)
    merger(last, before)()
    marker(replace(last, b_GRK=b * 1.001), last, now, marks)()
    assert torch.equal(marks.bool(), now.view(torch.int16) != before.view(torch.int16))
    assert 0 < marks.sum() < marks.numel()


def test_a_zero_that_has_another_sign_is_marked():
    """An engine that was not told would hold other bits than those that are hashed."""
    out, marks = torch.ones(1, 1, 2).bfloat16(), torch.zeros(1, 1, 2, dtype=torch.uint8)
    a, factors = torch.full((1, 1, 2), 1e-20), (torch.full((1, 1, 1), b) for b in (-1e-22, 1e-22))
    now, last = (MergeOperands(out * 0, b, a, 1.0, 0, 1) for b in factors)
    marker(now, last, out, marks)()
    assert bool(marks.all()) and not out.any()
