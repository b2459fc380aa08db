"""OpenAI's protocol over HTTP, for the episodes of a run: whatever speaks it can be an agent.

    POST /v1/chat/completions   messages, tools, stream, max_tokens, n, logprobs, return_token_ids
    POST /v1/completions        prompt (text or token ids), the same
    GET  /v1/models             one model, "policy"
    Authorization: Bearer KEY   the key of one episode; requests of different episodes never meet

Owns: the protocol. Does not own: which fields of a request are refused (request_fields.py), what a request samples
(episode.py), when an episode ends (service.py).
What would make the log-probabilities that training needs wrong is refused or taken from the run's options. A streamed
answer is sent when it is complete, in the protocol's events.
"""

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import accumulate

from aiohttp import web

from slipstream.conf.json_files import JsonMapping, JsonObject, is_object
from slipstream.rollout.agents.episode import MODEL, Answer, EngineFailed, Episode, EpisodeOver, LimitReached
from slipstream.rollout.agents.failures import TURNS
from slipstream.rollout.agents.request_fields import FIXED, FieldRefused, check_fields
from slipstream.rollout.errors import DataError
from slipstream.rollout.text.messages import TEMPLATE_OPTIONS, template_options, text_messages

logger = logging.getLogger(__name__)

_PATHS = "POST /v1/chat/completions, POST /v1/completions and GET /v1/models (session.base_url ends with /v1)"
MAX_BODY_BYTES = 64 << 20
MAX_CHOICES = 64


class Endpoint:
    """See the module's docstring. `episodes` are those that go on, by their keys; `fixed` are the run's values of what
    a request cannot choose, and `stop` the texts that end all responses; `tell` writes into the run's log."""

    def __init__(
        self, episodes: Mapping[str, Episode], fixed: Mapping[str, float], tell: Callable[[str], None] = logger.warning,
        stop: Collection[str] = (),
    ) -> None:  # fmt: skip
        self._episodes = episodes
        self._fixed = fixed
        self._stop = stop
        self._tell = tell
        self._told: set[str] = set()
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> str:
        """Listen. Returns the base URL. Raises: OSError."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/chat/completions", partial(self._answer, is_chat=True))
        app.router.add_post("/v1/completions", partial(self._answer, is_chat=False))
        app.router.add_get("/v1/models", self._models)
        app.router.add_route("*", "/{path:.*}", _no_such_path)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, backlog=4096)
        await site.start()
        name, bound, *_ = self._runner.addresses[0]
        return f"http://[{name}]:{bound}/v1" if ":" in name else f"http://{name}:{bound}/v1"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.StreamResponse:
        if self._episode_of(request) is None:
            return _wrong_key()
        return web.json_response(
            {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "slipstream"}]}
        )

    async def _answer(self, request: web.Request, *, is_chat: bool) -> web.StreamResponse:
        episode = self._episode_of(request)
        if episode is None:
            return _wrong_key()
        try:
            body = await _body_of(request)
            check_fields(body, is_chat=is_chat, stop=self._stop)
            _check_values(body, is_chat=is_chat)
            self._tell_what_is_fixed(body)
            answers = await self._sample(episode, body, is_chat=is_chat)
        except LimitReached as e:
            code = "turn_limit_exceeded" if e.kind == TURNS else "context_length_exceeded"
            return _error(400, str(e), code)
        except EpisodeOver as e:
            return _error(403, str(e), "episode_over")
        except EngineFailed as e:
            return _error(500, str(e), "engine_failed")
        except web.HTTPException:
            raise
        except DataError as e:
            return _error(400, str(e), "invalid_request")
        except FieldRefused as e:
            return _error(400, str(e), "invalid_request", param=e.name)
        except Exception as e:  # noqa: BLE001 - a template's own code may raise anything
            return _error(400, f"the chat template refuses the messages: {type(e).__name__}: {e}", "invalid_request")
        answer = _chat_answer(answers, body) if is_chat else _completion_answer(answers, body)
        if body.get("stream"):
            return await _stream(request, answer, body, is_chat=is_chat)
        return web.json_response(answer)

    async def _sample(self, episode: Episode, body: JsonMapping, *, is_chat: bool) -> list[Answer]:
        num = _number(body, "n", 1, most=MAX_CHOICES) or 1
        max_tokens = _number(body, "max_completion_tokens", 1) or _number(body, "max_tokens", 1)
        skips = body.get("skip_special_tokens") is not False
        if is_chat:
            messages, tools = _messages_of(body), _tools_of(body)
            options = template_options(body.get(TEMPLATE_OPTIONS))
            episode.check(messages, tools, options)
            calls = [
                episode.chat(messages, tools, options=options, max_tokens=max_tokens, skip_special_tokens=skips)
                for _ in range(num)
            ]
        else:
            prompt = _prompt_of(body)
            calls = [episode.complete(prompt, max_tokens=max_tokens, skip_special_tokens=skips) for _ in range(num)]
        return list(await asyncio.gather(*calls))

    def _tell_what_is_fixed(self, body: JsonMapping) -> None:
        """Say once of each field that a request's value was replaced."""
        for name in FIXED:
            asked, used = body.get(name), self._fixed[name]
            if asked is not None and asked != used and name not in self._told:
                self._told.add(name)
                self._tell(
                    f"an agent asks for {name}={asked!r:.40} and gets the run's {name}={used:g}, with which the "
                    f"trainer computes log-probabilities (evaluations have rollout.eval.{name})"
                )

    def _episode_of(self, request: web.Request) -> Episode | None:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        return self._episodes.get(key.strip()) if scheme.lower() == "bearer" else None


async def _body_of(request: web.Request) -> JsonObject:
    raw = await request.read()
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise DataError(f"the body is not JSON: {e}") from e
    if not isinstance(body, dict):
        raise DataError(f"the body must be a JSON object, got {type(body).__name__}")
    return body


def _check_values(body: JsonMapping, *, is_chat: bool) -> None:
    """Refuse values of honoured fields that are not done. Raises: DataError."""
    if body.get("model") not in (None, MODEL):
        raise DataError(f'model={body["model"]!r:.40}: this endpoint has one model, "{MODEL}" (session.model)')
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise DataError(
            'tool_choice: only "auto" and "none", as a forced call constrains decoding; ask for the call in a message'
        )
    for name in FIXED:
        if not isinstance(body.get(name), int | float | None) or isinstance(body.get(name), bool):
            raise DataError(f"{name} must be a number, got {body[name]!r:.40}")
    names = "stream", "return_token_ids", "return_tokens_as_token_ids", "skip_special_tokens"
    for name in (*names, *(("logprobs",) if is_chat else ())):
        if not isinstance(body.get(name), bool | None):
            raise DataError(f"{name} must be true or false, got {body[name]!r:.40}")
    logprobs = body.get("logprobs")
    if not is_chat and logprobs not in (None, 0):
        raise DataError(
            f"logprobs={logprobs!r:.40} asks for the likeliest tokens; there are those of the sampled tokens alone: 0"
        )


def _number(body: JsonMapping, name: str, least: int, *, most: int | None = None) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        raise DataError(f"{name} must be a whole number from {least}{f' to {most}' if most else ''}, got {value!r}")
    return value


def _messages_of(body: JsonMapping) -> list[JsonObject]:
    try:
        return text_messages(body.get("messages"))
    except DataError as e:
        raise DataError(f"messages: {e}") from e


def _tools_of(body: JsonMapping) -> list[JsonObject]:
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(is_object(one) and is_object(one.get("function")) for one in tools):
        raise DataError("tools must be a list of objects with a function")
    return [] if body.get("tool_choice") == "none" else tools


def _prompt_of(body: JsonMapping) -> str | list[int]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        (prompt,) = prompt  # as some clients always write it
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
        return prompt
    raise DataError("prompt must be text, or a list of token ids; one prompt a request")


def _chat_answer(answers: list[Answer], body: JsonMapping) -> JsonObject:
    choices = [
        {
            "index": index,
            "message": answer.reply.message,
            "finish_reason": "tool_calls" if answer.reply.tool_calls else answer.sampled.finish_reason,
            "logprobs": {"content": _token_logprobs(answer, body)} if body.get("logprobs") else None,
            **_token_ids(answer, body, "token_ids"),
        }
        for index, answer in enumerate(answers)
    ]
    prompt = _token_ids(answers[0], body, "prompt_token_ids")
    return _envelope("chat.completion", "chatcmpl", answers, choices) | prompt


def _completion_answer(answers: list[Answer], body: JsonMapping) -> JsonObject:
    choices = [
        {
            "index": index,
            "text": answer.reply.content,
            "finish_reason": answer.sampled.finish_reason,
            "logprobs": _text_logprobs(answer, body) if type(body.get("logprobs")) is int else None,
            **_token_ids(answer, body, "prompt_token_ids", "token_ids"),
        }
        for index, answer in enumerate(answers)
    ]
    return _envelope("text_completion", "cmpl", answers, choices)


def _token_ids(answer: Answer, body: JsonMapping, *names: str) -> JsonObject:
    """What vLLM's servers add for return_token_ids."""
    found: JsonObject = {"prompt_token_ids": answer.prompt_token_ids, "token_ids": answer.sampled.token_ids}
    return {name: found[name] for name in names} if body.get("return_token_ids") else {}


def _tokens(answer: Answer, body: JsonMapping) -> list[str]:
    as_ids = body.get("return_tokens_as_token_ids")
    return [f"token_id:{token}" for token in answer.sampled.token_ids] if as_ids else answer.tokens


def _text_logprobs(answer: Answer, body: JsonMapping) -> JsonObject:
    tokens, logprobs = _tokens(answer, body), answer.sampled.logprobs
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": [{token: logprob} for token, logprob in zip(tokens, logprobs, strict=True)],
        "text_offset": list(accumulate(map(len, tokens[:-1]), initial=0))[: len(tokens)],
    }


def _token_logprobs(answer: Answer, body: JsonMapping) -> list[JsonObject]:
    return [
        {"token": token, "logprob": logprob, "bytes": list(text.encode(errors="replace")), "top_logprobs": []}
        for token, text, logprob in zip(_tokens(answer, body), answer.tokens, answer.sampled.logprobs, strict=True)
    ]


def _envelope(kind: str, prefix: str, answers: list[Answer], choices: list[JsonObject]) -> JsonObject:
    num_prompt = len(answers[0].prompt_token_ids)
    num_sampled = sum(len(answer.sampled.token_ids) for answer in answers)
    return {
        "id": f"{prefix}-{answers[0].sampled.request}",
        "object": kind,
        "created": math.floor(time.time()),
        "model": MODEL,
        "choices": choices,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
        },
    }


async def _stream(request: web.Request, answer: JsonObject, body: JsonMapping, *, is_chat: bool) -> web.StreamResponse:
    """The whole answer as server-sent events."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    head = {key: answer[key] for key in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk" if is_chat else answer["object"]
    prompt = {name: answer[name] for name in ("prompt_token_ids",) if name in answer}
    chunks: list[JsonObject] = []
    for choice in answer["choices"]:
        if is_chat:
            message = choice["message"]
            calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls", []))]
            delta = {"role": "assistant", "content": message["content"], **({"tool_calls": calls} if calls else {})}
            whole = {name: value for name, value in choice.items() if name != "message"}
            chunks.append({**head, "choices": [{**whole, "delta": delta, "finish_reason": None}], **prompt})
            end = {name: choice[name] for name in ("index", "finish_reason")}
            chunks.append({**head, "choices": [{**end, "delta": {}, "logprobs": None}]})
        else:
            chunks.append({**head, "choices": [choice]})
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append({**head, "choices": [], "usage": answer["usage"]})
    for chunk in chunks:
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def _no_such_path(request: web.Request) -> web.StreamResponse:
    asked = f"{request.method} {request.path}"
    return _error(404, f"{asked:.80}: the endpoint of a training run has {_PATHS}", "not_found")


def _wrong_key() -> web.Response:
    return _error(401, "this key is not of an episode that goes on (Authorization: Bearer KEY)", "invalid_api_key")


def _error(status: int, message: str, code: str, *, param: str | None = None) -> web.Response:
    kind = "authentication_error" if status == 401 else "invalid_request_error"
    return web.json_response({"error": {"message": message, "type": kind, "param": param, "code": code}}, status=status)
