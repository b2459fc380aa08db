"""A replica's end of a publish's control: what ReplicaVerbs asks, one call at a time.

Owns the order of calls, who may publish, and the VersionState of the replica (all of its engine ranks together). What a
call does is the `ReplicaHandler`'s (`rollout/base_replica.py`). Weights never pass here.

    ReplicaClients                            ReplicaEndpoint                  ReplicaHandler
      describe  ------------------------------->  describe()  --------------->  layout and binding of every engine rank
      begin     ------------------------------->  begin()     state DIRTY  -->  pause(): the engine stands still
                                                                           -->  begin(): ranks DIRTY; where to write
         ... one-sided writes ...
      commit    ------------------------------->  verify()  --------------->    every rank proves its bytes
                                                  commit()  state CLEAN   -->   repack, recompute, drop caches, resume
      abort     ------------------------------->  abort()     state DIRTY

Calls are done in the order in which they arrive. One that fails leaves the replica DIRTY, and the publisher gets its
error.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from slipstream.conf.failures import outcome_when_done
from slipstream.weight_sync.calls.server import CallServer
from slipstream.weight_sync.errors import StaleEpoch
from slipstream.weight_sync.replica.messages import (
    Begun,
    Bound,
    Committed,
    Described,
    EngineRank,
    Expected,
    PublishId,
    ReplicaVerbs,
)
from slipstream.weight_sync.replica.version_state import VersionState

logger = logging.getLogger(__name__)


class ReplicaHandler(Protocol):
    """What a replica does in a publish. Lists have one entry per engine rank, in rank order. Called one at a time."""

    async def describe(self) -> Sequence[EngineRank]:
        """Layout, binding and link of every engine rank (Receiver.describe)."""
        ...

    async def pause(self, version: int, epoch: int, digest: str) -> None:
        """Stop serving and wait until the engine has paused."""
        ...

    async def begin(self, version: int, epoch: int, digest: str) -> Sequence[Bound]:
        """Receiver.begin on every rank, after pause(). Returns where to write."""
        ...

    async def verify(self, version: int, epoch: int, digest: str, expected: Sequence[Expected]) -> None:
        """Receiver.verify on every rank, with its own entry of `expected`. Raises if any rank does."""
        ...

    async def commit(self, version: int, epoch: int) -> None:
        """Receiver.commit on every rank, drop what belongs to older weights, resume. Called only after verify()."""
        ...

    async def abort(self, epoch: int, reason: str) -> None:
        """Stay paused and DIRTY (Receiver.abort): epoch `epoch` failed here or at the publisher."""
        ...


class ReplicaEndpoint(ReplicaVerbs):
    """Serves one replica's part of a publish. All methods belong to one event loop.

    Args:
        key: Shared with the publisher.
        pauses: Whether the replica samples nothing between begin and the end of commit.
    """

    def __init__(self, handler: ReplicaHandler, key: bytes, *, host: str = "127.0.0.1", pauses: bool = True) -> None:
        self._handler = handler
        self._pauses = pauses
        self._server = CallServer(self, ReplicaVerbs, key, host=host, has_one_client=False)
        self._one_at_a_time = asyncio.Lock()
        self._state = VersionState()
        self._described: dict[str, int] = {}
        """Per publisher: when it last called describe(), as a count of such calls."""
        self._turn = 0
        """That count of the publisher that began last."""
        self._began = 0.0

    @property
    def state(self) -> VersionState:
        """Sample only while it is serving."""
        return self._state

    def adopt(self, state: VersionState) -> None:
        """Take a state from the handler, while no publish fills the replica: it read a peer, or loaded its weights from
        disk. A publisher that comes later begins a later epoch. Raises StaleEpoch if a publish has begun a later epoch,
        or the replica serves this one already.
        """
        if state.epoch < self._state.epoch or (state.epoch == self._state.epoch and self._state.is_serving):
            raise StaleEpoch(f"epoch {state.epoch} cannot be adopted: epoch {self._state.epoch} has begun")
        self._state = state

    @property
    def address(self) -> str:
        """Where publishers reach this replica, e.g. "tcp://127.0.0.1:40123". Valid after start()."""
        return self._server.address

    async def start(self) -> str:
        """Bind and serve; returns the address."""
        return await self._server.start()

    async def close(self) -> None:
        """Stop serving; a call under way is cancelled. Idempotent."""
        self._state = self._state.invalidate()
        self._server.close()

    # -- ReplicaVerbs ------------------------------------------------------------------------------------------------

    async def describe(self, publisher: str) -> Described:
        async with self._one_at_a_time:
            self._described[publisher] = 1 + max(self._described.values(), default=0)
            return Described(tuple(await self._handler.describe()), self._state.epoch)

    async def begin(self, publish: PublishId) -> Begun:
        version, epoch, digest = publish.version, publish.epoch, publish.digest
        async with self._turn_of(publish):
            self._state = self._state.begin(version, epoch, digest)
            self._turn = self._described[publish.publisher]
            self._began = time.monotonic()
            await self._handler.pause(version, epoch, digest)
            idle = time.monotonic()
            bindings = await self._handler.begin(version, epoch, digest)
            return Begun(tuple(bindings), idle - self._began, time.monotonic() - idle)

    async def commit(self, publish: PublishId, expected: Sequence[Expected]) -> Committed:
        version, epoch, digest = publish.version, publish.epoch, publish.digest
        async with self._turn_of(publish):
            state = self._state.verified(version, epoch, digest)
            began = time.monotonic()
            await self._handler.verify(version, epoch, digest, expected)
            self._state = state
            verified = time.monotonic()
            await self._handler.commit(version, epoch)
            self._state = state.committed(version, epoch)
            done = time.monotonic()
            pause_s = done - self._began if self._pauses else 0.0
            logger.info("version %d committed (epoch %d, paused %.3f s)", version, epoch, pause_s)
            return Committed(verified - began, done - verified, pause_s)

    async def abort(self, publish: PublishId, reason: str) -> None:
        async with self._turn_of(publish):
            if publish.epoch == self._state.epoch and not self._state.is_serving:
                await self._fail(publish.epoch, reason)

    @contextlib.asynccontextmanager
    async def _turn_of(self, publish: PublishId) -> AsyncGenerator[None]:
        """One call after the other, of the publisher whose turn it is. An error leaves the replica DIRTY."""
        async with self._one_at_a_time:
            described = self._described.get(publish.publisher)
            if described is None:
                raise StaleEpoch("this replica restarted, or never met this publisher: connect again")
            if described < self._turn:
                raise StaleEpoch("another publisher, which met this replica later, has begun here: connect again")
            try:
                yield
            except StaleEpoch:
                raise
            except Exception as e:  # of whatever kind: it travels to the publisher, and what is here is no version
                logger.exception("version %d, epoch %d failed", publish.version, publish.epoch)
                await self._fail(publish.epoch, f"{type(e).__name__}: {e}")
                raise

    async def _fail(self, epoch: int, reason: str) -> None:
        self._state = self._state.failed(epoch)
        failure = await outcome_when_done(self._handler.abort(epoch, reason))
        if failure is not None:  # of a call that failed already: the first error is the one to report
            logger.error("abort of epoch %d failed as well", epoch, exc_info=failure)
