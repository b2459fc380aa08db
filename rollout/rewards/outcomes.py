"""What became of one sample, and how it is written in a message between the run and a reward process.

Owns the kinds of failure and the check of an answer: a reward process may have written anything.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.rollout.plain_number import plain_number

SCORE = "score"
RAISED = "raised"
NOT_A_NUMBER = "not_a_number"
TIMEOUT = "timeout"
MAX_ANSWER = 200
"""Longest answer that is kept as it is, in characters; of a longer one the beginning and a hash."""
TOLD = (RAISED, NOT_A_NUMBER, TIMEOUT)
"""Kinds of failure after which a reward process goes on: it reports them itself."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one sample."""

    kind: str
    """SCORE, or the kind of failure."""
    value: float | None = None
    report: str = ""
    place: str = ""
    """Class of an exception and where it was raised, without its message, which may contain the response."""
    answer: str | None = None
    """What the response answers, for majority votes."""

    @property
    def as_message(self) -> list[object]:
        """The outcome as a reward process writes it."""
        if self.kind != SCORE:
            return [self.kind, self.report, self.place]
        return [SCORE, self.value] if self.answer is None else [SCORE, self.value, shortened(self.answer)]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a reward process says about one sample, or about the samples of one group."""

    outcomes: list[Outcome]
    """One per response."""
    counts: dict[str, float]
    """What the reward counted, such as the tokens that a judge read."""


def shortened(answer: str) -> str:
    """The answer without white space around it, or what stands for a long one."""
    answer = answer.strip()
    if len(answer) <= MAX_ANSWER:
        return answer
    return f"{answer[: MAX_ANSWER - 17]} {hashlib.sha256(answer.encode(errors='replace')).hexdigest()[:16]}"


def failed(kind: str, report: str, num_responses: int) -> Answer:
    """The answer when all responses share one failure."""
    return Answer([Outcome(kind, report=report)] * num_responses, {})


def read_answer(message: Sequence[object], num_responses: int) -> Answer | None:
    """[outcomes, counts] as a reward process wrote them; None if that is no answer about so many responses."""
    match message:
        case [list(outcomes), dict(counts)] if len(outcomes) in (1, num_responses):
            read = [_outcome(one) for one in outcomes] * (num_responses // len(outcomes))
            if all(plain_number(value) is not None for value in counts.values()):
                known = [one for one in read if one is not None]
                return Answer(known, dict(counts)) if len(known) == len(read) else None
    return None


def _outcome(message: object) -> Outcome | None:
    match message:
        case ["score", float() as value] if math.isfinite(value):
            return Outcome(SCORE, value)
        case ["score", float() as value, str() as answer] if math.isfinite(value) and len(answer) <= MAX_ANSWER:
            return Outcome(SCORE, value, answer=answer)
        case [str() as kind, str() as report, str() as place] if kind in TOLD:
            return Outcome(kind, report=report, place=place)
        case _:
            return None
