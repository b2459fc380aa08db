"""Reward that another model gives, over OpenAI's chat protocol.

    fill the prompt --> cache? --> place in the rate --> POST /chat/completions --> number in the verdict --> reward
                          ^                                 | 429, 5xx, no connection, too late: wait, try again
                          +---- verdicts with a number -----+

Owns: what is asked, when it is asked again, what a verdict means, and what is counted (requests, retries, tokens, hits
of the cache). Does not own: how many samples are judged at the same time, and how long one may take (`pool.py`).
Invariant: a reward is a number that the judge gave. No answer, or one without a number in its range, is an error, which
leaves the sample out. The key is read from the environment and sent to the one URL only.
"""

from __future__ import annotations

import asyncio
import email.utils
import hashlib
import json
import math
import os
import random
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from conf.schema import RewardPart
from rollout.rewards.counting import count
from rollout.rewards.judge_prompt import fill, template_of
from rollout.rewards.regex import compile_pattern
from rollout.rewards.verdict_cache import VerdictCache

TRY_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""Statuses of a server that may answer later."""
FIRST_WAIT_S = 0.5
"""Before the second try; then twice as long each time, and up to a half less by chance."""
LONGEST_WAIT_S = 30.0
MAX_ANSWER_BYTES = 1 << 20
CACHE_FILE = "judge_cache.sqlite"
"""Name of the cache in the run folder."""


class JudgeFailed(Exception):
    """The judge gave no answer: it refused, or was asked as often as it may be."""


class NoVerdict(Exception):
    """The judge answered, but with no number in its range."""


class Rate:
    """When requests may leave: evenly, and not while the judge asks for patience. Times are seconds of one clock.

    Args:
        seconds_per_request: Time between two of them; 0: any number at once.
    """

    def __init__(self, seconds_per_request: float) -> None:
        self._seconds_per_request = seconds_per_request
        self._next = -math.inf

    def next_turn(self, now: float) -> float:
        """When a request that is ready now may leave."""
        return max(now, self._next)

    def take_turn(self, now: float) -> float:
        """The same; that turn is taken."""
        turn = self.next_turn(now)
        self._next = turn + self._seconds_per_request
        return turn

    def rest_until(self, then: float) -> None:
        """Let no request leave before."""
        self._next = max(self._next, then)


class Judge:
    """One judge, for all samples of one process.

    Args:
        config: The reward, with its section `judge`.
        section: How error messages name the configuration.
        folder: The run folder, for the cache; None: there is none yet.

    Raises:
        RewardError: The prompt file, the pattern or the cache cannot be used.
    """

    def __init__(self, config: RewardPart, section: str, folder: Path | None) -> None:
        self._config = config.judge
        self._timeout_s = config.timeout_s
        self._template = template_of(config, section)
        self._pattern = compile_pattern(self._config.verdict_pattern, f"{section}.judge.verdict_pattern")
        path = self._config.cache_path
        file = Path(path) if path is not None else folder / CACHE_FILE if folder is not None else None
        self._cache = VerdictCache(file, f"{section}.judge.cache_path")
        self._asking: dict[str, asyncio.Lock] = {}
        """One lock per question that is being asked: equal ones wait for its answer."""
        self._rate = Rate(60.0 * config.num_processes / (self._config.requests_per_minute or math.inf))
        key = os.environ.get(self._config.api_key_env or "", "")
        self._client = httpx.AsyncClient(
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=None,  # _ask has one of its own, for all of a request
            limits=httpx.Limits(max_connections=None),
            trust_env=False,  # neither proxies nor .netrc
        )

    async def judge(self, prompt: str, response: str, fields: dict[str, Any]) -> float:
        """The verdict, as a share of the range from reward.judge.lowest to highest.

        Raises:
            JudgeFailed: No answer.
            NoVerdict: An answer without a number in that range.
        """
        deadline = time.monotonic() + self._timeout_s
        question = fill(self._template, prompt, response, fields)
        body = {"model": self._config.model, "messages": [{"role": "user", "content": question}]}
        body |= {"temperature": self._config.temperature, "max_tokens": self._config.max_tokens, **self._config.extra}
        body = {name: value for name, value in body.items() if value is not None}
        asked = hashlib.sha256(json.dumps([self._config.base_url, body], sort_keys=True).encode()).hexdigest()
        async with self._asking.setdefault(asked, asyncio.Lock()):
            try:
                known = self._cache.get(asked)
                if known is not None:
                    count("cached")
                verdict = known if known is not None else await self._ask(body, deadline)
                reward = self._read(verdict)
                if known is None:
                    self._cache.put(asked, verdict)
                return reward
            finally:
                self._asking.pop(asked, None)

    async def _ask(self, body: dict[str, Any], deadline: float) -> str:
        """The text of the judge's answer, after as many tries as it takes and there is time for."""
        for number in range(1, self._config.max_tries + 1):
            try:
                await self._take_turn(deadline)
                count("requests")
                if number > 1:
                    count("retries")
                async with asyncio.timeout(self._config.try_timeout_s):
                    status, headers, answer = await self._post(body)
            except (httpx.TransportError, TimeoutError) as e:
                problem, asked_wait_s = f"{type(e).__name__}: {e}", 0.0
            else:
                if status == httpx.codes.OK:
                    return _content(answer)
                problem, asked_wait_s = f"status {status}: {answer[:300]!r}", retry_after_s(headers)
                if status not in TRY_AGAIN:
                    raise JudgeFailed(f"the judge refused the request with {problem}")
            wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (number - 1)) * random.uniform(0.5, 1.0)
            if asked_wait_s:
                wait_s = asked_wait_s
                self._rate.rest_until(time.monotonic() + asked_wait_s)  # all wait, not this one alone
            if number == self._config.max_tries or time.monotonic() + wait_s >= deadline:
                raise JudgeFailed(f"the judge gave no answer in {number} tries; the last one: {problem}")
            await asyncio.sleep(wait_s)
        raise AssertionError("max_tries >= 1")

    async def _take_turn(self, deadline: float) -> None:
        """Wait until the rate and the judge's own Retry-After let a request leave."""
        now = time.monotonic()
        if self._rate.next_turn(now) >= deadline:
            raise JudgeFailed("no request may leave before reward.timeout_s is over")
        await asyncio.sleep(self._rate.take_turn(now) - now)

    async def _post(self, body: dict[str, Any]) -> tuple[int, httpx.Headers, bytes]:
        url = self._config.base_url.rstrip("/") + "/chat/completions"
        async with self._client.stream("POST", url, json=body) as answer:
            data = bytearray()
            async for part in answer.aiter_bytes():
                data += part
                if len(data) > MAX_ANSWER_BYTES:
                    raise NoVerdict(f"the judge answered more than {MAX_ANSWER_BYTES} bytes")
            return answer.status_code, answer.headers, bytes(data)

    def _read(self, verdict: str) -> float:
        """The number in the verdict's last match, as a share of the range."""
        matches = list(self._pattern.finditer(verdict))
        lowest, highest = self._config.lowest, self._config.highest
        try:
            number = float(matches[-1][1])
        except (IndexError, TypeError, ValueError):
            raise NoVerdict(f"no number in the judge's verdict: {verdict[-300:]!r}") from None
        if not lowest <= number <= highest:
            raise NoVerdict(f"{number:g} is not from {lowest:g} to {highest:g} in the verdict: {verdict[-300:]!r}")
        return (number - lowest) / (highest - lowest)


def retry_after_s(headers: httpx.Headers) -> float:
    """Seconds that the header Retry-After asks for, which has a number or a date; 0 without it."""
    value = headers.get("retry-after", "")
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, (email.utils.parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):  # no date, or one without a zone
        return 0.0


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
