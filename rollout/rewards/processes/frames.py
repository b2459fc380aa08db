"""One message between the run and a reward process: four bytes of length, then that many bytes of JSON.

Owns the framing and the limit on a message's size. Does not own what a message says, nor how long one may wait for it.
The format is JSON, because whatever a reward writes to its descriptor must stay data: reading it must run nothing.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct

LENGTH = struct.Struct(">I")
MAX_READ = 1 << 20
"""Bytes that one call of recv asks for."""


class BadFrame(ValueError):
    """What arrived is not a message: it is too long, or not JSON."""


def framed(message: object) -> bytes:
    """The message as it is sent."""
    payload = json.dumps(message).encode()
    return LENGTH.pack(len(payload)) + payload


def receive(connection: socket.socket) -> object:
    """Read one message of the run, which may have any size; a plain reward's process has nothing else to do meanwhile.

    Raises:
        BadFrame: It is not JSON.
        EOFError: The other end closed the connection.
        OSError: The other end is gone.
    """

    def read(num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            part = connection.recv(min(num_bytes - len(data), MAX_READ))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    (num_bytes,) = LENGTH.unpack(read(LENGTH.size))
    return _parsed(read(num_bytes))


async def next_message(connection: socket.socket, *, max_bytes: int) -> object:
    """Wait for one message on a non-blocking socket.

    Args:
        max_bytes: A message that announces more is refused before it is read.

    Raises:
        BadFrame: It is too long, or not JSON.
        EOFError: The other end closed the connection, perhaps in mid-message.
        OSError: The other end is gone.
    """
    loop = asyncio.get_running_loop()

    async def read(num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            part = await loop.sock_recv(connection, min(num_bytes - len(data), MAX_READ))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    (num_bytes,) = LENGTH.unpack(await read(LENGTH.size))
    if num_bytes > max_bytes:
        raise BadFrame(f"a message of {num_bytes} bytes was announced; {max_bytes} are allowed")
    return _parsed(await read(num_bytes))


def _parsed(payload: bytes) -> object:
    try:
        return json.loads(payload)
    except (ValueError, RecursionError) as e:  # UnicodeDecodeError is a ValueError
        raise BadFrame(f"{len(payload)} bytes that are not JSON: {payload[:40]!r}") from e
