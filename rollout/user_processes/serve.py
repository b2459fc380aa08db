"""The other end of a pool (user_process.py has the messages): what a process does that runs a function of the user's.

Owns: reading questions and writing answers. If the user's code writes an answer itself, the real one follows as one too
many, which the pool notices. No torch, no vLLM.
"""

import asyncio
import contextlib
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from slipstream.conf.errors import SlipstreamError
from slipstream.rollout.channel import BlockingChannel, Channel, Disconnected
from slipstream.rollout.user_processes.user_process import ALIVE_EVERY_S

MAX_REASON = 4000
"""Longest reason why a function cannot be set up, in characters."""

Answer = Callable[..., list[object]] | Callable[..., Awaitable[list[object]]]


def serve(set_up: Callable[[Any], tuple[Answer, list[object]]], *, tells_alive: bool = False) -> None:
    """Answer until the pool closes the connection: coroutines many questions at the same time, a plain function one
    after the other, in the main thread and outside of an event loop.

    `set_up` takes the pool's first message, and returns what answers and what the pool is told then, or raises a
    SlipstreamError that says why it cannot. `tells_alive`: say every ALIVE_EVERY_S that the event loop turns."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    with contextlib.suppress(Disconnected):
        _serve(connection, set_up, tells_alive)


def _serve(connection: socket.socket, set_up: Callable[[Any], tuple[Answer, list[object]]], tells_alive: bool) -> None:
    """Raises: Disconnected."""
    channel = BlockingChannel(connection)
    _, message = channel.receive()
    try:
        answer, facts = set_up(message)
    except SlipstreamError as e:
        channel.send([0, "refused", str(e)[:MAX_REASON]])
        return
    channel.send([0, "ready", *facts])
    if asyncio.iscoroutinefunction(answer):
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:  # then cancels coroutines, which clean up
            runner.get_loop().run_until_complete(_serve_many(connection, answer, tells_alive))
    while True:
        number, *question = channel.receive()
        given: Any = answer(*question)
        channel.send([number, *given])


async def _serve_many(
    connection: socket.socket, answer: Callable[..., Awaitable[list[object]]], tells_alive: bool
) -> None:
    channel = await Channel.over(connection)
    running: dict[int, asyncio.Task[None]] = {}

    async def work(number: int, question: list[Any]) -> None:
        channel.send([number, *await answer(*question)])

    async def tell_alive() -> None:
        while tells_alive:
            channel.send([0])
            await asyncio.sleep(ALIVE_EVERY_S)

    beating = asyncio.create_task(tell_alive())
    while not tells_alive or not beating.done():
        number, *question = await channel.receive()
        if question:
            running[number] = task = asyncio.create_task(work(number, question))
            task.add_done_callback(lambda _, number=number: running.pop(number, None))
        elif number in running:
            running[number].cancel()
