"""Locks: OpenAI's own Python client, and a framework on top of it, get what the protocol promises; tool calls are found
by vLLM's parsers; who asks for token ids gets them where vLLM's own server has them, and log-probabilities in its form.

The endpoint, its episodes and vLLM's parsers are real; a script stands in for the engine. tests/system/test_agents.py
has the same client in a run with a real engine. Oracle of token ids and log-probabilities is vLLM: its classes read the
answers, and its server's functions write the log-probabilities.
"""

import importlib
import json
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import httpx
import openai
import pytest
from pydantic import BaseModel

from slipstream.conf.schema import DataConfig
from slipstream.orchestrator.data.prompts import PromptReader
from slipstream.orchestrator.data.sources import START, Row
from slipstream.orchestrator.inputs.character_tokenizer import save_character_tokenizer
from slipstream.orchestrator.inputs.text_encoder import TextEncoder
from slipstream.rollout.agents.chat_text import FolderChatText
from slipstream.rollout.agents.endpoint import Endpoint
from slipstream.rollout.agents.episode import Episode, Limits, Sampled
from slipstream.rollout.agents.request_fields import (
    FIXED,
    HARMLESS,
    HONOURED,
    HONOURED_OF_CHAT,
    HONOURED_OF_TEXT,
    FieldRefused,
    check_fields,
)
from slipstream.rollout.agents.session import Session, SessionError
from slipstream.rollout.agents.tool_calls import ToolCallParser, parser_names
from slipstream.rollout.errors import AgentError
from slipstream.rollout.text.chat_template import ChatTemplate

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
]
GO: list[Any] = [{"role": "user", "content": "go"}]
CALL = 'so <tool_call>{"name":"add","arguments":{"b":2,"a":1}}</tool_call>'


class Script:
    """An engine that samples the next text of a list; remembers what it was given after the parent's tokens."""

    def __init__(self, chat: FolderChatText) -> None:
        self.chat = chat
        self.texts: list[str] = []
        self.given: list[tuple[int | None, str]] = []

    async def generate(self, parent: int | None, token_ids: list[int], max_tokens: int) -> Sampled:
        self.given.append((parent, self.chat.decode(token_ids)))
        tokens = self.chat.encode(self.texts.pop(0))[:max_tokens]
        reason = "stop" if tokens[-1] == 2 else "length"
        return Sampled(len(self.given) - 1, tokens, [-0.5] * len(tokens), reason)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_character_tokenizer(folder, vocab_size=200)
    description = json.loads((folder / "tokenizer_config.json").read_text())
    # As in the shipped template, and with tool calls as Hermes and Qwen models write them.
    description["chat_template"] = (
        "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
        "{{ message.role + ': ' + (message.content or '') }}{% for call in message.tool_calls or [] %}"
        "{{ '<tool_call>' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson"
        " + '</tool_call>' }}{% endfor %}{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(description))
    (folder / "config.json").write_text('{"vocab_size": 100}')  # less than the tokenizer has
    return folder


@pytest.fixture(scope="module")
def chat(folder: Path) -> FolderChatText:
    return FolderChatText(folder, [2], "hermes")


@asynccontextmanager
async def serving(
    chat: FolderChatText, options: Mapping[str, Any] = {}
) -> AsyncIterator[tuple[openai.AsyncOpenAI, Script, Episode]]:
    """An endpoint with one episode, whose template has these options, and a client of it."""
    script = Script(chat)
    limits = Limits(max_turns=6, max_tokens=400, max_turn_tokens=80, max_model_len=2000)
    episode = Episode(chat, limits, script.generate, options)
    endpoint = Endpoint({"sesame": episode}, {"temperature": 1.0, "top_p": 1.0})
    base_url = await endpoint.start("127.0.0.1", 0)
    async with openai.AsyncOpenAI(base_url=base_url, api_key="sesame", max_retries=0) as client:
        yield client, script, episode
    await endpoint.close()


@pytest.fixture
async def served(chat: FolderChatText) -> AsyncIterator[tuple[openai.AsyncOpenAI, Script, Episode]]:
    async with serving(chat) as served:
        yield served


Served = tuple[openai.AsyncOpenAI, Script, Episode]


async def test_a_tool_call_keeps_its_tokens_and_its_result_comes_after_them(served: Served) -> None:
    client, script, episode = served
    script.texts = [f"{CALL}<eos>", "3<eos>"]
    messages: list[Any] = [{"role": "user", "content": "1 + 2?"}]
    asked = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
    assert asked.choices[0].finish_reason == "tool_calls"
    (call,) = asked.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
    messages += [asked.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    answer = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
    assert answer.choices[0].message.content == "3"
    assert answer.choices[0].finish_reason == "stop"
    assert script.given[1] == (0, "\ntool: 3\nassistant: "), "only what is new, after the call as it was sampled"
    assert [turn.reason for turn in episode.turns] == ["start", ""]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(
        script.chat.encode(script.given[0][1] + CALL + "<eos>" + script.given[1][1])
    )


async def test_special_tokens_in_a_text_that_was_asked_for_with_them_change_neither_history_nor_reward(
    served: Served,
) -> None:
    client, script, episode = served
    script.texts = ["a<bos>b<eos>", f"a<bos>{CALL}<eos>", "c<bos><eos>", "d<bos>e<eos>"]
    keeps = {"skip_special_tokens": False}
    messages: list[Any] = [*GO]
    first = await client.chat.completions.create(model="policy", messages=messages, extra_body=keeps)
    assert (first.choices[0].message.content, episode.last_reply) == ("a<bos>b", "ab")
    messages += [first.choices[0].message, {"role": "user", "content": "on"}]
    called = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS, extra_body=keeps)
    assert called.choices[0].message.content == "a<bos>so " and called.choices[0].message.tool_calls
    then = [messages[0], first.choices[0].message, {"role": "user", "content": "and"}]
    assert (await client.chat.completions.create(model="policy", messages=then)).choices[0].message.content == "c"
    assert script.given[2] == (0, "\nuser: and\nassistant: "), "the sampled tokens, as they were"
    text = await client.completions.create(model="policy", prompt="x", extra_body=keeps)
    assert (text.choices[0].text, episode.last_reply) == ("d<bos>e", "de")


@pytest.mark.parametrize("streams", [False, True])
async def test_an_agent_framework_runs_unmodified_and_its_history_keeps_the_tokens(
    served: Served, streams: bool
) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    client, script, episode = served
    call = CALL.removeprefix("so ") if streams else CALL  # a stream's first text would be the framework's last answer
    script.texts = [f"{call}<eos>", "3<eos>", "4<eos>"]
    agent = Agent(OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client)), instructions="Add.")

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        return a + b

    if streams:
        async with agent.run_stream("1 + 2?") as asked:
            assert await asked.get_output() == "3"
        messages = asked.all_messages()
    else:
        answer = await agent.run("1 + 2?")
        assert answer.output == "3"
        messages = answer.all_messages()
    again = await agent.run("And 1?", message_history=messages)
    assert again.output == "4"
    assert [turn.reason for turn in episode.turns] == ["start", "", ""]
    assert [parent for parent, _ in script.given] == [None, 0, 1]
    assert script.given[1][1] == "\ntool: 3\nassistant: "
    assert script.given[2][1] == "\nuser: And 1?\nassistant: "


async def test_a_refused_field_is_named(served: Served) -> None:
    client, _, episode = served
    with pytest.raises(openai.BadRequestError, match=r"rollout\.sampling\.stop is for all") as refused:
        await client.chat.completions.create(model="policy", messages=GO, stop=["x"])
    assert (refused.value.code, refused.value.param) == ("invalid_request", "stop") and not episode.turns


@pytest.mark.parametrize("text", ["1 + 2 =", "<bos>1 + 2 ="])
async def test_a_plain_prompt_has_the_tokens_of_a_row_with_this_text(served: Served, folder: Path, text: str) -> None:
    client, script, _ = served
    row = Row("rows.jsonl:1", {"prompt": text}, START)
    prompt = PromptReader(data=DataConfig(), encoder=TextEncoder(folder), max_prompt_tokens=99).prompt(row, 0)
    script.texts = ["3", " or 4<eos>"]
    answer = await client.completions.create(model="policy", prompt=text)
    await client.completions.create(model="policy", prompt=text + "3")
    assert answer.usage is not None and answer.usage.prompt_tokens == len(prompt.token_ids) == 8
    assert script.given == [(None, "<bos>1 + 2 ="), (0, "")]


@pytest.mark.parametrize("prompt", [[3, 100], [2**70], "a\t"])
async def test_a_token_without_a_row_in_the_models_embedding_does_not_reach_an_engine(
    served: Served, prompt: str | list[int]
) -> None:
    """An engine would end of it, and so would the next one."""
    client, script, episode = served
    messages: list[Any] = [{"role": "user", "content": "a\t"}]
    with pytest.raises(openai.BadRequestError, match="the model has vocab_size=100; give ids of its own"):
        await client.completions.create(model="policy", prompt=prompt)
    with pytest.raises(openai.BadRequestError, match="token 100: the model has vocab_size=100"):
        await client.chat.completions.create(model="policy", messages=messages)
    assert not script.given and not episode.turns
    script.texts = ["3<eos>"]
    await client.completions.create(model="policy", prompt=[3, 99])
    assert episode.turns


def fields_of(request: str) -> dict[str, Any]:
    """Fields of OpenAI's and of vLLM's requests, with the defaults of vLLM, which a client library may send."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    is_chat = request == "chat"
    model = ChatCompletionRequest if is_chat else CompletionRequest
    theirs = importlib.import_module(f"openai.types.{'chat.' if is_chat else ''}completion_create_params")
    known = dict.fromkeys(theirs.CompletionCreateParamsBase.__annotations__)
    return known | {
        name: field.get_default(call_default_factory=True)
        for name, field in model.model_fields.items()
        if not field.is_required()
    }


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_each_field_of_the_protocol_is_honoured_harmless_or_refused_by_its_name(kind: str) -> None:
    """Whatever a client library sends because it is the default asks for nothing."""
    is_chat = kind == "chat"
    done = HONOURED | HARMLESS | {*FIXED} | (HONOURED_OF_CHAT if is_chat else HONOURED_OF_TEXT)
    fields = fields_of(kind)
    assert len(fields) > 50
    check_fields(fields, is_chat=is_chat)
    for name in fields.keys() - done:
        with pytest.raises(FieldRefused, match=f"^{name}='something else' is not supported") as refused:
            check_fields({name: "something else"}, is_chat=is_chat)
        assert refused.value.name == name


@pytest.mark.parametrize(
    ("parser", "knows_tools", "message"),
    [(None, True, r"rollout\.episodes\.tool_parser is null"), ("hermes", False, "chat template writes none")],
)
async def test_tools_that_the_model_or_the_agent_would_not_see_are_refused(
    tmp_path: Path, parser: str | None, knows_tools: bool, message: str
) -> None:
    save_character_tokenizer(tmp_path, vocab_size=200)
    description = json.loads((tmp_path / "tokenizer_config.json").read_text())
    if knows_tools:
        description["chat_template"] = "{% if tools %}{{ tools | tojson }}{% endif %}" + description["chat_template"]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(description))
    async with serving(FolderChatText(tmp_path, [2], parser)) as (client, script, _):
        script.texts = ["a<eos>"]
        with pytest.raises(openai.BadRequestError, match=message):
            await client.chat.completions.create(model="policy", messages=GO, tools=TOOLS)
        await client.chat.completions.create(model="policy", messages=GO)


async def test_options_of_the_template_are_the_episodes_unless_a_request_gives_them(folder: Path) -> None:
    """In the text that the model is given; a name that the template does not read is refused."""
    own = folder.parent / "options"
    shutil.copytree(folder, own, dirs_exist_ok=True)
    description = json.loads((own / "tokenizer_config.json").read_text())
    description["chat_template"] += "{% if enable_thinking %}think: {% endif %}"
    (own / "tokenizer_config.json").write_text(json.dumps(description))
    async with serving(FolderChatText(own, [2]), {"enable_thinking": True}) as (openais, script, _):
        client = aiohttp.ClientSession()
        session = Session(client, str(openais.base_url).rstrip("/"), "sesame", "policy")
        for given in ({}, {"chat_template_kwargs": {"enable_thinking": False}}, {"chat_template_kwargs": None}):
            script.texts.append("a<eos>")
            await session.chat(GO, **given)
        closed = "<bos>user: go\nassistant: "
        assert [text for _, text in script.given] == [closed + "think: ", closed, closed + "think: "]
        for refused, message in (
            ({"enable_thought": True}, "chat_template_kwargs.enable_thought: .* it reads enable_thinking"),
            ({"messages": []}, "chat_template_kwargs.messages: "),
            ([1], "chat_template_kwargs must be an object"),
        ):
            with pytest.raises(SessionError, match=message):
                await session.chat(GO, chat_template_kwargs=refused)
        with pytest.raises(SessionError, match=r"chat_template_kwargs=.* is not supported"):
            await session.complete("go", chat_template_kwargs={"enable_thinking": False})
        await client.close()


async def test_another_path_is_answered_with_those_that_there_are(served: Served) -> None:
    """Some libraries take OpenAI's newer protocol unless they are told otherwise, and some addresses have /v1 twice."""
    client, _, episode = served
    paths = r"the endpoint of a training run has POST /v1/chat/completions, .*session\.base_url ends with /v1"
    for asked, request in (
        ("POST /v1/responses", client.responses.create(model="policy", input="go")),
        ("GET /v1/models/policy", client.models.retrieve("policy")),
        ("POST /v1/v1/chat/completions", client.post("/v1/chat/completions", body={}, cast_to=object)),
        ("GET /v1/chat/completions", client.get("/chat/completions", cast_to=object)),
    ):
        with pytest.raises(openai.NotFoundError, match=f"{asked}: {paths}"):
            await request
    assert not episode.turns and [model.id async for model in client.models.list()] == ["policy"]


async def test_a_conversation_that_does_not_fit_is_refused_whatever_its_size(served: Served) -> None:
    limit = r"this model's maximum context length is 2000 tokens \(rollout\.max_model_len\): the conversation has"
    for text, size in (("go" * 1000, "20"), ("x" * 10_000_000, "10000004 characters")):
        with pytest.raises(openai.BadRequestError, match=f"{limit} {size}") as long:
            await served[0].chat.completions.create(model="policy", messages=[{"role": "user", "content": text}])
        assert long.value.code == "context_length_exceeded"


def test_parsers_of_other_models_are_refused_with_the_list(chat: FolderChatText, tmp_path: Path) -> None:
    save_character_tokenizer(tmp_path, vocab_size=200)
    assert {"hermes", "llama3_json", "qwen3_coder", "glm45", "deepseek_v31"} <= set(parser_names())
    with pytest.raises(AgentError, match=r"deepseek_v31 is not for this model.*hermes"):
        ToolCallParser("deepseek_v31", ChatTemplate(tmp_path).tokenizer)


# -- token ids and log-probabilities, where and as vLLM's server has them ----------------------------------------------


async def post(client: openai.AsyncOpenAI, path: str, body: dict[str, Any]) -> Any:
    return json.loads((await client.post(path, body=body, cast_to=httpx.Response)).text)


def read(kind: type[BaseModel], answer: Any) -> Any:
    """An answer in vLLM's class, which has all of its fields."""
    found = kind.model_validate(answer)
    assert not found.model_extra
    for choice in found.choices:  # type: ignore[attr-defined]
        assert not choice.model_extra
    return found


async def test_a_chat_has_the_tokens_of_each_choice_and_of_the_whole_prompt(served: Served) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse

    client, script, _ = served
    script.texts = ["a<eos>", "bc<eos>", "d<eos>"]
    body = {"model": "policy", "messages": GO, "n": 2, "logprobs": True, "return_token_ids": True}
    first = read(ChatCompletionResponse, await post(client, "/chat/completions", body))
    prompt = script.chat.encode(script.given[0][1])
    assert first.prompt_token_ids == prompt
    said = {choice.message.content: choice.token_ids for choice in first.choices}
    assert said == {text: script.chat.encode(f"{text}<eos>") for text in ("a", "bc")}
    assert all(len(choice.logprobs.content) == len(choice.token_ids) for choice in first.choices)
    history = [*GO, {"role": "assistant", "content": "bc"}, *GO]
    body = {"model": "policy", "messages": history, "return_token_ids": True}
    again = read(ChatCompletionResponse, await post(client, "/chat/completions", body))
    assert again.prompt_token_ids == [*prompt, *said["bc"], *script.chat.encode(script.given[2][1])]
    assert again.usage.prompt_tokens == len(again.prompt_token_ids)
    for field in ({}, {"return_token_ids": False}, {"return_token_ids": None}):
        script.texts = ["a<eos>"]
        answer = await post(client, "/chat/completions", {"messages": GO, **field})
        assert "prompt_token_ids" not in answer and "token_ids" not in answer["choices"][0]


async def test_a_plain_prompt_has_its_tokens_in_each_choice(served: Served) -> None:
    from vllm.entrypoints.openai.completion.protocol import CompletionResponse

    client, script, _ = served
    script.texts = ["a<eos>", "bc<eos>"]
    body = {"prompt": [3, 4], "n": 2, "return_token_ids": True, "logprobs": 0}
    answer = read(CompletionResponse, await post(client, "/completions", body))
    assert [choice.prompt_token_ids for choice in answer.choices] == [[3, 4]] * 2
    said = {choice.text: choice.token_ids for choice in answer.choices}
    assert said == {text: script.chat.encode(f"{text}<eos>") for text in ("a", "bc")}


async def events_of(client: openai.AsyncOpenAI, path: str, body: dict[str, Any], kind: type[BaseModel]) -> list[Any]:
    lines = (await client.post(path, body={**body, "stream": True}, cast_to=httpx.Response)).text.split("\n\n")
    return [read(kind, json.loads(line.removeprefix("data: "))) for line in lines if line.startswith("data: {")]


async def test_a_stream_has_the_prompt_once_for_each_choice_and_every_sampled_token_once(served: Served) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionStreamResponse
    from vllm.entrypoints.openai.completion.protocol import CompletionStreamResponse

    client, script, _ = served
    texts = {"a": script.chat.encode("a<eos>"), "bc": script.chat.encode("bc<eos>")}
    script.texts = [f"{text}<eos>" for text in texts]
    body: dict[str, Any] = {"messages": GO, "n": 2, "return_token_ids": True}
    chunks = await events_of(client, "/chat/completions", body, ChatCompletionStreamResponse)
    said = dict[int, tuple[str, list[int]]]()
    for chunk in chunks:
        (choice,) = chunk.choices
        text, tokens = said.get(choice.index, ("", []))
        is_first = choice.index not in said
        assert chunk.prompt_token_ids == (script.chat.encode(script.given[0][1]) if is_first else None)
        said[choice.index] = (text + (choice.delta.content or ""), tokens + (choice.token_ids or []))
    assert dict(said.values()) == texts
    script.texts = ["a<eos>"]
    body = {"prompt": [3, 4], "return_token_ids": True}
    (chunk,) = await events_of(client, "/completions", body, CompletionStreamResponse)
    assert (chunk.choices[0].prompt_token_ids, chunk.choices[0].token_ids) == ([3, 4], texts["a"])


@pytest.mark.parametrize("as_ids", [False, True])
async def test_log_probabilities_are_written_as_vllm_does(served: Served, as_ids: bool) -> None:
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.logprobs import Logprob

    client, script, _ = served
    tokens = script.chat.encode("bc<eos>")
    sampled = [{token: Logprob(-0.5, 1, script.chat.decode([token]))} for token in tokens]
    server: Any = SimpleNamespace(return_tokens_as_token_ids=False)
    server._get_decoded_token = GenerateBaseServing._get_decoded_token
    server._get_top_logprobs = lambda *given, **named: OpenAIServingChat._get_top_logprobs(server, *given, **named)
    script.texts = ["bc<eos>"] * 2
    body = {"return_tokens_as_token_ids": as_ids}
    answer = await post(client, "/chat/completions", {**body, "messages": GO, "logprobs": True})
    theirs = OpenAIServingChat._create_chat_logprobs(server, tokens, sampled, None, return_as_token_id=as_ids)
    assert answer["choices"][0]["logprobs"] == theirs.model_dump()
    answer = await post(client, "/completions", {**body, "prompt": "go", "logprobs": 0})
    theirs = OpenAIServingCompletion._create_completion_logprobs(
        server, tokens, sampled, 0, None, return_as_token_id=as_ids
    )
    assert answer["choices"][0]["logprobs"] == theirs.model_dump()
