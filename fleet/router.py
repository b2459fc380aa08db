"""Which rollout worker samples the next group, and what a request that fails costs.

Owns: the choice of the least loaded replica, the deadline of a request, and the next try: a worker whose request failed
leaves service, and its group is sampled again on another one; a worker that is told to go, or whose engine has died,
hands its responses over, and another one samples the rest. Does not own: the state of a replica and who may serve
(supervisor), when a group is sampled (loop/sampler.py).
Invariant: a request goes only to a replica that serves.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from slipstream.conf.schema import SamplingConfig
from slipstream.fleet.errors import WaitTimeout
from slipstream.fleet.replicas import Replica, ReplicaState
from slipstream.fleet.supervisor import Supervisor
from slipstream.fleet.waiting import wait_for
from slipstream.rollout.errors import EngineDied
from slipstream.rollout.types import ABORTED, Prompt, Rollout
from slipstream.weight_sync.errors import ReplicaDirty

logger = logging.getLogger(__name__)

Note = Callable[[str, str, float, int | None], None]
"""(who, what, since when, prompt)"""

KEEP_S = 10.0
"""Longest wait for a worker to say whether it keeps a version."""


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

    async def generate_group(
        self, prompt: Prompt, n: int, sampling: SamplingConfig | None = None, version: int | None = None
    ) -> list[Rollout]:
        """Sample a group on the least loaded serving replica; on another one when that fails.

        Args:
            sampling: used instead of rollout.sampling, for evaluations.
            version: sample from this one where keep_version() has kept it.

        Raises:
            NoReplicasLeft: every replica is out. It comes at last, because each failure takes a replica out of service
                and each replica has a number of restarts.
        """
        so_far: list[Rollout] = []
        while True:
            replica = await self._supervisor.roster.least_loaded()
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
        """Let every serving replica keep its newest version, if it is this one; None: let them keep nothing.

        Returns:
            How many keep it. Those with merged weights cannot. One that fails here stays in service: sampling will
            tell.
        """
        serving = [one for one in self._supervisor.roster.replicas.values() if one.state is ReplicaState.serving]
        kept = await asyncio.gather(
            *(asyncio.wait_for(one.worker.keep_version(version), KEEP_S) for one in serving), return_exceptions=True
        )
        for replica, answer in zip(serving, kept, strict=True):
            if isinstance(answer, BaseException):
                logger.warning("%s did not answer about version %s: %r", replica.worker.name, version, answer)
        return sum(answer is True for answer in kept)

    async def score(self, token_ids: Sequence[int], version: int) -> list[float] | None:
        """Score one sequence on the least loaded serving replica; None when none serves, or another version.

        One try: a replica that fails here stays in service, because sampling will tell.
        """
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
