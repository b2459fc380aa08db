"""Promises of a trainer rank with objective=dpo: it learns what is preferred, beside the reference of the start."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cases.rank_helpers import count, make_rank, save_state

from slipstream.conf.schema import AlgorithmConfig, Objective, OptimConfig, TrainMode
from slipstream.trainer.rank import TrainerRank
from slipstream.trainer.types import Sample

DPO = AlgorithmConfig(objective=Objective.dpo)
NUM_STEPS = 30


def sequence(tokens: Sequence[int], num_prompt: int, version: int) -> Sample:
    zeros = np.zeros(len(tokens), np.float32)
    return Sample(np.array(tokens, np.int32), np.arange(len(tokens)) >= num_prompt, zeros, zeros, version)


def pairs(numbers: Sequence[int], version: int = 0, swap_seed: int | None = None) -> list[list[Sample]]:
    """Prompts of three random tokens. The chosen answer ends in the first of them plus 10, the rejected one in another
    token of that range, and both begin with up to three random tokens. With a seed, half of the pairs are swapped."""
    found, swaps = [], None if swap_seed is None else np.random.default_rng(swap_seed)
    for number in numbers:
        draw = np.random.default_rng(number)
        prompt, filler = draw.integers(1, 9, 3), draw.integers(20, 40, draw.integers(0, 4))
        wrong = 10 + (prompt[0] + draw.integers(1, 8)) % 8
        right = 10 + prompt[0] % 8
        pair = [sequence([*prompt, *filler, answer], 3, version) for answer in (right, wrong)]
        found.append(pair[::-1] if swaps is not None and swaps.random() < 0.5 else pair)
    return found


def flat(batch: list[list[Sample]]) -> list[Sample]:
    return [sample for pair in batch for sample in pair]


def held_out_share(rank: TrainerRank) -> float:
    """The share of pairs that were not taught whose chosen answer is the likelier one by the policy itself."""
    samples = flat(pairs(range(1000, 1200), rank.policy_version))
    (scores,) = rank.score([samples], rank.policy_version)
    logprobs = [float(one.logprobs.sum()) for one in scores]
    return float(np.mean(np.array(logprobs[::2]) > np.array(logprobs[1::2])))


def test_it_learns_which_answer_is_preferred_and_nothing_where_pairs_are_swapped_at_random():
    """Before the first update policy and reference are equal, so the loss is log 2."""
    reached = []
    for swap_seed in (None, 1):
        rank = make_rank(algorithm=replace(DPO, dpo_beta=0.5), optim=OptimConfig(lr=2e-2))
        assert 0.35 < held_out_share(rank) < 0.65
        for step in range(NUM_STEPS):
            batch = pairs(range(32 * step, 32 * step + 32), step, swap_seed and swap_seed + step)
            stats = rank.forward_backward([flat(batch)], count(flat(batch), step))
            assert step > 0 or stats.sums["loss/total_sum"] == pytest.approx(np.log(2), abs=1e-5)
            assert rank.optimizer_step().is_finite
        reached.append(held_out_share(rank))
    assert reached[0] > 0.9
    assert 0.3 < reached[1] < 0.7


@pytest.mark.parametrize("mode", [TrainMode.lora, TrainMode.full])
def test_what_goes_on_from_a_kept_state_has_the_reference_of_the_start(mode: TrainMode, tmp_path: Path) -> None:
    first, again = (make_rank(mode=mode, algorithm=DPO) for _ in range(2))
    first.forward_backward([flat(pairs(range(4)))], count(flat(pairs(range(4)))))
    first.optimizer_step()
    save_state(first, tmp_path)
    again.states.load_state(tmp_path)
    batch = flat(pairs(range(4, 8), version=1))
    seen, wanted = (rank.forward_backward([batch], count(batch, 1)).sums for rank in (again, first))
    assert seen == wanted
    assert wanted["loss/total_sum"] != pytest.approx(np.log(2), abs=1e-4), "the policy has left its reference"
