"""Promises of TrainerRank.warm_up: nothing that lasts is changed, and what does not fit is refused with its options."""

from pathlib import Path

import numpy as np
import pytest
import torch
from cases.rank_helpers import (
    VOCAB,
    are_equal,
    count,
    fill_adapters,
    make_rank,
    make_samples,
    save_state,
    trained,
    values_of,
)
from hypothesis import given, strategies as st
from safetensors.torch import load_file

from slipstream.conf.architecture.moe_spec import MoeSpec
from slipstream.conf.schema import AlgorithmConfig, Normalization, ParityConfig, TrainerConfig, TrainMode
from slipstream.trainer.errors import TrainerError
from slipstream.trainer.rank import TrainerRank
from slipstream.trainer.step.microbatches import full_microbatch, made_up_samples, pack

KL = AlgorithmConfig(kl_coef=0.1)


def updated(rank: TrainerRank) -> dict[str, torch.Tensor]:
    """The rank's values after one step."""
    samples = make_samples()
    rank.forward_backward([samples], count(samples))
    assert rank.optimizer_step().policy_version == 1
    return values_of(rank)


def state_of(rank: TrainerRank, folder: Path) -> dict[str, torch.Tensor]:
    """Parameters, moments and random state, as a resume would find them."""
    save_state(rank, folder)
    return load_file(folder / "rank-0.safetensors")


@pytest.mark.parametrize("mode", [TrainMode.lora, TrainMode.full])
def test_a_warm_up_changes_nothing_that_lasts(mode: TrainMode, tmp_path: Path) -> None:
    rank, other = (make_rank(mode=mode, algorithm=KL) for _ in range(2))
    for one in (rank, other):
        fill_adapters(one, 1)
    before = state_of(rank, tmp_path / "before")
    assert rank.warm_up([7, 7, 7])["seconds"] > 0
    assert are_equal(before, state_of(rank, tmp_path / "after"))
    assert rank.policy_version == 0
    assert all(param.grad is None for _, param in trained(rank))
    assert are_equal(updated(rank), updated(other))


def test_a_warm_up_divides_by_what_there_is() -> None:
    """A constant divisor, too: that of no response is 0."""
    assert make_rank(algorithm=AlgorithmConfig(normalization=Normalization.constant)).warm_up([7])["seconds"] > 0


@pytest.mark.parametrize("replays", [False, True])
def test_a_warm_up_replays_what_a_step_will(replays: bool) -> None:
    """Else kernels are compiled in the first step."""
    rank, replayed = make_rank(parity=ParityConfig(replay_routing=replays)), list[bool]()

    def note(_: torch.nn.Module, given: tuple[object, ...]) -> None:
        replayed.append(given[3] is not None)

    rank.decoder.register_forward_pre_hook(note)
    rank.warm_up([7])
    assert replayed == [replays]


def test_what_does_not_fit_is_refused_with_the_options_that_need_less() -> None:
    """Memory ends late in backward, when most gradients are there."""
    rank = make_rank()
    met: list[bool] = []

    def full(_: torch.Tensor) -> None:
        met.append(any(param.grad is not None for _, param in trained(rank)))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. If reserved but unallocated ...")

    trained(rank)[0][1].register_hook(full)
    with pytest.raises(TrainerError) as raised:
        rank.warm_up([7, 7])
    text = str(raised.value)
    assert "a microbatch of 14 tokens does not fit cpu" in text
    assert f"trainer.max_microbatch_tokens, which is {TrainerConfig().max_microbatch_tokens}" in text
    assert "Tried to allocate 2.00 GiB" in text and "reserved" not in text
    assert met == [True]
    assert all(param.grad is None for _, param in trained(rank))


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


def test_made_up_routes_give_every_expert_equally_many_tokens() -> None:
    moe = MoeSpec(num_experts=6, top_k=4, intermediate_size=8, norm_topk_prob=True, layers=(False, True, True))
    (sample,) = made_up_samples([9], VOCAB, 0, moe)
    assert sample.routed_experts is not None and sample.routed_experts.shape == (9, 2, 4)
    assert all(len({*choice}) == 4 for choice in sample.routed_experts.reshape(-1, 4).tolist())
    assert np.bincount(sample.routed_experts[:, 1].ravel()).tolist() == [6] * 6
