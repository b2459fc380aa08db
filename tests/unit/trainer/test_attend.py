"""Promises of trainer/model/attend.py: how long sequences are cut out and put back. Kernels run in tests/gpu."""

from __future__ import annotations

import math

import pytest
import torch

from trainer.model import attend
from trainer.model.attend import KeptAttention, PackedSequences, padded_length


def test_few_padded_lengths_and_little_padding():
    lengths = range(1, 32769)
    padded = [padded_length(length) for length in lengths]
    assert all(mine >= length for mine, length in zip(padded, lengths, strict=True))
    assert all(mine - length <= max(127, length / 8) for mine, length in zip(padded, lengths, strict=True))
    assert len(set(padded)) == 8 + 8 * math.log2(32768 / 1024)
    assert all(mine % 128 == 0 for mine in padded)


@pytest.mark.parametrize("lengths", [(1024,), (5, 0, 130, 128), (0, 1)], ids=str)
def test_sequences_cut_out_and_put_back_are_the_rows(lengths):
    starts = tuple(torch.tensor([0, *lengths]).cumsum(0).tolist())
    rows = torch.randn(sum(lengths), 2, 8)
    parts = [attend._sequence(rows, start, stop) for start, stop in attend._spans(starts)]
    assert [tuple(part.shape) for part in parts] == [(1, 2, padded_length(n), 8) for n in lengths if n]
    assert torch.equal(attend._rows(parts, starts), rows)
    for part, length in zip(parts, [n for n in lengths if n], strict=True):
        assert not part[:, :, length:].any()
        assert (part.data_ptr() == rows.data_ptr()) == (length == 1024)  # nothing to pad: a view


@pytest.mark.parametrize(("lengths", "is_long"), [((2048, 1), True), ((1023,), False), ((4096, *[10] * 20), False)])
def test_long_is_about_the_mean(lengths, is_long):
    starts = torch.tensor([0, *lengths]).cumsum(0)
    assert PackedSequences.from_cu_seqlens(starts, sum(lengths), torch.device("cpu")).is_long is is_long
    assert not PackedSequences.from_cu_seqlens(torch.tensor([0]), 0, torch.device("cpu")).is_long


def test_results_are_kept_for_one_recomputation():
    kept = KeptAttention()
    assert kept.take() is None
    kept.put("results")
    assert kept.take() == "results"
    assert kept.take() is None
