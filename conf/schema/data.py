"""Section `data`: prompts, conversations, or pairs of answers."""

import math
import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from slipstream.conf.json_files import JsonObject
from slipstream.conf.schema.rules import If, at_least, read_if, require


class Order(StrEnum):
    """In which order rows come."""

    shuffled = "shuffled"
    given = "given"
    middling = "middling"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Prompts: rows with a `prompt` column (text, or a list of chat messages) and any further columns, which rewards
    see. docs/data.md has the forms of a source."""

    path: str | None = None
    """Training rows: a .jsonl or .parquet file, several Parquet files as one (train-*.parquet), a folder that
    `Dataset.save_to_disk` wrote, or a dataset of the Hugging Face Hub, `hf:REPO:SPLIT` or `hf:REPO:CONFIG:SPLIT`
    (hf:openai/gsm8k:main:train). Relative paths start at the working directory; `pkg://NAME` is a file that ships in
    conf/data."""
    sources: tuple[str, ...] = ()
    """Several of these instead of `path`, mixed."""
    weights: tuple[float, ...] = field(default=(), metadata=read_if(If("data.sources!=[]", cure="give data.sources")))
    """How much of the training each of `sources` gives, such as [3, 1]; the sum does not matter. []: all the same."""
    eval_path: str | None = None
    """Held-out rows, one source of the same forms. null: no evaluation."""
    eval_sets: dict[str, str] = field(default_factory=dict[str, str])
    """Several held-out sets instead of `eval_path`, by names of your own: `data.eval_sets.aime=aime.jsonl` is the set
    `aime`, whose figures are eval/aime/reward and so on. docs/evaluation.md."""
    columns: dict[str, str] = field(default_factory=dict[str, str])
    """Columns under other names: `data.columns.answer=reward_model.ground_truth` adds a column `answer` with a field of
    a struct; of `question|problem` the first that a row has (null is none) is taken."""
    stream: bool = False
    """Read training rows while the run uses them, for what does not fit in memory. 1,000 rows of each source are
    shuffled among each other. Rows after these are checked when they are read: a wrong one then ends the run, its state
    saved."""
    stream_buffer_rows: ClassVar[int] = 1000
    """Rows of each source that are shuffled among each other; as many more are read ahead meanwhile."""
    order: Order = Order.shuffled
    """shuffled: rows come at random, seeded by run.seed, each once in an epoch. given: in the file's order. middling:
    prompts are drawn, and those that are solved now and then come more often than those that are always or never
    solved; rewards count as success rates, those below 0 as 0 and those above 1 as 1."""
    curriculum_floor: ClassVar[float] = 0.1
    """Least weight of a prompt in the draw; prompts solved half of the time, and those not seen yet, have 1."""
    prompt_key: str = "prompt"
    """Name of the prompt column."""
    max_sequence_tokens: int | None = field(
        default=None, metadata=read_if(If("algorithm.objective!=policy", cure="choose algorithm=sft or algorithm=dpo"))
    )
    """algorithm=sft: longest conversation. algorithm=dpo: longest prompt with an answer. A longer one is refused, with
    its line number. null: any length."""
    max_prompt_tokens: int | None = None
    """Longest prompt; longer ones are refused. null: rollout.max_model_len - rollout.sampling.max_tokens."""
    drop_too_long: bool = False
    """Leave out rows that are longer than these two allow, instead of refusing them. The start of a run tells how many
    (with `stream`: how many of the first ones)."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=JsonObject)
    """Further variables of the model's chat template, for rows, held-out rows and agents' requests:
    `data.chat_template_kwargs.enable_thinking=false`. A row's column of this name, and a request's field, go first."""

    def __post_init__(self) -> None:
        at_least(1, "data", self, "max_prompt_tokens")
        at_least(2, "data", self, "max_sequence_tokens")
        require(bool(self.prompt_key), "data.prompt_key must name a column, got nothing")
        require(
            self.path is None or not self.sources,
            f"data.path={self.path} and data.sources={list(self.sources)} are both set; give all of them in "
            "data.sources, and data.path=null (or choose data=files)",
        )
        require(
            not self.sources or len(self.weights) in (0, len(self.sources)),
            f"data.weights must have one number for each of data.sources, got {len(self.weights)} for "
            f"{len(self.sources)}",
        )
        require(
            len(set(self.sources)) == len(self.sources),
            f"data.sources names a source twice: {list(self.sources)}; give it a larger weight instead",
        )
        for weight in self.weights:
            require(0 < weight < math.inf, f"data.weights must be > 0, got {weight:g}")
        require(
            self.eval_path is None or not self.eval_sets,
            f"data.eval_path={self.eval_path} and data.eval_sets ({', '.join(self.eval_sets)}) are both set; give all "
            "of them in data.eval_sets, and data.eval_path=null",
        )
        for name, source in self.eval_sets.items():
            require(
                re.fullmatch("[A-Za-z][A-Za-z0-9_]*", name) is not None,
                f"data.eval_sets.{name}: the name of a set is part of metrics' names: letters, digits and _, a letter "
                "first",
            )
            require(bool(source), f"data.eval_sets.{name} must name a source of rows, got nothing")
        for name, column in self.columns.items():
            require(bool(column), f"data.columns.{name} must name a column, got nothing")
        require(
            not (self.stream and self.order is Order.middling),
            "data.order=middling contradicts data.stream=true: it draws from all prompts by their success rates; "
            "set data.stream=false, or data.order=shuffled",
        )

    @property
    def held_out_sources(self) -> dict[str, str]:
        """Name -> source of every held-out set; the name of `eval_path` is empty."""
        return dict(self.eval_sets) if self.eval_path is None else {"": self.eval_path}

    @property
    def training_sources(self) -> tuple[str, ...]:
        """`sources`, or `path` as the only one; empty when neither is set."""
        return tuple(self.sources) or (() if self.path is None else (self.path,))
