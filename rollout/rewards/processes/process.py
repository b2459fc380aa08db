"""One reward process: `python -m rollout.rewards.processes.process FD`. Reads samples from a socket, writes scores.

Owns the loop and the report of a failure. Speaks to the pool (`pool.py`) over an inherited socket in frames of JSON
(`frames.py`), so that what a reward prints cannot disturb the exchange. Every answer repeats its sample's number:
if a reward writes an answer itself, the real one follows as one too many, which the run notices. No torch, no vLLM.

    run -> [RewardPart's fields, section, folder]    process -> [0, "ready", is_async, is_of_group, source file]
                                                              | [0, "refused", reason]
    run -> [number, prompt, [response...], fields]   process -> [number, [outcome...], counts]     one outcome for all
                                                                                                   responses, or each

A plain function judges in the main thread, one sample after the other. Coroutines judge many samples at the same time;
each has reward.timeout_s, after which it is cancelled and the others go on.
"""

from __future__ import annotations

import asyncio
import reprlib
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from conf.errors import SlipstreamError
from conf.schema import reward_part
from rollout.plain_number import plain_list, plain_number
from rollout.rewards.counting import counted
from rollout.rewards.function import Reward, load_reward
from rollout.rewards.processes import frames
from rollout.rewards.processes.outcomes import NOT_A_NUMBER, RAISED, SCORE, TIMEOUT, Outcome

MAX_FRAMES = 10
"""Parts of a traceback that are reported: the last ones, including the exception's own line."""
MAX_PART = 600
"""Longest part, in characters. An exception's message may hold a whole response."""
MAX_REASON = 4000
"""Longest reason why a reward cannot be set up, in characters."""


def main() -> None:
    """Serve until the run closes the connection."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    options, section, folder = _received(connection)
    try:
        config = reward_part(section, options)
        reward = load_reward(config, section, Path(folder) if folder else None)
    except SlipstreamError as e:
        connection.sendall(frames.framed([0, "refused", str(e)[:MAX_REASON]]))
        return
    connection.sendall(frames.framed([0, "ready", reward.is_async, reward.is_of_group, reward.source]))
    try:
        if reward.is_async:
            asyncio.run(_serve_many(connection, reward, config.timeout_s))
        while True:
            number, *sample = _received(connection)
            connection.sendall(frames.framed([number, *_judge(reward, *sample)]))
    except EOFError:
        return


def _received(connection: socket.socket) -> Any:
    return frames.receive(connection)


async def _serve_many(connection: socket.socket, reward: Reward, timeout_s: float) -> None:
    """Await a coroutine per sample until the run closes the connection, which raises EOFError."""
    connection.setblocking(False)
    loop, is_writing = asyncio.get_running_loop(), asyncio.Lock()

    async def answer(number: int, *sample: Any) -> None:
        judged = await _judge_soon(reward, timeout_s, *sample)
        async with is_writing:
            await loop.sock_sendall(connection, frames.framed([number, *judged]))

    async with asyncio.TaskGroup() as samples:
        while True:
            try:
                message: Any = await frames.next_message(connection, max_bytes=1 << 32)
            except EOFError:
                break
            samples.create_task(answer(*message))
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
    raise EOFError


def _judge(reward: Reward, prompt: str, responses: Sequence[str], fields: dict[str, Any]) -> tuple[Any, ...]:
    """Outcomes and counts of one sample, or of one group."""
    with counted() as counts:
        try:
            value = reward.function(prompt, responses if reward.is_of_group else responses[0], fields)
            outcomes = _outcomes(reward, value, len(responses))
        except BaseException as e:  # noqa: BLE001 - SystemExit of a user's function costs one sample, too
            outcomes = [_raised(e)]
    return [one.as_message for one in outcomes], counts


async def _judge_soon(
    reward: Reward, timeout_s: float, prompt: str, responses: Sequence[str], fields: dict[str, Any]
) -> tuple[Any, ...]:
    """The same for a coroutine."""
    with counted() as counts:
        try:
            async with asyncio.timeout(timeout_s) as limit:
                value = await reward.function(prompt, responses if reward.is_of_group else responses[0], fields)
                outcomes = _outcomes(reward, value, len(responses))
        except asyncio.CancelledError:
            raise
        except BaseException as e:  # noqa: BLE001 - as in _judge
            late = f"the reward gave no score within reward.timeout_s={timeout_s:g} seconds"
            outcomes = [Outcome(TIMEOUT, report=late) if limit.expired() else _raised(e)]
    return [one.as_message for one in outcomes], counts


def _outcomes(reward: Reward, value: Any, num_responses: int) -> list[Outcome]:
    if not reward.is_of_group:
        return [_outcome(value)]
    values = plain_list(value)
    if values is None or len(values) != num_responses:
        got = type(value).__name__ if values is None else f"{len(values)} values"
        report = f"a reward of a group must be a list of one number per response, here {num_responses}, got {got}"
        return [Outcome(NOT_A_NUMBER, report=report, place=f"got {type(value).__name__}")]
    return [_outcome(one) for one in values]


def _outcome(value: Any) -> Outcome:
    answer: str | None = None
    if isinstance(value, tuple) and len(cast("tuple[Any, ...]", value)) == 2:  # with the answer, for majority votes
        number, given = cast("tuple[Any, Any]", value)
        if given is None or isinstance(given, str):
            value, answer = number, given
    if (number := plain_number(value)) is not None:
        return Outcome(SCORE, number, answer=answer)
    report = f"a reward must be a finite number, got {type(value).__name__}: {reprlib.repr(value)}"
    return Outcome(NOT_A_NUMBER, report=report, place=f"got {type(value).__name__}")


def _raised(error: BaseException) -> Outcome:
    """The end of the traceback, and "class file:line" of what was raised."""
    told = traceback.TracebackException.from_exception(error)
    parts = [
        part if len(part) <= MAX_PART else f"{part[:MAX_PART]}... ({len(part)} characters)\n" for part in told.format()
    ]
    raised_at = told.stack[-1]
    place = f"{type(error).__name__} {raised_at.filename}:{raised_at.lineno}"
    return Outcome(RAISED, report="".join(parts[-MAX_FRAMES:]), place=place)


if __name__ == "__main__":
    main()
