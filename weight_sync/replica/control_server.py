"""A replica's end of the control channel of a publish: a ZMQ server that answers one request at a time.

Owns the socket, request order, replay protection, and the VersionState of the replica (all of its engine ranks
together). Does not own what a request does: that is the `ReplicaHandler`, implemented by `rollout/base_replica.py`; nor
the publisher's end (`control_client.py`). Carries messages only; weights never pass here.

    Publisher (rank 0)                        ReplicaEndpoint                  ReplicaHandler
      Describe  ------------------------------->  describe()  --------------->  layout and binding of every engine rank
      Begin     ------------------------------->  begin()     state DIRTY  -->  pause(): the engine stands still
                                                                           -->  begin(): ranks DIRTY; where to write
         ... one-sided writes ...
      Commit    ------------------------------->  verify()  --------------->    every rank proves its bytes
                                                  commit()  state CLEAN   -->   repack, recompute, drop caches, resume
      Abort     ------------------------------->  abort()     state DIRTY

The server handles one request at a time, in order. A request that fails leaves the replica DIRTY and is answered
Failed(class name, text). If a peer does not know the run's key, libzmq closes its connection before it can send a
message (curve.py). A message that comes over a guarded connection but is not signed, or was seen before, gets no
answer: it is counted, and such messages are logged now and then.

Several publishers. Any publisher with the key may call Describe at any time; that changes nothing. The publisher that
called Describe last takes ownership at its first Begin, and the others are refused (StaleEpoch) until they call
Describe again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections.abc import Sequence
from typing import Protocol

import zmq
import zmq.asyncio

from slipstream.weight_sync.errors import AuthenticationError, ProtocolError, StaleEpoch
from slipstream.weight_sync.replica.curve import frames_of, serve_guarded
from slipstream.weight_sync.replica.messages import (
    Abort,
    Aborted,
    Begin,
    Begun,
    Bound,
    Commit,
    Committed,
    Describe,
    Described,
    EngineRank,
    Expected,
    Failed,
    Message,
    Signer,
)
from slipstream.weight_sync.replica.version_state import VersionState

logger = logging.getLogger(__name__)

REJECTED_LOG_S = 10.0


class ReplicaHandler(Protocol):
    """What a replica does in a publish. Lists have one entry per engine rank, in rank order. Called one at a time."""

    async def describe(self) -> Sequence[EngineRank]:
        """Layout, binding and link of every engine rank (Receiver.describe)."""
        ...

    async def pause(self, version: int, epoch: int, digest: str) -> None:
        """Stop serving and wait until the engine has paused."""
        ...

    async def begin(self, version: int, epoch: int, digest: str, known: Sequence[str]) -> Sequence[Bound]:
        """Receiver.begin on every rank, after pause(). Returns where to write: Bound.of(binding, known)."""
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


class ReplicaEndpoint:
    """Serves one replica's part of the protocol.

    Args:
        handler: Does the work.
        key: The run's key, shared with the publisher.
        host: Address to bind; loopback unless publisher and replica are on different machines.
        port: 0 takes a free one.
        pauses: Whether the replica samples nothing between Begin and the end of Commit.
    """

    def __init__(
        self,
        handler: ReplicaHandler,
        key: bytes,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        pauses: bool = True,
    ) -> None:
        self._handler = handler
        self._pauses = pauses
        self._signer = Signer(key)
        self._host = host
        self._port = port
        self._incarnation = secrets.token_hex(8)
        self._state = VersionState()
        self._last_ids: dict[tuple[str, str], int] = {}
        """Per client and the incarnation that it named: the id of its last request. Only holders of the key add to
        it."""
        self._described: dict[str, int] = {}
        """Per client: when it last called Describe, as a count of such calls."""
        self._turn = 0
        """That count of the client that began last."""
        self._began = 0.0
        self._task: asyncio.Task[None] | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._context: zmq.asyncio.Context | None = None
        self.num_rejected = 0
        """Messages that were not answered: unsigned, malformed or replayed."""
        self.rejected_log_s = REJECTED_LOG_S
        """Seconds between two log lines about messages that got no answer."""
        self._rejected_log = (0, -math.inf)
        """num_rejected when it was last logged, and the time."""

    @property
    def state(self) -> VersionState:
        """The replica's place in the protocol. Sample only while `state.is_serving`."""
        return self._state

    def adopt(self, state: VersionState) -> None:
        """Take a state from the handler, while no publish fills the replica: it read a peer, or loaded its weights from
        disk. A publisher that comes later begins a later epoch.

        Raises:
            StaleEpoch: A publish has begun a later epoch, or the replica serves this one already.
        """
        if state.epoch < self._state.epoch or (state.epoch == self._state.epoch and self._state.is_serving):
            raise StaleEpoch(f"epoch {state.epoch} cannot be adopted: epoch {self._state.epoch} has begun")
        self._state = state

    @property
    def address(self) -> str:
        """Where publishers reach this replica, e.g. "tcp://127.0.0.1:40123". Valid after start()."""
        return f"tcp://{self._host}:{self._port}"

    async def start(self) -> str:
        """Bind and serve in a task of the running loop. Returns the address."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        serve_guarded(self._socket, self._signer.key)
        try:
            if self._port:
                self._socket.bind(self.address)
            else:
                self._port = self._socket.bind_to_random_port(f"tcp://{self._host}")
        except zmq.ZMQError as e:
            self._release()
            raise ProtocolError(f"the control endpoint cannot bind {self.address}: {e}") from e
        self._task = asyncio.create_task(self._serve(self._socket), name="weight-sync-endpoint")
        return self.address

    async def close(self) -> None:
        """Stop serving; a request under way is cancelled. Idempotent."""
        self._state = self._state.invalidate()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        self._release()

    def _release(self) -> None:
        if self._socket is not None:
            self._socket.close(0)
            self._socket = None
        if self._context is not None:
            self._context.term()
            self._context = None

    async def _serve(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            peer, *frames = await socket.recv_multipart()
            request = self._accept(b"".join(frames))
            if request is None:
                continue
            reply = await self.answer(request)
            try:
                frames = [peer, *frames_of(self._signer.seal(reply))]
                await socket.send_multipart(frames)  # pyright: ignore[reportUnknownMemberType]
            except (zmq.ZMQError, ValueError, TypeError):  # one answer is lost; the endpoint must go on serving
                logger.exception("the answer to %s cannot be sent", type(request).__name__)

    def _accept(self, data: bytes) -> Message | None:
        """The request; None if it gets no answer."""
        try:
            request = self._signer.open_request(data)
            sender = request.client, request.incarnation
            last = self._last_ids.get(sender, 0)
            if request.request_id <= last:
                raise AuthenticationError(f"request {request.request_id} after {last} of one client: a replay")
        except ProtocolError as e:
            self._reject(e)
            return None
        self._last_ids[sender] = request.request_id
        return request

    def _reject(self, reason: ProtocolError) -> None:
        """Count a rejected message, and log only now and then, so that garbage cannot fill a disk with logs."""
        self.num_rejected += 1
        logged, when = self._rejected_log
        now = time.monotonic()
        if now >= when + self.rejected_log_s:
            self._rejected_log = self.num_rejected, now
            num_since = self.num_rejected - logged
            logger.warning("%d control messages ignored (%d in all): %s", num_since, self.num_rejected, reason)

    async def answer(self, request: Message) -> Message:
        """Do what a checked request asks. An error is answered Failed and, during a transaction, leaves the state
        DIRTY."""
        try:
            if not isinstance(request, Describe) and request.incarnation != self._incarnation:
                raise StaleEpoch(
                    f"this replica restarted (it is {self._incarnation}, not {request.incarnation}): connect again"
                )
            if not isinstance(request, Describe) and self._described.get(request.client, -1) < self._turn:
                raise StaleEpoch("another publisher, which met this replica later, has begun here: connect again")
            match request:
                case Describe():
                    self._described[request.client] = 1 + max(self._described.values(), default=0)
                    return self._reply(Described, request, ranks=tuple(await self._handler.describe()), **self._own())
                case Begin():
                    return await self._begin(request)
                case Commit():
                    return await self._commit(request)
                case Abort():
                    if request.epoch == self._state.epoch and not self._state.is_serving:
                        await self._fail(request.epoch, request.reason)
                    return self._reply(Aborted, request)
                case _:
                    raise ProtocolError(f"a replica does not answer {type(request).__name__}")
        except Exception as e:  # the boundary of one request: the error travels to the publisher
            logger.exception("%s(version %d, epoch %d) failed", type(request).__name__, request.version, request.epoch)
            if isinstance(request, Begin | Commit) and not isinstance(e, StaleEpoch):
                await self._fail(request.epoch, f"{type(e).__name__}: {e}")
            return self._reply(Failed, request, error=type(e).__name__, text=str(e))

    async def _begin(self, request: Begin) -> Message:
        self._state = self._state.begin(request.version, request.epoch, request.digest)
        self._turn = self._described[request.client]
        self._began = time.monotonic()
        await self._handler.pause(request.version, request.epoch, request.digest)
        idle = time.monotonic()
        bindings = await self._handler.begin(request.version, request.epoch, request.digest, request.known)
        marked = time.monotonic()
        return self._reply(Begun, request, bindings=tuple(bindings), idle_s=idle - self._began, mark_s=marked - idle)

    async def _commit(self, request: Commit) -> Message:
        state = self._state.verified(request.version, request.epoch, request.digest)
        began = time.monotonic()
        await self._handler.verify(request.version, request.epoch, request.digest, request.expected)
        self._state = state
        verified = time.monotonic()
        await self._handler.commit(request.version, request.epoch)
        self._state = state.committed(request.version, request.epoch)
        done = time.monotonic()
        pause_s = done - self._began if self._pauses else 0.0
        logger.info("version %d committed (epoch %d, paused %.3f s)", request.version, request.epoch, pause_s)
        return self._reply(Committed, request, verify_s=verified - began, commit_s=done - verified, pause_s=pause_s)

    async def _fail(self, epoch: int, reason: str) -> None:
        self._state = self._state.failed(epoch)
        try:
            await self._handler.abort(epoch, reason)
        except Exception:  # teardown of a request that failed already; the first error is the one to report
            logger.exception("abort of epoch %d failed as well", epoch)

    def _own(self) -> dict[str, int]:
        return {"own_epoch": self._state.epoch, "own_version": self._state.version}

    def _reply(self, kind: type[Message], request: Message, **fields: object) -> Message:
        return kind(
            run_id=self._signer.run_id,
            client=request.client,
            incarnation=self._incarnation,
            request_id=request.request_id,
            epoch=request.epoch,
            version=request.version,
            digest=request.digest,
            **fields,  # type: ignore[arg-type]
        )
