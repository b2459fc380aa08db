"""Punishments of length against the equations, with exact fractions."""

from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from slipstream.conf.schema import RewardConfig
from slipstream.rollout.rewards.shaping import overlong_punishment, shape


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


def test_shaping_is_weighted_and_off_by_default():
    assert shape(RewardConfig(), 100, 100) == {}
    config = RewardConfig(overlong_tokens=10, overlong_penalty=0.5, length_penalty=0.2)
    assert shape(config, 95, 100) == pytest.approx({"overlong_penalty": -0.25, "length_penalty": -0.19})
    assert shape(config, 0, 100) == {"overlong_penalty": 0.0, "length_penalty": 0.0}
    assert shape(RewardConfig(length_penalty=0.1), 1, 7) == {"length_penalty": 0.1 * (-1 / 7)}, "rounded as it ever was"
