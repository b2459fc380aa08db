"""Locks: what the trainer gets of an episode is what the engine was given and what it sampled, each token once."""

from itertools import count

import numpy as np
from cases.samples import build_samples
from hypothesis import given, strategies as st

from slipstream.conf.schema import AlgorithmConfig
from slipstream.rollout.branches import branches_of, context_of
from slipstream.rollout.types import Group, Prompt, Rollout, Routes, Turn

PROMPT = Prompt(0, (1, 2, 3), "text")


@st.composite
def episodes(draw: st.DrawFn) -> tuple[Rollout, list[tuple[list[int], list[int]]]]:
    """An episode, and of each turn what the engine was given in all and what it sampled. No token is there twice."""
    fresh = count(10)
    turns: list[Turn] = []
    requests: list[tuple[list[int], list[int]]] = []
    for number in range(draw(st.integers(0, 6))):
        parent = draw(st.none() | st.integers(0, number - 1)) if number else None
        given_tokens = [next(fresh) for _ in range(draw(st.integers(1, 3)))]
        sampled = [next(fresh) for _ in range(draw(st.integers(1, 3)))]
        before = [] if parent is None else [*requests[parent][0], *requests[parent][1]]
        turns.append(Turn(parent, given_tokens, len(sampled)))
        requests.append(([*before, *given_tokens], sampled))
    tokens = [token for _, sampled in requests for token in sampled]
    logprobs = [-0.5 * token for token in tokens]
    return Rollout(tokens, logprobs, [token % 7 for token in tokens], "", "stop", turns=tuple(turns)), requests


Episode = tuple[Rollout, list[tuple[list[int], list[int]]]]


@given(episodes())
def test_every_sampled_token_counts_once_behind_what_the_engine_was_given(episode: Episode) -> None:
    rollout, requests = episode
    branches = branches_of(PROMPT, rollout)
    counted: list[int] = []
    for branch in branches:
        versions = iter(branch.policy_versions)
        rows = zip(branch.token_ids, branch.counts, branch.logprobs, strict=True)
        for place, (token, counts, logprob) in enumerate(rows):
            assert logprob == (-0.5 * token if counts else 0)
            if counts:
                counted.append(token)
                assert next(versions) == token % 7
                ((given_tokens, sampled),) = [request for request in requests if token in request[1]]
                assert branch.token_ids[:place] == [*given_tokens, *sampled[: sampled.index(token)]]
    assert sorted(counted) == sorted(rollout.token_ids)
    assert len(branches) == len(requests) - len({turn.parent for turn in rollout.turns} - {None})


@given(episodes())
def test_the_context_of_a_turn_is_what_the_engine_was_given_and_what_it_sampled(episode: Episode) -> None:
    rollout, requests = episode
    turns = {
        number: (turn.parent, [*turn.given_token_ids, *sampled])
        for number, (turn, (_, sampled)) in enumerate(zip(rollout.turns, requests, strict=True))
    }
    assert [context_of(turns, last) for last in turns] == [[*given, *sampled] for given, sampled in requests]
    assert context_of(turns, None) == []


@given(episodes())
def test_every_branch_is_a_sample_with_its_episodes_advantage(episode: Episode) -> None:
    rollout, _ = episode
    single = Rollout([5], [-1.0], [0], "", "stop")
    group = Group(PROMPT, [rollout, single], [1.0, 0.0])
    *of_episode, of_single = build_samples([group], AlgorithmConfig())
    assert len(of_episode) == len(branches_of(PROMPT, rollout))
    for sample in of_episode:
        assert set(sample.advantages[sample.loss_mask].round(3)) == {1.0}
        assert sample.oldest_version == min(token % 7 for token in sample.token_ids[sample.loss_mask])
    assert set(of_single.advantages[of_single.loss_mask].round(3)) == {-1.0}


def test_routes_of_turns_join_to_one_less_than_the_tokens() -> None:
    def routes(first: int, last: int) -> Routes:
        experts = np.arange(first, last, dtype=np.uint8).reshape(-1, 1, 1)
        return Routes(experts, experts[:, 0, 0] > 2)

    # Turn 0: 2 given + 1 sampled = positions 0 and 1. Turn 1: 2 given + 2 sampled, from position 2 to 5.
    turns = (Turn(None, [1, 2], 1, routes=routes(0, 2)), Turn(0, [4, 5], 2, "", routes=routes(2, 6)))
    rollout = Rollout([3, 6, 7], [-1.0] * 3, [0] * 3, "", "stop", turns=turns)
    (branch,) = branches_of(PROMPT, rollout)
    assert branch.token_ids == [1, 2, 3, 4, 5, 6, 7]
    assert branch.routes is not None
    assert branch.routes.experts.ravel().tolist() == [0, 1, 2, 3, 4, 5]
    assert branch.routes.is_recorded.tolist() == [False] * 3 + [True] * 3, "of turn 0 none is"
    assert rollout.num_tokens_without_route == 1
    lost = (turns[0], Turn(0, [4, 5], 2, "", routes=routes(0, 4)))
    assert Rollout([3, 6, 7], [-1.0] * 3, [0] * 3, "", "stop", turns=lost).num_tokens_without_route == 2


def test_a_group_whose_episodes_all_failed_before_a_token_has_no_age() -> None:
    failed = Rollout([], [], [], "", "stop", failure="raised", seconds=0.1)
    assert Group(PROMPT, [failed, failed], [None, None]).staleness_steps(7) == 0
    assert build_samples([Group(PROMPT, [failed], [None])], AlgorithmConfig()) == []


def test_one_response_is_one_sequence_behind_its_prompt() -> None:
    routes = Routes(np.zeros((4, 1, 1), np.uint8), np.ones(4, bool))
    (branch,) = branches_of(PROMPT, Rollout([5, 6], [-0.5, -0.25], [3, 4], "t", "stop", routes=routes))
    assert (branch.token_ids, branch.counts) == ([1, 2, 3, 5, 6], [False] * 3 + [True] * 2)
    assert (branch.logprobs, branch.policy_versions) == ([0.0] * 3 + [-0.5, -0.25], [3, 4])
    assert (list(branch.places), branch.routes) == ([0, 1], routes)
    assert branch.first_response == ([1, 2, 3], [5, 6], [-0.5, -0.25])
    assert branches_of(PROMPT, Rollout([], [], [], "", "length")) == []


def test_the_first_response_of_a_branch_ends_where_the_engine_was_given_more() -> None:
    """Turn 1 goes on from turn 0, and turn 2 from it, too: in its branch the tokens of turn 0 are context."""
    turns = (Turn(None, [1], 2), Turn(0, [2], 1), Turn(0, [3], 2))
    rollout = Rollout([5, 6, 7, 8, 9], [-1.0, -2.0, -3.0, -4.0, -5.0], [0] * 5, "", "stop", turns=turns)
    first, second = branches_of(PROMPT, rollout)
    assert first.first_response == ([1], [5, 6], [-1.0, -2.0])
    assert second.first_response == ([1, 5, 6, 3], [8, 9], [-4.0, -5.0])
    assert (first.token_ids, list(first.places)) == ([1, 5, 6, 2, 7], [0, 1, 2])
    assert (second.token_ids, list(second.places)) == ([1, 5, 6, 3, 8, 9], [3, 4])
    assert first.routes is None
