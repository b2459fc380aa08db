"""A publisher's end of its control: one connection to every replica, the wait for their answers, and which are gone.

Does not own what is asked (`messages.py`), how calls travel (weight_sync/calls), or what an answer means
(`publish/transaction.py`).
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from slipstream.conf.errors import SlipstreamError
from slipstream.weight_sync.calls.connection import Connection
from slipstream.weight_sync.calls.loop_thread import LoopThread
from slipstream.weight_sync.calls.verbs import Verb, verb_of
from slipstream.weight_sync.errors import ProtocolError, ReplicaError, TransferTimeout, WeightSyncError

logger = logging.getLogger(__name__)

T = TypeVar("T")

WAIT_LOG_S = 30.0
"""How often a wait logs which replicas are late."""


class ReplicaClients:
    """A publisher's connections to its replicas, in a thread of their own. Its methods are called by one other thread.

    If a replica's connection breaks or is silent, its process is gone, and nothing more is sent to it until replace()
    names the one that replaces it. An endpoint is "" where a replica is not there yet.
    """

    def __init__(self, endpoints: Sequence[str], key: bytes) -> None:
        self.publisher = secrets.token_hex(8)
        """This publisher's name in a PublishId."""
        self.answer_s: dict[int, float] = {}
        """Replica -> seconds that its last answer took."""
        self._key = key
        self._endpoints: dict[int, str] = {}
        self._connections: dict[int, Connection] = {}
        self._given_up: dict[int, str] = {}
        self._loop = LoopThread("weight-sync-control")
        try:
            for replica, endpoint in enumerate(endpoints):
                if endpoint:
                    self.replace(replica, endpoint)
        except ProtocolError:
            self.close()
            raise

    def replace(self, replica: int, endpoint: str) -> None:
        """Ask this process from now on: the replica was started again, or is a further one."""

        async def connect() -> Connection:
            connection = Connection(endpoint, self._key)
            if replica in self._connections:
                self._connections[replica].close()
            return connection

        self._connections[replica] = self._loop.run(connect())
        self._endpoints[replica] = endpoint
        self._given_up.pop(replica, None)

    def give_up(self, replica: int, reason: str) -> None:
        """Ask a replica nothing until it is replaced."""
        self._given_up[replica] = reason

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run what asks replicas, while the caller does something else."""
        return self._loop.start(coroutine)

    def call(
        self,
        verb: Callable[..., Coroutine[Any, Any, T]],
        arguments: Mapping[int, tuple[object, ...]],
        timeouts_s: Mapping[int, float],
    ) -> dict[int, T | WeightSyncError]:
        """ask(), and wait."""
        return self._loop.run(self.ask(verb, arguments, timeouts_s))

    async def ask(
        self,
        verb: Callable[..., Coroutine[Any, Any, T]],
        arguments: Mapping[int, tuple[object, ...]],
        timeouts_s: Mapping[int, float],
    ) -> dict[int, T | WeightSyncError]:
        """Ask replicas at once, each with its own arguments, and wait for all answers, each until its own deadline.

        Returns replica -> its answer, or an error in its place (never raised here). `verb` is one of ReplicaVerbs.
        """
        asked, began = verb_of(verb), time.monotonic()
        tasks = {
            replica: asyncio.create_task(self._ask(replica, asked, own, timeouts_s[replica]))
            for replica, own in arguments.items()
        }
        while late := {replica: task for replica, task in tasks.items() if not task.done()}:
            _, waiting = await asyncio.wait(late.values(), timeout=WAIT_LOG_S)
            if waiting:
                names = ", ".join(self._endpoints[replica] for replica, task in late.items() if not task.done())
                logger.warning("%s: waited %.0f s for %s", asked.name, time.monotonic() - began, names)
        return {replica: task.result() for replica, task in tasks.items()}

    def close(self) -> None:
        """Close all connections. Idempotent."""
        connections, self._connections = self._connections, {}

        async def close() -> None:
            for connection in connections.values():
                connection.close()

        if connections:
            self._loop.run(close())
        self._loop.close()

    async def _ask(self, replica: int, verb: Verb, arguments: tuple[object, ...], limit_s: float) -> Any:
        if (reason := self._given_up.get(replica)) is not None:
            return ReplicaError(reason)
        endpoint, connection, began = self._endpoints[replica], self._connections[replica], time.monotonic()
        try:
            async with asyncio.timeout(limit_s):
                return await connection.call(verb, *arguments)
        except SlipstreamError as e:
            if not connection.is_open:
                return ReplicaError(
                    f"the replica at {endpoint} is gone: its connection broke or was refused, or it belongs to another"
                    " run, or another push attached since"
                )
            if isinstance(e, WeightSyncError):
                return type(e)(f"{endpoint}: {e}")
            return ReplicaError(f"{endpoint}: {type(e).__name__}: {e}")
        except TimeoutError:
            return TransferTimeout(f"{endpoint} did not answer {verb.name} within {limit_s:.1f} s")
        finally:
            self.answer_s[replica] = time.monotonic() - began
