"""The reward `math`: which answers are equal, and that no expression takes more than its sample's time."""

import pytest
from fakes.reward_runs import running

from slipstream.conf.schema import RewardConfig
from slipstream.rollout.types import Prompt, Rollout

CASES = [
    ("42", "so the answer is \\boxed{42}", 1.0),
    ("42", "\\boxed{41}. Let me check that again. It is \\boxed{42}", 1.0),
    ("42", "42 it is not: \\boxed{41}", 0.0),
    ("42", "I do not know", 0.0),
    ("42", "", 0.0),
    (42, "\\boxed{42.0}", 1.0),
    ("1/2", "\\boxed{\\frac{1}{2}}", 1.0),
    ("\\frac{1}{2}", "it is 0.5", 1.0),
    ("x^2+1", "\\boxed{1+x^2}", 1.0),
    ("x^2+1", "\\boxed{(x+1)^2}", 0.0),
    ("\\sqrt{8}", "\\boxed{2\\sqrt 2}", 1.0),
    ("(1,2)", "\\boxed{(1,2)}", 1.0),
    ("$\\frac{3}{4}$", "\\boxed{0.75}", 1.0),
    ("A", "\\boxed{A}", 1.0),
]


def prompt(answer: object) -> Prompt:
    return Prompt(0, (1,), "p", {"answer": answer})


def rollout(text: str) -> Rollout:
    return Rollout([5], [0.0], [0], text, "stop")


async def test_answers_are_compared_by_what_they_mean():
    async with running(RewardConfig(kind="math", timeout_s=60)) as runner:
        for answer, response, expected in CASES:
            (judgement,) = await runner.score_group(prompt(answer), [rollout(response)])
            assert (answer, response, judgement.reward) == (answer, response, expected)
        responses = ("\\boxed{\\frac{1}{2}}", "so it is 1/2", "it is 0.5", "\\boxed{5.0}", "1e3", "I do not know")
        written = [rollout(response) for response in responses]
        votes = [judgement.answer for judgement in await runner.score_group(prompt("2"), written)]
        assert votes == ["1/2", "1/2", "1/2", "5", "1", None]


HOSTILE = [
    "\\boxed{9^{9^{9^{9}}}}",
    "\\boxed{(10^{10})!}",
    "\\boxed{" + "(" * 5000 + "1" + ")" * 5000 + "}",
    "1" * 100_000,
]


async def test_a_hostile_expression_costs_its_sample_and_no_other():
    """Judged as wrong when math-verify's own limits end it, left out when the end of its process does."""
    async with running(RewardConfig(kind="math", timeout_s=12, num_processes=2)) as runner:
        judged = await runner.score_group(prompt("42"), [rollout(text) for text in (*HOSTILE, "\\boxed{42}")])
    *hostile, honest = (judgement.reward for judgement in judged)
    assert honest == 1.0
    assert set(hostile) <= {0.0, None}


async def test_an_answer_without_an_expression_leaves_the_sample_out(caplog: pytest.LogCaptureFixture):
    async with running(RewardConfig(kind="math")) as runner:
        (judgement,) = await runner.score_group(prompt(""), [rollout("\\boxed{42}")])
    assert judgement.reward is None
    assert "math-verify finds no expression in the answer ''" in caplog.text
