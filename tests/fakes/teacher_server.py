"""A teacher over OpenAI's completions protocol: token t after token s has log-probability -(s + t / 8) / 16.

The first token says how it answers, by its number in BEHAVIOURS; another one is answered well. A text is tokenized one
character a token, by `tokenize`.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from fakes.judge_server import AskedServer, listening

Answer = dict[str, Any]


def expected(token_ids: list[int]) -> list[float]:
    """The log-probability of each token but the first; binary fractions, which JSON carries exactly."""
    return [-(before + token / 8) / 16 for before, token in itertools.pairwise(token_ids)]


def completion(token_ids: list[int]) -> Answer:
    names = [f"token_id:{token}" for token in token_ids]
    logprobs = {"tokens": names, "token_logprobs": [None, *expected(token_ids)], "text_offset": [0] * len(names)}
    return {"object": "text_completion", "choices": [{"index": 0, "text": "", "logprobs": logprobs}]}


def changed(change: Callable[[list[str], list[float | None]], object]) -> Callable[[list[int]], web.Response]:
    def answer(token_ids: list[int]) -> web.Response:
        found = completion(token_ids)
        change(found["choices"][0]["logprobs"]["tokens"], found["choices"][0]["logprobs"]["token_logprobs"])
        return web.json_response(found)

    return answer


ALWAYS: dict[str, Callable[[list[int]], web.Response]] = {
    "always broken": lambda _: web.Response(status=503, text="oops"),
    "refuses": lambda _: web.Response(status=400, text="Token id 70 is out of vocabulary"),
    "not JSON": lambda _: web.Response(text="<html>a proxy</html>"),
    "deep": lambda _: web.Response(text="[" * 100_000),
    "bad gzip": lambda _: web.Response(body=b"no gzip", headers={"content-encoding": "gzip"}),
    "no logprobs": lambda _: web.json_response({"choices": [{"text": "abc", "logprobs": None}]}),
    "texts": changed(lambda tokens, _: tokens.__setitem__(slice(None), ["a"] * len(tokens))),
    "other tokens": changed(lambda tokens, _: tokens.__setitem__(-1, "token_id:1")),
    "one less": changed(lambda tokens, values: (tokens.pop(), values.pop())),
    "one number less": changed(lambda _, values: values.pop()),
    "a null": changed(lambda _, values: values.__setitem__(2, None)),
    "impossible": changed(lambda _, values: values.__setitem__(2, -9999.0)),
    "NaN": changed(lambda _, values: values.__setitem__(2, float("nan"))),
    "positive": changed(lambda _, values: values.__setitem__(2, 0.5)),
}
AT_FIRST = {
    ("busy twice", 1): lambda: web.Response(status=429, headers={"retry-after": "0"}),
    ("busy twice", 2): lambda: web.Response(status=500),
}
BEHAVIOURS = ("good", "busy twice", "silent", *ALWAYS)


class TeacherServer(AskedServer):
    """`asked` counts behaviours."""

    def __init__(self, tokenize: Callable[[str], list[int]]) -> None:
        super().__init__()
        self.tokenize = tokenize
        self.max_model_len: int | None = 4096
        self.models: object = None
        """What /models says; None: that there is `big`."""

    async def list_models(self, request: web.Request) -> web.Response:
        self.keys.add(request.headers.get("authorization", ""))
        mine = {"object": "list", "data": [{"id": "big", "max_model_len": self.max_model_len}, {"id": "bigger"}]}
        return web.json_response(mine if self.models is None else self.models)

    async def answer_to(self, body: dict[str, Any], request: web.Request) -> web.Response:
        prompt = body["prompt"]
        if isinstance(prompt, str):
            return web.json_response(completion(self.tokenize(prompt)))
        behaviour = BEHAVIOURS[prompt[0]] if prompt[0] < len(BEHAVIOURS) else "good"
        self.asked[behaviour] += 1
        await asyncio.sleep(600 if behaviour == "silent" else 0.01)
        if (behaviour, self.asked[behaviour]) in AT_FIRST:
            return AT_FIRST[behaviour, self.asked[behaviour]]()
        return ALWAYS[behaviour](prompt) if behaviour in ALWAYS else web.json_response(completion(prompt))


@asynccontextmanager
async def teacher_server(
    tokenize: Callable[[str], list[int]] = lambda text: [5] * len(text),
) -> AsyncIterator[TeacherServer]:
    server = TeacherServer(tokenize)
    routes = web.get("/v1/models", server.list_models), web.post("/v1/completions", server.answer)
    async with listening(server, *routes):
        yield server
