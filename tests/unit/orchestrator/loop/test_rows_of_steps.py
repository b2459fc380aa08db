"""Locks: what the row, the timeline and the shown responses of a step have, beside what it trained on; and that what
the trainer returns of a sequence comes to the tokens of its rollout that the sequence counts.
"""

import json
import time
from itertools import count
from pathlib import Path

import numpy as np
from cases.samples import build_samples
from fakes.loop import Loop, make_config
from hypothesis import given, strategies as st

from slipstream.conf.schema import AlgorithmConfig
from slipstream.fleet.replicas import Recovery
from slipstream.orchestrator.files.row_files import read_rows
from slipstream.orchestrator.loop.updates import join, mark
from slipstream.rollout.types import Group, Prompt, Rollout, Routes, Turn
from slipstream.trainer.types import LossStats


async def test_so_many_responses_of_a_step_are_shown_as_was_asked_for(tmp_path: Path) -> None:
    loop = Loop(tmp_path, make_config(num_steps=2, run={"samples_per_step": 2}))
    await loop.run()
    samples = [json.loads(line) for line in loop.folder.samples.read_text().splitlines()]
    assert [row["step"] for row in samples if row["kind"] == "training"] == [1, 1, 2, 2]
    assert [sum(one.is_shown for one in trained) for _, trained in loop.trainer.trained] == [2, 2]


async def test_a_row_has_the_longest_of_the_recoveries_since_the_one_before_it(tmp_path: Path) -> None:
    loop = Loop(tmp_path, make_config(num_steps=1))
    controller = await loop.run()
    recoveries = controller.services.supervisor.roster.recoveries
    told = ("rollout/recoveries", "rollout/down_s", "rollout/recovery_read_s")
    recoveries += [Recovery("a", 5.0, 1.5), Recovery("b", 7.0, 0.5), Recovery("c", 6.0, None)]
    counts = controller._counts()
    assert [counts[name] for name in told] == [3, 7.0, 1.5]
    recoveries.append(Recovery("d", 2.0, None))
    counts = controller._counts()
    assert [counts[name] for name in told] == [1, 2.0, None]


async def test_every_step_has_a_timeline_of_trainer_workers_and_rewards(tmp_path: Path) -> None:
    """Each of 4 batches is 3 groups, and the evaluations are 2 groups each, of which step 0 has one."""
    loop = Loop(tmp_path, make_config(num_steps=4))
    before = time.time()
    await loop.run()
    rows = read_rows(loop.folder.timeline)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert all(before - 0.01 <= row["from"] <= row["to"] <= time.time() + 0.01 for row in rows)
    for row in rows[1:]:
        of_trainer = [what for who, what, *_ in row["spans"] if who == "trainer"]
        assert of_trainer[:4] == ["wait for rollouts", "forward and backward", "optimizer", "publish"]
        assert of_trainer[4:] == (["wait for the evaluation"] if row["step"] == 4 else [])
        assert (row["publish"]["version"], len(row["publish"]["replicas"])) == (row["step"], 2)
        assert all(begin <= end <= row["to"] - row["from"] + 0.01 for _, _, begin, end, _ in row["spans"])
    sampled = [span for row in rows for span in row["spans"] if span[1] == "sample"]
    judged = [span for row in rows for span in row["spans"] if span[1] == "judge"]
    assert len(sampled) == len(judged) == 4 * 3 + 2 * 2
    assert {who for who, *_ in sampled} == {"rollout-0", "rollout-1"}
    assert sorted(prompt for *_, prompt in sampled) == sorted([*range(12), 1000, 1001, 1000, 1001])


async def test_what_a_reward_gave_and_what_its_judge_cost_is_in_the_rows(tmp_path: Path) -> None:
    """Two steps of 3 groups of 2, of which one is right: the reward style is half of 0 or 1. Two held-out prompts are
    judged before the first step.
    """
    loop = Loop(tmp_path, make_config(num_steps=2, run={"eval_every_steps": 1}))
    loop.rewards.requests = 0
    await loop.run()
    assert [row["reward/style_mean"] for row in loop.rows] == [None, 0.25, 0.25]
    assert [row["reward/style_failures"] for row in loop.rows] == [None, 0, 0]
    assert [row["eval/style_mean"] for row in loop.rows] == [0.0, 0.0, 0.0]
    asked = [row["reward/style_requests"] for row in loop.rows]
    assert asked[0] is None
    assert sum(asked[1:]) <= loop.controller.sampler.num_generated * 2
    assert asked[1] >= 3 * 2 + 2
    shown = [json.loads(line)["parts"] for line in loop.folder.samples.read_text().splitlines()]
    assert {"style": 0.0} in shown


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
