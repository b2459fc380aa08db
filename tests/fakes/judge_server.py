"""A judge over OpenAI's chat protocol that answers as the response under judgement tells it to.

The response names the behaviour, and after "#" what makes it different from others: "busy twice #3".
"""

import asyncio
import email.utils
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

VERDICT = "Of 3 claims 2 hold. Score: 7"
USAGE = {"prompt_tokens": 100, "completion_tokens": 5, "total_tokens": 105}


def busy(retry_after: str) -> web.Response:
    return web.Response(status=429, headers={"retry-after": retry_after}, text="slow down")


def said(text: object) -> web.Response:
    return web.json_response(completion(text))


def completion(text: object) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": USAGE}


AT_FIRST = {
    ("busy twice", 1): lambda: busy("0"),
    ("busy twice", 2): lambda: busy(email.utils.formatdate(time.time() - 5, usegmt=True)),
    ("broken once", 1): lambda: web.Response(status=500, text="oops"),
}
"""(behaviour, number of the request) -> answer."""
ALWAYS = {
    "busy for an hour": lambda: busy("3600"),
    "always broken": lambda: web.Response(status=503, text="oops"),
    "forbidden": lambda: web.Response(status=401, text="no such key"),
    "elsewhere": lambda: web.Response(status=302, headers={"location": "http://127.0.0.1:1/"}),
    "not JSON": lambda: web.Response(text="<html>a proxy</html>"),
    "not a completion": lambda: web.json_response([1, 2]),
    "no text": lambda: said(None),
    "no number": lambda: said("I cannot say."),
    "out of range": lambda: said("Score: 11"),
    "no usage": lambda: web.json_response({"choices": completion("Score: 10")["choices"]}),
}
"""Behaviour -> answer."""


class AskedServer(ABC):
    """What it was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: Counter[str] = Counter()
        """Requests by what the answer depends on."""
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.num_now = self.num_most = 0
        """Requests at the same time: now, and at most."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.num_now += 1
        self.num_most = max(self.num_most, self.num_now)
        self.keys.add(request.headers.get("authorization", ""))
        try:
            self.bodies.append(await request.json())
            return await self.answer_to(self.bodies[-1], request)
        finally:
            self.num_now -= 1

    @abstractmethod
    async def answer_to(self, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        """What a body is answered with."""


@asynccontextmanager
async def listening(server: AskedServer, *routes: web.RouteDef) -> AsyncIterator[None]:
    app = web.Application()
    app.add_routes(routes)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield
    finally:
        await runner.cleanup()


class JudgeServer(AskedServer):
    """Answers as the response under judgement says."""

    async def answer_to(self, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        response = body["messages"][0]["content"].split("<<")[1].split(">>")[0]
        self.asked[response] += 1
        behaviour, number = response.partition(" #")[0], self.asked[response]
        if (behaviour, number) in AT_FIRST:
            return AT_FIRST[behaviour, number]()
        if behaviour in ALWAYS:
            return ALWAYS[behaviour]()
        match behaviour:
            case "hangs up once" if number == 1:
                assert request.transport is not None
                request.transport.abort()
            case "silent":
                await asyncio.sleep(600)
            case "slow":
                await asyncio.sleep(0.05)
            case "endless":
                stream = web.StreamResponse()
                await stream.prepare(request)
                while True:
                    await stream.write(b"x" * (1 << 16))
        return said(VERDICT)


@asynccontextmanager
async def judge_server() -> AsyncIterator[JudgeServer]:
    server = JudgeServer()
    async with listening(server, web.post("/v1/chat/completions", server.answer)):
        yield server
