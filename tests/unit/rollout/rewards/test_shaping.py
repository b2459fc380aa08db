"""Punishments of length against the equations, written out case by case with exact fractions."""

from fractions import Fraction

import pytest
from fakes.reward_runs import running
from hypothesis import given, strategies as st

from slipstream.conf.errors import ConfigError
from slipstream.conf.load import load_run_config
from slipstream.conf.schema import RewardConfig
from slipstream.rollout.rewards.shaping import length_punishment, overlong_punishment, shape
from slipstream.rollout.types import Judgement, Prompt, Rollout


def equation_13(length: int, longest: int, cache: int) -> Fraction:
    """R_length of DAPO, as the paper writes it."""
    if length <= longest - cache:
        return Fraction(0)
    if longest - cache < length <= longest:
        return Fraction((longest - cache) - length, cache)
    return Fraction(-1)


@given(length=st.integers(0, 50_000), longest=st.integers(1, 40_000), share=st.floats(0, 1))
def test_overlong_punishment_is_equation_13(length: int, longest: int, share: float):
    cache = max(1, int(share * longest))
    found = overlong_punishment(length, max_tokens=longest, overlong_tokens=cache)
    assert found == pytest.approx(float(equation_13(length, longest, cache)), abs=1e-12)


def test_overlong_punishment_with_the_numbers_of_the_paper():
    """L_max 20480, of which the last 4096 are punished."""
    at = [
        overlong_punishment(length, max_tokens=20480, overlong_tokens=4096)
        for length in (16384, 17408, 18432, 20480, 30000)
    ]
    assert at == [0.0, -0.25, -0.5, -1.0, -1.0]


def test_length_punishment_is_the_share_of_the_longest_response():
    assert [length_punishment(length, max_tokens=200) for length in (0, 50, 200)] == [0.0, -0.25, -1.0]


def test_shaping_is_weighted_and_off_by_default():
    assert shape(RewardConfig(), 100, 100) == {}
    config = RewardConfig(overlong_tokens=10, overlong_penalty=0.5, length_penalty=0.2)
    assert shape(config, 95, 100) == pytest.approx({"overlong_penalty": -0.25, "length_penalty": -0.19})


async def test_what_length_adds_is_a_part_of_the_judgement_and_of_the_sum():
    async with running(RewardConfig(overlong_tokens=2, overlong_penalty=0.5), max_response_tokens=4) as runner:
        prompt = Prompt(0, (1,), "p", {"answer": "a"})
        rollouts = [Rollout([5] * n, [0.0] * n, [0] * n, "a", "stop") for n in (2, 3, 4)]
        judged = await runner.score_group(prompt, rollouts)
    assert judged == [
        Judgement(1.0 + added, {"exact_match": 1.0, "overlong_penalty": added}, "a") for added in (0.0, -0.25, -0.5)
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["reward.overlong_tokens=9999"], r"reward\.overlong_tokens=9999 exceeds the 4 tokens"),
        (["reward.overlong_tokens=-1"], r"reward\.overlong_tokens must be >= 0, got -1"),
        (["reward.overlong_penalty=2"], r"reward\.overlong_penalty has no effect with reward\.overlong_tokens=0"),
        (["reward.length_penalty=nan"], "penalties must be finite, got nan"),
        (["reward.parts.length_penalty.kind=regex"], r"neither of overlong_penalty, length_penalty, got"),
    ],
)
def test_wrong_shaping_is_refused(words: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        load_run_config(["experiment=quickstart", *words])
