"""Calls to another process: verbs of a protocol, served on one socket, or by a thread of a process that has other work.

    controller                                                  rollout worker's process
      WorkerClient.score(tokens, 3) --(number, "score", args)-->  CallServer --> RolloutWorker.score(tokens, 3)
                                    <--(number, result or error)--               one task per call

    trainer rank 0                                              rollout worker's process
      ReplicaClients: ReplicaVerbs.begin ------ the same ------>  CallServer --> ReplicaEndpoint.begin(..)

    rollout worker's process                                    engine rank's process, while it samples
      ask_all(.., SlotReceivers.begin, ..) ---- the same ------->  serve_in_thread --> SlotReceivers.begin(..)

Server and client are made from the declaration (rollout/worker_verbs.py, rollout/receivers.py, replica/messages.py).
Ray is not on this way (docs/decisions/0024-sampling-without-ray.md).

Does not own: the caller's end (connection.py), the messages (verbs.py), or the keys of a connection (curve.py).
Invariant: every call is answered by its result or an error.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from slipstream.conf.errors import SlipstreamError
from slipstream.weight_sync.calls.curve import frames_of, serve_guarded
from slipstream.weight_sync.calls.loop_thread import give_way_sooner
from slipstream.weight_sync.calls.verbs import Answer, Request, failure_of, verbs_of
from slipstream.weight_sync.errors import ProtocolError
from slipstream.weight_sync.typed_msgpack import pack

logger = logging.getLogger(__name__)


def serve_in_thread(
    target: object, key: bytes, protocol: type, context: Callable[[], AbstractContextManager[Any]]
) -> str:
    """Answer in a daemon thread, one call after the other, until this process ends: it has other work and no event
    loop.

    Args:
        target: Implements the verbs, as plain methods.
        protocol: Declares the verbs.
        context: The thread enters it once; it sets the thread's device and stream.

    Returns:
        Where clients on this machine reach it.
    """
    verbs, socket = verbs_of(protocol), zmq.Context().socket(zmq.ROUTER)
    set_unlimited(socket)
    serve_guarded(socket, key)
    port = socket.bind_to_random_port("tcp://127.0.0.1")

    def serve() -> None:
        with context():
            while True:
                peer, *frames = socket.recv_multipart()
                request = msgspec.msgpack.decode(b"".join(frames), type=Request)
                try:
                    result = pack(verbs[request.verb].asked(target, request.arguments))
                    answer = Answer(request.number, "", "", msgspec.Raw(result))
                except Exception as raised:  # the caller gets the error, and the thread goes on
                    if not isinstance(raised, SlipstreamError):
                        logger.exception("%s failed", request.verb)
                    answer = failure_of(request, raised)
                socket.send_multipart([peer, *frames_of(pack(answer))])

    give_way_sooner()
    threading.Thread(target=serve, name=protocol.__name__, daemon=True).start()
    return f"tcp://127.0.0.1:{port}"


class CallServer:
    """A server whose verbs are async methods. All methods belong to one event loop.

    Args:
        target: Implements the verbs; nothing else of it can be called.
        protocol: Declares them.
        host: Address to bind: loopback unless client and server are on different machines.
        has_one_client: When another one calls, the one before is gone, and what it asked is given up.
        another_came: Called then, before its first call.
    """

    def __init__(
        self,
        target: object,
        protocol: type,
        key: bytes,
        *,
        host: str = "127.0.0.1",
        has_one_client: bool = True,
        another_came: Callable[[], None] = lambda: None,
    ) -> None:
        self._target = target
        self._key = key
        self._host = host
        self._verbs = verbs_of(protocol)
        self._has_one_client = has_one_client
        self._another_came = another_came
        self.address = ""
        """Where clients reach it, after start()."""
        self._context: zmq.asyncio.Context | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._client: bytes = b""
        """Who called last."""
        self._asked: set[asyncio.Task[None]] = set()
        """By the client, if there is one at a time."""

    async def start(self) -> str:
        """Bind a free port and answer from now on. Returns the address.

        Raises:
            ProtocolError: The host is no address of this machine, or has no free port.
        """
        self._context = zmq.asyncio.Context()
        socket = self._context.socket(zmq.ROUTER)
        set_unlimited(socket)
        serve_guarded(socket, self._key)
        try:
            port = socket.bind_to_random_port(f"tcp://{self._host}")
        except zmq.ZMQError as e:
            self.close()
            raise ProtocolError(f"a server of calls cannot bind tcp://{self._host}: {e}") from e
        self.address = f"tcp://{self._host}:{port}"
        self._begin(self._serve(socket))
        return self.address

    def close(self) -> None:
        """Answer no more; calls under way are cancelled. Idempotent."""
        for task in self._tasks:
            task.cancel()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    async def _serve(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            peer, *frames = await socket.recv_multipart()
            if self._has_one_client and peer != self._client:
                for task in self._asked:
                    task.cancel()
                self._client, self._asked = peer, set()
                self._another_came()
            task = self._begin(self._answer(socket, peer, b"".join(frames)))
            if self._has_one_client:
                self._asked.add(task)
                task.add_done_callback(self._asked.discard)

    async def _answer(self, socket: zmq.asyncio.Socket, peer: bytes, data: bytes) -> None:
        request = msgspec.msgpack.decode(data, type=Request)
        try:
            result = pack(await self._verbs[request.verb].asked(self._target, request.arguments))
            answer = Answer(request.number, "", "", msgspec.Raw(result))
        except (Exception, asyncio.CancelledError) as raised:  # the boundary of one call: its client raises it
            if self._context is None or (self._has_one_client and peer != self._client):
                raise  # close() cancels this, or another client came
            if not isinstance(raised, SlipstreamError):
                logger.exception("%s failed", request.verb)
            answer = failure_of(request, raised)
        await send(socket, [peer], answer)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a call gets no answer", exc_info=error)


def set_unlimited(socket: zmq.Socket[Any] | zmq.asyncio.Socket) -> None:
    """The run bounds how many calls there are, and a message that does not fit must not be dropped."""
    for option in (zmq.LINGER, zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(option, 0)


async def send(socket: zmq.asyncio.Socket, peer: list[bytes], message: object) -> None:
    """Send a message in frames."""
    with contextlib.suppress(zmq.ZMQError):  # the other end is gone, or this one is closing
        await socket.send_multipart([*peer, *frames_of(pack(message))])  # pyright: ignore[reportUnknownMemberType]
