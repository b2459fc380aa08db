"""Requests as the endpoint takes and answers them, and as an agent's session makes and reads them: no socket, no model.

tests/contract/test_agent_endpoint.py has OpenAI's own client, real templates and vLLM's parsers.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.rollout.agents import endpoint as endpoint_module, session as session_module
from slipstream.rollout.agents.chat_text import Reply
from slipstream.rollout.agents.endpoint import MAX_CHOICES, Endpoint
from slipstream.rollout.agents.episode import Answer, EngineFailed, EpisodeOver, LimitReached, Sampled
from slipstream.rollout.agents.request_fields import FieldRefused, check_fields
from slipstream.rollout.agents.session import Session, SessionError, ToolCall
from slipstream.rollout.errors import DataError

ASKED = [{"role": "user", "content": "go"}]
CALL = {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "add"}}


class Played:
    """An episode that notes what it is asked, and answers by number."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.skips: list[bool] = []
        """Whether each request's text is to be without special tokens."""
        self.reply, self.error = Reply("4"), None

    def check(self, *given: Any) -> None:
        if self.error is not None:
            raise self.error

    async def chat(
        self, messages: Any, tools: Any, *, options: Any, max_tokens: int | None, skip_special_tokens: bool
    ) -> Answer:
        self.skips.append(skip_special_tokens)
        return self._answer("chat", messages, tools, options, max_tokens)

    async def complete(self, prompt: Any, *, max_tokens: int | None, skip_special_tokens: bool) -> Answer:
        self.skips.append(skip_special_tokens)
        return self._answer("complete", prompt, max_tokens)

    def _answer(self, *given: Any) -> Answer:
        self.asked.append(given)
        sampled = Sampled(6 + len(self.asked), [5, 2], [-0.5, -0.25], "stop")
        return Answer(self.reply, sampled, [4] * 9, lambda tokens: {5: "4", 2: "\ud800"}[tokens[0]])


class World:
    """One episode behind an endpoint."""

    def __init__(self) -> None:
        self.episode, self.told = Played(), []
        self.endpoint = Endpoint({"sesame": self.episode}, {"temperature": 1.0, "top_p": 1.0}, self.told.append)  # type: ignore[dict-item]

    async def post(self, body: Any, *, is_chat: bool = True, key: str = "Bearer sesame") -> tuple[int, dict[str, Any]]:
        async def read() -> bytes:
            return body if isinstance(body, bytes) else json.dumps(body).encode()

        request: Any = SimpleNamespace(headers={"Authorization": key}, read=read)
        answer: Any = await self.endpoint._answer(request, is_chat=is_chat)
        return answer.status, json.loads(answer.text)


@pytest.fixture
def world() -> World:
    return World()


async def test_a_chat_is_asked_as_often_as_it_says_and_its_choices_are_in_order(world: World) -> None:
    body = {"messages": ASKED, "tools": [TOOL], "n": 2, "max_tokens": 7, "chat_template_kwargs": {"a": None, "b": 1}}
    status, answer = await world.post({"model": "policy", "logprobs": True, **body})
    assert status == 200 and world.episode.asked == [("chat", ASKED, [TOOL], {"b": 1}, 7)] * 2
    assert (answer["object"], answer["id"], answer["model"]) == ("chat.completion", "chatcmpl-7", "policy")
    assert answer["usage"] == {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    first = answer["choices"][0]
    assert (first["message"], first["finish_reason"]) == ({"role": "assistant", "content": "4"}, "stop")
    assert first["logprobs"]["content"] == [
        {"token": "4", "logprob": -0.5, "bytes": [52], "top_logprobs": []},
        {"token": "\ud800", "logprob": -0.25, "bytes": [63], "top_logprobs": []},
    ]


async def test_calls_of_tools_are_the_reason_why_it_ends(world: World) -> None:
    world.episode.reply = Reply("", [CALL])
    _, answer = await world.post({"messages": ASKED, "tools": [TOOL], "max_completion_tokens": 3, "max_tokens": 9})
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert (choice["finish_reason"], choice["logprobs"]) == ("tool_calls", None)
    await world.post({"messages": ASKED, "tools": [TOOL], "tool_choice": "none"})
    assert [(tools, most) for _, _, tools, _, most in world.episode.asked] == [([TOOL], 3), ([], None)]


@pytest.mark.parametrize(("logprobs", "are_there"), [(None, False), (False, False), (0, True)])
async def test_a_plain_prompt_is_text_or_tokens(world: World, logprobs: Any, are_there: bool) -> None:
    for prompt in ("a", [3, 0], ["a"], [[3, 0]]):
        status, answer = await world.post({"prompt": prompt, "logprobs": logprobs}, is_chat=False)
        assert (status, answer["object"], answer["id"][:5]) == (200, "text_completion", "cmpl-")
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("4", "stop")
        logprobs_of = {
            "tokens": ["4", "\ud800"],
            "token_logprobs": [-0.5, -0.25],
            "top_logprobs": [{"4": -0.5}, {"\ud800": -0.25}],
            "text_offset": [0, 1],
        }
        assert choice["logprobs"] == (logprobs_of if are_there else None)
    assert world.episode.asked == [("complete", "a", None), ("complete", [3, 0], None)] * 2


async def test_special_tokens_are_left_out_of_a_text_unless_the_request_wants_them(world: World) -> None:
    for fields in ({}, {"skip_special_tokens": None}, {"skip_special_tokens": True}, {"skip_special_tokens": False}):
        for body, is_chat in (({"messages": ASKED}, True), ({"prompt": "a"}, False)):
            assert (await world.post({**body, **fields}, is_chat=is_chat))[0] == 200
    assert world.episode.skips == [True] * 6 + [False] * 2
    status, answer = await world.post({"messages": ASKED, "skip_special_tokens": 0})
    assert (status, answer["error"]["message"]) == (400, "skip_special_tokens must be true or false, got 0")


class Streamed:
    status, sent = 200, list[bytes]()

    def __init__(self, headers: Any) -> None:
        self.sent.clear()

    async def prepare(self, request: Any) -> None: ...

    async def write(self, data: bytes) -> None:
        self.sent.append(data)

    async def write_eof(self) -> None:
        self.text = "[]"


@pytest.mark.parametrize("tells_usage", [False, True])
async def test_a_stream_is_the_whole_answer_in_events(
    world: World, tells_usage: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_module.web, "StreamResponse", Streamed)
    world.episode.reply = Reply("4", [CALL, CALL])
    asks = {"stream": True, "n": 2, "stream_options": {"include_usage": tells_usage}}
    for is_chat, body in ((True, {"messages": ASKED, "tools": [TOOL]}), (False, {"prompt": "a"})):
        await world.post({**asks, **body}, is_chat=is_chat)
        *sent, last = Streamed.sent
        events = [json.loads(data.removeprefix(b"data: ")) for data in sent]
        assert last == b"data: [DONE]\n\n" and all(data.endswith(b"\n\n") for data in sent)
        assert {one["object"] for one in events} == {"chat.completion.chunk" if is_chat else "text_completion"}
        usage = [events.pop()] if tells_usage else []
        assert not any("usage" in one for one in events)
        assert [one["usage"]["completion_tokens"] for one in usage] == [4] * tells_usage
        choices = [choice for one in events for choice in one["choices"]]
        assert [one["index"] for one in choices] == ([0, 0, 1, 1] if is_chat else [0, 1])
        reasons = [None, "tool_calls"] * 2 if is_chat else ["stop"] * 2
        assert [one["finish_reason"] for one in choices] == reasons
        calls = [{"index": number, **CALL} for number in (0, 1)]
        delta = {"role": "assistant", "content": "4", "tool_calls": calls}
        assert [one.get("delta") for one in choices] == ([delta, {}] * 2 if is_chat else [None] * 2)


@pytest.mark.parametrize(
    ("body", "is_chat", "said"),
    [
        *((body, True, "the body is not JSON") for body in (b"{", b"", b"\xff", b"[" * 100_000)),
        ([1], True, "the body must be a JSON object, got list"),
        ({"messages": []}, True, "messages: must be a non-empty list"),
        ({"messages": ASKED, "model": "gpt"}, True, "model='gpt': this endpoint has one model, \"policy\""),
        ({"messages": ASKED, "tool_choice": "required"}, True, "tool_choice: only"),
        ({"messages": ASKED, "logprobs": 1}, True, "logprobs must be true or false, got 1"),
        ({"messages": ASKED, "stream": "false"}, True, "stream must be true or false, got 'false'"),
        ({"messages": ASKED, "return_token_ids": 1}, True, "return_token_ids must be true or false, got 1"),
        ({"prompt": "a", "return_tokens_as_token_ids": "yes"}, False, "return_tokens_as_token_ids must be true or"),
        ({"messages": ASKED, "n": 0}, True, "n must be a whole number from 1 to 64, got 0"),
        ({"messages": ASKED, "n": MAX_CHOICES + 1}, True, "n must be a whole number from 1 to 64, got 65"),
        ({"messages": ASKED, "n": True}, True, "n must be a whole number"),
        ({"messages": ASKED, "max_tokens": 0}, True, "max_tokens must be a whole number from 1, got 0"),
        ({"messages": ASKED, "max_tokens": 1.5}, True, "max_tokens must be a whole number from 1, got 1.5"),
        ({"messages": ASKED, "tools": [{"type": "function"}]}, True, "tools must be a list of objects with a function"),
        ({"messages": ASKED, "tools": {"function": {}}}, True, "tools must be a list"),
        ({"messages": ASKED, "chat_template_kwargs": 3}, True, "chat_template_kwargs must be an object"),
        ({"prompt": ""}, False, "prompt must be text, or a list of token ids"),
        ({"prompt": []}, False, "prompt must be text"),
        ({"prompt": [1, -1]}, False, "prompt must be text"),
        ({"prompt": [1, True]}, False, "prompt must be text"),
        ({"prompt": ["a", "b"]}, False, "prompt must be text"),
        *(({"prompt": prompt}, False, "prompt must be text") for prompt in ([""], [[]], [[["a"]]], [[3], [4]])),
        ({"prompt": "a", "logprobs": 1}, False, "logprobs=1 asks for the likeliest tokens"),
    ],
)
async def test_what_is_no_request_is_refused_and_samples_nothing(
    world: World, body: Any, is_chat: bool, said: str
) -> None:
    status, answer = await world.post(body, is_chat=is_chat)
    assert status == 400 and answer["error"]["code"] == "invalid_request", answer
    assert said in answer["error"]["message"] and not world.episode.asked


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (LimitReached("no turn is left", "turns"), 400, "turn_limit_exceeded"),
        (LimitReached("no token is left", "tokens"), 400, "context_length_exceeded"),
        (EpisodeOver("it is over"), 403, "episode_over"),
        (EngineFailed("all engines are out"), 500, "engine_failed"),
        (DataError("tools: no parser"), 400, "invalid_request"),
        (KeyError("of a template"), 400, "invalid_request"),
    ],
)
async def test_each_end_of_a_request_has_its_code(world: World, error: Exception, status: int, code: str) -> None:
    world.episode.error = error  # type: ignore[assignment]
    got, answer = await world.post({"messages": ASKED})
    assert (got, answer["error"]["code"], answer["error"]["type"]) == (status, code, "invalid_request_error")
    is_foreign = isinstance(error, KeyError)
    wanted = f"the chat template refuses the messages: KeyError: {error}" if is_foreign else str(error)
    assert answer["error"]["message"] == wanted


@pytest.mark.parametrize("key", ["", "Bearer", "Bearer open", "Basic sesame", "sesame"])
async def test_only_the_key_of_an_episode_that_goes_on_opens(world: World, key: str) -> None:
    status, answer = await world.post({"messages": ASKED}, key=key)
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    assert answer["error"]["type"] == "authentication_error" and not world.episode.asked
    assert (await world.post({"messages": ASKED}, key="bearer  sesame "))[0] == 200
    for given, status in ((key, 401), ("Bearer sesame", 200)):
        request: Any = SimpleNamespace(headers={"Authorization": given})
        assert (await world.endpoint._models(request)).status == status


async def test_what_the_run_fixes_is_told_once_where_it_was_asked_otherwise(world: World) -> None:
    for temperature in (1, None, 0, 0.7):
        assert (await world.post({"messages": ASKED, "temperature": temperature}))[0] == 200
    assert len(world.told) == 1
    assert world.told[0].startswith("an agent asks for temperature=0 and gets the run's temperature=1, with which")
    for value in ("0.5", [1], True, {}):
        status, answer = await world.post({"messages": ASKED, "top_p": value})
        assert (status, answer["error"]["message"]) == (400, f"top_p must be a number, got {value!r}")
    await world.post({"messages": ASKED, "top_p": 0.9})
    assert len(world.told) == 2 and "top_p=0.9" in world.told[1]


ASKS_FOR_NOTHING = {
    "stop": [], "seed": None, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0, "presence_penalty": 0.0,
    "repetition_penalty": 1.0, "length_penalty": 1, "logit_bias": {}, "min_tokens": 0, "best_of": 1, "echo": False,
    "use_beam_search": False, "response_format": {"type": "text"}, "parallel_tool_calls": True, "ignore_eos": False,
    "skip_special_tokens": True, "add_generation_prompt": True, "continue_final_message": False, "top_logprobs": 0,
    "guided_json": None, "a_later_field": None, "function_call": "auto", "modalities": ["text"],
}  # fmt: skip
CHANGES_THE_ANSWER = {
    "stop": ["a"], "seed": 1, "top_k": 5, "min_p": 0.1, "frequency_penalty": 0.1, "presence_penalty": -0.1,
    "repetition_penalty": 1.1, "length_penalty": 0, "logit_bias": {"5": 1}, "min_tokens": 1, "best_of": 2,
    "echo": True, "use_beam_search": True, "response_format": {"type": "json_object"}, "parallel_tool_calls": False,
    "ignore_eos": True, "add_generation_prompt": False, "continue_final_message": True,
    "top_logprobs": 1, "guided_json": {}, "a_later_field": 0, "function_call": "add", "modalities": ["audio"],
    "stop_token_ids": [1], "allowed_token_ids": [1], "bad_words": ["a"], "functions": [TOOL], "suffix": "b",
    "prompt_logprobs": 1, "structured_outputs": {"choice": ["a"]}, "vllm_xargs": {"a": 1}, "documents": [{}],
}  # fmt: skip


async def test_texts_that_end_every_response_of_the_run_may_be_asked_for(world: World) -> None:
    """Some agents always send theirs; the run is given the same ones."""
    world.endpoint = Endpoint({"sesame": world.episode}, {"temperature": 1.0, "top_p": 1.0}, stop=("a", "b"))  # type: ignore[dict-item]
    for stop, status in ((["b", "a"], 200), (["a"], 400), ("a", 400), (["a", "b", "c"], 400), (3, 400), ([["a"]], 400)):
        assert (await world.post({"messages": ASKED, "stop": stop}))[0] == status
    assert len(world.episode.asked) == 1
    check_fields({"stop": "a"}, is_chat=True, stop=["a"])


def test_a_field_that_would_be_ignored_is_refused_by_its_name() -> None:
    for is_chat in (True, False):
        check_fields(ASKS_FOR_NOTHING, is_chat=is_chat)
        for name, value in CHANGES_THE_ANSWER.items():
            with pytest.raises(FieldRefused, match=f"^{name}=.* is not supported .*; leave it out$") as refused:
                check_fields({"model": "policy", name: value}, is_chat=is_chat)
            assert refused.value.name == name
    why = {
        "seed": "rollout.sampling.seed is",
        "stop": "rollout.sampling.stop is for all",
        "stop_token_ids": "rollout.sampling.stop_token_ids is for all",
        "top_k": "the model's own distribution",
        "continue_final_message": "session.complete",
        "guided_json": "constrains decoding; ask for the form in a message, or offer a tool",
        "response_format": "constrains decoding; ask for the form in a message, or offer a tool",
        "parallel_tool_calls": "an answer may have several calls; take the first",
        "enable_thinking": "give it in chat_template_kwargs",
        "reasoning_effort": "give it in chat_template_kwargs",
        "a_later_field": "it would be ign",
    }
    for name, reason in why.items():
        with pytest.raises(FieldRefused, match=reason):
            check_fields({name: 7}, is_chat=True)
    with pytest.raises(FieldRefused, match=r"^documents=\['(a){35}\.\.\. is not"):
        check_fields({"documents": ["a" * 99]}, is_chat=True)


@pytest.mark.parametrize(
    ("of_chat", "of_text"),
    [
        ({"messages": ASKED}, {"prompt": "a"}),
        ({"tools": [TOOL]}, {"add_special_tokens": True}),
        ({"add_special_tokens": False}, {"prompt": [3]}),
    ],
)
def test_chats_and_plain_prompts_have_fields_of_their_own(of_chat: dict[str, Any], of_text: dict[str, Any]) -> None:
    for fields, is_chat in ((of_chat, True), (of_text, False)):
        check_fields(fields, is_chat=is_chat)
        with pytest.raises(FieldRefused):
            check_fields(fields, is_chat=not is_chat)


def test_options_of_a_stream_that_would_be_ignored_are_refused() -> None:
    check_fields({"stream_options": {"include_usage": True, "include_obfuscation": False}}, is_chat=True)
    check_fields({"stream_options": {"continuous_usage_stats": False, "later": None}}, is_chat=True)
    for options in ({"continuous_usage_stats": True}, {"later": 1}, [1]):
        with pytest.raises(FieldRefused, match=r"^stream_options") as refused:
            check_fields({"stream_options": options}, is_chat=True)
        assert refused.value.name == "stream_options"


# -- the other end -----------------------------------------------------------------------------------------------------


class Client:
    """Answers each request with what it is told to; notes what was sent."""

    def __init__(self, status: int, answer: Any) -> None:
        self.status, self.answer, self.sent = status, answer, []

    @asynccontextmanager
    async def post(self, url: str, *, json: Any, headers: Any) -> AsyncIterator[Any]:
        self.sent.append((url, json, headers))

        async def read() -> Any:
            return self.answer

        yield SimpleNamespace(status=self.status, json=read)


async def test_a_session_sends_the_conversation_and_reads_the_first_choice() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    client: Any = Client(200, {"choices": [{"message": message, "finish_reason": "tool_calls"}, "another"]})
    session = Session(client, "http://here/v1", "sesame", "policy")
    reply = await session.chat(tuple(ASKED), [TOOL], max_tokens=3)
    assert (reply.message, reply.text, reply.finish_reason) == (message, "", "tool_calls")
    assert reply.tool_calls == [ToolCall("call-1", "add", {"a": 1})]
    result = {"role": "tool", "tool_call_id": "call-1", "name": "add", "content": "3"}
    assert reply.tool_calls[0].result(3) == result
    body = {"model": "policy", "messages": ASKED, "tools": [TOOL], "max_tokens": 3}
    assert client.sent == [("http://here/v1/chat/completions", body, {"Authorization": "Bearer sesame"})]
    await session.chat(ASKED)
    assert "tools" not in client.sent[1][1]
    client.answer = {"choices": [{"text": "4", "finish_reason": "length"}]}
    reply = await session.complete([3, 4], n=1)
    assert (reply.message, reply.text, reply.tool_calls) == ({"role": "assistant", "content": "4"}, "4", [])
    assert client.sent[2][:2] == ("http://here/v1/completions", {"model": "policy", "prompt": [3, 4], "n": 1})


@pytest.mark.parametrize("arguments", ["{", "[1]", "3", '"text"', pytest.param("[" * 100_000, id="deep")])
def test_arguments_that_are_no_object_stay_as_they_were_written(arguments: str) -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    assert session_module._tool_call(call) == ToolCall("c", "f", arguments)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("turn_limit_exceeded", session_module.LimitReached),
        ("context_length_exceeded", session_module.LimitReached),
        ("episode_over", SessionError),
    ],
)
async def test_a_refusal_is_raised_with_the_endpoints_words(code: str, kind: type[Exception]) -> None:
    client: Any = Client(400, {"error": {"message": "no more", "code": code}})
    with pytest.raises(SessionError, match=r"^no more$") as caught:
        await Session(client, "http://here/v1", "sesame", "policy").chat(ASKED)
    assert type(caught.value) is kind
