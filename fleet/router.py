"""Which rollout worker samples the next group, and what a request that fails costs.

A worker whose request failed leaves service, and its group is sampled again on another one. A worker that is told to
go, or whose engine has died, hands its responses over, and another one samples the rest. A group that a worker keeps
for a controller that is gone is asked of that worker. Owns: whom to ask, the deadline of a request, and the next try.
Does not own: who may serve (supervisor), when a group is sampled (loop/sampler.py). Invariant: a request goes only to a
replica that serves.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from slipstream.conf.plural import counted
from slipstream.conf.schema import SamplingConfig
from slipstream.fleet.errors import WaitTimeout
from slipstream.fleet.replicas import Replica, ReplicaState, RolloutHandle
from slipstream.fleet.supervisor import Supervisor
from slipstream.fleet.waiting import wait_for
from slipstream.rollout.errors import EngineDied
from slipstream.rollout.types import ABORTED, Prompt, Rollout
from slipstream.rollout.worker_verbs import digest_of
from slipstream.weight_sync.errors import ReplicaDirty

logger = logging.getLogger(__name__)

T = TypeVar("T")

Note = Callable[[str, str, float, int | None], None]
"""(who, what, since when, prompt)"""

ANSWER_S = 10.0
"""Longest wait for a worker to say whether it keeps a version, or what it has left."""


class Router:
    """See the module's docstring.

    Args:
        request_timeout_s: a group that takes longer is given up, and its worker with it.
        note: told which worker has sampled what since when, in seconds since 1970.
    """

    def __init__(self, supervisor: Supervisor, *, request_timeout_s: float, note: Note | None = None) -> None:
        self.num_failed_groups = 0
        """Groups that had to be sampled again because their worker failed."""
        self.num_handed_over = 0
        """Responses that another worker went on with."""
        self._supervisor = supervisor
        self._request_timeout_s = request_timeout_s
        self._note = note
        self._left: dict[bytes, list[Replica]] = {}
        """What was asked for by a controller that is gone (digest_of) -> who has it, once for each time."""

    async def generate_group(
        self, prompt: Prompt, n: int, sampling: SamplingConfig | None = None, version: int | None = None
    ) -> list[Rollout]:
        """Sample a group on the least loaded serving replica; on another one when that fails. Arguments as of
        RolloutVerbs. Raises NoReplicasLeft when every replica is out, which comes at last: each failure takes a replica
        out of service, and each has a number of restarts."""
        so_far: list[Rollout] = []
        while True:
            replica = await self._supervisor.roster.least_loaded()
            if self._left and version is None and not so_far:
                replica = self._who_has(digest_of(prompt, n, sampling)) or replica
            worker, num_updates = replica.worker, replica.num_updates
            replica.num_in_flight += 1
            began = time.time()
            try:
                so_far = await self._generate_on(replica, prompt, n, sampling, version, so_far)
                num_left = sum(one.finish_reason == ABORTED for one in so_far)
                if not num_left:
                    return so_far
                self.num_handed_over += num_left
            except ReplicaDirty as error:
                # A publish's Begin, which has a socket of its own, overtook this request. Nothing was sampled and the
                # worker is well. When no publish explains it, the worker really is dirty.
                is_serving = replica.worker is worker and replica.state is ReplicaState.serving
                if is_serving and replica.num_updates == num_updates:
                    await self._supervisor.fail(replica, f"it committed the newest version, yet it refuses: {error}")
            except Exception as error:  # the boundary to another process
                logger.debug("a group on %s failed: %s", worker.name, error, exc_info=not isinstance(error, EngineDied))
                self.num_failed_groups += not any(one.token_ids for one in so_far)
                if replica.worker is worker:  # otherwise its successor is up already, which did not fail
                    await self._supervisor.fail(replica, f"{type(error).__name__}: {error}")
            finally:
                replica.num_in_flight -= 1
                if self._note is not None:
                    self._note(replica.name, "sample", began, prompt.prompt_id)

    async def generate(self, prompt: Prompt, sampling: SamplingConfig) -> Rollout:
        """Sample one response, in the same way. Raises: as generate_group()."""
        (rollout,) = await self.generate_group(prompt, 1, sampling)
        return rollout

    async def keep_version(self, version: int | None) -> int:
        """Let every serving replica keep its newest version, if it is this one; None: let them keep nothing. Returns
        how many keep it: those with merged weights cannot. One that fails here stays in service: sampling will tell."""
        kept = await self._answers(
            lambda worker: worker.keep_version(version), f"about version {version}", ReplicaState.serving
        )
        return sum(kept.values())

    async def find_left(self) -> None:
        """Ask workers which groups they have for the controller before this one."""
        those_up = ReplicaState.pending, ReplicaState.serving
        found = await self._answers(lambda worker: worker.groups_left(), "what it has left", *those_up)
        for replica, digests in found.items():
            for digest in digests:
                self._left.setdefault(digest, []).append(replica)
        if self._left:
            num_groups = sum(map(len, self._left.values()))
            logger.info("rollout workers have %s for the controller before", counted(num_groups, "group"))

    def _who_has(self, asked: bytes) -> Replica | None:
        """A worker that need not sample this anew, if one serves. It is named once for each group that it has."""
        having = self._left.get(asked, [])
        while having:
            replica = having.pop(0)
            if replica.state is ReplicaState.serving:
                return replica
        return None

    async def _answers(
        self, call: Callable[[RolloutHandle], Awaitable[T]], what: str, *states: ReplicaState
    ) -> dict[Replica, T]:
        """What workers in one of these states answer; of one that does not answer in time, a word in the log."""
        asked = [one for one in self._supervisor.roster.replicas.values() if one.state in states]
        calls = (asyncio.wait_for(call(one.worker), ANSWER_S) for one in asked)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        found: dict[Replica, T] = {}
        for replica, answer in zip(asked, answers, strict=True):
            if isinstance(answer, BaseException):
                logger.warning("%s did not answer %s: %r", replica.worker.name, what, answer)
            else:
                found[replica] = answer
        return found

    async def score(self, token_ids: Sequence[int], version: int) -> list[float] | None:
        """Score one sequence on the least loaded serving replica; None when none serves, or another version. One try: a
        replica that fails here stays in service."""
        if self._supervisor.roster.num_serving == 0:
            return None
        replica = await self._supervisor.roster.least_loaded()
        return await replica.worker.score(token_ids, version)

    async def _generate_on(
        self,
        replica: Replica,
        prompt: Prompt,
        n: int,
        sampling: SamplingConfig | None,
        version: int | None,
        so_far: Sequence[Rollout],
    ) -> list[Rollout]:
        """Try once. Ends early when the replica fails: a frozen engine would hold the group until its deadline."""
        call = asyncio.ensure_future(replica.worker.generate_group(prompt, n, sampling, version, so_far))
        left = asyncio.ensure_future(replica.left.wait())
        try:
            await wait_for(
                asyncio.wait({call, left}, return_when=asyncio.FIRST_COMPLETED),
                f"a group of {n} on {replica.worker.name} (prompt {prompt.prompt_id})",
                timeout_s=self._request_timeout_s,
                say_every_s=self._request_timeout_s / 2,  # the wait for a batch says more, and once for all groups
            )
            if not call.done():
                raise WaitTimeout(f"{replica.worker.name} went out of service meanwhile")
            rollouts = call.result()
            if len(rollouts) != n or not all(one.token_ids or one.finish_reason == ABORTED for one in rollouts):
                raise ValueError(f"asked for {n} responses, got {len(rollouts)}, or one without a token")
            return rollouts
        finally:
            call.cancel()
            left.cancel()
