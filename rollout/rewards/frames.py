"""One message between the run and a reward process: four bytes of length, then that many bytes of JSON.

Owns the framing, the limit on a message's size and the deadline of a whole message. Does not own what a message says.
The format is JSON, because whatever a reward writes to its descriptor must stay data: reading it must run nothing.
"""

from __future__ import annotations

import json
import math
import socket
import struct
import time

LENGTH = struct.Struct(">I")


class BadFrame(ValueError):
    """What arrived is not a message: it is too long, or not JSON."""


def send(connection: socket.socket, message: object, *, deadline: float = math.inf) -> None:
    """Write one message.

    Args:
        deadline: A time of time.monotonic().

    Raises:
        TimeoutError: The other end did not read it in time; part of it may have been sent.
        OSError: The other end is gone.
    """
    payload = json.dumps(message).encode()
    connection.settimeout(_left(deadline))
    connection.sendall(LENGTH.pack(len(payload)) + payload)


def receive(connection: socket.socket, *, max_bytes: int, deadline: float = math.inf) -> object:
    """Read one message.

    Args:
        max_bytes: A message that announces more is refused before it is read.
        deadline: A time of time.monotonic().

    Raises:
        BadFrame: It is too long, or not JSON.
        TimeoutError: It did not arrive whole in time.
        EOFError: The other end closed the connection, perhaps in mid-message.
        OSError: The other end is gone.
    """
    (num_bytes,) = LENGTH.unpack(_read(connection, LENGTH.size, deadline))
    if num_bytes > max_bytes:
        raise BadFrame(f"a message of {num_bytes} bytes was announced; {max_bytes} are allowed")
    payload = _read(connection, num_bytes, deadline)
    try:
        return json.loads(payload)
    except (ValueError, RecursionError) as e:  # UnicodeDecodeError is a ValueError
        raise BadFrame(f"{num_bytes} bytes that are not JSON: {payload[:40]!r}") from e


def _read(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        connection.settimeout(_left(deadline))
        part = connection.recv(min(num_bytes - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _left(deadline: float) -> float | None:
    """Seconds until the deadline; None without one. (A socket's timeout of 0 would mean "do not wait".)"""
    return None if deadline == math.inf else max(1e-3, deadline - time.monotonic())
