"""A caller's end of calls to another process (server.py), and clients that are made from a declaration.

Owns: noticing the connection's end. Does not own: the messages (verbs.py), which process is asked (fleet/router.py,
replica/clients.py), or the keys (curve.py).
Invariant: every call ends with its result or an error. When the server's process or its machine is gone, calls to it
fail with an error that says so, or with what the one who watches the process says of its end.
"""

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from slipstream.conf.errors import SlipstreamError, named_error
from slipstream.weight_sync.calls.curve import connect_guarded
from slipstream.weight_sync.calls.server import send, set_unlimited
from slipstream.weight_sync.calls.verbs import NOT_OURS, Answer, Request, Verb, verbs_of
from slipstream.weight_sync.errors import ProtocolError, ReplicaError

ClassT = TypeVar("ClassT", bound=type)

HEARTBEAT_S, SILENCE_S = 5, 20
"""A server is asked for a heartbeat every HEARTBEAT_S, and counts as gone if it then is silent for SILENCE_S, because a
machine that vanishes closes no connection. ZMQ's own thread answers, however busy Python is. Servers do not ask for
heartbeats: a publisher whose process stopped for a while would lose all of them."""
END_TOLD_S = 3.0
"""How long after a connection broke one waits for what is said of the process's end."""


class Connection:
    """A caller's end, for one server. All methods belong to one event loop.

    Args:
        ended: Done when the server's process has ended; its exception says how. Cancelled by close(). None: nobody
            watches it.

    Raises:
        ProtocolError: The address is none.
    """

    failed: type[SlipstreamError] = ReplicaError
    """Raised in the place of an error that is none of Slipstream's."""
    gone: type[SlipstreamError] = ReplicaError
    """Raised when the server is gone."""

    def __init__(self, address: str, key: bytes, ended: asyncio.Future[None] | None = None) -> None:
        self._address = address
        self._ended = ended
        self._numbers = itertools.count()
        self._pending: dict[int, tuple[Verb, asyncio.Future[Any]]] = {}
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        set_unlimited(self._socket)
        connect_guarded(self._socket, key)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, int(1000 * HEARTBEAT_S))
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * SILENCE_S))
        monitor: Any = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as e:
            self._destroy()
            raise ProtocolError(f"{address!r} is no address of a process (tcp://host:port): {e}") from e
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch(monitor))]
        self.is_open = True
        """False from the first sign on that the server is gone."""
        if ended is not None:
            ended.add_done_callback(lambda _: self.close())

    async def call(self, verb: Verb, *args: object, **kwargs: object) -> Any:
        """Ask, and wait for the answer.

        Raises:
            SlipstreamError: What the server raised; `failed` for what is no error of ours; `gone` if it is gone, and
                nobody says how.
        """
        if not self.is_open:
            raise self._gone()
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[number] = verb, answer
        try:
            await send(self._socket, [], Request(number, verb.name, msgspec.Raw(verb.given(*args, **kwargs))))
            return await answer
        finally:
            self._pending.pop(number, None)

    def close(self) -> None:
        """End the connection; calls under way fail. Idempotent."""
        if not self.is_open:
            return
        self.is_open = False
        for task in self._tasks:
            task.cancel()
        gone = self._gone()
        for _, answer in self._pending.values():
            if not answer.done():
                answer.set_exception(type(gone)(str(gone)))
        if self._ended is not None:
            self._ended.cancel()
        self._destroy()

    def _destroy(self) -> None:
        self._socket.disable_monitor()
        self._context.destroy(linger=0)

    async def _read(self) -> None:
        while True:
            answer = msgspec.msgpack.decode(b"".join(await self._socket.recv_multipart()), type=Answer)
            verb, waits = self._pending.get(answer.number, (None, None))
            if verb is None or waits is None or waits.done():  # whoever waited has given up
                continue
            if answer.error:
                waits.set_exception(self._raised(answer))
                continue
            try:
                waits.set_result(verb.result.decode(answer.result))
            except msgspec.MsgspecError as error:
                waits.set_exception(self.failed(f"{verb.name} was answered with something else: {error}"))

    async def _watch(self, monitor: Any) -> None:
        """The first event says that the connection broke, or could not be made."""
        await recv_monitor_message(monitor)
        if self._ended is not None:
            await asyncio.wait({self._ended}, timeout=END_TOLD_S)
        self.close()

    def _raised(self, answer: Answer) -> SlipstreamError:
        if (cls := named_error(answer.error, SlipstreamError)) is not None:
            return cls(answer.text)
        return self.failed(answer.text if answer.error == NOT_OURS else f"{answer.error}: {answer.text}")

    def _gone(self) -> SlipstreamError:
        told = self._ended.exception() if self._ended is not None and _has_failed(self._ended) else None
        if isinstance(told, SlipstreamError):
            return type(told)(str(told))
        return self.gone(
            f"the process at {self._address} is gone, or it belongs to another run: the connection to it is closed"
        )


class Client(Protocol):
    """What a class must have to be given verbs."""

    connection: Connection


def calls(protocol: type) -> Callable[[ClassT], ClassT]:
    """Give a class a method for each verb of the protocol, which calls it over self.connection."""

    def made(verb: Verb) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def call(self: Client, *args: object, **kwargs: object) -> Any:
            return await self.connection.call(verb, *args, **kwargs)

        call.__name__, call.__signature__ = verb.name, verb.signature  # pyright: ignore[reportFunctionMemberAccess]
        return call

    def fill(cls: ClassT) -> ClassT:
        for name, verb in verbs_of(protocol).items():
            setattr(cls, name, made(verb))
        return cls

    return fill


def _has_failed(future: asyncio.Future[None]) -> bool:
    return future.done() and not future.cancelled()
