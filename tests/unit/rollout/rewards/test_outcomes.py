"""What a reward process makes of a function's values, how it says so, and what is taken for an answer."""

import asyncio
import hashlib
import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
import torch

from slipstream.conf.schema import CodeConfig
from slipstream.rollout.rewards import code_tests
from slipstream.rollout.rewards.counting import count, counted
from slipstream.rollout.rewards.function import Form, Reward
from slipstream.rollout.rewards.reward_pool import TOLD, Answer, read_answer
from slipstream.rollout.rewards.reward_process import _judge, _judge_soon
from slipstream.rollout.sandbox.sandbox import Limits
from slipstream.rollout.user_processes.outcomes import (
    MAX_ANSWER,
    MAX_FRAMES,
    MAX_PART,
    NOT_A_NUMBER,
    RAISED,
    SCORE,
    TIMEOUT,
    Outcome,
    raised,
    read_outcome,
    shortened,
)

OUTCOMES = [
    Outcome(SCORE, 0.5),
    Outcome(SCORE, -1.0, answer="b"),
    Outcome(RAISED, report="a traceback", place="KeyError a.py:3"),
    Outcome(NOT_A_NUMBER, report="a text", place="got str"),
    Outcome(TIMEOUT, report="late"),
]


def test_outcomes_arrive_as_they_were_said_and_one_may_be_of_all_responses() -> None:
    said = [one.as_message for one in OUTCOMES]
    assert read_answer([said, {"requests": 2}], len(said)) == Answer(OUTCOMES, {"requests": 2})
    assert read_answer([said[:1], {}], 3) == Answer(OUTCOMES[:1] * 3, {}) == Answer([Outcome(SCORE, 0.5)] * 3, {})


@pytest.mark.parametrize(
    "message",
    [
        [[["score", 0.5], ["score", 0.5]], {}],  # of three responses
        [[["score", 0.5]] * 4, {}],
        [[], {}],
        *([[["score", value, *answer]] * 3, {}] for value in (math.nan, math.inf, None) for answer in ([], ["a"])),
        [[["score", 1]] * 3, {}],
        [[["score", 0.5, "a" * (MAX_ANSWER + 1)]] * 3, {}],
        [[["score", 0.5, 7]] * 3, {}],
        [[["score", 0.5], ["score", 0.5], ["died", "r", "p"]], {}],
        [[["raised", "r"]], {}],
        [[["raised", "r", "p", "more"]], {}],
        *([[["score", 0.5]], {"requests": count}] for count in ("2", None, 10**400, float("inf"))),
        [[["score", 0.5]]],
        [[["score", 0.5]], {}, 0],
        "score",
    ],
)
def test_what_is_no_answer_about_so_many_responses_is_none(message: Any) -> None:
    assert read_answer(message, 3) is None
    whole = [[["score", 0.5, "a" * MAX_ANSWER]], {}]
    assert read_answer(whole, 3) is not None
    assert read_outcome(["raised", "r", "p"], TOLD) and read_outcome(["nothing", "", ""], TOLD) is None
    assert read_outcome(["nothing", "", ""], ("nothing",)) == Outcome("nothing")


def deep(depth: int, text: str) -> None:
    if not depth:
        raise LookupError(text)
    deeper(depth - 1, text)


def deeper(depth: int, text: str) -> None:
    """Two functions in turns: lines that repeat would be told once."""
    deep(depth, text)


def failed(depth: int, text: str) -> Outcome:
    try:
        deep(depth, text)
    except LookupError as error:
        return raised(error)
    raise AssertionError


def test_a_report_is_the_end_of_a_traceback_and_its_place_has_no_word_of_the_response() -> None:
    plain, long, many = failed(0, "no such row"), failed(2, "y" * MAX_PART), failed(MAX_FRAMES * 3, "deep down")
    assert plain.report.startswith("Traceback") and plain.report.endswith("LookupError: no such row\n")
    assert {one.place for one in (plain, long)} == {f"LookupError {__file__}:{deep.__code__.co_firstlineno + 2}"}
    assert long.report.endswith(f"... ({len('LookupError: ') + MAX_PART + 1} characters)\n")
    assert len(long.report.splitlines()[-1]) < MAX_PART + 40
    assert many.report.count("File ") < MAX_FRAMES and "Traceback" not in many.report
    assert many.report.endswith("deep down\n") and raised(ValueError("x")).place == "ValueError nowhere"


def test_a_long_answer_is_its_beginning_and_a_hash() -> None:
    longest, longer = "a" * MAX_ANSWER, "a" * MAX_ANSWER + "b"
    assert shortened(f" {longest}\n") == longest
    assert shortened(longer) == f"{'a' * (MAX_ANSWER - 17)} {hashlib.sha256(longer.encode()).hexdigest()[:16]}"
    assert len(shortened(longer)) == MAX_ANSWER


def test_what_is_counted_belongs_to_the_sample_under_way() -> None:
    count("requests")  # of nobody
    with counted() as outer:
        count("requests")
        with counted() as inner:
            count("prompt_tokens", 7)
            count("prompt_tokens", 2)
        count("requests")
    count("requests")
    assert (outer, inner) == ({"requests": 2}, {"prompt_tokens": 9})


def answered(function: Any, *responses: str, is_of_group: bool = False, timeout_s: float = 5.0) -> Answer | None:
    """Through the process's code for either kind of function."""

    async def soon(*arguments: Any) -> Any:
        await asyncio.sleep(0)
        return function(*arguments)

    plain = _judge(Reward(function, Form(False, is_of_group)), "p", responses, {"a": 1})
    awaited = asyncio.run(_judge_soon(Reward(soon, Form(True, is_of_group)), timeout_s, "p", responses, {"a": 1}))
    first, second = (read_answer(said, len(responses)) for said in (plain, awaited))
    assert values(first) == values(second)
    return first


def values(answer: Answer | None) -> list[tuple[Any, ...]]:
    assert answer is not None
    return [(one.kind, one.value, one.answer) for one in answer.outcomes]


def test_values_of_a_function_become_outcomes() -> None:
    def echoes(prompt: str, response: str, fields: dict[str, Any]) -> Any:
        assert (prompt, fields) == ("p", {"a": 1})
        count("requests", len(response))
        return {"one": 1, "voted": (0.5, " b "), "none": (2, None), "pair": (1.0, 2.0), "text": "1"}[response]

    assert values(answered(echoes, "one")) == [(SCORE, 1.0, None)]
    assert values(answered(echoes, "voted")) == [(SCORE, 0.5, "b")]
    assert values(answered(echoes, "none")) == [(SCORE, 2.0, None)]
    assert values(answered(echoes, "pair")) == values(answered(echoes, "text")) == [(NOT_A_NUMBER, None, None)]
    (pair,) = answered(echoes, "pair").outcomes  # pyright: ignore[reportOptionalMemberAccess]
    assert (
        pair.report
        == "a reward must be a finite number, or a pair of one and the answer as text, got tuple: (1.0, 2.0)"
    )
    assert answered(echoes, "voted").counts == {"requests": 5}  # pyright: ignore[reportOptionalMemberAccess]
    missing = answered(echoes, "else")
    assert missing is not None and missing.outcomes[0].kind == RAISED
    assert "KeyError: 'else'" in missing.outcomes[0].report and missing.outcomes[0].place.startswith("KeyError /")


def test_values_of_a_group_are_one_for_each_response() -> None:
    assert values(answered(lambda p, texts, f: [len(one) for one in texts], "a", "bb", is_of_group=True)) == [
        (SCORE, 1.0, None),
        (SCORE, 2.0, None),
    ]
    for given, got in (([1.0], "got 1 values"), (3.0, "got float")):
        answer = answered(lambda p, texts, f, given=given: given, "a", "bb", is_of_group=True)
        assert values(answer) == [(NOT_A_NUMBER, None, None)] * 2
        assert answer is not None and f"one number per response, here 2, {got}" in answer.outcomes[0].report


def test_numbers_of_numpy_and_torch_are_values() -> None:
    for given, value in (
        (np.bool_(True), 1.0), (np.array(0.25), 0.25), (torch.tensor(0.25), 0.25),
        (np.array([0.25, 0.5]), None), (np.array(float("inf")), None), (10**400, None),
    ):  # fmt: skip
        found = answered(lambda p, text, f, given=given: given, "a")
        assert [one[1] for one in values(found)] == [value], given
    for given, of_each in (
        (np.array([0, 1]) > 0, [0.0, 1.0]), (torch.tensor([0.25, 0.5]), [0.25, 0.5]), (np.zeros((2, 1)), [None] * 2),
        ([1.0, "?"], [1.0, None]),
    ):  # fmt: skip
        found = answered(lambda p, texts, f, given=given: given, "a", "bb", is_of_group=True)
        assert [one[1] for one in values(found)] == of_each, given


async def test_a_coroutine_that_takes_too_long_is_late_and_one_that_times_out_itself_has_raised() -> None:
    async def hangs(*_: Any) -> float:
        await asyncio.sleep(60)
        return 1.0

    late, own = [
        read_answer(await _judge_soon(Reward(one, Form(True, False)), 0.05, "p", ["a"], {}), 1)
        for one in (hangs, AsyncMock(side_effect=TimeoutError("of its own")))
    ]
    assert late is not None and late.outcomes == [
        Outcome(TIMEOUT, report="the reward gave no score within reward.timeout_s=0.05 seconds")
    ]
    assert own is not None and own.outcomes[0].kind == RAISED


@pytest.mark.parametrize(
    ("is_partial", "takes_s", "worth", "walls_s"),
    [
        (False, [1, 1, 1], 1.0, [4, 4, 4]),
        (False, [1, 9, 1], 0.0, [4, 4]),
        (True, [1, 9, 1], 2 / 3, [4, 4, 4]),
        (True, [4, 3, 4], 2 / 3, [4, 4, 2]),
        (True, [4, 4, 1, 1], 3 / 4, [4, 4, 1]),
        (False, [4, 4, 1, 1], 0.0, [4, 4, 1]),
    ],
)
def test_tests_of_code_share_the_time_of_a_sample(
    monkeypatch: pytest.MonkeyPatch, is_partial: bool, takes_s: list[int], worth: float, walls_s: list[float]
) -> None:
    """Of ten seconds one makes cells, and a test has four at most; one that takes longer than it has fails."""
    clock, left, given = SimpleNamespace(now=100.0), list(takes_s), []

    def passes(code: str, case: code_tests.Case, limits: Limits) -> bool:
        given.append(limits.wall_s)
        takes = left.pop(0)
        clock.now += min(takes, limits.wall_s)
        return takes <= limits.wall_s

    monkeypatch.setattr(code_tests, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(code_tests, "passes", passes)
    monkeypatch.setattr(code_tests, "check_available", lambda: None)
    judge = code_tests.code_reward(CodeConfig(wall_s=4.0, partial=is_partial), section="reward", timeout_s=10.0)
    assert judge("p", "code", {"tests": ["pass"] * len(takes_s)}) == worth
    assert given == walls_s
