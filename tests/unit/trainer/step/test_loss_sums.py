"""Promises of LossAccumulator: what microbatches add up to, and which log-probabilities are kept."""

import numpy as np
import torch

from slipstream.trainer.step.loss import LossAccumulator, PolicyLoss
from slipstream.trainer.types import Sample


def test_sums_and_vectors_add_up_and_maxima_do_not():
    """In float64: no float32 is the sum of `other`."""
    accumulated = LossAccumulator()
    for a, b in ((1.0, 5.0), (2.0, 3.0)):
        sums = {"s": torch.tensor(a), "other": torch.tensor(2.0**24 + 1, dtype=torch.float64)}
        vectors = {"v": torch.tensor([a, b]), "w": torch.tensor([b])}
        part = PolicyLoss(torch.zeros(()), sums, {"m": torch.tensor(b)}, vectors)
        accumulated.add(part)
        accumulated.add(part.uncounted())
    stats = accumulated.result()
    assert (stats.sums, stats.maxima) == ({"s": 3.0, "other": 2.0**25 + 2}, {"m": 5.0})
    assert stats.vectors == {"v": [3.0, 8.0], "w": [8.0]}
    other_rank = LossAccumulator()
    other_rank.add(part.uncounted())
    stats = other_rank.result()
    assert (stats.sums, stats.maxima) == ({"s": 0.0, "other": 0.0}, {"m": 3.0})
    assert stats.vectors == {"v": [0.0, 0.0], "w": [0.0]}, "as many as the rank that counts them has"


def test_log_probabilities_of_the_samples_that_are_shown_are_kept_apart():
    """Two microbatches; lengths 1, 2 and 3, the first one is not shown."""
    accumulated = LossAccumulator()

    def sample(origin, num_valid, is_shown):
        mask = np.arange(num_valid + 1) > 0
        zeros = np.zeros(num_valid + 1, np.float32)
        return Sample(np.zeros(num_valid + 1, np.int32), mask, zeros, zeros, 0, origin=origin, is_shown=is_shown)

    accumulated.show(
        [sample((0, 1, 0), 1, False), sample((0, 0, 0), 2, True)], torch.tensor([-3.0, -1.0, -2.0], requires_grad=True)
    )
    accumulated.show([sample((0, 2, 0), 2, False)], torch.tensor([-9.0, -9.0]))
    accumulated.show([sample((1, 0, 0), 3, True)], torch.tensor([-4.0, -5.0, -6.0]))
    accumulated.add(PolicyLoss(torch.zeros(()), {"a": torch.ones((), dtype=torch.float64)}))
    shown = accumulated.result().logprobs
    assert {origin: values.tolist() for origin, values in shown.items()} == {
        (0, 0, 0): [-1.0, -2.0], (1, 0, 0): [-4.0, -5.0, -6.0]
    }  # fmt: skip


def test_nothing_accumulated_is_no_stats():
    stats = LossAccumulator().result()
    assert stats.sums == {} and stats.maxima == {}
