"""Calls to a rollout worker: its verbs (worker_verbs.py), served by its process on one socket, and the client for them.

    controller                                                  rollout worker's process
      WorkerClient.score(tokens, 3) --(number, "score", args)-->  CallServer --> RolloutWorker.score(tokens, 3)
                                    <--(number, result or error)--               one task per call

Server and client are made from the declaration: a verb's annotations say how its arguments and its result are read, and
what does not fit them is an error of that call. Ray is not on this way (docs/decisions/0024-sampling-without-ray.md).

Owns: both ends, their messages, and noticing the end of a connection. Does not own: what a verb does (worker.py), which
worker is asked (fleet/router.py), or the keys of a connection (weight_sync/replica/curve.py).
Invariant: every call is answered by its result or an error. When the worker's process or its machine is gone, its
calls fail with EngineDied, or with what the one who watches the process says of its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import logging
import typing
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

import msgspec
import numpy as np
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from slipstream.conf.errors import SlipstreamError, named_error
from slipstream.conf.schema import EvalSampling, SamplingConfig
from slipstream.rollout.errors import EngineDied, EngineError
from slipstream.rollout.types import Prompt
from slipstream.rollout.worker_verbs import RolloutVerbs, WorkerVerbs
from slipstream.weight_sync.replica.control_client import HEARTBEAT_S, SILENCE_S
from slipstream.weight_sync.replica.curve import connect_guarded, frames_of, serve_guarded

logger = logging.getLogger(__name__)
ClassT = TypeVar("ClassT", bound=type)

END_TOLD_S = 3.0
"""How long after a connection broke one waits for what is said of the process's end."""


def _plain_of(value: Any) -> Any:
    """Values of NumPy as msgpack has them."""
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a call cannot carry {type(value).__name__}")


def _array_of(kind: type, value: Any) -> Any:
    if kind is not np.ndarray:
        raise TypeError(f"a call cannot carry {kind.__name__}")
    dtype, shape, data = value
    return np.frombuffer(data, dtype=dtype).reshape(shape).copy()  # so that it can be written


_encode = msgspec.msgpack.Encoder(enc_hook=_plain_of).encode


class _PromptForm(msgspec.Struct, array_like=True):
    """What a worker needs of a prompt: a row's other columns may be anything."""

    prompt_id: int
    token_ids: tuple[int, ...]


class _SamplingForm(msgspec.Struct, array_like=True):
    """One of the two."""

    training: SamplingConfig | None
    evaluation: EvalSampling | None


_FORMS: dict[Any, Any] = {Prompt: _PromptForm, SamplingConfig | None: _SamplingForm | None}
"""Type of a parameter -> as what it travels, where not as it is."""


def _form_of(argument: object) -> object:
    match argument:
        case Prompt():
            return _PromptForm(argument.prompt_id, argument.token_ids)
        case EvalSampling():
            return _SamplingForm(None, argument)
        case SamplingConfig():
            return _SamplingForm(argument, None)
        case _:
            return argument


def _argument_of(form: object) -> object:
    match form:
        case _PromptForm():
            return Prompt(form.prompt_id, form.token_ids, "")
        case _SamplingForm():
            return form.evaluation or form.training
        case _:
            return form


class _Request(msgspec.Struct, array_like=True):
    number: int
    verb: str
    arguments: msgspec.Raw


class _Answer(msgspec.Struct, array_like=True):
    number: int
    error: str
    """Name of the error's class; empty: none was raised."""
    text: str
    """The error's, or what failed in another way than by an error of ours."""
    result: msgspec.Raw


class Verb:
    """One method of a protocol, as messages."""

    def __init__(self, method: Callable[..., object]) -> None:
        hints = typing.get_type_hints(method)
        self.name = method.__name__
        self.signature = inspect.signature(method)
        declared = [hints[name] for name in list(self.signature.parameters)[1:]]
        parameters = tuple(_FORMS.get(kind, kind) for kind in declared)
        self.arguments = msgspec.msgpack.Decoder(tuple[parameters] if parameters else tuple[()], dec_hook=_array_of)
        self.result = msgspec.msgpack.Decoder(hints["return"], dec_hook=_array_of)


@functools.cache
def verbs_of(protocol: type) -> dict[str, Verb]:
    """A protocol's methods, by name."""
    return {
        name: Verb(method)
        for base in protocol.__mro__
        for name, method in vars(base).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }


class CallServer:
    """The worker's end. All methods belong to one event loop. It has one client: when another one calls, the one before
    is gone, and what it asked is given up.

    Args:
        target: Implements the verbs.
        key: The run's key.
        protocol: Declares the verbs; nothing else of the target can be called.
        host: Address to bind: loopback unless controller and worker are on different machines.
    """

    def __init__(
        self, target: RolloutVerbs, key: bytes, *, host: str = "127.0.0.1", protocol: type = WorkerVerbs
    ) -> None:
        self._target = target
        self._key = key
        self._host = host
        self._verbs = verbs_of(protocol)
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
        socket = _unlimited(self._context.socket(zmq.ROUTER))
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
        request = msgspec.msgpack.decode(data, type=_Request)
        result, error, text = _encode(None), "", ""
        try:
            verb = self._verbs[request.verb]
            call = getattr(self._target, verb.name)
            result = _encode(await call(*map(_argument_of, verb.arguments.decode(request.arguments))))
        except SlipstreamError as raised:
            error, text = type(raised).__name__, str(raised)
        except (Exception, asyncio.CancelledError) as raised:  # the boundary of one call: its client raises it
            if self._context is None or peer != self._client:  # close() cancels this, or another client came
                raise
            logger.exception("%s failed", request.verb)
            error, text = EngineError.__name__, f"{request.verb} failed with {type(raised).__name__}: {raised}"
        text = text.encode(errors="replace").decode()  # a file's name may be no text
        await _send(socket, [peer], _Answer(request.number, error, text, msgspec.Raw(result)))

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
    """The controller's end, for one worker. All methods belong to one event loop.

    Args:
        address: The server's.
        key: The run's key.
        ended: Done when the worker's process has ended; its exception says how. Cancelled by close(). None: nobody
            watches it.
    """

    def __init__(self, address: str, key: bytes, ended: asyncio.Future[Any] | None = None) -> None:
        self._address = address
        self._ended = ended
        self._numbers = itertools.count()
        self._pending: dict[int, tuple[Verb, asyncio.Future[Any]]] = {}
        self._context = zmq.asyncio.Context()
        self._socket = _unlimited(self._context.socket(zmq.DEALER))
        connect_guarded(self._socket, key)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 1000 * HEARTBEAT_S)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 1000 * SILENCE_S)
        monitor: Any = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)
        self._socket.connect(address)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch(monitor))]
        self._is_open = True
        if ended is not None:
            ended.add_done_callback(lambda _: self.close())

    async def call(self, verb: Verb, *arguments: object) -> Any:
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
            given = msgspec.Raw(_encode([*map(_form_of, arguments)]))
            await _send(self._socket, [], _Request(number, verb.name, given))
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
            answer = msgspec.msgpack.decode(b"".join(await self._socket.recv_multipart()), type=_Answer)
            verb, waits = self._pending.get(answer.number, (None, None))
            if verb is None or waits is None or waits.done():  # whoever waited has given up
                continue
            if answer.error:
                error = named_error(answer.error, SlipstreamError) or EngineError
                waits.set_exception(error(answer.text))
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
        return EngineDied(f"the connection to the rollout worker at {self._address} is closed")


def _calls(protocol: type) -> Callable[[ClassT], ClassT]:
    """Give a class a method for each verb of the protocol, which calls it over self.connection."""

    def made(verb: Verb) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def call(self: WorkerClient, *args: object, **kwargs: object) -> Any:
            bound = verb.signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            return await self.connection.call(verb, *bound.args[1:])

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


def _unlimited(socket: zmq.asyncio.Socket) -> zmq.asyncio.Socket:
    """The run bounds how many calls there are, and a message that does not fit must not be dropped."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    return socket


async def _send(socket: zmq.asyncio.Socket, peer: list[bytes], message: object) -> None:
    with contextlib.suppress(zmq.ZMQError):  # the other end is gone, or this one is closing
        await socket.send_multipart([*peer, *frames_of(_encode(message))])  # pyright: ignore[reportUnknownMemberType]
