"""What an agent gets: `session`, a client of the run's endpoint for one episode.

    async def agent(task, session):
        prompt = task["prompt"]  # text, or chat messages, as the row has it
        messages = list(prompt) if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        reply = await session.chat(messages)
        messages += [reply.message, {"role": "user", "content": "Are you sure?"}]
        reply = await session.chat(messages)
        return float(reply.text == task["answer"])

`session.base_url`, `session.api_key` and `session.model` are for any other client of OpenAI's protocol; both ways lead
to the same endpoint. Owns no rule: limits are the endpoint's.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from slipstream.conf.json_files import JsonMapping, JsonObject

LIMIT_CODES = ("turn_limit_exceeded", "context_length_exceeded")


class SessionError(Exception):
    """The endpoint refused a request; the message is the endpoint's."""


class LimitReached(SessionError):
    """The episode has had its turns or its tokens. Return a reward, or let this end the episode without one."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model asks for. Example: ToolCall("call-1", "calculate", {"expression": "2 + 2"})."""

    id: str
    name: str
    arguments: JsonObject | str
    """As the model wrote them where that is not a JSON object."""

    def result(self, content: object) -> JsonObject:
        """The message that answers this call."""
        return {"role": "tool", "tool_call_id": self.id, "name": self.name, "content": str(content)}


@dataclass(frozen=True, slots=True)
class ChatReply:
    message: JsonObject
    """To be appended to the messages, as it is: then the conversation keeps its tokens."""
    finish_reason: str
    """stop, length or tool_calls."""

    @property
    def text(self) -> str:
        """What it says; "" if it only calls tools."""
        return self.message.get("content") or ""

    @property
    def tool_calls(self) -> list[ToolCall]:
        return [_tool_call(call) for call in self.message.get("tool_calls", [])]


class Session:
    def __init__(self, client: aiohttp.ClientSession, base_url: str, api_key: str, model: str) -> None:
        self.base_url = base_url
        self.api_key = api_key
        self.model = model
        self._client = client

    async def chat(
        self, messages: Sequence[JsonMapping], tools: Sequence[JsonMapping] | None = None, **options: object
    ) -> ChatReply:
        """Send the whole conversation, with further fields of the request such as max_tokens, and get the next answer.
        Raises LimitReached: the episode may sample no more; SessionError: the request was refused."""
        body = {"messages": list(messages), **({"tools": list(tools)} if tools else {}), **options}
        choice = (await self._post("/chat/completions", body))["choices"][0]
        return ChatReply(choice["message"], choice["finish_reason"])

    async def complete(self, prompt: str | Sequence[int], **options: object) -> ChatReply:
        """The same for a plain prompt, text or token ids. Raises: as chat()."""
        choice = (await self._post("/completions", {"prompt": prompt, **options}))["choices"][0]
        return ChatReply({"role": "assistant", "content": choice["text"]}, choice["finish_reason"])

    async def _post(self, path: str, body: JsonMapping) -> JsonObject:
        headers = {"Authorization": f"Bearer {self.api_key}"}
        async with self._client.post(self.base_url + path, json={"model": self.model, **body}, headers=headers) as got:
            answer = await got.json()
        if got.status == 200:
            return answer
        error = answer["error"]
        kind = LimitReached if error["code"] in LIMIT_CODES else SessionError
        raise kind(error["message"])


def _tool_call(call: JsonMapping) -> ToolCall:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        arguments = None
    is_object = isinstance(arguments, dict)
    return ToolCall(call["id"], function["name"], arguments if is_object else function["arguments"])
