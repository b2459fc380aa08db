"""Agents whose rows say how they go on after their first response, most of them badly. Named by this file's path."""

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
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


async def _raise(_: Session) -> NoReturn:
    raise KeyError("no such thing")


async def _end_python(_: Session) -> NoReturn:
    sys.exit(3)


async def _end_process(_: Session) -> NoReturn:
    os._exit(3)


async def _block(_: Session) -> None:
    threading.Event().wait()


async def _hang(_: Session) -> None:
    await asyncio.sleep(600)


async def _hang_for_ever(_: Session) -> NoReturn:
    print("waits for ever")
    while True:
        with contextlib.suppress(BaseException):
            await asyncio.sleep(600)


async def _print(_: Session) -> None:
    tool = await asyncio.create_subprocess_exec("head", "-c", "1000000000", "/dev/zero")
    await tool.wait()


async def _ask_for_much(session: Session) -> None:
    await session.chat([{"role": "user", "content": "x" * 10_000_000}])


async def _heat(session: Session) -> None:
    await session.chat(GO, temperature=0.5)


async def _wait(_: Session) -> None:
    await asyncio.sleep(1)


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


async def _fork(session: Session) -> None:
    await asyncio.gather(*(session.chat(GO) for _ in range(3)))


async def _write_garbage(_: Session) -> None:
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"\0\0\0\4garb")
    await asyncio.sleep(600)


RETURNED = {"nan": float("nan"), "large": 10**400, "text": "1.0", "nothing": None}
ACTS: dict[str, Callable[[Session], Awaitable[None]]] = {
    "raise": _raise,
    "sys.exit": _end_python,
    "exit": _end_process,
    "block": _block,
    "hang": _hang,
    "hang for ever": _hang_for_ever,
    "print": _print,
    "huge": _ask_for_much,
    "heat": _heat,
    "wait": _wait,
    "turns": _go_on,
    "fork": _fork,
    "garbage": _write_garbage,
}
"""A row's column "what" -> what its agent does; another word: nothing."""
