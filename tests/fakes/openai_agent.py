"""Agents that speak through OpenAI's own Python client, unmodified, and do what agents do to their histories."""

from typing import Any

import openai

from slipstream.rollout.agents.session import Session

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
]


async def talk(task: dict[str, Any], session: Session) -> float:
    """A conversation of six requests: plain, streamed, with a tool's result, without the tools, with a history that was
    edited, and a plain prompt. The third line of a row decides whether the episode fails.
    """
    client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0, timeout=300)
    assert [model.id async for model in client.models.list()] == [session.model]
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    first = await client.chat.completions.create(
        model=session.model, messages=messages, tools=TOOLS, max_tokens=2, temperature=0.3, logprobs=True
    )
    choice = first.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == first.usage.completion_tokens <= 2  # type: ignore[union-attr]
    messages += [choice.message, {"role": "user", "content": "more"}]
    text = ""
    stream = await client.chat.completions.create(model=session.model, messages=messages, tools=TOOLS, stream=True)
    async for event in stream:
        text += event.choices[0].delta.content or ""
    messages += [{"role": "assistant", "content": text}, {"role": "tool", "tool_call_id": "look-0", "content": "again"}]
    await client.chat.completions.create(model=session.model, messages=messages, tools=TOOLS)
    await client.chat.completions.create(model=session.model, messages=messages[:3])
    messages[1] = {"role": "assistant", "content": "edited"}
    answer = await client.chat.completions.create(model=session.model, messages=messages, tools=TOOLS)
    await client.completions.create(model=session.model, prompt=[5, 6, 7], max_tokens=1)
    if task["lines"][2] < "4":
        raise ValueError("lines that begin with 0 to 3 are not for this agent")
    return len(set(answer.choices[0].message.content or "")) / 4
