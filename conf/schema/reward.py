"""Section `reward`: what a response is worth."""

from __future__ import annotations

from dataclasses import dataclass

from conf.schema.rules import above, at_least, require


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """How responses are judged: the same kind of reward for every row."""

    kind: str = "exact_match"
    """exact_match, regex, or a function (prompt, response, fields) -> float: `FILE.py:function`, or
    `package.module:function`. Fields are the row's other columns, and `finish_reason`.
    """
    answer_key: str = "answer"
    """Column with the expected answer; for exact_match and regex."""
    pattern: str = r"(.+)"
    """regex: the first group of the first match in the response is compared with the answer."""
    keep_special_tokens: bool = False
    """Keep special tokens in the response that rewards see: the marks of channels and tool calls, and the end of
    sequence. false: only text.
    """
    timeout_s: float = 10.0
    """If a reward takes longer, its sample is left out of training and counted."""
    num_processes: int = 1
    """Processes that run rewards, apart from the controller."""
    env: tuple[str, ...] = ()
    """Names of environment variables that a reward function gets, such as [JUDGE_API_KEY]; their values are never
    written into the run folder. It also gets PATH, HOME, the locale and what its libraries need, but no other variable.
    """

    def __post_init__(self) -> None:
        require(
            self.kind in ("exact_match", "regex") or all(self.kind.rpartition(":")),
            f"reward.kind must be exact_match, regex, FILE.py:function or package.module:function, got {self.kind!r}",
        )
        require(
            not (self.keep_special_tokens and self.kind == "exact_match"),
            "reward.keep_special_tokens=true contradicts reward.kind=exact_match: with the end-of-sequence token in it "
            "a response equals no answer; choose reward=regex, or a function",
        )
        above(0, "reward", timeout_s=self.timeout_s)
        at_least(1, "reward", num_processes=self.num_processes)
