"""Calls methods in an engine rank's process while it samples, in a thread of that process.

vLLM's own collective_rpc runs between two steps of the engine: each call waits for one step and delays the next, and a
publish into an adapter slot makes three calls. These need not wait, because no request reads the slot that is written.

    RolloutWorker's process                          engine rank's process
      SlotClients.call(method, args) -- unix socket --> SlotServer's thread -> handler(*args) -> (error, text, result)

Owns the sockets, request numbers, and the deadline of a call. The sockets are in a folder that only this user may
enter, so nothing is signed. Does not own what a call does (rollout/in_vllm/adapter_slots.py). Values are msgpack, never
pickle.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgpack
import zmq
import zmq.asyncio

from slipstream.conf.errors import SlipstreamError
from slipstream.rollout.crash_reports import death_of_a_child
from slipstream.rollout.errors import EngineDied, error_class

logger = logging.getLogger(__name__)

LOOK_S = 0.2
"""How often a waiting call checks whether the engine still runs."""
SWITCH_S = 0.0005
"""sys.setswitchinterval() in an engine process with a server. With Python's 5 ms, which pass at every call and after
every wait for the device, waiting would be most of a publish."""


def socket_address(folder: str, rank: int) -> str:
    """Where one engine rank listens."""
    return f"ipc://{Path(folder) / f'rank-{rank}'}"


class SlotServer:
    """Serves calls in a daemon thread, one after the other, until the process ends.

    Args:
        address: `socket_address` of this rank.
        handlers: Method -> what to do; arguments and results are plain values and bytes.
        context: The thread enters it once; it sets the thread's device and stream.
    """

    def __init__(
        self,
        address: str,
        handlers: Mapping[str, Callable[..., Any]],
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._handlers = handlers
        self._socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        # Set once and not per call: the thread needs the interpreter even to see that there is a call.
        sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))
        threading.Thread(target=self._serve, args=(context,), name="adapter-slots", daemon=True).start()

    def _serve(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        with context():
            while True:
                sender, data = self._socket.recv_multipart()
                number, method, *args = msgpack.unpackb(data)
                answer: Any = msgpack.packb([number, *self._answer(method, args)])
                self._socket.send_multipart([sender, answer])

    def _answer(self, method: str, args: Sequence[Any]) -> tuple[str, str, Any]:
        try:
            return "", "", self._handlers[method](*args)
        except SlipstreamError as e:
            return type(e).__name__, str(e), None
        except Exception as e:  # the caller gets the error, and the thread goes on
            logger.exception("%s failed", method)
            return "EngineError", f"{method} failed inside the engine: {type(e).__name__}: {e}", None


class SlotClients:
    """The rollout worker's sockets to all ranks of its engine. Belongs to one event loop.

    Args:
        folder: Where the sockets are.
        num_ranks: Ranks of the engine.
        timeout_s: Longest that all ranks together may take for one call.
        is_alive: Whether the engine runs: a ZMQ socket does not say when the process behind it dies.
    """

    def __init__(self, folder: str, num_ranks: int, timeout_s: float, is_alive: Callable[[], bool]) -> None:
        self._timeout_s = timeout_s
        self._is_alive = is_alive
        self._numbers = itertools.count()
        self._turn = asyncio.Lock()
        """One call at a time. A recovering peer may ask for an offer during a publish, and two calls at the same time
        would each drop the other's answer."""
        self._context = zmq.asyncio.Context()
        self._sockets: list[zmq.asyncio.Socket] = []
        for rank in range(num_ranks):
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(socket_address(folder, rank))
            self._sockets.append(socket)

    async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Call a method on every rank at once. Results by rank.

        Args:
            timeout_s: Used instead of the usual deadline.

        Raises:
            SlipstreamError: The first rank's error, as its own class.
            EngineDied: The engine's process is gone, or a rank did not answer in time.
        """
        async with self._turn:
            limit_s = self._timeout_s if timeout_s is None else timeout_s
            number = next(self._numbers)
            data = msgpack.packb([number, method, *args])
            for socket in self._sockets:
                await socket.send(data)
            try:
                async with asyncio.timeout(limit_s):
                    replies = [await self._receive(socket, number) for socket in self._sockets]
            except TimeoutError as e:
                raise EngineDied(f"the engine did not answer {method} within {limit_s:g} s") from e
        for error, text, _ in replies:
            if error:
                raise error_class(error)(text)
        return [result for _, _, result in replies]

    async def _receive(self, socket: zmq.asyncio.Socket, number: int) -> tuple[str, str, Any]:
        while True:
            while not await socket.poll(int(LOOK_S * 1000)):
                if not self._is_alive():
                    how = death_of_a_child() or "died"
                    raise EngineDied(f"the engine's process {how}; this rollout worker must be restarted")
            answered, error, text, result = msgpack.unpackb(await socket.recv())
            if answered == number:  # an older number belongs to a call that was given up
                return error, text, result

    def close(self) -> None:
        """Close all sockets. Idempotent."""
        for socket in self._sockets:
            socket.close(0)
        self._sockets = []
        self._context.destroy(linger=0)
