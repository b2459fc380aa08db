"""Figures of the mismatch, against plain loops over the tokens."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from slipstream.trainer.step.mismatch import measure_mismatch
from slipstream.trainer.step.mismatch_bins import BINS_PER_DECADE, POSITION_STARTS, quantile


@settings(max_examples=60)
@given(st.data())
def test_figures_are_those_of_a_loop_over_tokens(data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 30))
    one_per_token = lambda values: data.draw(st.lists(values, min_size=size, max_size=size))  # noqa: E731
    trainer, engine = one_per_token(st.floats(-9, 0)), one_per_token(st.floats(-9, 0))
    staleness = one_per_token(st.integers(0, 2))
    positions = one_per_token(st.sampled_from([0, 15, 16, 63, 64, 255, 256, 1023, 1024, 5000, 16383, 16384, 99999]))
    pi, mu = torch.tensor(trainer, dtype=torch.float64), torch.tensor(engine, dtype=torch.float64)
    sums, maxima, vectors = measure_mismatch(
        pi - mu, pi, mu, torch.tensor(staleness, dtype=torch.int64), torch.tensor(positions, dtype=torch.int64)
    )
    k3s = [math.exp(t - e) - (t - e) - 1 for t, e in zip(trainer, engine, strict=True)]
    diffs = [abs(math.exp(t) - math.exp(e)) for t, e in zip(trainer, engine, strict=True)]
    ratios = [abs(t - e) for t, e in zip(trainer, engine, strict=True)]
    for suffix, is_stale in (("", False), ("_stale", True)):
        rows = [row for row in range(size) if (staleness[row] > 0) == is_stale]
        assert sums[f"parity/num_tokens{suffix}"].sum().item() == len(rows)
        for name, values in (("k3", k3s), ("prob_diff", diffs), ("log_ratio", ratios)):
            wanted = [values[row] for row in rows]
            if name != "log_ratio":
                assert sums[f"parity/{name}_sum{suffix}"].sum().item() == pytest.approx(sum(wanted), abs=1e-9)
            if rows:
                assert maxima[f"parity/{name}_max{suffix}"].max().item() == pytest.approx(max(wanted), abs=1e-9)
        assert vectors[f"parity/k3_histogram{suffix}"].sum().item() == len(rows)
    for index, start in enumerate(POSITION_STARTS):
        end = POSITION_STARTS[index + 1] if index + 1 < len(POSITION_STARTS) else math.inf
        inside = [row for row in range(size) if staleness[row] == 0 and start <= positions[row] < end]
        assert vectors["parity/num_tokens_by_position"][index].item() == len(inside)
        wanted_sum = sum(k3s[row] for row in inside)
        assert vectors["parity/k3_by_position"][index].item() == pytest.approx(wanted_sum, abs=1e-9)


@pytest.mark.parametrize("scale", [1e-7, 1e-3, 0.1, 3.0])
def test_p99_is_at_most_one_bin_above_that_of_the_sorted_tokens(scale: float) -> None:
    """Counts of two microbatches, added up, against numpy on all tokens together."""
    generator = torch.Generator().manual_seed(1)
    d = torch.randn(4000, generator=generator, dtype=torch.float64) * scale
    zeros = torch.zeros(2000, dtype=torch.int64)
    parts = [measure_mismatch(half, half - 5, torch.full_like(half, -5), zeros, zeros) for half in d.split(2000)]
    counts = sum(vectors["parity/k3_histogram"] for _, _, vectors in parts)
    assert isinstance(counts, torch.Tensor)
    exact = np.quantile((torch.expm1(d) - d).numpy(), 0.99, method="inverted_cdf")
    found = quantile(counts.tolist(), 0.99)
    assert found is not None
    assert exact <= found <= exact * 10 ** (1 / BINS_PER_DECADE) * (1 + 1e-9)


def test_no_token_has_no_quantile() -> None:
    assert quantile([0.0, 0.0], 0.99) is None


def test_equal_log_probabilities_are_equal_probabilities_to_the_last_digit() -> None:
    one, zero = torch.tensor([-1.0]), torch.zeros(1, dtype=torch.int64)
    sums, _, _ = measure_mismatch(one - one, one, one, zero, zero)
    assert sums["parity/prob_diff_sum"].item() == 0


def test_tokens_without_a_number_break_nothing() -> None:
    """A step whose loss is not finite is refused later; its figures must not fail before."""
    nan, zero = torch.tensor([math.nan]), torch.zeros(1, dtype=torch.int64)
    _, _, vectors = measure_mismatch(nan, nan, nan, zero, zero)
    histogram = vectors["parity/k3_histogram"]
    assert histogram.sum().item() == histogram[-1].item() == 1, "as bad as can be"
