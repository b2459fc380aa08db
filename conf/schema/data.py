"""Sections `data` and `reward`: prompts or conversations, and what a response is worth."""

from __future__ import annotations

from dataclasses import dataclass

from conf.schema.rules import above, at_least, at_least_or_null, require


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Prompts, from JSONL or Parquet: a `prompt` column (text, or a list of chat messages) and any further columns,
    which rewards see.
    """

    path: str | None = None
    """Training prompts: a .jsonl or .parquet file. Relative paths start at the working directory; `pkg://NAME` is a
    file that ships in conf/data.
    """
    eval_path: str | None = None
    """Held-out prompts, same format. null: no evaluation."""
    prompt_key: str = "prompt"
    """Name of the prompt column."""
    response_key: str = "response"
    """algorithm=sft: name of the column with the answer to `prompt_key`, for rows without a list of messages."""
    messages_key: str = "messages"
    """algorithm=sft: name of the column with a conversation, a list of {role, content}. The model learns its assistant
    turns.
    """
    max_sequence_tokens: int | None = None
    """algorithm=sft: longest conversation. A longer one is refused before the run starts, with its line number. null:
    any length.
    """
    max_prompt_tokens: int | None = None
    """Longest prompt. A longer one is refused before the run starts, with its line number. null:
    rollout.max_model_len - rollout.sampling.max_tokens.
    """
    shuffle: bool = True
    """Take prompts in a random order, seeded by run.seed and new in each epoch. false: in the file's order."""
    add_special_tokens: bool = True
    """Let the tokenizer add its special tokens to plain-text prompts. Chat prompts always go through the chat
    template.
    """

    def __post_init__(self) -> None:
        at_least_or_null(1, "data", max_prompt_tokens=self.max_prompt_tokens)
        at_least_or_null(2, "data", max_sequence_tokens=self.max_sequence_tokens)
        for name in ("prompt_key", "response_key", "messages_key"):
            require(bool(getattr(self, name)), f"data.{name} must name a column, got nothing")


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
