"""One agent process: `python -m rollout.agents.agent_process FD AGENT`. Runs many episodes of the user's agent at once.

    pool -> ["run", number, task, base_url, key, model]   process -> ["ready", source file] | ["refused", reason]
    pool -> ["cancel", number]                            process -> ["ended", number, reward or None]
                                                          process -> ["failed", number, kind, report, place]
                                                          process -> ["alive"]   every second: the event loop turns

Owns: the event loop that the user's code shares, and the report of a failure. Does not own: limits and deadlines
(episode.py, service.py), nor the end of what an agent starts (rewards/processes/keeper.py). A message that the user's
code writes into the connection is data to the pool.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import reprlib
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from conf.errors import ConfigError
from conf.functions import import_function
from rollout.agents.agent_pool import ALIVE_EVERY_S
from rollout.agents.channel import Channel, Disconnected
from rollout.agents.failures import NOT_A_NUMBER, RAISED
from rollout.agents.session import Session
from rollout.errors import AgentError
from rollout.plain_number import plain_number

Agent = Callable[[dict[str, Any], Session], Awaitable[Any]]
MAX_REPORT = 4000
"""Longest report of a failure, in characters; its end is kept."""


def load_agent(name: str) -> Agent:
    """The function at `package.module:function` or `FILE.py:function`.

    Raises:
        AgentError: The module does not import, has no such name, or it is not an async function of two arguments.
    """
    try:
        function = import_function("rollout.agent", name)
    except ConfigError as e:
        raise AgentError(str(e)) from e
    except BaseException as e:  # it exits
        raise AgentError(f"rollout.agent={name}: importing it failed: {type(e).__name__}: {e}") from e
    if not inspect.iscoroutinefunction(function):
        raise AgentError(f"rollout.agent={name}: it must be `async def`: many episodes share one process")
    try:
        inspect.signature(function).bind({}, None)
    except TypeError as e:
        raise AgentError(f"rollout.agent={name}: it must take (task, session): {e}") from e
    return function


async def _run(agent: Agent, number: int, task: dict[str, Any], session: Session) -> list[Any]:
    """One episode. Returns the message that tells its end."""
    try:
        reward = await agent(task, session)
    except asyncio.CancelledError:
        return ["failed", number, RAISED, "cancelled", "cancelled"]
    except BaseException as e:  # noqa: BLE001 - SystemExit of a user's function costs one episode, too
        return ["failed", number, RAISED, *_report(e)]
    if reward is None:
        return ["ended", number, None]
    if (value := plain_number(reward)) is not None:
        return ["ended", number, value]
    kind = type(reward).__name__
    report = f"an agent must return a finite number or None, got {kind}: {reprlib.repr(reward)}"
    return ["failed", number, NOT_A_NUMBER, report, f"got {kind}"]


def _report(error: BaseException) -> tuple[str, str]:
    """The end of the traceback, and "class file:line" of what was raised."""
    told = traceback.TracebackException.from_exception(error)
    place = f"{told.stack[-1].filename}:{told.stack[-1].lineno}" if told.stack else "nowhere"
    return "".join(told.format())[-MAX_REPORT:], f"{type(error).__name__} {place}"


async def _serve(connection: socket.socket, name: str) -> None:
    """Answer until the pool closes the connection."""
    channel = await Channel.over(connection)
    try:
        agent = load_agent(name)
    except AgentError as e:
        channel.send(["refused", str(e)[:MAX_REPORT]])
        await channel.receive()  # it closes the connection when it has read that
        return
    channel.send(["ready", inspect.getsourcefile(inspect.unwrap(agent)) or ""])
    running: dict[int, asyncio.Task[None]] = {}

    async def episode(number: int, task: dict[str, Any], session: Session) -> None:
        channel.send(await _run(agent, number, task, session))

    async def tell_alive() -> None:
        while True:
            channel.send(["alive"])
            await asyncio.sleep(ALIVE_EVERY_S)

    beating = asyncio.create_task(tell_alive())
    unlimited = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=unlimited[0], timeout=unlimited[1]) as client:
        while not beating.done():
            kind, number, *rest = await channel.receive()
            if kind == "run":
                task, base_url, key, model = rest
                started = asyncio.create_task(episode(number, task, Session(client, base_url, key, model)))
                running[number] = started
                started.add_done_callback(lambda _, number=number: running.pop(number, None))
            elif number in running:
                running[number].cancel()


def main() -> None:
    """Serve until the pool closes the connection; then end, whatever the user's code still does."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    try:
        asyncio.run(_serve(connection, sys.argv[2]))
    except Disconnected:
        pass
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
