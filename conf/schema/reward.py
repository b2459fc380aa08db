"""Section `reward`: what a response is worth."""

import math
import re
from dataclasses import dataclass, field, fields
from typing import Any

from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import JsonObject, is_object
from slipstream.conf.schema.rules import If, above, at_least, read_if, require, section_of
from slipstream.conf.schema.teacher import AskedModel

SHIPPED_REWARDS = ("exact_match", "regex", "math", "judge", "code", "none")
"""Values of reward.kind that are not functions of the user's own."""
READ_AN_ANSWER = ("exact_match", "regex", "math")
"""Kinds that compare the response with the row's answer."""
ANSWER = "answer"
"""The column of it; data.columns.answer says where rows have another."""
MIN_SANDBOX_BYTES = 1 << 20
"""Least memory and disk that a sandbox may be given."""
SHAPINGS = ("overlong_penalty", "length_penalty")
"""What a response's length adds to the sum of the rewards (rollout.rewards.shaping)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeConfig(AskedModel):
    """kind=judge: another model grades the response, over OpenAI's chat protocol. Without an answer, or without a
    number in it, the sample has no reward."""

    prompt_file: str | None = None
    """Text file with what it is asked; {{prompt}}, {{response}} and {{COLUMN}} stand for those. The last number of the
    answer is the score. null: a prompt that asks for one from 0 to 10."""
    scale: tuple[float, float] = (0.0, 10.0)
    """The score that is worth 0, and the one that is worth 1. A score out of this range is none."""
    extra: dict[str, Any] = field(default_factory=JsonObject)
    """Fields of the request beside temperature=0 and max_tokens=512, or in their place, such as
    {reasoning_effort: low}. null: the field is not sent."""
    requests_per_minute: int | None = None
    """Requests that leave in a minute, from all processes. null: as many as reward.max_concurrent lets."""
    cache_path: str | None = None
    """SQLite file with verdicts by what was asked; runs may share it. null: judge_cache.sqlite in the run folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeConfig:
    """kind=code: the response's code runs with each of the row's tests in a sandbox without network. What it and the
    processes that it starts exceed is a failed test. A row's column `tests` has Python text, such as asserts, that runs
    after the response's code; a list of such texts; or a list of {input, output}, standard input and expected standard
    output."""

    partial: bool = False
    """The reward is the share of tests that pass. false: 1 if all do, otherwise 0."""
    wall_s: float = 10.0
    """Seconds of one test, also of CPU time of all its processes; tests of a response share reward.timeout_s."""
    memory_bytes: int = 1 << 30
    """Memory of one test's processes together. They may be 32, and write 64 MiB to /tmp, which is kept in memory;
    nothing else can be written to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPart:
    """One reward: the whole section if it is the only one, or a value of reward.parts."""

    kind: str = "exact_match"
    """exact_match, regex, math (these compare with the column `answer`), judge, code, none (0 for every response:
    algorithm=distill needs no reward), or a function: `FILE.py:function`, `package.module:function`. It is (prompt,
    response, fields) -> number, or (prompt, responses, fields) -> list of numbers for a whole group; both may be async.
    Fields are the row's other columns, and `finish_reason`."""
    weight: float = 1.0
    """What the reward is multiplied by before it is added to the others."""
    pattern: str = field(default=r"(.+)", metadata=read_if(If("reward.kind=regex", cure="choose reward=regex")))
    """regex: the first group of the first match in the response is compared with the answer."""
    timeout_s: float = 10.0
    """If a reward takes longer, its sample is left out of training and counted."""
    num_processes: int = 1
    """Processes that run the reward at the same time, apart from the controller."""
    max_concurrent: int = field(
        default=64, metadata=read_if(If("reward.kind=*:*|judge", cure=": set reward.num_processes"))
    )
    """Async functions and judge: samples (or groups) that one process judges at once. A plain function judges one."""
    env: tuple[str, ...] = field(
        default=(), metadata=read_if(If("reward.kind=*:*", cure=": only functions read the environment"))
    )
    """Names of environment variables that a reward function gets, such as [JUDGE_API_KEY]; their values are never
    written into the run folder. It also gets PATH, HOME, the locale and what its libraries need, but no other variable.
    """
    judge: JudgeConfig = field(
        default_factory=JudgeConfig, metadata=read_if(If("reward.kind=judge", cure="choose reward=judge"))
    )
    code: CodeConfig = field(
        default_factory=CodeConfig, metadata=read_if(If("reward.kind=code", cure="choose reward=code"))
    )

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that every row must have. A function gets all columns and needs none that is known here."""
        if self.kind == "code":
            return ("tests",)
        return (ANSWER,) if self.kind in READ_AN_ANSWER else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig(RewardPart):
    """How responses are judged: by one reward, or by the weighted sum of several (reward.parts)."""

    parts: dict[str, Any] = field(default_factory=JsonObject)
    """Several rewards by name, each with the options of this section that describe one: reward.parts.right.kind=regex
    reward.parts.brevity.kind=rewards.py:brevity reward.parts.brevity.weight=0.2. Empty: the section itself is the only
    reward."""
    keep_special_tokens: bool = False
    """Keep special tokens in the response that rewards see: the marks of channels and tool calls, and the end of
    sequence. false: only text."""

    overlong_tokens: int = 0
    """Soft overlong punishment (DAPO, arXiv:2503.14476, equation 13): the last so many of rollout.sampling.max_tokens
    tokens take the reward down evenly, by overlong_penalty at the end. 0: none."""
    overlong_penalty: float = field(
        default=1.0, metadata=read_if(If("reward.overlong_tokens!=0", cure="set reward.overlong_tokens"))
    )
    """What the longest response loses by overlong_tokens."""
    length_penalty: float = 0.0
    """What the longest response loses; a shorter one loses in proportion to its tokens. 0: none."""

    def __post_init__(self) -> None:
        at_least(0, "reward", self, "overlong_tokens")
        for penalty in (self.overlong_penalty, self.length_penalty):
            require(math.isfinite(penalty), f"reward's penalties must be finite, got {penalty}")
        for name, part in self.by_name.items():
            section = self.section_of(name)
            _check_part(section, part)
            require(
                re.fullmatch(r"[A-Za-z_]\w*", name) is not None and name not in SHAPINGS,
                f"{section}: a reward's name must be a word of letters, digits and underscores and neither of "
                f"{', '.join(SHAPINGS)}, got {name!r}",
            )
            require(
                not (self.keep_special_tokens and part.kind == "exact_match"),
                f"reward.keep_special_tokens=true contradicts {section}.kind=exact_match: with the end-of-sequence "
                "token in it a response equals no answer; choose reward=regex, or a function",
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all rewards. The only one is named after its kind, or after its function."""
        return tuple(self.parts) or (self.kind.rpartition(":")[2],)

    @property
    def shapings(self) -> tuple[str, ...]:
        asked = (self.overlong_tokens > 0, self.length_penalty != 0)
        return tuple(name for name, is_asked in zip(SHAPINGS, asked, strict=True) if is_asked)

    @property
    def by_name(self) -> dict[str, RewardPart]:
        """Every reward; a ConfigError where a value of reward.parts is not the options of one."""
        if not self.parts:
            only = RewardPart(**{item.name: getattr(self, item.name) for item in fields(RewardPart)})
            return {self.names[0]: only}
        return {name: reward_part(f"reward.parts.{name}", values) for name, values in self.parts.items()}

    def section_of(self, name: str) -> str:
        return f"reward.parts.{name}" if self.parts else "reward"

    def source_copy(self, name: str) -> str:
        """What a run's folder calls its copy of the file that defines a reward."""
        return f"reward_source_{name}.py" if self.parts else "reward_source.py"

    def prompt_copy(self, name: str) -> str:
        """What a run's folder calls its copy of a judge's prompt_file."""
        return f"reward_prompt_{name}.txt" if self.parts else "reward_prompt.txt"

    @property
    def longest_timeout_s(self) -> float:
        """Longest time that the judging of one response may take."""
        return max(part.timeout_s for part in self.by_name.values())


def reward_part(section: str, values: object) -> RewardPart:
    """A RewardPart from plain mappings. A ConfigError begins with the section."""
    if not is_object(values):
        raise ConfigError(f"{section} must be a mapping of options, got {values!r}")
    return section_of(RewardPart, section, values)


def _check_part(section: str, part: RewardPart) -> None:
    kinds = ", ".join(SHIPPED_REWARDS)
    require(
        part.kind in SHIPPED_REWARDS or all(part.kind.rpartition(":")),
        f"{section}.kind must be {kinds}, FILE.py:function or package.module:function, got {part.kind!r}",
    )
    require(math.isfinite(part.weight), f"{section}.weight must be finite, got {part.weight}")
    above(0, section, part, "timeout_s")
    if part.kind == "judge":
        _check_judge(section, part)
    above(0, f"{section}.code", part.code, "wall_s")
    at_least(MIN_SANDBOX_BYTES, f"{section}.code", part.code, "memory_bytes")
    at_least(1, section, part, "num_processes", "max_concurrent")


def _check_judge(section: str, part: RewardPart) -> None:
    judge = part.judge
    judge.check_address(f"{section}.judge")
    require(bool(judge.model), f"{section}.judge.model must be the name of a model at {judge.base_url}, got nothing")
    require(
        len(judge.scale) == 2 and 0 < judge.scale[1] - judge.scale[0] < math.inf,
        f"{section}.judge.scale must be two numbers, the lower one first, got {list(judge.scale)}",
    )
    at_least(1, f"{section}.judge", judge, "requests_per_minute")
    if judge.requests_per_minute is not None:
        wait_s = 60 * part.max_concurrent * part.num_processes / judge.requests_per_minute
        require(
            wait_s < part.timeout_s,
            f"{section}.judge.requests_per_minute={judge.requests_per_minute} lets the last of "
            f"{section}.max_concurrent={part.max_concurrent} samples wait {wait_s:g} s, and "
            f"{section}.timeout_s={part.timeout_s:g}; lower {section}.max_concurrent, or raise {section}.timeout_s",
        )
