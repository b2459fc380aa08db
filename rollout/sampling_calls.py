"""Requests to sample, from the controller of a run straight to the process of a rollout worker.

    controller                                                     rollout worker's process
      SamplingClient.generate_group() --(number, prompt, n, ...)-->  SamplingServer --> RolloutWorker.generate_group()
                                      <--(number, responses)-------                     one task per request

All other calls go through Ray and the worker's actor (worker_process.py). An agent makes a request per turn, and that
way took two fifths of such a run's CPU time (docs/decisions/0024-sampling-without-ray.md).

Owns: both ends, their messages, and noticing the end of a connection. Does not own: what a request does (worker.py),
which worker gets it (orchestrator/fleet/router.py), or the keys of a connection (weight_sync/replica/curve.py).
Invariant: every request is answered by its responses or an error. When the worker's process or its machine is gone, its
requests fail with EngineDied.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from conf.errors import SlipstreamError, named_error
from conf.schema import EvalSampling, SamplingConfig
from rollout.errors import EngineDied, EngineError
from rollout.types import Prompt, Rollout, Routes
from weight_sync.replica.control_client import HEARTBEAT_S, SILENCE_S
from weight_sync.replica.curve import connect_guarded, frames_of, serve_guarded
from weight_sync.typed_msgpack import pack, unpack

logger = logging.getLogger(__name__)


class Sample(Protocol):
    """RolloutWorker.generate_group."""

    def __call__(
        self, prompt: Prompt, n: int, sampling: SamplingConfig | None, version: int | None
    ) -> Awaitable[list[Rollout]]: ...


@dataclass(frozen=True, slots=True)
class _Request:
    number: int
    prompt_id: int
    token_ids: bytes
    """The prompt's, int32."""
    n: int
    sampling: SamplingConfig | None
    eval_sampling: EvalSampling | None
    """Instead of `sampling`."""
    version: int | None


@dataclass(frozen=True, slots=True)
class _Routes:
    """Routes, as bytes."""

    experts: bytes
    dtype: str
    shape: tuple[int, ...]
    is_recorded: bytes


@dataclass(frozen=True, slots=True)
class _Response:
    """What a worker knows of a Rollout."""

    token_ids: bytes
    """int32, as policy_versions."""
    logprobs: bytes
    """float64."""
    policy_versions: bytes
    text: str
    finish_reason: str
    num_evictions: int
    routes: _Routes | None


@dataclass(frozen=True, slots=True)
class _Reply:
    number: int
    responses: tuple[_Response, ...]
    error: str
    """Name of the error's class; empty: none was raised."""
    error_text: str


class SamplingServer:
    """The worker's end. All methods belong to one event loop.

    Args:
        sample: Answers a request.
        key: The run's key.
        host: Address to bind: loopback unless controller and worker are on different machines.
    """

    def __init__(self, sample: Sample, key: bytes, *, host: str = "127.0.0.1") -> None:
        self._sample = sample
        self._key = key
        self._host = host
        self.address = ""
        """Where clients reach it, after start()."""
        self._context: zmq.asyncio.Context | None = None
        self._tasks: set[asyncio.Task[None]] = set()

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
            self._begin(self._answer(socket, peer, b"".join(frames)))

    async def _answer(self, socket: zmq.asyncio.Socket, peer: bytes, data: bytes) -> None:
        request = unpack(_Request, data)
        prompt = Prompt(request.prompt_id, tuple(_ints_of(request.token_ids)), "")
        responses: tuple[_Response, ...] = ()
        error = text = ""
        try:
            rollouts = await self._sample(prompt, request.n, request.eval_sampling or request.sampling, request.version)
            responses = tuple(map(_response_of, rollouts))
        except SlipstreamError as raised:
            error, text = type(raised).__name__, str(raised)
        except Exception as raised:  # the boundary of one request: its client raises it
            logger.exception("a request to sample failed")
            error, text = EngineError.__name__, f"{type(raised).__name__}: {raised}"
        await _send(socket, [peer], pack(_Reply(request.number, responses, error, text)))

    def _begin(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a request to sample gets no answer", exc_info=error)


class SamplingClient:
    """The controller's end, for one worker. All methods belong to one event loop.

    Args:
        address: The server's.
        key: The run's key.
    """

    def __init__(self, address: str, key: bytes) -> None:
        self._address = address
        self._numbers = itertools.count()
        self._pending: dict[int, asyncio.Future[list[Rollout]]] = {}
        self._context = zmq.asyncio.Context()
        self._socket = _unlimited(self._context.socket(zmq.DEALER))
        connect_guarded(self._socket, key)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 1000 * HEARTBEAT_S)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 1000 * SILENCE_S)
        monitor: Any = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)
        self._socket.connect(address)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch(monitor))]
        self._is_open = True

    async def generate_group(
        self, prompt: Prompt, n: int, sampling: SamplingConfig | None, version: int | None
    ) -> list[Rollout]:
        """RolloutWorker.generate_group.

        Raises:
            SlipstreamError: What that raised.
            EngineDied: The worker is gone.
        """
        if not self._is_open:
            raise self._gone()
        number = next(self._numbers)
        answer = self._pending[number] = asyncio.get_running_loop().create_future()
        try:
            asked = (None, sampling) if isinstance(sampling, EvalSampling) else (sampling, None)
            request = _Request(number, prompt.prompt_id, _bytes_of(prompt.token_ids), n, *asked, version)
            await _send(self._socket, [], pack(request))
            return await answer
        finally:
            self._pending.pop(number, None)

    def close(self) -> None:
        """End the connection; requests under way fail. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        for task in self._tasks:
            task.cancel()
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(self._gone())
        self._socket.disable_monitor()
        self._context.destroy(linger=0)

    async def _read(self) -> None:
        while True:
            reply = unpack(_Reply, b"".join(await self._socket.recv_multipart()))
            answer = self._pending.get(reply.number)
            if answer is None or answer.done():  # whoever waited has given up
                continue
            if reply.error:
                error = named_error(reply.error, SlipstreamError) or EngineError
                answer.set_exception(error(reply.error_text))
            else:
                answer.set_result([_rollout_of(response) for response in reply.responses])

    async def _watch(self, monitor: Any) -> None:
        """The first event says that the connection broke, or could not be made."""
        await recv_monitor_message(monitor)
        self.close()

    def _gone(self) -> EngineDied:
        return EngineDied(f"the connection to the rollout worker at {self._address} is closed")


def _unlimited(socket: zmq.asyncio.Socket) -> zmq.asyncio.Socket:
    """The run bounds how many requests there are, and a message that does not fit must not be dropped."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    return socket


async def _send(socket: zmq.asyncio.Socket, peer: list[bytes], data: bytes) -> None:
    with contextlib.suppress(zmq.ZMQError):  # the other end is gone, or this one is closing
        await socket.send_multipart([*peer, *frames_of(data)])  # pyright: ignore[reportUnknownMemberType]


def _bytes_of(ints: Sequence[int]) -> bytes:
    return np.asarray(ints, dtype=np.int32).tobytes()


def _ints_of(data: bytes) -> list[int]:
    return np.frombuffer(data, dtype=np.int32).tolist()


def _response_of(rollout: Rollout) -> _Response:
    routes = rollout.routes
    return _Response(
        _bytes_of(rollout.token_ids),
        np.asarray(rollout.logprobs, dtype=np.float64).tobytes(),
        _bytes_of(rollout.policy_versions),
        rollout.text,
        rollout.finish_reason,
        rollout.num_evictions,
        None
        if routes is None
        else _Routes(
            routes.experts.tobytes(), routes.experts.dtype.name, routes.experts.shape, routes.is_recorded.tobytes()
        ),
    )


def _rollout_of(response: _Response) -> Rollout:
    routes = response.routes
    return Rollout(
        _ints_of(response.token_ids),
        np.frombuffer(response.logprobs, dtype=np.float64).tolist(),
        _ints_of(response.policy_versions),
        response.text,
        response.finish_reason,
        num_evictions=response.num_evictions,
        routes=None
        if routes is None
        else Routes(
            np.frombuffer(routes.experts, dtype=routes.dtype).reshape(routes.shape).copy(),  # so that it can be written
            np.frombuffer(routes.is_recorded, dtype=bool).copy(),
        ),
    )
