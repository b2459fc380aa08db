"""Promises of trainer/step/microbatches.py: every sample once, bounds kept, ranks in step, balance, and a right
shift of targets.
"""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from slipstream.trainer.step.microbatches import (
    ATTENTION_EQUAL_TOKENS,
    Extent,
    Microbatch,
    collate,
    extent_of,
    pack,
    sample_cost,
)
from slipstream.trainer.types import Sample

lengths_strategy = st.lists(st.integers(1, 400), max_size=60)


def make_sample(prompt: list[int], response: list[int], oldest_version: int = 3) -> Sample:
    num_tokens = len(prompt) + len(response)
    mask = np.arange(num_tokens) >= len(prompt)
    return Sample(
        token_ids=np.array(prompt + response, np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, -0.5 - np.arange(num_tokens), 0).astype(np.float32),
        advantages=np.where(mask, 2.0, 0).astype(np.float32),
        oldest_version=oldest_version,
    )


@given(lengths_strategy, st.integers(1, 9), st.integers(1, 500))
def test_every_sample_is_packed_once_within_the_bound_in_equally_many_microbatches_and_no_needless_ones(
    lengths, num_ranks, max_tokens
):
    ranks = pack(lengths, num_ranks, max_tokens)
    assert ranks == pack(list(lengths), num_ranks, max_tokens)
    assert len(ranks) == num_ranks
    (count,) = {len(microbatches) for microbatches in ranks}
    microbatches = [members for of_rank in ranks for members in of_rank]
    assert sorted(sample for members in microbatches for sample in members) == list(range(len(lengths)))
    for members in microbatches:
        assert sum(lengths[sample] for sample in members) <= max_tokens or len(members) == 1
    assert count <= -(-len(lengths) // num_ranks)
    assert count <= 1 or sum(lengths) > max_tokens


@given(st.lists(st.integers(1, 400), min_size=1, max_size=60), st.integers(1, 8))
def test_ranks_differ_by_at_most_one_sample_when_nothing_is_bounded(lengths, num_ranks):
    """Longest-processing-time scheduling leaves no two bins further apart than the largest cost (Graham 1969)."""
    ranks = pack(lengths, num_ranks, max_tokens=10**9)
    loads = [sum(sample_cost(lengths[s]) for members in microbatches for s in members) for microbatches in ranks]
    assert max(loads) - min(loads) <= max(sample_cost(length) for length in lengths) + 1e-9


E = ATTENTION_EQUAL_TOKENS


@pytest.mark.parametrize(("lengths", "num_ranks", "max_tokens", "wanted"), [
    # a sample of 2 E tokens costs 2 E + 4 E, one of E tokens 2 E: it weighs as three
    ([2 * E, E, E, E], 2, 10 * E, [[[0]], [[1, 2, 3]]]),
    # first-fit-decreasing fits 5 5 | 4 3 3; by cost it is 5 | 5, then 4 | ., 3 joins the other, and 3 finds no room
    ([5, 5, 4, 3, 3], 1, 10, [[[0, 1], [2, 3, 4]]]),
    # bins of 8, 7, 6 and 5 tokens: 8 beside 7, then 6 to the rank of 7
    ([5, 6, 7, 8], 2, 8, [[[3], [0]], [[2], [1]]]),
    # 20 | 14, then 13 | 14: 33 beside 28, so the rank of 28 gets 12, though its last one was the heavier
    ([20, 14, 14, 13, 12, 11], 2, 20, [[[0], [3], [5]], [[1], [2], [4]]]),
    # the longest goes first
    ([1, 1, 2], 2, 8, [[[2]], [[0, 1]]]),
    # full at the bound; beyond it a sample is alone, and the others are spread all the same
    ([4, 4], 1, 8, [[[0, 1]]]),
    ([4, 5], 1, 8, [[[1], [0]]]),
    ([9, 1], 1, 8, [[[0], [1]]]),
    ([1], 1, 1, [[[0]]]),
    ([9, 3, 3], 3, 8, [[[0]], [[1]], [[2]]]),
    # members ascend, and equal samples keep their order
    ([2, 2, 2, 2], 2, 4, [[[0, 2]], [[1, 3]]]),
    ([1, 3, 2], 1, 6, [[[0, 1, 2]]]),
])  # fmt: skip
def test_packed_by_hand(lengths, num_ranks, max_tokens, wanted):
    assert pack(lengths, num_ranks, max_tokens) == wanted


def test_ranks_that_share_a_microbatch_pack_twice_the_tokens():
    shared = pack([36000, 18000, 18000, 18000, 18000], num_ranks=4, max_tokens=36000, cp_size=2)
    assert shared == [[[1, 2, 3, 4]]] * 2 + [[[0]]] * 2


def test_a_spread_that_is_stuck_with_a_bin_more_than_first_fit_needs_leaves_that_one_empty(monkeypatch):
    """160 tokens fill eight bins of 20, and three ranks need nine. Spread by cost, the first 18 samples are two in each
    of nine, 15 tokens or more, and the next one, of 6, has no room."""
    lengths = [10, 10, 10, 9, 9, 8, 8, 8, 8, 8, 7, 7, 7, 6, 6, 6, 6, 6, 6, 4, 4, 3, 2, 1, 1]
    monkeypatch.setattr("slipstream.trainer.step.microbatches.ATTENTION_EQUAL_TOKENS", 0.4)
    ranks = pack(lengths, num_ranks=3, max_tokens=20)
    members = [microbatch for of_rank in ranks for microbatch in of_rank]
    assert sorted(map(len, ranks)) == [3, 3, 3]
    assert sorted(sample for microbatch in members for sample in microbatch) == list(range(len(lengths)))
    assert sum(microbatch == [] for microbatch in members) == 1
    assert max(sum(lengths[sample] for sample in microbatch) for microbatch in members) <= 20


def test_collate_shifts_targets_to_the_row_before_them():
    """An agent's episode is among them: two turns of the model, two tokens of a tool between them. Tokens 2, 3 and 6
    count, hence positions 0, 1 and 4."""
    mask = np.array([False, False, True, True, False, False, True])
    episode = replace(make_sample([7, 7], [1, 2, 3, 4, 5], oldest_version=1), loss_mask=mask)
    micro = collate([make_sample([4], [5]), episode], policy_version=3)
    assert micro.token_ids.tolist() == [4, 5, 7, 7, 1, 2, 3, 4, 5]
    assert micro.positions.tolist() == [0, 1, *range(7)]
    assert micro.cu_seqlens.tolist() == [0, 2, 9]
    assert micro.response_positions.tolist() == [0, 0, 1, 4]
    assert micro.predictor_rows.tolist() == [0, 2 + 1, 2 + 2, 2 + 5]
    assert micro.targets.tolist() == [5, 1, 2, 5]
    assert micro.sequence_lengths.tolist() == [1, 3, 3, 3]
    assert micro.sequence_index.tolist() == [0, 1, 1, 1]
    assert micro.rollout_logprobs.tolist() == [-1.5, -2.5, -3.5, -6.5]
    assert micro.advantages.tolist() == [2.0] * 4
    assert micro.staleness.tolist() == [0, 2, 2, 2]
    assert micro.old_logprobs is None and micro.ref_logprobs is None


def test_each_array_of_a_microbatch_has_the_type_that_the_device_reads():
    known = replace(make_sample([7], [8]), old_logprobs=np.ones(2), ref_logprobs=np.ones(2))
    for micro in (collate([known], policy_version=3), collate([], policy_version=3)):
        types = {field.name: getattr(micro, field.name) for field in fields(Microbatch) if field.name != "extents"}
        dtypes = {name: array.dtype for name, array in types.items() if array is not None}
        floats = {"rollout_logprobs", "advantages", "old_logprobs", "ref_logprobs"}
        assert {name for name, dtype in dtypes.items() if dtype == np.float32} == floats & dtypes.keys()
        assert dtypes.pop("cu_seqlens") == np.int32
        assert all(dtype == np.int64 for name, dtype in dtypes.items() if name not in floats)


def test_log_probabilities_are_given_where_every_sample_has_them():
    old, ref = np.arange(3) / 4, np.arange(3) / 8
    first, second = make_sample([7], [8, 9]), make_sample([4], [5, 6])
    both = [replace(sample, old_logprobs=old + n, ref_logprobs=ref + n) for n, sample in enumerate((first, second))]
    micro = collate(both, policy_version=3)
    assert micro.old_logprobs is not None and micro.ref_logprobs is not None
    assert micro.old_logprobs.tolist() == [0.25, 0.5, 1.25, 1.5]
    assert micro.ref_logprobs.tolist() == [0.125, 0.25, 1.125, 1.25]
    one = collate([replace(both[0], ref_logprobs=None), both[1]], policy_version=3)
    assert one.ref_logprobs is None and one.old_logprobs is not None
    one = collate([both[0], replace(both[1], old_logprobs=None)], policy_version=3)
    assert one.old_logprobs is None and one.ref_logprobs is not None


def with_routes(sample: Sample, first: int) -> Sample:
    """Two layers, two experts per token; those of token t are 4 * (first + t) and the next three numbers."""
    num_tokens = sample.num_tokens
    experts = 4 * first + np.arange(4 * num_tokens, dtype=np.uint8).reshape(num_tokens, 2, 2)
    return replace(sample, routed_experts=experts, has_route=np.arange(num_tokens) < num_tokens - 1)


def test_collate_lays_routes_beside_their_tokens():
    micro = collate(
        [with_routes(make_sample([7], [8, 9]), 0), with_routes(make_sample([4], [5]), 10)], policy_version=3
    )
    assert micro.routed_experts is not None and micro.has_route is not None
    assert micro.routed_experts.dtype == np.uint8
    assert micro.routed_experts[:, 0, 0].tolist() == [0, 4, 8, 40, 44]
    assert micro.has_route.tolist() == [True, True, False, True, False]


def test_collate_leaves_the_choice_to_the_trainer_where_a_sample_has_no_routes():
    free, fixed = make_sample([4], [5]), with_routes(make_sample([7], [8, 9]), 0)
    micro = collate([free, fixed], policy_version=3)
    assert micro.routed_experts is not None and micro.has_route is not None
    assert micro.has_route.tolist() == [False, False, True, True, False] and micro.has_route.dtype == bool
    assert micro.routed_experts[2:, 0, 0].tolist() == [0, 4, 8]
    assert collate([free], policy_version=3).routed_experts is None


def test_ranks_tell_each_other_what_their_microbatches_are():
    free, fixed = make_sample([4], [5]), with_routes(make_sample([7], [8, 9]), 0)
    told = tuple(map(extent_of, ([free, fixed, free], [free], [])))
    assert told == (Extent(7, 3, 3, True), Extent(2, 1, 2, False), Extent(1, 1, 1, False))
    assert collate([free], 3, told[1:]).most_tokens == 2 and collate([free], 3).most_tokens is None
    assert collate([], 3, told).extents == told


def test_collate_of_nothing_is_one_dummy_token_that_does_not_count():
    micro = collate([], policy_version=0)
    assert micro.token_ids.tolist() == [0] and micro.cu_seqlens.tolist() == [0, 1]
    assert micro.positions.tolist() == [0]
    known = {field.name: getattr(micro, field.name) for field in fields(Microbatch) if field.name != "extents"}
    sizes = {name: len(array) for name, array in known.items() if array is not None}
    assert sizes == dict.fromkeys(sizes, 0) | {"token_ids": 1, "positions": 1, "cu_seqlens": 2}
    absent = {"routed_experts", "has_route", "old_logprobs", "ref_logprobs"}
    assert known.keys() - sizes.keys() == absent


def test_collate_refuses_what_cannot_be_trained():
    sample, nothing = make_sample([7], [8]), np.zeros(0)
    with pytest.raises(ValueError, match="first token"):
        collate([make_sample([], [8, 9])], policy_version=3)
    with pytest.raises(ValueError, match="policy version 3, but the trainer is only at 2"):
        collate([sample], policy_version=2)
    with pytest.raises(ValueError, match="sample 0 needs arrays"):
        collate([Sample(nothing, nothing, nothing, nothing, 0)], policy_version=3)
    fixed = with_routes(sample, 0)
    for short in (
        {"rollout_logprobs": np.zeros(1)}, {"advantages": np.zeros(3)}, {"token_ids": nothing},
        {"loss_mask": sample.loss_mask[:1]}, {"has_route": fixed.has_route[:1]},
        {"routed_experts": fixed.routed_experts[:1]},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="sample 1 needs arrays of one length >= 1"):
            collate([sample, replace(fixed, **short)], policy_version=3)
    with pytest.raises(ValueError, match=r"arrays of one length.*'has_route': 0"):
        collate([replace(fixed, has_route=None)], policy_version=3)
