"""One agent process: `python -m slipstream.rollout.agents.agent_process FD`. Runs many episodes of the user's agent.

    first message: the agent's name                       ready: source file
    question: task, base_url, key, model                  answer: an outcome (user_processes/outcomes.py)

Does not own: the connection and the event loop (user_processes/serve.py), limits and deadlines (episode.py,
service.py), nor the end of what an agent starts (user_processes/keeper.py).
"""

import asyncio
import inspect
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from slipstream.conf.errors import ConfigError
from slipstream.conf.functions import file_of, has_form, import_function
from slipstream.conf.json_files import JsonObject
from slipstream.rollout.agents.session import Session
from slipstream.rollout.errors import AgentError
from slipstream.rollout.user_processes.outcomes import NOTHING, RAISED, SCORE, Outcome, no_number, plain_number, raised
from slipstream.rollout.user_processes.serve import Answer, serve

Agent = Callable[[JsonObject, Session], Awaitable[Any]]


def load_agent(name: str) -> Agent:
    """The function at `package.module:function` or `FILE.py:function`. Raises AgentError: the module does not import,
    has no such name, or it is not an async function of two arguments."""
    try:
        function = import_function("rollout.agent", name)
    except ConfigError as e:
        raise AgentError(str(e)) from e
    except BaseException as e:  # it exits
        raise AgentError(f"rollout.agent={name}: importing it failed: {type(e).__name__}: {e}") from e
    if not has_form(inspect.iscoroutinefunction, function):
        raise AgentError(f"rollout.agent={name}: it must be `async def`: many episodes share one process")
    try:
        inspect.signature(function).bind({}, None)
    except TypeError as e:
        raise AgentError(f"rollout.agent={name}: it must take (task, session): {e}") from e
    return function


async def _run(agent: Agent, client: aiohttp.ClientSession, task: JsonObject, *connection: str) -> Outcome:
    try:
        reward = await agent(task, Session(client, *connection))
        if reward is None:
            return Outcome(NOTHING)
        if (value := plain_number(reward)) is not None:
            return Outcome(SCORE, value)
        return no_number("an agent must return a finite number or None", reward)  # its own repr may raise
    except asyncio.CancelledError:
        return Outcome(RAISED, report="cancelled", place="cancelled")
    except BaseException as e:  # noqa: BLE001 - SystemExit of a user's function costs one episode, too
        return raised(e)


def _set_up(name: str) -> tuple[Answer, list[object]]:
    agent = load_agent(name)
    client: aiohttp.ClientSession | None = None

    async def answer(*question: Any) -> list[object]:
        nonlocal client
        if client is None:  # it belongs to an event loop
            unlimited = aiohttp.ClientTimeout(total=None)
            client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=unlimited)
        return (await _run(agent, client, *question)).as_message

    return answer, [file_of(agent)]


if __name__ == "__main__":
    try:
        serve(_set_up, tells_alive=True)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # whatever the user's code still does
