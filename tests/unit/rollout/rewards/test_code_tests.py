"""The reward `code`: where the code is, which tests pass, and what a response gains by cheating."""

import asyncio
import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
from fakes.reward_runs import running

from slipstream.conf.schema import CodeConfig, RewardConfig
from slipstream.rollout.errors import RewardError
from slipstream.rollout.rewards import code_tests
from slipstream.rollout.rewards.code_tests import Case, cases_of, code_of
from slipstream.rollout.rewards.runner import check_reward
from slipstream.rollout.sandbox.sandbox import ROOT, Ended, Limits
from slipstream.rollout.types import Prompt, Rollout

DOUBLE = "def double(x):\n    return 2 * x\n"
READS = "print(2 * int(input()))"
ASSERTS = "assert double(2) == 4\nassert double(-1) == -2"


def fenced(code: str, language: str = "python") -> str:
    return f"Here it is:\n```{language}\n{code}\n```\nDone."


@pytest.mark.parametrize(
    ("response", "code"),
    [
        (fenced(DOUBLE), DOUBLE + "\n"),
        (fenced(DOUBLE, ""), DOUBLE + "\n"),
        (fenced("wrong") + fenced(DOUBLE, "py"), DOUBLE + "\n"),
        (fenced("x", "bash"), fenced("x", "bash")),
        (DOUBLE, DOUBLE),
        ("```python\nnever closed", "```python\nnever closed"),
    ],
)
def test_code_is_the_last_fenced_block_of_python_or_the_whole_response(response: str, code: str):
    assert code_of(response) == code


@pytest.mark.parametrize(
    ("tests", "cases"),
    [
        ("assert f()", [Case("assert f()", None)]),
        (["a", "b"], [Case("a", None), Case("b", None)]),
        ([{"input": "1", "output": "2"}], [Case("1", "2")]),
        ({"inputs": ["1", "2"], "outputs": ["3", "4"]}, [Case("1", "3"), Case("2", "4")]),
        (json.dumps([{"input": "1", "output": "2"}]), [Case("1", "2")]),
        ("[x] = f()", [Case("[x] = f()", None)]),
    ],
)
def test_tests_have_one_of_three_forms(tests: Any, cases: list[Case]):
    assert cases_of(tests) == cases


@pytest.mark.parametrize(
    "tests", [[], 3, None, "", " \n", [{"input": 1, "output": "2"}], [["a"]], {"inputs": ["1", "2"], "outputs": ["3"]}]
)
def test_tests_of_another_form_are_an_error(tests: Any):
    with pytest.raises(ValueError, match=r"empty list of tests|a test must be text or|lists of one length"):
        cases_of(tests)


JUDGED = [
    (DOUBLE, ASSERTS, 1.0),
    ("def double(x):\n    return x + 2\n", ASSERTS, 0.0),
    ("def double(x)", ASSERTS, 0.0),
    ("", ASSERTS, 0.0),
    (READS, [{"input": "4", "output": "8"}, {"input": "5\n", "output": "10\n"}], 1.0),
    (READS, [{"input": "4", "output": "8"}, {"input": "5", "output": "11"}], 0.0),
    ("print('8 \\n')", [{"input": "4", "output": "8"}], 1.0),
    (f"{DOUBLE}\nif __name__ == '__main__':\n    print(double(4))", [{"input": "", "output": "8"}], 1.0),
    ("while True:\n    pass", ASSERTS, 0.0),
    ("import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass", ASSERTS, 0.0),
    ("while True:\n    print('x' * 100_000)", ASSERTS, 0.0),
    (f"{DOUBLE}\n# \ud800 is no character", ASSERTS, 1.0),
    # cheats
    ("import os\nos._exit(0)", ASSERTS, 0.0),
    ("raise SystemExit(0)", ASSERTS, 0.0),
    ("import sys\nsys.exit = lambda *a: None\nprint('passed')\nraise SystemExit", ASSERTS, 0.0),
    ("import os\nprint('8', flush=True)\nos.kill(os.getpid(), 9)", [{"input": "4", "output": "8"}], 0.0),
]


def prompt(tests: Any) -> Prompt:
    return Prompt(0, (1,), "p", {"tests": tests})


def rollout(code: str) -> Rollout:
    return Rollout([5], [0.0], [0], fenced(code), "stop")


def can_run(config: RewardConfig) -> bool:
    """False, after a look at the refusal, where this machine has no sandbox (rollout.sandbox)."""
    try:
        check_reward(config)
    except RewardError as e:
        assert "kind=code: this machine runs no code of responses, because it cannot do so safely: " in str(e)
        return False
    return True


async def rewards_of(config: RewardConfig, judged: list[tuple[str, Any]]) -> list[float | None]:
    async with running(config) as runner:
        return [(await runner.score_group(prompt(tests), [rollout(code)]))[0].reward for code, tests in judged]


CODE = RewardConfig(kind="code", timeout_s=120, code=CodeConfig(wall_s=5))


def test_a_response_is_worth_what_its_code_does():
    if can_run(CODE):
        found = asyncio.run(rewards_of(CODE, [(code, tests) for code, tests, _ in JUDGED]))
        assert found == [expected for *_, expected in JUDGED]


def test_a_machine_that_cannot_is_refused_before_the_run():
    """The filter of a container refuses namespaces to this program and to the reward processes that it starts."""
    code = """
import ctypes
from slipstream.conf.schema import RewardConfig
from slipstream.rollout.errors import RewardError
from slipstream.rollout.rewards.runner import check_reward
from slipstream.rollout.sandbox import syscalls
syscalls.install(ctypes.CDLL(None, use_errno=True), syscalls.program())
try:
    check_reward(RewardConfig(parts={"tests": {"kind": "code"}}))
except RewardError as e:
    print(e)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    told = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, check=True)
    assert re.match(
        r"reward\.parts\.tests\.kind=code: this machine runs no code of responses, because it cannot do so safely: "
        "unshare: Operation not permitted; a seccomp filter is on, as in a container: start it with",
        told.stdout.decode(),
    )


@pytest.mark.parametrize(
    ("printed", "is_right"), [("a\n  b\n", True), ("a  \n  b \n\n", True), ("a\nb\n", False), ("  a\n  b\n", False)]
)
def test_lines_are_compared_with_their_indentation(
    printed: str, is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_tests, "run", lambda *_, **__: Ended(0, "", printed.encode(), b""))
    assert code_tests.passes("", Case("", "a\n  b"), Limits()) is is_right
