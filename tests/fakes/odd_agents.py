"""Agents whose rows say how they go on after their first response, most of them badly. Named by this file's path."""

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from slipstream.rollout.agents.session import Session

GO = [{"role": "user", "content": "go"}]


async def play(task: Mapping[str, Any], session: Session) -> float:
    messages = [{"role": "user", "content": task["prompt"]}]
    for hint in task["hints"]:
        reply = await session.chat(messages)
        messages += [reply.message, {"role": "user", "content": hint}]
    return len(messages) / 10


async def behave(task: Mapping[str, Any], session: Session) -> Any:
    what = task["what"]
    await session.chat(GO)
    if what == "tensor":
        import numpy

        return numpy.bool_(True)
    if what in RETURNED:
        return RETURNED[what]
    if what == "leave":
        await asyncio.create_subprocess_exec("sleep", "86413", task["mark"], start_new_session=True)
    if what == "impatient":
        await _lose_patience(session, Path(task["under_way"]))
    if what in ACTS:
        await ACTS[what](session)
    return 0.5


async def _hang_for_ever(_: Session) -> NoReturn:
    print("waits for ever")
    while True:
        with contextlib.suppress(BaseException):
            await asyncio.sleep(600)


async def _print(_: Session) -> None:
    tool = await asyncio.create_subprocess_exec("head", "-c", "1000000000", "/dev/zero")
    await tool.wait()


async def _go_on(session: Session) -> NoReturn:
    while True:
        await session.chat(GO)


async def _lose_patience(session: Session, under_way: Path) -> None:
    """Give a request up when there is that file, and ask once more when there is none."""
    asked = asyncio.create_task(session.chat(GO))
    for is_there in (True, False):
        while await asyncio.to_thread(under_way.exists) != is_there:
            await asyncio.sleep(0.01)
        asked.cancel()
    await session.chat(GO)


async def _write_garbage(_: Session) -> None:
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"\0\0\0\4garb")
    await asyncio.sleep(600)


RETURNED = {"nan": float("nan"), "large": 10**400, "text": "1.0", "nothing": None}
ACTS: dict[str, Callable[[Session], Any]] = {
    "raise": lambda _: {}["no such thing"],
    "sys.exit": lambda _: sys.exit(3),
    "exit": lambda _: os._exit(3),
    "block": lambda _: threading.Event().wait(),
    "hang": lambda _: asyncio.sleep(600),
    "hang for ever": _hang_for_ever,
    "print": _print,
    "huge": lambda session: session.chat([{"role": "user", "content": "x" * 10_000_000}]),
    "heat": lambda session: session.chat(GO, temperature=0.5),
    "wait": lambda _: asyncio.sleep(1),
    "turns": _go_on,
    "fork": lambda session: asyncio.gather(*(session.chat(GO) for _ in range(3))),
    "garbage": _write_garbage,
}
"""A row's column "what" -> what its agent does; another word: nothing."""
