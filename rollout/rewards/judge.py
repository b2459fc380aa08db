"""Reward that another model gives, over OpenAI's chat protocol.

    fill the prompt --> cache? --> POST /chat/completions (rollout.openai_client) --> number in the verdict --> reward
                          ^                                                                     |
                          +------------------------- verdicts with a number --------------------+

Owns: what is asked, what a verdict means and how it is kept, and what is counted. Does not own: when it is asked again
(rollout.openai_client), how many samples are judged at the same time, and how long one may take (reward_pool.py).
Invariant: a reward is a number that the judge gave. No answer, or one without a number in its range, is an error, which
leaves the sample out.
"""

import asyncio
import hashlib
import json
import logging
import math
import re
import sqlite3
import time
from pathlib import Path
from weakref import WeakValueDictionary

from slipstream.conf.json_files import JsonObject
from slipstream.conf.schema import RewardPart
from slipstream.rollout.errors import RewardError
from slipstream.rollout.openai_client import OpenAIClient
from slipstream.rollout.rewards.counting import count
from slipstream.rollout.rewards.judge_prompt import fill, template_of

logger = logging.getLogger(__name__)

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
CACHE_FILE = "judge_cache.sqlite"
WAIT_S = 2.0
"""How long another process may hold it."""


class NoVerdict(Exception):
    """The judge answered, but with no number in its range."""


class Judge:
    """One judge, for all samples of one process; the cache is in the run's folder. Raises RewardError: the prompt file
    or the cache cannot be used."""

    def __init__(self, config: RewardPart, section: str, folder: Path | None) -> None:
        self._config = config.judge
        self._timeout_s = config.timeout_s
        self._template = template_of(config, section)
        path = self._config.cache_path
        file = Path(path) if path is not None else folder / CACHE_FILE if folder is not None else None
        self._cache = VerdictCache(file, f"{section}.judge.cache_path")
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """One lock per question: equal ones are asked one after the other, so that later ones find the verdict in the
        cache. Whoever asks or waits keeps the lock alive; it is gone with the last of them."""
        self._client = OpenAIClient(
            "the judge",
            self._config.base_url,
            timeout_option="reward.timeout_s",
            api_key_env=self._config.api_key_env,
            max_tries=self._config.max_tries,
            try_timeout_s=self._config.try_timeout_s,
            seconds_per_request=60.0 * config.num_processes / (self._config.requests_per_minute or math.inf),
            count=count,
        )

    async def judge(self, prompt: str, response: str, fields: JsonObject) -> float:
        """The verdict, as a share of the range reward.judge.scale. Raises NoAnswer: the judge refused, or was asked as
        often as it may be; NoVerdict: an answer without a number in that range."""
        deadline = time.monotonic() + self._timeout_s
        question = fill(self._template, prompt, response, fields)
        body = {"model": self._config.model, "messages": [{"role": "user", "content": question}]}
        body |= {"temperature": 0.0, "max_tokens": 512, **self._config.extra}
        body = {name: value for name, value in body.items() if value is not None}
        asked = hashlib.sha256(json.dumps([self._config.base_url, body], sort_keys=True).encode()).hexdigest()
        async with self._asking.setdefault(asked, asyncio.Lock()):
            known = self._cache.get(asked)
            if known is not None:
                count("cached")
                return self._read(known)
            verdict = _content(await self._client.post("/chat/completions", body, deadline))
            reward = self._read(verdict)
            self._cache.put(asked, verdict)
            return reward

    def _read(self, verdict: str) -> float:
        """The last number in the verdict, as a share of the range."""
        numbers = _NUMBER.findall(verdict)
        lowest, highest = self._config.scale
        try:
            number = float(numbers[-1])
        except IndexError:
            raise NoVerdict(f"no number in the judge's verdict: {verdict[-300:]!r}") from None
        if not lowest <= number <= highest:
            raise NoVerdict(f"{number:g} is not from {lowest:g} to {highest:g} in the verdict: {verdict[-300:]!r}")
        return (number - lowest) / (highest - lowest)


def _content(answer: bytes) -> str:
    """The text of a chat completion, whose tokens are counted."""
    try:
        completion = json.loads(answer)
        for name in ("prompt_tokens", "completion_tokens"):
            count(name, max(0, int((completion.get("usage") or {}).get(name) or 0)))
        content = completion["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise NoVerdict(f"the judge's answer is no chat completion: {answer[:300]!r}") from None
    if not isinstance(content, str):
        raise NoVerdict(f"the judge's answer has no text: {answer[:300]!r}")
    return content


class VerdictCache:
    """Verdicts by the content of what was asked, in one SQLite file that processes and runs may share; without one, in
    this process alone. A cache that cannot be read or written costs a request, never a sample. Raises RewardError: the
    file cannot be opened, or is something else."""

    def __init__(self, file: Path | None, option: str) -> None:
        try:
            self._file = sqlite3.connect(file or ":memory:", timeout=WAIT_S, isolation_level=None)
            self._file.execute("PRAGMA synchronous=OFF")
            self._file.execute("CREATE TABLE IF NOT EXISTS verdicts (asked TEXT PRIMARY KEY, verdict TEXT NOT NULL)")
        except sqlite3.Error as e:
            raise RewardError(f"{option}={file} cannot be used: {e}; give the path of a cache or of a new file") from e

    def get(self, asked: str) -> str | None:
        try:
            row = self._file.execute("SELECT verdict FROM verdicts WHERE asked = ?", (asked,)).fetchone()
        except sqlite3.Error:
            return None
        return None if row is None else str(row[0])

    def put(self, asked: str, verdict: str) -> None:
        try:
            self._file.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", (asked, verdict))
        except sqlite3.Error as e:
            logger.warning("a verdict was not kept: %s", e)  # into rewards.log
