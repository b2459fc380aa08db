"""Calls to another process: verbs of a protocol, served on one socket, and the client for them.

    controller                                                  rollout worker's process
      WorkerClient.score(tokens, 3) --(number, "score", args)-->  CallServer --> RolloutWorker.score(tokens, 3)
                                    <--(number, result or error)--               one task per call

    rollout worker's process                                    engine rank's process, while it samples
      SlotRanks.ask(.., SlotReceivers.begin, ..) ---- the same ---->  serve_in_thread --> SlotReceivers.begin(..)

Server and client are made from the declaration (worker_verbs.py, receivers.py). Ray is not on this way
(docs/decisions/0024-sampling-without-ray.md).

Owns: both ends, and noticing the end of a connection. Does not own: the messages (verbs.py), what a verb does, which
worker is asked (fleet/router.py), or the keys of a connection (weight_sync/replica/curve.py).
Invariant: every call is answered by its result or an error. When the server's process or its machine is gone, calls to
it fail with EngineDied, or with what the one who watches the process says of its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any, Self, TypeVar

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from slipstream.conf.errors import SlipstreamError
from slipstream.rollout.errors import EngineDied, EngineError, error_class
from slipstream.rollout.verbs import Answer, Request, Verb, failure_of, verbs_of
from slipstream.rollout.worker_verbs import WorkerVerbs
from slipstream.weight_sync.replica.control_client import HEARTBEAT_S, SILENCE_S
from slipstream.weight_sync.replica.curve import connect_guarded, frames_of, serve_guarded
from slipstream.weight_sync.typed_msgpack import pack

logger = logging.getLogger(__name__)
ClassT = TypeVar("ClassT", bound=type)

END_TOLD_S = 3.0
"""How long after a connection broke one waits for what is said of the process's end."""
SWITCH_S = 0.0005
"""sys.setswitchinterval() in a process that serves in a thread. With Python's 5 ms, which pass at every call and after
every wait for the device, waiting would be most of a publish into an adapter slot."""


def serve_in_thread(
    target: object, key: bytes, protocol: type, context: Callable[[], AbstractContextManager[Any]]
) -> str:
    """Answer in a daemon thread, one call after the other, until this process ends: it has other work and no event
    loop.

    Args:
        target: Implements the verbs, as plain methods.
        key: The run's key.
        protocol: Declares the verbs.
        context: The thread enters it once; it sets the thread's device and stream.

    Returns:
        Where clients on this machine reach it.
    """
    verbs, socket = verbs_of(protocol), zmq.Context().socket(zmq.ROUTER)
    _set_unlimited(socket)
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
                except SlipstreamError as raised:
                    answer = failure_of(request, raised)
                except Exception as raised:  # the caller gets the error, and the thread goes on
                    logger.exception("%s failed", request.verb)
                    answer = failure_of(request, raised)
                socket.send_multipart([peer, *frames_of(pack(answer))])

    # Set once and not per call: the thread needs the interpreter even to see that there is a call.
    sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))
    threading.Thread(target=serve, name=protocol.__name__, daemon=True).start()
    return f"tcp://127.0.0.1:{port}"


class CallServer:
    """The worker's end. All methods belong to one event loop. It has one client: when another one calls, the one before
    is gone, and what it asked is given up.

    Args:
        target: Implements the verbs; nothing else of it can be called.
        key: The run's key.
        host: Address to bind: loopback unless controller and worker are on different machines.
    """

    def __init__(self, target: WorkerVerbs, key: bytes, *, host: str = "127.0.0.1") -> None:
        self._target = target
        self._key = key
        self._host = host
        self._verbs = verbs_of(WorkerVerbs)
        self.address = ""
        """Where clients reach it, after start()."""
        self._context: zmq.asyncio.Context | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._client = b""
        self._asked: set[asyncio.Task[None]] = set()
        """By the client."""

    async def start(self) -> None:
        """Bind a free port and answer from now on."""
        self._context = zmq.asyncio.Context()
        socket = self._context.socket(zmq.ROUTER)
        _set_unlimited(socket)
        serve_guarded(socket, self._key)
        port = socket.bind_to_random_port(f"tcp://{self._host}")
        self.address = f"tcp://{self._host}:{port}"
        self._begin(self._serve(socket))

    def close(self) -> None:
        """Answer no more. Idempotent."""
        for task in self._tasks:
            task.cancel()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    async def _serve(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            peer, *frames = await socket.recv_multipart()
            if peer != self._client:
                for task in self._asked:
                    task.cancel()
                self._client, self._asked = peer, set()
            task = self._begin(self._answer(socket, peer, b"".join(frames)))
            self._asked.add(task)
            task.add_done_callback(self._asked.discard)

    async def _answer(self, socket: zmq.asyncio.Socket, peer: bytes, data: bytes) -> None:
        request = msgspec.msgpack.decode(data, type=Request)
        try:
            result = pack(await self._verbs[request.verb].asked(self._target, request.arguments))
            answer = Answer(request.number, "", "", msgspec.Raw(result))
        except (Exception, asyncio.CancelledError) as raised:  # the boundary of one call: its client raises it
            if self._context is None or peer != self._client:  # close() cancels this, or another client came
                raise
            if not isinstance(raised, SlipstreamError):
                logger.exception("%s failed", request.verb)
            answer = failure_of(request, raised)
        await _send(socket, [peer], answer)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a call gets no answer", exc_info=error)


class Connection:
    """A caller's end, for one server. All methods belong to one event loop.

    Args:
        address: The server's.
        key: The run's key.
        ended: Done when the server's process has ended; its exception says how. Cancelled by close(). None: nobody
            watches it.
    """

    def __init__(self, address: str, key: bytes, ended: asyncio.Future[Any] | None = None) -> None:
        self._address = address
        self._ended = ended
        self._numbers = itertools.count()
        self._pending: dict[int, tuple[Verb, asyncio.Future[Any]]] = {}
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _set_unlimited(self._socket)
        connect_guarded(self._socket, key)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 1000 * HEARTBEAT_S)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 1000 * SILENCE_S)
        monitor: Any = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)
        self._socket.connect(address)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch(monitor))]
        self._is_open = True
        if ended is not None:
            ended.add_done_callback(lambda _: self.close())

    async def call(self, verb: Verb, *args: object, **kwargs: object) -> Any:
        """Ask, and wait for the answer.

        Raises:
            SlipstreamError: What the worker raised; EngineError for what is no error of ours.
            EngineDied: The worker is gone, and nobody says how.
        """
        if not self._is_open:
            raise self._gone()
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[number] = verb, answer
        try:
            await _send(self._socket, [], Request(number, verb.name, msgspec.Raw(verb.given(*args, **kwargs))))
            return await answer
        finally:
            self._pending.pop(number, None)

    def close(self) -> None:
        """End the connection; calls under way fail. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        for task in self._tasks:
            task.cancel()
        gone = self._gone()
        for _, answer in self._pending.values():
            if not answer.done():
                answer.set_exception(type(gone)(str(gone)))
        if self._ended is not None:
            self._ended.cancel()
        self._socket.disable_monitor()
        self._context.destroy(linger=0)

    async def _read(self) -> None:
        while True:
            answer = msgspec.msgpack.decode(b"".join(await self._socket.recv_multipart()), type=Answer)
            verb, waits = self._pending.get(answer.number, (None, None))
            if verb is None or waits is None or waits.done():  # whoever waited has given up
                continue
            if answer.error:
                waits.set_exception(error_class(answer.error)(answer.text))
                continue
            try:
                waits.set_result(verb.result.decode(answer.result))
            except msgspec.MsgspecError as error:
                waits.set_exception(EngineError(f"{verb.name} was answered with something else: {error}"))

    async def _watch(self, monitor: Any) -> None:
        """The first event says that the connection broke, or could not be made."""
        await recv_monitor_message(monitor)
        if self._ended is not None:
            await asyncio.wait({self._ended}, timeout=END_TOLD_S)
        self.close()

    def _gone(self) -> SlipstreamError:
        told = self._ended.exception() if self._ended is not None and _has_failed(self._ended) else None
        if isinstance(told, SlipstreamError):
            return type(told)(str(told))
        return EngineDied(f"the connection to the process at {self._address} is closed")


def _calls(protocol: type) -> Callable[[ClassT], ClassT]:
    """Give a class a method for each verb of the protocol, which calls it over self.connection."""

    def made(verb: Verb) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def call(self: WorkerClient, *args: object, **kwargs: object) -> Any:
            return await self.connection.call(verb, *args, **kwargs)

        call.__name__, call.__signature__ = verb.name, verb.signature  # pyright: ignore[reportFunctionMemberAccess]
        return call

    def fill(cls: ClassT) -> ClassT:
        for name, verb in verbs_of(protocol).items():
            setattr(cls, name, made(verb))
        return cls

    return fill


@_calls(WorkerVerbs)
class WorkerClient(WorkerVerbs):
    """A rollout worker as others call it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    @classmethod
    def at(cls, address: str, key: bytes, ended: asyncio.Future[Any] | None = None) -> Self:
        """Connect (see Connection)."""
        return cls(Connection(address, key, ended))


def _has_failed(future: asyncio.Future[Any]) -> bool:
    return future.done() and not future.cancelled()


def _set_unlimited(socket: zmq.Socket[Any] | zmq.asyncio.Socket) -> None:
    """The run bounds how many calls there are, and a message that does not fit must not be dropped."""
    for option in (zmq.LINGER, zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(option, 0)


async def _send(socket: zmq.asyncio.Socket, peer: list[bytes], message: object) -> None:
    with contextlib.suppress(zmq.ZMQError):  # the other end is gone, or this one is closing
        await socket.send_multipart([*peer, *frames_of(pack(message))])  # pyright: ignore[reportUnknownMemberType]
