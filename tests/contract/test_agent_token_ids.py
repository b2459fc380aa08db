"""Locks: who asks for token ids gets them where vLLM's own server has them, and log-probabilities in its form.

The oracle is vLLM: its classes read the answers, and its server's functions write the log-probabilities.
"""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fakes.scripted_engine import Script
from pydantic import BaseModel

from slipstream.orchestrator.inputs.character_tokenizer import save_character_tokenizer
from slipstream.rollout.agents.chat_text import FolderChatText
from slipstream.rollout.agents.endpoint import Endpoint
from slipstream.rollout.agents.episode import Episode, Limits

GO = [{"role": "user", "content": "go"}]
Served = tuple[httpx.AsyncClient, Script]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    save_character_tokenizer(tmp_path, vocab_size=200)
    chat = FolderChatText(tmp_path, [2])
    script = Script(chat)
    limits = Limits(max_turns=6, max_tokens=400, max_turn_tokens=80, max_model_len=2000)
    endpoint = Endpoint({"sesame": Episode(0, chat, limits, script.generate)}, {"temperature": 1.0, "top_p": 1.0})
    base_url = await endpoint.start("127.0.0.1", 0)
    key = {"Authorization": "Bearer sesame"}
    async with httpx.AsyncClient(base_url=base_url, headers=key, timeout=None) as client:
        yield client, script
    await endpoint.close()


def read(kind: type[BaseModel], answer: Any) -> Any:
    """An answer in vLLM's class, which has all of its fields."""
    found = kind.model_validate(answer)
    assert not found.model_extra
    for choice in found.choices:  # type: ignore[attr-defined]
        assert not choice.model_extra
    return found


async def test_a_chat_has_the_tokens_of_each_choice_and_of_the_whole_prompt(served: Served) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse

    client, script = served
    script.texts = ["a<eos>", "bc<eos>", "d<eos>"]
    body = {"model": "policy", "messages": GO, "n": 2, "logprobs": True, "return_token_ids": True}
    first = read(ChatCompletionResponse, (await client.post("/chat/completions", json=body)).json())
    prompt = script.chat.encode(script.given[0][1])
    assert first.prompt_token_ids == prompt
    said = {choice.message.content: choice.token_ids for choice in first.choices}
    assert said == {text: script.chat.encode(f"{text}<eos>") for text in ("a", "bc")}
    assert all(len(choice.logprobs.content) == len(choice.token_ids) for choice in first.choices)
    history = [*GO, {"role": "assistant", "content": "bc"}, *GO]
    body = {"model": "policy", "messages": history, "return_token_ids": True}
    again = read(ChatCompletionResponse, (await client.post("/chat/completions", json=body)).json())
    assert again.prompt_token_ids == [*prompt, *said["bc"], *script.chat.encode(script.given[2][1])]
    assert again.usage.prompt_tokens == len(again.prompt_token_ids)
    for field in ({}, {"return_token_ids": False}, {"return_token_ids": None}):
        script.texts = ["a<eos>"]
        answer = (await client.post("/chat/completions", json={"messages": GO, **field})).json()
        assert "prompt_token_ids" not in answer and "token_ids" not in answer["choices"][0]


async def test_a_plain_prompt_has_its_tokens_in_each_choice(served: Served) -> None:
    from vllm.entrypoints.openai.completion.protocol import CompletionResponse

    client, script = served
    script.texts = ["a<eos>", "bc<eos>"]
    body = {"prompt": [3, 4], "n": 2, "return_token_ids": True, "logprobs": 0}
    answer = read(CompletionResponse, (await client.post("/completions", json=body)).json())
    assert [choice.prompt_token_ids for choice in answer.choices] == [[3, 4]] * 2
    said = {choice.text: choice.token_ids for choice in answer.choices}
    assert said == {text: script.chat.encode(f"{text}<eos>") for text in ("a", "bc")}


async def events_of(client: httpx.AsyncClient, path: str, body: dict[str, Any], kind: type[BaseModel]) -> list[Any]:
    lines = (await client.post(path, json={**body, "stream": True})).text.split("\n\n")
    return [read(kind, json.loads(line.removeprefix("data: "))) for line in lines if line.startswith("data: {")]


async def test_a_stream_has_the_prompt_once_for_each_choice_and_every_sampled_token_once(served: Served) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionStreamResponse
    from vllm.entrypoints.openai.completion.protocol import CompletionStreamResponse

    client, script = served
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

    client, script = served
    tokens = script.chat.encode("bc<eos>")
    sampled = [{token: Logprob(-0.5, 1, script.chat.decode([token]))} for token in tokens]
    server: Any = SimpleNamespace(return_tokens_as_token_ids=False)
    server._get_decoded_token = GenerateBaseServing._get_decoded_token
    server._get_top_logprobs = lambda *given, **named: OpenAIServingChat._get_top_logprobs(server, *given, **named)
    script.texts = ["bc<eos>"] * 2
    body = {"return_tokens_as_token_ids": as_ids}
    answer = (await client.post("/chat/completions", json={**body, "messages": GO, "logprobs": True})).json()
    theirs = OpenAIServingChat._create_chat_logprobs(server, tokens, sampled, None, return_as_token_id=as_ids)
    assert answer["choices"][0]["logprobs"] == theirs.model_dump()
    answer = (await client.post("/completions", json={**body, "prompt": "go", "logprobs": 0})).json()
    theirs = OpenAIServingCompletion._create_completion_logprobs(
        server, tokens, sampled, 0, None, return_as_token_id=as_ids
    )
    assert answer["choices"][0]["logprobs"] == theirs.model_dump()
