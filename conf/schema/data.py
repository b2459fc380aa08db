"""Section `data`: prompts or conversations."""

from __future__ import annotations

from dataclasses import dataclass

from conf.schema.rules import at_least_or_null, require


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
