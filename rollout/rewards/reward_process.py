"""One reward process: `python -m slipstream.rollout.rewards.reward_process FD`. Gets samples, gives scores.

    first message: [RewardPart's fields, section, folder]    ready: the fields of function.Form
    question: prompt, [response...], fields, messages        answer: [outcome...], counts     one outcome for all
                                                                                              responses, or each

A plain function judges in the main thread, one sample after the other. Coroutines judge many samples at the same time;
each has reward.timeout_s, after which it is cancelled and the others go on.
"""

import asyncio
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.conf.deadlines import within
from slipstream.conf.json_files import is_list
from slipstream.conf.schema import reward_part
from slipstream.rollout.rewards.counting import counted
from slipstream.rollout.rewards.function import Reward, load_reward
from slipstream.rollout.user_processes.outcomes import (
    NOT_A_NUMBER,
    SCORE,
    TIMEOUT,
    Outcome,
    no_number,
    plain_list,
    plain_number,
    raised,
)
from slipstream.rollout.user_processes.serve import Answer, serve


def _set_up(message: Any) -> tuple[Answer, list[object]]:
    options, section, folder = message
    config = reward_part(section, options)
    reward = load_reward(config, section, Path(folder) if folder else None)
    judge = partial(_judge_soon, reward, config.timeout_s) if reward.form.is_async else partial(_judge, reward)
    return judge, list(astuple(reward.form))


def _judge(reward: Reward, *question: Any) -> list[object]:
    """Outcomes and counts of one sample, or of one group."""
    with counted() as counts:
        try:
            outcomes = _outcomes(reward, reward.call(*question), len(question[1]))
        except BaseException as e:  # noqa: BLE001 - SystemExit of a user's function costs one sample, too
            outcomes = [raised(e)]
    return [[one.as_message for one in outcomes], counts]


async def _judge_soon(reward: Reward, timeout_s: float, *question: Any) -> list[object]:
    """The same with a reward that is a coroutine."""
    with counted() as counts:
        try:
            async with within(timeout_s) as limit:
                outcomes = _outcomes(reward, await reward.call(*question), len(question[1]))
        except asyncio.CancelledError:
            raise
        except BaseException as e:  # noqa: BLE001 - as in _judge
            late = f"the reward gave no score within reward.timeout_s={timeout_s:g} seconds"
            outcomes = [Outcome(TIMEOUT, report=late) if limit.expired() else raised(e)]
    return [[one.as_message for one in outcomes], counts]


def _outcomes(reward: Reward, value: object, num_responses: int) -> list[Outcome]:
    if not reward.form.is_of_group:
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
    return no_number(f"a reward must be a finite number{also}", value)


if __name__ == "__main__":
    serve(_set_up)
