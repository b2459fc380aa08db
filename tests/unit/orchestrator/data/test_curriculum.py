"""A curriculum prefers prompts of middling difficulty, and goes on exactly from a checkpoint."""

import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, strategies as st

from slipstream.orchestrator.data.curriculum import Middling, learnability
from slipstream.orchestrator.data.streams import Mixed
from slipstream.rollout.errors import DataError
from slipstream.rollout.types import Prompt

GROUP = 8


def prompts(count: int) -> list[Prompt]:
    return [Prompt(3 * number, (number + 10,), str(number)) for number in range(count)]


def middling(count: int, floor: float = 0.1, seed: int = 1) -> Middling:
    return Middling(prompts(count), seed=seed, floor=floor)


def test_weights_are_largest_for_a_rate_of_one_half_and_for_what_was_not_seen() -> None:
    successes, trials = np.array([0.0, 2, 4, 6, 8, 0]), np.array([8.0, 8, 8, 8, 8, 0])
    assert learnability(successes, trials, 0.1).tolist() == [0.1, 0.75, 1.0, 0.75, 0.1, 1.0]


def test_prompts_are_drawn_by_their_weights() -> None:
    """Rates 0, 1/2 and 1 with a floor of 0.25: of 6 draws 1, 4 and 1. 3000 draws: 0.03 is more than three standard
    deviations of a share."""
    stream = middling(3, floor=0.25)
    rewards = {0: [0.0] * 4, 3: [0.0, 1.0] * 2, 6: [1.0] * 4}
    seen: Counter[int] = Counter()
    for _ in range(3003):
        prompt = next(stream)
        seen[prompt.prompt_id] += 1
        stream.observe(prompt.prompt_id, rewards[prompt.prompt_id])
    assert seen[3] / seen.total() == pytest.approx(4 / 6, abs=0.03)
    assert seen[0] / seen.total() == pytest.approx(1 / 6, abs=0.03)


def test_a_prompt_that_is_being_sampled_is_not_drawn_while_there_are_others() -> None:
    stream = middling(4)
    first = [next(stream).prompt_id for _ in range(4)]
    assert sorted(first) == [0, 3, 6, 9]
    again = Counter(next(stream).prompt_id for _ in range(20))
    assert set(again) == set(first), "all are being sampled: by their weights again"
    for prompt_id in (6, 0, 9, 3):
        for _ in range(1 + again[prompt_id]):
            stream.observe(prompt_id, [None] * 4)
        assert next(stream).prompt_id == prompt_id


def test_a_cursor_of_an_earlier_release_draws_the_same_prompts() -> None:
    stream, drawn = middling(5), []
    for _ in range(12):
        drawn.append(next(stream).prompt_id)
        stream.observe(drawn[-1], [float(drawn[-1] == 3), 0.0])
    assert drawn == [6, 9, 9, 3, 12, 3, 3, 0, 3, 3, 3, 3]


def test_rewards_outside_of_zero_and_one_count_as_these_and_failed_ones_do_not_count() -> None:
    stream = middling(1)
    stream.observe(next(stream).prompt_id, [-3.0, 7.0, None, 0.5])
    figures = stream.metrics()
    assert figures["data/success_rate"] == pytest.approx(0.5)
    assert (figures["data/seen_fraction"], figures["data/middling_fraction"]) == (1.0, 1.0)
    stream.observe(next(stream).prompt_id, [1.0] * 3)  # three and half of the three before
    assert stream.metrics()["data/success_rate"] == pytest.approx((3 + 1.5 / 2) / (3 + 3 / 2))
    assert middling(2).metrics()["data/success_rate"] is None


@given(before=st.integers(0, 60), late=st.integers(0, 3), seed=st.integers(0, 3))
def test_a_cursor_continues_draws_and_success_rates_exactly(before: int, late: int, seed: int) -> None:
    """Up to `late` groups are being sampled when the checkpoint is made; they are sampled and observed after it."""

    def rewards(prompt: Prompt) -> list[float | None]:
        return [float(index < prompt.prompt_id // 3) for index in range(GROUP)]

    def go_on(stream: Middling, waiting: list[Prompt], count: int) -> list[int]:
        drawn: list[int] = []
        for _ in range(count):
            waiting.append(next(stream))
            drawn.append(waiting[-1].prompt_id)
            if len(waiting) > late:
                oldest = waiting.pop(0)
                stream.observe(oldest.prompt_id, rewards(oldest))
        return drawn

    stream, waiting = middling(9, seed=seed), []
    go_on(stream, waiting, before)
    resumed = middling(9, seed=seed)
    resumed.observe(next(resumed).prompt_id, [1.0])  # it forgets that
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert resumed.metrics() == stream.metrics()
    assert go_on(resumed, list(waiting), 40) == go_on(stream, waiting, 40)
    assert resumed.state_dict() == stream.state_dict()


@pytest.mark.parametrize(
    ("other", "option"),
    [
        (middling(8), r"data\.path"),
        (middling(9, seed=2), r"run\.seed"),
        (middling(9, floor=0.2), r"data\.curriculum_floor"),
    ],
)
def test_a_cursor_of_another_curriculum_is_refused(other: Middling, option: str) -> None:
    with pytest.raises(DataError, match=option):
        other.load_state_dict(middling(9).state_dict())


def test_each_of_several_sources_has_success_rates_of_its_own() -> None:
    """Ids as data.sources gives them: of three sources, the i-th has i modulo 3."""
    sources = {
        name: [Prompt(3 * row + index, (row + 5,), name) for row in range(4)] for index, name in enumerate("abc")
    }
    streams = {name: Middling(found, seed=1, floor=0.1) for name, found in sources.items()}
    mixed = Mixed(streams, [1, 1, 1], seed=2)
    for prompt in islice(mixed, 200):
        mixed.observe(prompt.prompt_id, [float(prompt.text == "a"), float(prompt.text != "c")])
    rates = {name: stream.metrics()["data/success_rate"] for name, stream in streams.items()}
    assert rates == {"a": 1.0, "b": 0.5, "c": 0.0}
    assert mixed.metrics()["data/success_rate"] == pytest.approx(0.5)
    assert mixed.metrics()["data/middling_fraction"] == pytest.approx(1 / 3)
