"""Reward 1 for a response whose final answer is mathematically equal to the row's, judged by math-verify and SymPy.

Owns the limits within which a hostile expression is judged. math-verify's own time limits are signals: they work
because a plain reward judges in the main thread of its process, and they stop SymPy wherever that runs Python. One call
of C that takes too long (a power of huge integers) ends with the process, after reward.timeout_s.
"""

import logging
import resource
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

from slipstream.conf.failures import outcome_of
from slipstream.conf.json_files import JsonObject
from slipstream.rollout.rewards.answer_text import answer_of

MAX_MEMORY_BYTES = 4 << 30
"""Address space of the process; an expression that needs more is not equal to the answer."""
LONGEST_TO_READ = 64
"""Characters of an expression up to which equal ones written in two ways are one answer of a majority vote."""
CALLS_PER_SAMPLE = 6
"""Calls of math-verify that have a time limit of their own: the answer, the response, and two readings of each."""


def math_reward(*, timeout_s: float) -> Callable[[str, str, JsonObject], tuple[float, str | None]]:
    """(prompt, response, fields) -> (1.0 or 0.0, the expression that the response gives as its answer).

    That is its last boxed expression, or else its last one. 1.0: it equals the answer (a number, an expression, or
    LaTeX). 0.0 also if there is none, or if comparing takes too long. Limits this process's memory."""
    for library in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(library).setLevel(logging.CRITICAL)  # they log whole responses
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MAX_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, MAX_MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    limit_s = max(1, int(timeout_s / CALLS_PER_SAMPLE))

    @lru_cache(maxsize=4096)
    def expected(answer: str) -> tuple[Any, ...]:
        is_marked = any(mark in answer for mark in ("\\boxed", "$", "\\(", "\\["))
        return tuple(parse(answer if is_marked else f"\\boxed{{{answer}}}", parsing_timeout=limit_s))

    def judge(prompt: str, response: str, fields: JsonObject) -> tuple[float, str | None]:
        answer = expected(answer_of(fields))
        if not answer:
            raise ValueError(f"math-verify finds no expression in the answer {answer_of(fields)!r}")
        found = parse(response, parsing_timeout=limit_s)
        return float(verify(list(answer), found, timeout_seconds=limit_s)), _in_words(found)

    return judge


def _in_words(found: Sequence[object]) -> str | None:
    """One text for an expression, however it is written; None if there is none. A long one stays as it is written,
    because SymPy may take minutes for it."""
    if not found:
        return None
    written = str(found[-1]) if isinstance(found[-1], str) else ""
    if len(written) > LONGEST_TO_READ:
        return written
    text = outcome_of(str, found[0])  # SymPy refuses an integer of thousands of digits, for one
    if isinstance(text, Exception):
        return written
    number = text if "e" in text else outcome_of(Fraction, text)  # 5.00000000000000 is 5
    return str(number) if isinstance(number, Fraction) else text
