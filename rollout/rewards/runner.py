"""What every response of a group is worth: the weighted sum of one or several rewards.

    score_group --> the rewards that judge the row --> a pool of processes each --> sum of weight x reward --> Judgement
                                                                       '-- a reward that failed: no sum, counted, logged

Owns: which rewards judge a row, what a reward is told, the sum, the report of failures. Does not own: processes
(reward_pool.py), nor what a missing reward means (the advantage leaves the sample out).
Invariant: score_group() returns one judgement per rollout, in order, whatever the rewards do.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from slipstream.conf.functions import keep_copy
from slipstream.conf.json_files import JsonObject
from slipstream.conf.plural import counted
from slipstream.conf.schema import RewardConfig
from slipstream.rollout.errors import RewardError
from slipstream.rollout.rewards.function import FINISH_REASON, Form
from slipstream.rollout.rewards.judge_prompt import question_of
from slipstream.rollout.rewards.reward_pool import RewardPool
from slipstream.rollout.rewards.shaping import shape
from slipstream.rollout.types import Judgement, Prompt, Rollout
from slipstream.rollout.user_processes.outcomes import SCORE, Outcome

logger = logging.getLogger(__name__)


def check_reward(config: RewardConfig) -> dict[str, Path]:
    """Set the rewards up once, in processes of their own, to find out before a run starts whether that works. Returns
    the files behind them: the name of the copy that a run keeps -> the file. Raises RewardError: one cannot; the
    message names the option and the reason."""

    async def try_to_start() -> dict[str, Path]:
        runner = RewardRunner(config, num_processes=1)
        try:
            await runner.start()
            return {copy: file for _, copy, file in runner.files()}
        finally:
            await runner.close()

    return asyncio.run(try_to_start())


class RewardRunner:
    """All rewards of a run. `max_response_tokens` is for penalties of length; copies of the files that define rewards
    go beside `log_path`; `num_processes` is in place of what the options say."""

    def __init__(
        self,
        config: RewardConfig,
        *,
        max_response_tokens: int = 0,
        log_path: Path | None = None,
        num_processes: int | None = None,
    ) -> None:
        self._config = config
        self._max_response_tokens = max_response_tokens
        self._log_path = log_path
        self._parts = config.by_name
        self._pools = {
            name: RewardPool(config.section_of(name), part, log_path, num_processes)
            for name, part in self._parts.items()
        }
        self._forms: dict[str, Form] = {}
        self._reported: set[str] = set()

    async def start(self) -> None:
        """Start every process and wait until it has imported its reward. Raises RewardError: a reward cannot be set
        up."""
        forms = await asyncio.gather(*(pool.start() for pool in self._pools.values()))
        self._forms = dict(zip(self._pools, forms, strict=True))
        num_processes = sum(part.num_processes for part in self._parts.values())
        logger.info("rewards: %s", counted(num_processes, "process"))
        for option, copy, file in self.files():
            keep_copy(option, file, None if self._log_path is None else self._log_path.with_name(copy))

    def files(self) -> Iterator[tuple[str, str, Path]]:
        """Files behind the rewards that start() has set up: the option with its value, the copy's name, the file."""
        for name, form in self._forms.items():
            section, part = self._config.section_of(name), self._parts[name]
            if ":" in part.kind and form.source:
                yield f"{section}.kind={part.kind}", self._config.source_copy(name), Path(form.source)
            if part.kind == "judge" and part.judge.prompt_file is not None:
                prompt = part.judge.prompt_file
                yield f"{section}.judge.prompt_file={prompt}", self._config.prompt_copy(name), Path(prompt)

    async def score_group(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Judgement]:
        """What each of one prompt's rollouts is worth; the log says how a reward failed. Raises RewardError: the row
        names a reward that there is not, or the runner is closed."""
        names = chosen_rewards(self._config, prompt)
        judged = await asyncio.gather(*(self._judge(name, prompt, rollouts) for name in names))
        for name, outcomes in zip(names, judged, strict=True):
            for outcome in outcomes:
                if outcome.kind != SCORE:
                    self._report_once(name, outcome, prompt)
        return [
            self._sum(dict(zip(names, values, strict=True)), len(rollout.token_ids))
            for rollout, *values in zip(rollouts, *judged, strict=True)
        ]

    def take_counts(self) -> dict[str, float]:
        """What rewards counted since the last call: "NAME_COUNT" -> number."""
        taken: dict[str, float] = {}
        for name, pool in self._pools.items():
            taken |= {f"{name}_{what}": number for what, number in pool.counts.items()}
            pool.counts.clear()
        return taken

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))

    async def _judge(self, name: str, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Outcome]:
        pool, form = self._pools[name], self._forms[name]
        text = question_of(prompt) if self._parts[name].kind == "judge" else prompt.text
        messages = prompt.messages if form.messages else None
        calls: list[tuple[list[str], object]] = [([one.text], one.finish_reason) for one in rollouts]
        if form.is_of_group:
            calls = [([one.text for one in rollouts], [one.finish_reason for one in rollouts])]
        answers = await asyncio.gather(
            *(pool.judge(text, responses, _fields(prompt, reason), messages) for responses, reason in calls)
        )
        return [outcome for answer in answers for outcome in answer.outcomes]

    def _sum(self, outcomes: Mapping[str, Outcome], num_tokens: int) -> Judgement:
        added = shape(self._config, num_tokens, self._max_response_tokens)
        parts = {name: outcome.value for name, outcome in outcomes.items()}
        weighted = [None if value is None else self._parts[name].weight * value for name, value in parts.items()]
        known = [value for value in (*weighted, *added.values()) if value is not None]
        answer = next((outcome.answer for outcome in outcomes.values() if outcome.answer is not None), None)
        return Judgement(None if None in weighted else sum(known), parts | added, answer)

    def _report_once(self, name: str, outcome: Outcome, prompt: Prompt) -> None:
        """Log the first failure of each kind in full (for exceptions: of each class and place). Count the others."""
        key = f"{name} {outcome.kind}: {outcome.place or outcome.report}"
        if key not in self._reported:
            self._reported.add(key)
            logger.warning(
                "reward %s failed (%s) on prompt %d; its sample is left out; more of this kind are only counted:\n%s",
                name,
                outcome.kind,
                prompt.prompt_id,
                outcome.report,
            )


CHOICE = "reward"
"""Column of a row that names the rewards in reward.parts that judge it."""


def chosen_rewards(config: RewardConfig, prompt: Prompt, where: str = "") -> list[str]:
    """Names of the rewards that judge a row: those that its column `reward` names, otherwise all. Raises RewardError:
    the column names a reward that is not configured, or none."""
    names = list(config.names)
    given = prompt.fields.get(CHOICE)
    if not config.parts or given is None:  # Parquet gives every row the column
        return names
    chosen = given if isinstance(given, list) else [given]
    if not chosen or not all(isinstance(one, str) and one in names for one in chosen):
        raise RewardError(
            f"{where or f'prompt {prompt.prompt_id}'}: column {CHOICE!r} is {given!r}, which must name one "
            f"of reward.parts ({', '.join(names)}), or be a list of several"
        )
    return [name for name in names if name in chosen]


def _fields(prompt: Prompt, finish_reason: object) -> JsonObject:
    return {FINISH_REASON: finish_reason, **prompt.fields}  # a column of that name wins
