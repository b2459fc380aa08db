"""Messages between two processes of a run's agents: four bytes of length, then that many bytes of msgpack.

Owns the framing and the limit on a message's size. Does not own what a message says. What an agent process writes must
stay data: reading it runs nothing, and a message that is too long ends the connection.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import msgpack  # pyright: ignore[reportMissingTypeStubs]

LENGTH = struct.Struct(">I")
MAX_BYTES = 1 << 30
"""Largest message between processes that trust each other."""


class Disconnected(ConnectionError):
    """The other end is gone, or wrote something that is no message."""


class Channel:
    """One end of a connection.

    Args:
        max_bytes: A message that announces more ends the connection.
    """

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

    def send(self, message: Any) -> None:
        """Send one message of lists, maps, text and numbers, without waiting. receive() tells of a lost connection."""
        payload: bytes = msgpack.packb(message)  # pyright: ignore[reportUnknownMemberType, reportAssignmentType]
        if not self._writer.is_closing():
            self._writer.write(LENGTH.pack(len(payload)) + payload)

    async def receive(self) -> Any:
        """Wait for one message.

        Raises:
            Disconnected: There will be no further one.
        """
        try:
            (num_bytes,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            if num_bytes > self._max_bytes:
                raise Disconnected(f"a message of {num_bytes} bytes was announced; {self._max_bytes} are allowed")
            payload = await self._reader.readexactly(num_bytes)
            return msgpack.unpackb(payload, strict_map_key=False)  # pyright: ignore[reportUnknownMemberType]
        except Disconnected:
            raise
        except (asyncio.IncompleteReadError, OSError) as e:
            raise Disconnected("the other end closed the connection") from e
        except (ValueError, RecursionError) as e:
            raise Disconnected(f"what arrived is no message: {type(e).__name__}: {e}") from e

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._writer.close()
