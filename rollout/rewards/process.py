"""One reward process: `python -m rollout.rewards.process FD OWNER_PID`. Reads samples from a socket, writes scores
back.

Owns nothing but the loop. Speaks to `rollout.rewards.runner` over an inherited socket pair (multiprocessing's framing;
the peer is always the parent), so that whatever a reward prints cannot disturb the exchange. No torch, no vLLM.

    parent -> RewardConfig                      child -> ("ready", "") | ("refused", reason)
    parent -> (prompt, response, fields)        child -> ("score", float) | (failure kind, text) ...
"""

from __future__ import annotations

import math
import numbers
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from conf.errors import SlipstreamError
from rollout.die_with_owner import end_with
from rollout.rewards.function import Reward, load_reward

RAISED = "raised"
NOT_A_NUMBER = "not_a_number"
MAX_TEXT = 4000
"""Longest report of one failure, in characters; the end of a traceback is what tells."""


def score(reward: Reward, prompt: str, response: str, fields: dict[str, Any]) -> tuple[str, Any]:
    """("score", value), or (failure kind, report)."""
    try:
        value = reward(prompt, response, fields)
    except BaseException:  # SystemExit and KeyboardInterrupt of a user's function cost one sample as well
        return RAISED, traceback.format_exc()[-MAX_TEXT:]
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        return NOT_A_NUMBER, f"a reward must be a finite number, got {type(value).__name__}: {value!r}"[:MAX_TEXT]
    return "score", float(value)


def main() -> None:
    """Serve until the parent closes the connection."""
    connection = Connection(int(sys.argv[1]))
    end_with(int(sys.argv[2]))
    try:
        reward = load_reward(connection.recv())
    except SlipstreamError as e:
        connection.send(("refused", str(e)))
        return
    connection.send(("ready", ""))
    while True:
        try:
            sample = connection.recv()
        except EOFError:
            return
        connection.send(score(reward, *sample))


if __name__ == "__main__":
    main()
