"""Reward that another model gives, over OpenAI's chat protocol.

    fill the prompt --> cache? --> POST /chat/completions (rollout.openai_client) --> number in the verdict --> reward
                          ^                                                                     |
                          +------------------------- verdicts with a number --------------------+

Owns: what is asked, what a verdict means, and what is counted (requests, retries, tokens, hits of the cache). Does not
own: when it is asked again (rollout.openai_client), how many samples are judged at the same time, and how long one may
take (reward_pool.py).
Invariant: a reward is a number that the judge gave. No answer, or one without a number in its range, is an error, which
leaves the sample out.
"""

import asyncio
import hashlib
import json
import math
import re
import time
from pathlib import Path
from weakref import WeakValueDictionary

from slipstream.conf.json_files import JsonObject
from slipstream.conf.schema import RewardPart
from slipstream.rollout.openai_client import OpenAIClient
from slipstream.rollout.rewards.counting import count
from slipstream.rollout.rewards.judge_prompt import fill, template_of
from slipstream.rollout.rewards.verdict_cache import VerdictCache

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
CACHE_FILE = "judge_cache.sqlite"
"""Name of the cache in the run folder."""


class NoVerdict(Exception):
    """The judge answered, but with no number in its range."""


class Judge:
    """One judge, for all samples of one process.

    Args:
        config: The reward, with its section `judge`.
        section: How error messages name the configuration.
        folder: The run folder, for the cache; None: there is none yet.

    Raises:
        RewardError: The prompt file or the cache cannot be used.
    """

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
        """The verdict, as a share of the range reward.judge.scale.

        Raises:
            NoAnswer: The judge refused, or was asked as often as it may be.
            NoVerdict: An answer without a number in that range.
        """
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
