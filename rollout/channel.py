"""Messages between a process and one that it has started: four bytes of length, then that many bytes of msgpack.

    a reward's, an agent's       rollout/user_processes/      what serves agents      rollout/agents/
    a rank of a push             orchestrator/push/           a rollout worker        rollout/worker_process.py
    who wants a worker forked, and the server that forks it      rollout/in_vllm/fork_server.py

Owns the framing and the limit on a message's size. What the user's code writes to its end must stay data: reading it
runs nothing, and a message that is too long ends the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import struct
from typing import Any

import msgpack

_msgpack: Any = msgpack  # its types miss half of its parameters
LENGTH = struct.Struct(">I")
MAX_BYTES = (1 << 32) - 1
"""Largest message between processes that trust each other."""
LARGE_INTEGER = 1
"""Type of an extension of msgpack: an integer of more than 64 bits, as its digits."""


CLOSED = "the other end closed the connection"


class Disconnected(ConnectionError):
    """The other end is gone."""


class Garbled(Disconnected):
    """The other end wrote something that is no message."""


class Channel:
    """One end of a connection, in an event loop. A message that announces more than `max_bytes` ends the connection."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, max_bytes: int = MAX_BYTES
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._max_bytes = max_bytes

    @classmethod
    async def over(cls, connection: socket.socket, *, max_bytes: int = MAX_BYTES) -> Channel:
        """The end that `connection`, of a socketpair, is."""
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        return cls(reader, writer, max_bytes=max_bytes)

    def send(self, message: object) -> None:
        """Send one message of lists, maps, text and numbers, without waiting. receive() tells of a lost connection."""
        framed = _framed(message)
        if not self._writer.is_closing():
            self._writer.write(framed)

    async def sent(self) -> None:
        """Wait until most of what was sent has been read. receive() tells of a lost connection."""
        with contextlib.suppress(OSError):
            await self._writer.drain()

    async def receive(self) -> Any:
        """Wait for one message. Raises Disconnected if there will be no further one."""
        try:
            (num_bytes,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            if num_bytes > self._max_bytes:
                raise Garbled(f"a message of {num_bytes} bytes was announced; {self._max_bytes} are allowed")
            return _unpacked(await self._reader.readexactly(num_bytes))
        except Disconnected:
            raise
        except (asyncio.IncompleteReadError, OSError) as e:
            raise Disconnected(CLOSED) from e

    def close(self, *, drop_unsent: bool = False) -> None:
        if drop_unsent:
            self._writer.transport.abort()
        self._writer.close()


class BlockingChannel:
    """One end of a connection, in a process without an event loop, or in which it does not turn."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self._socket = connection

    def send(self, message: object) -> None:
        """Send one message, once the other end has room for it. receive() tells of a lost connection."""
        with contextlib.suppress(OSError):
            self._socket.sendall(_framed(message))

    def hears(self, timeout_s: float) -> bool:
        """Whether there is something to receive, or the connection has ended, within this time."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(1000 * timeout_s))

    def receive(self) -> Any:
        """Wait for one message. Raises: Disconnected, Garbled."""
        (num_bytes,) = LENGTH.unpack(self._read(LENGTH.size))
        return _unpacked(self._read(num_bytes))

    def close(self) -> None:
        self._socket.close()

    def _read(self, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        rest = memoryview(data)
        while rest:
            try:
                received = self._socket.recv_into(rest)
            except OSError as e:
                raise Disconnected(f"the connection is lost: {e}") from e
            if not received:
                raise Disconnected(CLOSED)
            rest = rest[received:]
        return bytes(data)


def _framed(message: object) -> bytes:
    payload: bytes = _msgpack.packb(message, default=_extended, unicode_errors="surrogatepass")
    return LENGTH.pack(len(payload)) + payload


def _unpacked(payload: bytes) -> Any:
    try:
        return _msgpack.unpackb(payload, strict_map_key=False, ext_hook=_whole, unicode_errors="surrogatepass")
    except (ValueError, TypeError, RecursionError) as e:
        raise Garbled(f"{len(payload)} bytes that are no message: {type(e).__name__}: {e!s:.200}") from e


def _extended(value: object) -> object:
    if isinstance(value, int):
        return _msgpack.ExtType(LARGE_INTEGER, str(value).encode())
    raise TypeError(f"a message cannot hold {type(value).__name__}: {value!r:.100}")


def _whole(kind: int, data: bytes) -> int:
    if kind != LARGE_INTEGER:
        raise ValueError(f"an extension of type {kind}")
    return int(data)
