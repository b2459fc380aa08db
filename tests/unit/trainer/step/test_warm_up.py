"""Promises of TrainerRank.warm_up: nothing that lasts is changed, and what does not fit is refused with its options."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cases.rank_helpers import VOCAB, count, fill_adapters, make_rank, make_samples
from hypothesis import given
from hypothesis import strategies as st

from conf.schema import AlgorithmConfig, Normalization, TrainMode
from trainer.errors import TrainerError
from trainer.rank import TrainerRank
from trainer.step.microbatches import pack
from trainer.step.warm_up import full_microbatch, made_up_samples

KL = AlgorithmConfig(kl_coef=0.1)


def updated(rank: TrainerRank) -> list[torch.Tensor]:
    """The rank's values after one step."""
    samples = make_samples()
    rank.forward_backward([samples], count(samples))
    assert rank.optimizer_step().policy_version == 1
    return [shard.values.clone() for shard in rank._shards]


@pytest.mark.parametrize("mode", [TrainMode.lora, TrainMode.full])
def test_a_warm_up_changes_nothing_that_lasts(mode: TrainMode) -> None:
    rank, other = (make_rank(mode=mode, algorithm=KL) for _ in range(2))
    for one in (rank, other):
        fill_adapters(one, 1)
    before = {name: tensor.clone() for name, tensor in rank._state_tensors().items()}
    assert rank.warm_up([7, 7, 7])["seconds"] > 0
    after = rank._state_tensors()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (rank.policy_version, rank._local_loss) == (0, 0.0)
    assert all(param.grad is None for _, param in rank._trainable)
    assert all(torch.equal(a, b) for a, b in zip(updated(rank), updated(other), strict=True))


def test_a_warm_up_divides_by_what_there_is() -> None:
    """A constant divisor, too: that of no response is 0."""
    assert make_rank(algorithm=AlgorithmConfig(normalization=Normalization.constant)).warm_up([7])["seconds"] > 0


def test_what_does_not_fit_is_refused_with_the_options_that_need_less(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = make_rank()

    def full(*_: Any) -> None:
        rank._trainable[0][1].grad = torch.zeros_like(rank._trainable[0][1])
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. If reserved but unallocated ...")

    monkeypatch.setattr(rank, "forward_backward", full)
    with pytest.raises(TrainerError) as raised:
        rank.warm_up([7, 7])
    text = str(raised.value)
    assert "a microbatch of 14 tokens does not fit cpu" in text
    assert f"trainer.max_microbatch_tokens, which is {rank._trainer.max_microbatch_tokens}" in text
    assert "Tried to allocate 2.00 GiB" in text and "reserved" not in text
    assert all(param.grad is None for _, param in rank._trainable)


@given(st.integers(1, 500), st.integers(1, 700), st.integers(1, 40))
def test_a_full_microbatch_is_one_that_packing_makes(max_tokens: int, longest: int, num_samples: int) -> None:
    lengths = full_microbatch(max_tokens, longest, num_samples)
    assert 1 <= len(lengths) <= num_samples and set(lengths) == {longest}
    assert pack(lengths, 1, max_tokens) == [[list(range(len(lengths)))]]
    is_full = sum(lengths) + lengths[0] > max_tokens
    assert is_full or len(lengths) == num_samples


def test_made_up_samples_are_of_the_vocabulary_and_count_all_but_their_first_tokens() -> None:
    samples = made_up_samples([3, 5], VOCAB, version=4)
    assert [sample.num_tokens for sample in samples] == [3, 5]
    assert [sample.num_valid_tokens for sample in samples] == [2, 4]
    assert all(sample.token_ids.min() >= 0 and sample.token_ids.max() < VOCAB for sample in samples)
    assert {sample.oldest_version for sample in samples} == {4}
    assert np.array_equal(samples[0].token_ids, made_up_samples([3], VOCAB, version=0)[0].token_ids)
