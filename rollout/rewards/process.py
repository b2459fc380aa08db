"""One reward process: `python -m rollout.rewards.process FD`. Reads samples from a socket, writes scores back.

Owns the loop and the report of a failure. Speaks to `rollout.rewards.runner` over an inherited socket in frames of
JSON (`frames.py`), so that what a reward prints cannot disturb the exchange. Every answer repeats its sample's number:
if a reward writes an answer itself, the real one follows as one too many, which the runner notices. No torch, no vLLM.

    runner -> RewardConfig's fields                 process -> [0, "ready", source file] | [0, "refused", reason]
    runner -> [number, prompt, response, fields]    process -> [number, "score", value] | [number, kind, report, place]
"""

from __future__ import annotations

import math
import numbers
import reprlib
import socket
import sys
import traceback
from typing import Any

from conf.errors import SlipstreamError
from conf.schema import RewardConfig
from rollout.rewards.frames import receive, send
from rollout.rewards.function import Reward, load_reward, source_file

RAISED = "raised"
NOT_A_NUMBER = "not_a_number"
MAX_FRAMES = 10
"""Parts of a traceback that are reported: the last ones, including the exception's own line."""
MAX_PART = 600
"""Longest part, in characters. An exception's message may hold a whole response."""

MAX_REASON = 4000
"""Longest reason why a reward cannot be set up, in characters."""


def score(reward: Reward, prompt: str, response: str, fields: dict[str, Any]) -> tuple[Any, ...]:
    """("score", value), or (kind of failure, report, class and place)."""
    try:
        value = reward(prompt, response, fields)
        if isinstance(value, numbers.Real) and math.isfinite(value):
            return "score", float(value)
    except BaseException as e:  # noqa: BLE001 - SystemExit of a user's function costs one sample, too
        return RAISED, *_report(e)
    report = f"a reward must be a finite number, got {type(value).__name__}: {reprlib.repr(value)}"
    return NOT_A_NUMBER, report, f"got {type(value).__name__}"


def _report(error: BaseException) -> tuple[str, str]:
    """The end of the traceback, and "class file:line" of what was raised."""
    told = traceback.TracebackException.from_exception(error)
    parts = [
        part if len(part) <= MAX_PART else f"{part[:MAX_PART]}... ({len(part)} characters)\n" for part in told.format()
    ]
    raised_at = told.stack[-1]
    return "".join(parts[-MAX_FRAMES:]), f"{type(error).__name__} {raised_at.filename}:{raised_at.lineno}"


def main() -> None:
    """Serve until the runner closes the connection."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    config: Any = receive(connection, max_bytes=1 << 32)
    try:
        reward = load_reward(RewardConfig(**config))
    except SlipstreamError as e:
        send(connection, [0, "refused", str(e)[:MAX_REASON]])
        return
    send(connection, [0, "ready", source_file(reward)])
    while True:
        try:
            sample: Any = receive(connection, max_bytes=1 << 32)
        except EOFError:
            return
        number, *arguments = sample
        send(connection, [number, *score(reward, *arguments)])


if __name__ == "__main__":
    main()
