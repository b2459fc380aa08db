"""Reward for code that passes the row's tests, each run in a cell of its own (rollout.sandbox).

Owns: where the code is in a response, the forms that tests may have, and what passing means. Does not own the cell.

    tests: text              Python that runs after the response's code, such as asserts
           list of texts     several of them
           list of {input, output}, or {inputs, outputs}
                             programs: what is read from standard input, what must be on standard output

A test of the third form is compared outside of the cell. Python tests run in the interpreter that ran the response's
code before, which can therefore tamper with them if it knows how; it is not told by which sign a test is known to have
passed until its own code has run.
"""

import contextlib
import json
import re
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from slipstream.conf.json_files import JsonObject
from slipstream.conf.schema import CodeConfig
from slipstream.rollout.errors import RewardError
from slipstream.rollout.sandbox.sandbox import Limits, SandboxUnavailable, check_available, run

FENCED = re.compile(r"```[ \t]*(?:python|py|python3)?[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)
RESERVED_S = 1.0
"""Part of reward.timeout_s that is left for the making of cells."""
DRIVER = """
import sys
names = {"__name__": "solution"}
exec(compile(open("solution.py").read(), "solution.py", "exec"), names)
sign, _, tests = sys.stdin.read().partition("\\n")
exec(compile(tests, "tests.py", "exec"), names)
print("\\n" + sign)
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One test. Example: Case("assert twice(2) == 4", None), or Case("2\\n", "4\\n")."""

    given: str
    """Python code, or standard input."""
    expected: str | None
    """Standard output; None: `given` is Python code."""


def code_reward(config: CodeConfig, *, section: str, timeout_s: float) -> Callable[[str, str, JsonObject], float]:
    """(prompt, response, fields) -> 1.0 if the response's code passes all tests, otherwise 0.0, or with
    reward.code.partial the share of tests that it passes. Raises RewardError: this machine cannot run code in a
    cell."""
    try:
        check_available()
    except SandboxUnavailable as e:
        raise RewardError(
            f"{section}.kind=code: this machine runs no code of responses, because it cannot do so safely: {e}"
        ) from e
    limits = Limits(wall_s=config.wall_s, cpu_s=config.wall_s, memory_bytes=config.memory_bytes)

    def judge(prompt: str, response: str, fields: JsonObject) -> float:
        deadline = time.monotonic() + timeout_s - RESERVED_S
        code, cases = code_of(response), cases_of(fields["tests"])
        num_passed = 0
        for case in cases:
            left_s = deadline - time.monotonic()
            if left_s > 0 and passes(code, case, replace(limits, wall_s=min(limits.wall_s, left_s))):
                num_passed += 1
            elif not config.partial:
                return 0.0
        return num_passed / len(cases)

    return judge


def code_of(response: str) -> str:
    """The last fenced block of Python, or the whole response if it has none."""
    blocks = FENCED.findall(response)
    return blocks[-1] if blocks else response


def cases_of(tests: object) -> list[Case]:
    """The row's tests. Raises ValueError: they have none of the forms that the module's docstring lists."""
    if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(ValueError):  # or Python that begins with a bracket
            tests = json.loads(tests)
    if isinstance(tests, dict) and isinstance(inputs := tests.get("inputs"), list):
        if not isinstance(outputs := tests.get("outputs"), list) or len(outputs) != len(inputs):
            raise ValueError("inputs and outputs must be lists of one length")
        tests = [{"input": given, "output": made} for given, made in zip(inputs, outputs, strict=True)]
    cases = [_case(one) for one in (tests if isinstance(tests, list) else [tests])]
    if not cases:
        raise ValueError("the row has an empty list of tests")
    return cases


def _case(test: object) -> Case:
    match test:
        case str() if test.strip():
            return Case(test, None)
        case {"input": str() as given, "output": str() as made}:
            return Case(given, made)
    raise ValueError(f"a test must be text or {{input: text, output: text}}, got {test!r:.200}")


def passes(code: str, case: Case, limits: Limits) -> bool:
    """Whether the code passes one test within the limits. Raises SandboxUnavailable: no cell could be made."""
    files = {"solution.py": code}
    if case.expected is not None:
        ended = run([sys.executable, "solution.py"], files=files, stdin=case.given, limits=limits)
        return ended.status == 0 and _lines(ended.stdout.decode(errors="replace")) == _lines(case.expected)
    sign = secrets.token_hex(16)
    ended = run(
        [sys.executable, "driver.py"],
        files={**files, "driver.py": DRIVER},
        stdin=f"{sign}\n{case.given}",
        limits=limits,
    )
    return ended.status == 0 and ended.stdout.endswith(f"\n{sign}\n".encode())


def _lines(text: str) -> list[str]:
    """Lines without white space at their ends, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
