"""One reward process: `python -m slipstream.rollout.rewards.reward_process FD`. Gets samples, gives scores.

Owns what is answered. Does not own the connection (user_processes/serve.py) nor what a reward is (function.py).

    first message: [RewardPart's fields, section, folder]    ready: is_async, is_of_group, source file,
                                                                    asks_messages
    question: prompt, [response...], fields, messages        answer: [outcome...], counts     one outcome for all
                                                                                              responses, or each

A plain function judges in the main thread, one sample after the other. Coroutines judge many samples at the same time;
each has reward.timeout_s, after which it is cancelled and the others go on.
"""

import asyncio
import reprlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.conf.json_files import JsonObject, is_list
from slipstream.conf.schema import reward_part
from slipstream.rollout.plain_number import plain_list, plain_number
from slipstream.rollout.rewards.counting import counted
from slipstream.rollout.rewards.function import Reward, load_reward
from slipstream.rollout.rewards.outcomes import NOT_A_NUMBER, RAISED, SCORE, TIMEOUT, Outcome
from slipstream.rollout.user_processes.serve import Answer, report_of, serve


def _set_up(message: Any) -> tuple[Answer, list[object]]:
    options, section, folder = message
    config = reward_part(section, options)
    reward = load_reward(config, section, Path(folder) if folder else None)
    judge = partial(_judge_soon, reward, config.timeout_s) if reward.is_async else partial(_judge, reward)
    return judge, [reward.is_async, reward.is_of_group, reward.source, reward.asks_messages]


def _judge(
    reward: Reward, prompt: str, responses: Sequence[str], fields: JsonObject, messages: Any = None
) -> list[object]:
    """Outcomes and counts of one sample, or of one group."""
    with counted() as counts:
        try:
            value = reward.call(prompt, responses, fields, messages)
            outcomes = _outcomes(reward, value, len(responses))
        except BaseException as e:  # noqa: BLE001 - SystemExit of a user's function costs one sample, too
            outcomes = [_raised(e)]
    return [[one.as_message for one in outcomes], counts]


async def _judge_soon(
    reward: Reward, timeout_s: float, prompt: str, responses: Sequence[str], fields: JsonObject, messages: Any = None
) -> list[object]:
    """Judge with a reward that is a coroutine."""
    with counted() as counts:
        try:
            async with asyncio.timeout(timeout_s) as limit:
                value = await reward.call(prompt, responses, fields, messages)
                outcomes = _outcomes(reward, value, len(responses))
        except asyncio.CancelledError:
            raise
        except BaseException as e:  # noqa: BLE001 - as in _judge
            late = f"the reward gave no score within reward.timeout_s={timeout_s:g} seconds"
            outcomes = [Outcome(TIMEOUT, report=late) if limit.expired() else _raised(e)]
    return [[one.as_message for one in outcomes], counts]


def _outcomes(reward: Reward, value: object, num_responses: int) -> list[Outcome]:
    if not reward.is_of_group:
        return [_outcome(value)]
    values = plain_list(value)
    if values is None or len(values) != num_responses:
        got = type(value).__name__ if values is None else f"{len(values)} values"
        report = f"a reward of a group must be a list of one number per response, here {num_responses}, got {got}"
        return [Outcome(NOT_A_NUMBER, report=report, place=f"got {type(value).__name__}")]
    return [_outcome(one) for one in values]


def _outcome(value: object) -> Outcome:
    answer: str | None = None
    if isinstance(value, tuple) and is_list(value) and len(value) == 2:  # with the answer, for majority votes
        number, given = value
        if given is None or isinstance(given, str):
            value, answer = number, given
    if (number := plain_number(value)) is not None:
        return Outcome(SCORE, number, answer=answer)
    also = ", or a pair of one and the answer as text" if isinstance(value, tuple) else ""
    report = f"a reward must be a finite number{also}, got {type(value).__name__}: {reprlib.repr(value)}"
    return Outcome(NOT_A_NUMBER, report=report, place=f"got {type(value).__name__}")


def _raised(error: BaseException) -> Outcome:
    report, place = report_of(error)
    return Outcome(RAISED, report=report, place=place)


if __name__ == "__main__":
    serve(_set_up)
