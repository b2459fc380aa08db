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
def test_every_sample_is_packed_exactly_once_within_the_bound_in_equally_many_microbatches(
    lengths, num_ranks, max_tokens
):
    ranks = pack(lengths, num_ranks, max_tokens)
    assert len(ranks) == num_ranks
    assert len({len(microbatches) for microbatches in ranks}) == 1
    packed = [sample for microbatches in ranks for members in microbatches for sample in members]
    assert sorted(packed) == list(range(len(lengths)))
    for microbatches in ranks:
        for members in microbatches:
            assert sum(lengths[sample] for sample in members) <= max_tokens or len(members) == 1


@given(lengths_strategy, st.integers(1, 9), st.integers(1, 500))
def test_packing_is_deterministic_and_uses_no_needless_microbatches(lengths, num_ranks, max_tokens):
    ranks = pack(lengths, num_ranks, max_tokens)
    assert ranks == pack(list(lengths), num_ranks, max_tokens)
    count = len(ranks[0]) if lengths else 0
    assert count <= -(-len(lengths) // num_ranks)
    if lengths and sum(lengths) <= max_tokens:
        assert count == 1


@given(st.lists(st.integers(1, 400), min_size=1, max_size=60), st.integers(1, 8))
def test_ranks_differ_by_at_most_one_sample_when_nothing_is_bounded(lengths, num_ranks):
    """Longest-processing-time scheduling leaves no two bins further apart than the largest cost (Graham 1969)."""
    ranks = pack(lengths, num_ranks, max_tokens=10**9)
    loads = [sum(sample_cost(lengths[s]) for members in microbatches for s in members) for microbatches in ranks]
    assert max(loads) - min(loads) <= max(sample_cost(length) for length in lengths) + 1e-9


def test_cost_of_attention_counts_in_the_balance():
    """With E = ATTENTION_EQUAL_TOKENS a sample of 2 E tokens costs 2 E + 4 E, one of E tokens 2 E, so 1 weighs as 3."""
    E = ATTENTION_EQUAL_TOKENS
    ranks = pack([2 * E, E, E, E], num_ranks=2, max_tokens=10 * E)
    assert sorted(len(microbatches[0]) for microbatches in ranks) == [1, 3]


def test_a_stuck_spread_falls_back_to_first_fit():
    """Bins of 10: first-fit-decreasing fits 5 5 | 4 3 3 in two. By cost: 5 | 5, then 4 | ., 3 joins the other,
    and the last 3 finds 9 and 8 used: no room. The fallback keeps two microbatches."""
    lengths = [5, 5, 4, 3, 3]
    ranks = pack(lengths, num_ranks=1, max_tokens=10)
    assert [sum(lengths[s] for s in members) for members in ranks[0]] == [10, 10]


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
    micro = collate([make_sample([7], [8, 9], oldest_version=1), make_sample([4], [5])], policy_version=3)
    assert micro.token_ids.tolist() == [7, 8, 9, 4, 5]
    assert micro.positions.tolist() == [0, 1, 2, 0, 1]
    assert micro.cu_seqlens.tolist() == [0, 3, 5]
    assert micro.predictor_rows.tolist() == [0, 1, 3]
    assert micro.targets.tolist() == [8, 9, 5]
    assert micro.rollout_logprobs.tolist() == [-1.5, -2.5, -1.5]
    assert micro.sequence_lengths.tolist() == [2, 2, 1]
    assert micro.staleness.tolist() == [2, 2, 0]
    assert micro.advantages.tolist() == [2.0] * 3
    assert micro.sequence_index.tolist() == [0, 0, 1]
    assert micro.response_positions.tolist() == [0, 1, 0]
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


def test_positions_in_a_response_count_what_lies_between_its_counted_tokens():
    """Of an agent's episode: two turns of the model, and two tokens of a tool between them. Tokens 2, 3 and 6 count,
    hence positions 0, 1 and 4."""
    sample = make_sample([7, 7], [1, 2, 3, 4, 5])
    mask = np.array([False, False, True, True, False, False, True])
    micro = collate([make_sample([4], [5]), replace(sample, loss_mask=mask)], policy_version=3)
    assert micro.response_positions.tolist() == [0, 0, 1, 4]
    assert micro.predictor_rows.tolist() == [0, 2 + 1, 2 + 2, 2 + 5]
    assert micro.targets.tolist() == [5, 1, 2, 5]
    assert micro.sequence_lengths.tolist() == [1, 3, 3, 3]
    assert micro.sequence_index.tolist() == [0, 1, 1, 1]
    assert micro.rollout_logprobs.tolist() == [-1.5, -2.5, -3.5, -6.5]


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


def test_a_sample_of_the_version_that_is_trained_is_fresh_and_one_of_a_later_version_refused():
    assert collate([make_sample([7], [8], oldest_version=3)], policy_version=3).staleness.tolist() == [0]
    for changes in ({"rollout_logprobs": np.zeros(1)}, {"advantages": np.zeros(3)}, {"token_ids": np.zeros(0)}):
        with pytest.raises(ValueError, match="sample 1 needs arrays of one length >= 1"):
            collate([make_sample([7], [8]), replace(make_sample([7], [8]), **changes)], policy_version=3)
    nothing = np.zeros(0)
    with pytest.raises(ValueError, match="sample 0 needs arrays"):
        collate([Sample(nothing, nothing, nothing, nothing, 0)], policy_version=3)


def test_the_costs_of_attention_and_of_everything_else_are_equal_at_the_given_length():
    assert sample_cost(16384) == 2 * 16384 and sample_cost(8192) == 1.5 * 8192


def test_the_heaviest_bins_meet_and_the_least_loaded_rank_gets_the_heaviest():
    """Four bins of 8, 7, 6 and 5 tokens for two ranks: 8 beside 7, then 6 to the rank of 7; loads of 13 and 13."""
    ranks = pack([5, 6, 7, 8], num_ranks=2, max_tokens=8)
    assert ranks == [[[3], [0]], [[2], [1]]]
    # 20 | 14, then 13 | 14: 33 beside 28, so the rank of 28 gets 12, though its last one was the heavier
    ranks = pack([20, 14, 14, 13, 12, 11], num_ranks=2, max_tokens=20)
    assert ranks == [[[0], [3], [5]], [[1], [2], [4]]]
    ranks = pack([1, 1, 2], num_ranks=2, max_tokens=8)
    assert ranks == [[[2]], [[0, 1]]], "the longest sample goes first"
    shared = pack([36000, 18000, 18000, 18000, 18000], num_ranks=4, max_tokens=36000, cp_size=2)
    assert shared == [[[1, 2, 3, 4]]] * 2 + [[[0]]] * 2, "two ranks share a microbatch, of twice the tokens"


def test_a_bin_is_full_at_the_bound_and_a_sample_beyond_it_is_alone():
    assert pack([4, 4], num_ranks=1, max_tokens=8) == [[[0, 1]]]
    assert pack([4, 5], num_ranks=1, max_tokens=8) == [[[1], [0]]]
    assert pack([9, 1], num_ranks=1, max_tokens=8) == [[[0], [1]]]
    assert pack([1], num_ranks=1, max_tokens=1) == [[[0]]]
    assert pack([9, 3, 3], num_ranks=3, max_tokens=8) == [[[0]], [[1]], [[2]]], "the others are spread all the same"


def test_members_of_a_microbatch_ascend_and_equal_samples_keep_their_order():
    assert pack([2, 2, 2, 2], num_ranks=2, max_tokens=4) == [[[0, 2]], [[1, 3]]]
    assert pack([1, 3, 2], num_ranks=1, max_tokens=6) == [[[0, 1, 2]]]


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
    with pytest.raises(ValueError, match=r"arrays of one length.*'has_route': 0"):
        collate([replace(fixed, has_route=None)], policy_version=3)
    for changes in ({"has_route": fixed.has_route[:2]}, {"routed_experts": fixed.routed_experts[:2]}):
        with pytest.raises(ValueError, match="sample 1 needs arrays of one length"):
            collate([free, replace(fixed, **changes)], policy_version=3)


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
    sample = make_sample([7], [8])
    with pytest.raises(ValueError, match="first token"):
        collate([make_sample([], [8, 9])], policy_version=3)
    with pytest.raises(ValueError, match="policy version 3, but the trainer is only at 2"):
        collate([sample], policy_version=2)
    short = Sample(sample.token_ids, sample.loss_mask[:1], sample.rollout_logprobs, sample.advantages, 0)
    with pytest.raises(ValueError, match="arrays of one length"):
        collate([short], policy_version=0)
