"""A response that was ended goes on as one: what the second request is asked, and what becomes of the two."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from slipstream.conf.schema import SamplingConfig
from slipstream.rollout.continuation import go_on, seed_of_part, without_half_a_stop
from slipstream.rollout.types import ABORTED, NOTHING_YET, Rollout, Routes

SAMPLING = SamplingConfig(max_tokens=5)
SO_FAR = Rollout([4, 5], [-0.5, -0.25], [3, 4], "", ABORTED, num_evictions=1)


class Engine:
    """Gives tokens from 10 on, of version 7."""

    def __init__(self, num_tokens: int = 2, reason: str = "stop") -> None:
        self.asked: list[tuple[list[int], int, int | None]] = []
        self.num_tokens = num_tokens
        self.reason = reason

    async def sample(self, prompt: Sequence[int], sampling: SamplingConfig, seed: int | None) -> Rollout:
        self.asked.append((list(prompt), sampling.max_tokens, seed))
        num = self.num_tokens
        return Rollout(list(range(10, 10 + num)), [-1.0] * num, [7] * num, "", self.reason)


async def test_the_rest_is_sampled_behind_what_there_is_and_each_token_keeps_its_version() -> None:
    engine = Engine()
    whole = await go_on((1, 2), SO_FAR, SAMPLING, None, engine.sample)
    assert engine.asked == [([1, 2, 4, 5], 3, None)]
    assert whole == Rollout([4, 5, 10, 11], [-0.5, -0.25, -1.0, -1.0], [3, 4, 7, 7], "", "stop", num_evictions=1)


async def test_a_response_that_has_ended_or_is_full_asks_nothing() -> None:
    engine = Engine()
    ended = replace(SO_FAR, finish_reason="stop")
    assert await go_on((1,), ended, SAMPLING, 1, engine.sample) is ended
    full = await go_on((1,), SO_FAR, replace(SAMPLING, max_tokens=2), 1, engine.sample)
    assert full == replace(SO_FAR, finish_reason="length")
    assert engine.asked == []


async def test_random_numbers_of_the_beginning_are_not_repeated() -> None:
    engine = Engine()
    await go_on((1,), SO_FAR, SAMPLING, 11, engine.sample)
    assert engine.asked[0][2] == seed_of_part(11, 2) != 11


async def test_a_response_that_is_ended_again_stays_ended() -> None:
    again = await go_on((1,), SO_FAR, SAMPLING, None, Engine(reason=ABORTED).sample)
    assert (again.finish_reason, again.token_ids) == (ABORTED, [4, 5, 10, 11])
    first = await go_on((1,), NOTHING_YET, SAMPLING, None, Engine().sample)
    assert first.token_ids == [10, 11]
    assert NOTHING_YET.token_ids == []


@pytest.mark.parametrize(("stop", "kept"), [((), 4), (("a",), 4), (("ab", "\u00e9nd"), 1), (("a" * 9,), 0)])
def test_tokens_in_which_a_stop_text_may_have_begun_are_sampled_again(stop: tuple[str, ...], kept: int) -> None:
    """The accent makes four bytes of three letters, of which three may be the last three tokens. The prompt had two."""
    routes = Routes(np.arange(20, dtype=np.uint8).reshape(5, 2, 2), np.ones(5, dtype=bool))
    so_far = Rollout([4, 5, 6, 7], [-1.0, -2.0, -3.0, -4.0], [1, 1, 2, 2], "", ABORTED, routes=routes)
    found = without_half_a_stop(so_far, stop)
    assert found.token_ids == [4, 5, 6, 7][:kept]
    assert found.logprobs == [-1.0, -2.0, -3.0, -4.0][:kept]
    assert found.policy_versions == [1, 1, 2, 2][:kept]
    assert found.routes is not None
    assert len(found.routes.experts) == len(found.routes.is_recorded) == 1 + kept
    assert found.finish_reason == ABORTED
