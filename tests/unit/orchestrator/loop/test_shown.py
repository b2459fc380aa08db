"""Locks: what the trainer returns of a sequence comes to the tokens of its rollout that the sequence counts."""

from itertools import count

import numpy as np
from cases.samples import build_samples
from hypothesis import given, strategies as st

from slipstream.conf.schema import AlgorithmConfig
from slipstream.orchestrator.loop.samples import join, mark
from slipstream.rollout.types import Group, Prompt, Rollout, Routes, Turn
from slipstream.trainer.types import LossStats


@st.composite
def groups(draw: st.DrawFn) -> list[Group]:
    """Groups of responses and of episodes; no sampled token is there twice. Some tokens have no route."""
    fresh = count(1)
    made = []
    for number in range(draw(st.integers(1, 3))):
        rollouts = []
        for _ in range(draw(st.integers(1, 3))):
            lengths = draw(st.lists(st.integers(1, 3), max_size=4))
            turns = tuple(
                Turn(draw(st.none() | st.integers(0, i - 1)) if i else None, [0, 0], length)
                for i, length in enumerate(lengths)
            )
            tokens = [next(fresh) for _ in range(sum(lengths) or draw(st.integers(1, 4)))]
            routes = None
            if not turns and draw(st.booleans()):
                recorded = np.array(draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens))))
                routes = Routes(np.zeros((len(tokens), 1, 1), np.uint8), recorded)
            versions = draw(st.lists(st.integers(2, 4), min_size=len(tokens), max_size=len(tokens)))
            rollouts.append(Rollout(tokens, [-0.5] * len(tokens), versions, "", "stop", turns=turns, routes=routes))
        rewards = [float(draw(st.integers(0, 1))) for _ in rollouts]
        made.append(Group(Prompt(number, (0,), ""), rollouts, rewards))
    return made


@given(groups(), st.booleans())
def test_each_token_gets_its_own_log_probability_and_none_where_the_loss_has_none(
    batch: list[Group], is_split: bool
) -> None:
    """The trainer's log-probability of token t is -t here, so that a token in a wrong place shows."""
    algorithm = AlgorithmConfig(drop_zero_variance_groups=False)
    samples = build_samples(batch, algorithm)
    places = [(g, 0) for g in range(len(batch))]
    marked = mark(samples, places)
    assert [sample.is_shown for sample in marked] == [sample.origin[:2] in places for sample in samples]
    assert not any(sample.is_shown for sample in samples)
    returned = {s.origin: -s.token_ids[s.loss_mask].astype(np.float32) for s in marked if s.is_shown}
    ranks = [{k: v for i, (k, v) in enumerate(returned.items()) if not is_split or i % 2 == half} for half in (0, 1)]
    later = [{origin: logprobs - 0.5 for origin, logprobs in rank.items()} for rank in ranks]  # of a second update
    stats = [LossStats({}, {}, logprobs=rank) for rank in (*ranks, *later)]
    trained = join(batch, marked, stats, policy_version=5)
    assert trained.keys() == {sample.origin[:2] for sample in marked if sample.is_shown}
    for (number, which), found in trained.items():
        rollout = batch[number].rollouts[which]
        own = [s for s in marked if s.origin[:2] == (number, which)]
        in_loss = {t: a for s in own for t, a in zip(s.token_ids[s.loss_mask].tolist(), s.advantages[s.loss_mask])}
        assert found.staleness_steps == 5 - min(rollout.policy_versions)
        assert found.trainer_logprobs == [-token if token in in_loss else None for token in rollout.token_ids]
        assert found.advantages == [in_loss.get(token) for token in rollout.token_ids]
