"""A rollout worker's side of a publish of the engine's own weights, and of a recovery of them from another worker.

    pause(v)     no new groups; the engine stands still
    begin(v)     every rank DIRTY -> where to write; KV blocks are dropped while bytes arrive
    verify       every rank proves its bytes
    commit(v)    every rank CLEAN(v); outputs from before the pause are stamped; the version moves; the engine resumes
    abort        stays paused and DIRTY until a later begin..commit succeeds; requests in flight stay frozen

    pull(offers) pause; every rank DIRTY, reads the peer's same rank, proves the bytes
    adopt(v)     every rank CLEAN(v); the version moves; the engine resumes
    release      every rank closes its link to the peer

Owns: the order of these steps, and the endpoint at which publishers make theirs. Does not own: who samples when
(worker.py), the proof of the bytes (`weight_sync.replica.receiver`, in the engine's processes) nor the order of a
publisher's calls (`endpoint.py`, which calls the handler methods below one at a time).
Invariant: `serving` is set only while every rank holds one committed version.
"""

import asyncio
import gc
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from slipstream.conf.schema import PauseMode, WeightSyncConfig
from slipstream.rollout.engine.engine import Engine
from slipstream.rollout.receivers import WEIGHTS, Receivers
from slipstream.weight_sync.calls.verbs import verb_of
from slipstream.weight_sync.replica.endpoint import ReplicaEndpoint, ReplicaHandler
from slipstream.weight_sync.replica.messages import Bound, EngineRank, Expected
from slipstream.weight_sync.replica.recovery import Offer, Pulled, slowest
from slipstream.weight_sync.replica.version_state import VersionState

P = ParamSpec("P")
T = TypeVar("T")
CALL_SLACK_S = 5.0
"""The publisher gives a replica up after weight_sync.timeout_s. An engine whose rank takes so much longer is dead."""


class BaseReplica(ReplicaHandler):
    """See the module's docstring. The engine need not be started yet; `host` is where trainer ranks reach this
    worker."""

    def __init__(self, engine: Engine, config: WeightSyncConfig, key: bytes, host: str) -> None:
        self.config = config
        self.ranks: list[EngineRank] = []
        """What every engine rank must receive, and where; empty if the engine loaded its weights from disk."""
        self.serving = asyncio.Event()
        self.endpoint = ReplicaEndpoint(self, key, host=host)
        self._engine = engine
        self._clearing: asyncio.Task[None] | None = None
        """Task that drops the KV blocks of older weights; it ends before the engine resumes."""
        self._limit_s = config.timeout_s + CALL_SLACK_S

    @property
    def state(self) -> VersionState:
        """Which version the weights hold. The endpoint owns it."""
        return self.endpoint.state

    async def close(self) -> None:
        """Serve no more, and answer no publisher. Idempotent."""
        self.serving.clear()
        gc.enable()
        await self.endpoint.close()
        if self._clearing is not None:
            self._clearing.cancel()
            await asyncio.gather(self._clearing, return_exceptions=True)

    # -- recovery ----------------------------------------------------------------------------------------------------

    async def offer(self) -> list[Offer]:
        return await self._ask(self._limit_s, Receivers.offer, WEIGHTS) if self.ranks else []

    async def pull(self, offers: Sequence[Offer]) -> Pulled:
        """Read a peer's weights, rank by rank, and prove them. Does not serve before adopt()."""
        version, epoch, plan = offers[0].version, offers[0].epoch, offers[0].plan
        self.endpoint.adopt(self.state.begin(version, epoch, plan))
        self.serving.clear()
        await self._engine.pause(self.config.requests_in_flight, timeout_s=self._limit_s)
        self._clear_cache()
        read_s = self.config.timeout_s  # limits the read, which must end before the wait for it
        pulled = await self._ask(2 * self._limit_s, Receivers.pull, WEIGHTS, offers, read_s)
        self.endpoint.adopt(self.state.verified(version, epoch, plan))
        return slowest(pulled)

    async def adopt(self, version: int, epoch: int) -> None:
        committed = self.state.committed(version, epoch)
        self.endpoint.adopt(self.state.failed(epoch))  # until all of it is done
        await self._put_in_service(Receivers.adopt, version, epoch)
        self.endpoint.adopt(committed)

    async def release(self, offers: Sequence[Offer]) -> None:
        """Close the links to the peer of pull(). This stops sampling for about a second."""
        await self._ask(self._limit_s, Receivers.release, offers)

    # -- ReplicaHandler ----------------------------------------------------------------------------------------------

    async def describe(self) -> Sequence[EngineRank]:
        return self.ranks

    async def pause(self, version: int, epoch: int, digest: str) -> None:
        """Stop serving, then pause the engine. Only begin(), which comes later, lets bytes change, so no request
        samples from a mixture of versions."""
        self.serving.clear()
        gc.disable()  # until it resumes (weight_sync/gc_freeze.py)
        await self._engine.pause(self.config.requests_in_flight, timeout_s=self._limit_s)

    async def begin(self, version: int, epoch: int, digest: str) -> Sequence[Bound]:
        bound = await self._ask(self._limit_s, Receivers.begin, WEIGHTS, version, epoch, digest)
        self._clear_cache()
        return bound

    async def verify(self, version: int, epoch: int, digest: str, expected: Sequence[Expected]) -> None:
        await self._ask(self._limit_s, Receivers.verify, WEIGHTS, version, epoch, digest, expected)

    async def commit(self, version: int, epoch: int) -> None:
        await self._put_in_service(Receivers.commit, version, epoch)

    async def abort(self, epoch: int, reason: str) -> None:
        gc.enable()
        await self._ask(self._limit_s, Receivers.abort, WEIGHTS, epoch, reason)

    async def _put_in_service(self, verb: Callable[[Receivers, int, int, int], None], version: int, epoch: int) -> None:
        """Make every rank CLEAN, then resume. The stamp changes before the engine resumes, so that no token of new
        weights gets the old version."""
        if self._clearing is not None:
            await self._clearing
        await self._ask(self._limit_s, verb, WEIGHTS, version, epoch)
        await self._engine.set_version(version)
        await self._engine.resume(timeout_s=self._limit_s)
        gc.enable()
        self.serving.set()

    def _clear_cache(self) -> None:
        """Start to drop KV blocks. That takes milliseconds, and bytes already arrive meanwhile."""
        if self.config.requests_in_flight is not PauseMode.keep_kv:
            self._clearing = asyncio.create_task(self._engine.clear_cache(timeout_s=self._limit_s))

    async def _ask(
        self, limit_s: float, verb: Callable[Concatenate[Receivers, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Ask all ranks, with a deadline: the endpoint waits here, and must be free again for a later publisher."""
        asked = verb_of(verb)
        given = asked.given(*args, **kwargs)
        replies = await self._engine.call_ranks(f"slipstream_{asked.name}", given, timeout_s=limit_s)
        return [asked.result.decode(reply) for reply in replies]
