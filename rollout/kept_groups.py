"""Groups that a controller asked for, kept for the one that takes its place when it is killed.

    controller    asks for a group --> sample() --> a task samples it; its result is kept
    another one   calls the worker --> hand_on()
                  asks for the same group --> sample() --> what that task has, or will have

It asks for every group that its predecessor had not trained on: those under way, and those that waited for their step
(docs/decisions/0042). Engines went on with them meanwhile.
Owns: what is kept, how long, and who gets it.
Invariant: what one controller asked for goes to a later one alone, once, for an equal request, and only while the
worker has not gone back to an older version.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.rollout.types import ABORTED, Rollout, RoutingShape

MOST_TOKENS = 4_000_000
"""Kept results have at most so many. Where routes are recorded prompts have some, too, and their tokens count."""
_TOKEN_BYTES = 80
"""A sampled token's id, log-probability and version take so many in Python's lists."""


def bytes_kept(num_versions: int, num_tokens_of_version: int, routing: RoutingShape | None) -> tuple[int, int]:
    """Memory of what a worker keeps: of so many tokens sampled from each version (of responses, and with routes of
    their prompts), and at most."""
    if num_versions == 0:
        return 0, 0
    routes = 0 if routing is None else len(routing.layers) * routing.top_k * np.dtype(routing.dtype).itemsize
    num_tokens = min(MOST_TOKENS, (num_versions + 1) * num_tokens_of_version)
    return num_tokens * (_TOKEN_BYTES + routes), MOST_TOKENS * (_TOKEN_BYTES + routes)


@dataclass(slots=True, eq=False)
class _Group:
    asked: bytes
    task: asyncio.Task[list[Rollout]]
    num_tokens: int = 0
    """Tokens of its result, as MOST_TOKENS counts them, once a controller had it."""


class KeptGroups:
    """See the module's docstring. A result is kept until `num_versions` further versions have been committed; 0:
    nothing is kept. All methods belong to one event loop."""

    def __init__(self, num_versions: int, version: Callable[[], int]) -> None:
        self._num_versions = num_versions
        self._version = version
        self._own: deque[_Group] = deque()
        """Asked for by the controller that is there, oldest first."""
        self._num_tokens = 0
        """Tokens of their results."""
        self._left: dict[bytes, list[_Group]] = {}
        """Asked for by those before, and not by a later one."""
        self._left_at = -1
        """The version when the last of them left."""

    async def sample(self, asked: bytes, sample: Callable[[], Coroutine[Any, Any, list[Rollout]]]) -> list[Rollout]:
        """What an earlier controller's equal request (`asked`) led to, or else what `sample` returns."""
        if self._num_versions == 0:
            return await sample()
        group = self._taken(asked)
        if group is None:
            group = _Group(asked, asyncio.create_task(sample()))
            group.task.add_done_callback(_is_good)  # nobody may ask for it again, and an error is no news then
        self._own.append(group)
        rollouts = await asyncio.shield(group.task)
        group.num_tokens = sum(map(_num_tokens, rollouts))
        self._num_tokens += group.num_tokens
        self._forget()
        return rollouts

    def hand_on(self) -> None:
        """Keep for another controller, which is there now, what those before had asked for."""
        self._drop_old()
        for group in self._own:
            self._left.setdefault(group.asked, []).append(group)
        self._left_at = self._version()
        self._own.clear()
        self._num_tokens = 0

    def left(self) -> list[bytes]:
        """What controllers before have asked for, and this one has not: once for each time."""
        return [group.asked for groups in self._left.values() for group in groups]

    def close(self) -> None:
        """Give up what is under way."""
        self._drop_left()
        for group in self._own:
            group.task.cancel()

    def _taken(self, asked: bytes) -> _Group | None:
        """Out of what is left, the oldest one that came to something, or may."""
        self._drop_old()
        groups = self._left.get(asked, [])
        while groups:
            group = groups.pop(0)
            if not group.task.done() or _is_good(group.task):
                return group
        return None

    def _drop_old(self) -> None:
        """What is left, where it is of a version that there is no more, or must have been trained on."""
        if not 0 <= self._version() - self._left_at <= self._num_versions:
            self._drop_left()

    def _drop_left(self) -> None:
        for groups in self._left.values():
            for group in groups:
                group.task.cancel()
        self._left.clear()

    def _forget(self) -> None:
        """The oldest ones, which must have been trained on, and what is too much."""
        while self._own and (task := self._own[0].task).done():
            is_needed = _is_good(task) and self._version() - _version_of(task.result()) <= self._num_versions
            if is_needed and self._num_tokens <= MOST_TOKENS:
                return
            self._num_tokens -= self._own.popleft().num_tokens


def _num_tokens(rollout: Rollout) -> int:
    """As MOST_TOKENS counts them."""
    return max(len(rollout.token_ids), sum(len(routes.is_recorded) for routes, _ in rollout.all_routes))


def _is_good(task: asyncio.Task[list[Rollout]]) -> bool:
    """Whether a task that is done has a group that came to its end."""
    if task.cancelled() or task.exception() is not None:
        return False
    return all(one.finish_reason != ABORTED for one in task.result())


def _version_of(rollouts: list[Rollout]) -> int:
    """The newest version that sampled the last token of a rollout; -1 if none has a token."""
    return max((one.policy_versions[-1] for one in rollouts if one.policy_versions), default=-1)
