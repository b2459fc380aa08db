"""Requests to a server that speaks OpenAI's protocol, such as `vllm serve`, asked again while it may answer later.

    post --> place in the rate --> POST base_url/path --> 200: the answer's bytes
                    ^                    | 429, 5xx, no connection, too late: wait, try again
                    +--------------------+

Owns: when a request leaves, when it is asked again, how much of an answer is read. Does not own: what is asked, or what
an answer means. The key is read from the environment and sent to the one URL only.
"""

import asyncio
import email.utils
import math
import os
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime

import httpx

from slipstream.conf.json_files import JsonObject

TRY_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
FIRST_WAIT_S = 0.5
"""Before the second try; then twice as long each time, and up to a half less by chance."""
LONGEST_WAIT_S = 30.0
MAX_ANSWER_BYTES = 1 << 20


class NoAnswer(Exception):
    """The server refused, was asked as often as it may be, or answered more than is read."""


class Rate:
    """When requests may leave: evenly (0 s: any number at once), and not while the server asks for patience."""

    def __init__(self, seconds_per_request: float) -> None:
        self._seconds_per_request = seconds_per_request
        self._next = -math.inf

    def next_turn(self, now: float) -> float:
        """When a request that is ready now may leave."""
        return max(now, self._next)

    def take_turn(self, now: float) -> float:
        """When this request leaves; the next one leaves later."""
        turn = self.next_turn(now)
        self._next = turn + self._seconds_per_request
        return turn

    def rest_until(self, then: float) -> None:
        self._next = max(self._next, then)


class OpenAIClient:
    """One server, for all requests of one process.

    Args:
        who: How errors name it, such as "the judge".
        base_url: Its address up to /v1.
        timeout_option: How errors name the option that sets deadlines.
        api_key_env: Environment variable that holds the key; None: none is sent.
        count: Called with "requests" for each request, and with "retries" for each that repeats one.
    """

    def __init__(
        self,
        who: str,
        base_url: str,
        *,
        timeout_option: str,
        api_key_env: str | None,
        max_tries: int,
        try_timeout_s: float,
        count: Callable[[str], None],
        seconds_per_request: float = 0.0,
    ) -> None:
        self._who = who
        self._timeout_option = timeout_option
        self._base_url = base_url.rstrip("/")
        self._max_tries = max_tries
        self._try_timeout_s = try_timeout_s
        self._count = count
        self._rate = Rate(seconds_per_request)
        self._client = httpx.AsyncClient(
            headers=key_headers(api_key_env),
            timeout=None,  # post has one of its own, for all of a request
            limits=httpx.Limits(max_connections=None),
            trust_env=False,  # neither proxies nor .netrc
        )

    async def post(self, path: str, body: JsonObject, deadline: float, max_bytes: int = MAX_ANSWER_BYTES) -> bytes:
        """The answer with status 200, after as many tries as it takes and there is time for until `deadline`, by
        time.monotonic(). Raises NoAnswer if there is none, or one of more than `max_bytes`."""
        for number in range(1, self._max_tries + 1):
            try:
                await self._take_turn(deadline)
                self._count("requests")
                if number > 1:
                    self._count("retries")
                async with asyncio.timeout(self._try_timeout_s):
                    status, headers, answer = await self._post(path, body, max_bytes)
            except (httpx.RequestError, TimeoutError) as e:
                problem, asked_wait_s = f"{type(e).__name__}: {e}", 0.0
            else:
                if status == httpx.codes.OK:
                    return answer
                problem, asked_wait_s = f"status {status}: {answer[:300]!r}", retry_after_s(headers)
                if status not in TRY_AGAIN:
                    raise NoAnswer(f"{self._who} refused the request with {problem}")
            wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (number - 1)) * random.uniform(0.5, 1.0)
            if asked_wait_s:
                wait_s = asked_wait_s
                self._rate.rest_until(time.monotonic() + asked_wait_s)  # all wait, not this one alone
            if number == self._max_tries or time.monotonic() + wait_s >= deadline:
                raise NoAnswer(f"{self._who} gave no answer in {number} tries; the last one: {problem}")
            await asyncio.sleep(wait_s)
        raise AssertionError("max_tries >= 1")

    async def close(self) -> None:
        await self._client.aclose()

    async def _take_turn(self, deadline: float) -> None:
        """Wait until the rate and the server's own Retry-After let a request leave."""
        now = time.monotonic()
        if self._rate.next_turn(now) >= deadline:
            raise NoAnswer(f"no request may leave before {self._timeout_option} is over")
        await asyncio.sleep(self._rate.take_turn(now) - now)

    async def _post(self, path: str, body: JsonObject, max_bytes: int) -> tuple[int, httpx.Headers, bytes]:
        async with self._client.stream("POST", self._base_url + path, json=body) as answer:
            data = bytearray()
            async for part in answer.aiter_bytes():
                data += part
                if len(data) > max_bytes:
                    raise NoAnswer(f"{self._who} answered more than {max_bytes} bytes")
            return answer.status_code, answer.headers, bytes(data)


def key_headers(api_key_env: str | None) -> dict[str, str]:
    """The header with the key that the environment variable holds."""
    key = os.environ.get(api_key_env or "", "")
    return {"authorization": f"Bearer {key}"} if key else {}


def retry_after_s(headers: httpx.Headers) -> float:
    """Seconds that Retry-After asks for, which has a number or a date by the server's clock; 0 without it."""
    value = headers.get("retry-after", "")
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        said = headers.get("date")  # by that clock, too: ours may be an hour off
        now = datetime.now(UTC) if said is None else email.utils.parsedate_to_datetime(said)
        return max(0.0, (email.utils.parsedate_to_datetime(value) - now).total_seconds())
    except (ValueError, TypeError):  # no date, or one without a zone
        return 0.0
