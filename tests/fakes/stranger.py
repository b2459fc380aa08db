"""What another local user can do to a port of ours, with Python's standard library alone: it runs as that user.

    python -I - VERB HOST PORT < stranger.py          answers one JSON line: what became of every attempt

`as_stranger` runs it. Where the tests run as root, the process becomes uid 65534 before it does anything (root's
interpreter may be where nobody else can start it); elsewhere it stays the user who runs the tests, who has no more
rights at a port than any other.
"""

import contextlib
import encodings.idna  # noqa: F401 - its file cannot be read any more after the user has changed
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

NOBODY = 65534
SMALL_FRAME = 8 << 10
FLOOD_BYTES = 1 << 30


def as_stranger(verb: str, host: str, port: int, *more: str, timeout_s: float = 240) -> Any:
    """Run this file's `verb` in a process of another user. Returns what it answers."""
    done = subprocess.run(
        [sys.executable, "-I", "-", verb, host, str(port), *more],
        input=Path(__file__).read_text(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def greeting(mechanism: bytes) -> bytes:
    """The first 64 bytes of a ZMTP 3.1 connection."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


def frame(flags: int, body: bytes, announced: int | None = None) -> bytes:
    """A ZMTP frame with a long size. Flags: 1 more follow, 2 long size, 4 command."""
    return bytes([flags | 2]) + (len(body) if announced is None else announced).to_bytes(8, "big") + body


READY = frame(4, b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER")
HELLO = frame(4, b"\x05HELLO\x01\x00" + os.urandom(193))


def connect(host: str, port: int) -> socket.socket:
    """A connection whose writes and reads end after 20 seconds."""
    return socket.create_connection((host, port), timeout=20)


def pump(connection: socket.socket, chunk: bytes, limit: int) -> int:
    """Send a chunk again and again until the other end hangs up, or reads no more. Returns the bytes that it took."""
    sent = 0
    with contextlib.suppress(OSError):
        while sent < limit:
            connection.sendall(chunk)
            sent += len(chunk)
    return sent


def flood(host: str, port: int) -> dict[str, int]:
    """A gigabyte without a key, in every shape that libzmq reads. Returns the bytes that were taken, per shape."""
    small = frame(1, bytes(SMALL_FRAME))
    taken: dict[str, int] = {}
    for name, opening, chunk in (
        ("small frames", greeting(b"NULL") + READY, small),
        ("one frame", greeting(b"NULL") + READY + frame(0, b"", FLOOD_BYTES), bytes(1 << 20)),
        ("small frames after a CURVE greeting", greeting(b"CURVE"), small),
        ("small frames after a false HELLO", greeting(b"CURVE") + HELLO, small),
        ("one huge HELLO", greeting(b"CURVE") + frame(4, b"\x05HELLO", FLOOD_BYTES), bytes(1 << 20)),
        ("no ZMQ at all", b"GET / HTTP/1.1\r\n", b"x" * (1 << 20)),
    ):
        with connect(host, port) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(opening)
            taken[name] = pump(connection, chunk, FLOOD_BYTES)
    return taken


def many(host: str, port: int) -> int:
    """As many connections as are allowed at once, each with as much of one frame as fits. Returns the bytes taken."""
    taken = 0
    with contextlib.ExitStack() as connections:
        for _ in range(200):
            connection = connections.enter_context(connect(host, port))
            connection.settimeout(2)
            with contextlib.suppress(OSError):
                connection.sendall(greeting(b"CURVE") + frame(4, b"\x05HELLO", 60_000))
                taken += pump(connection, bytes(50_000), 50_000)
    return taken


def replay(host: str, port: int, recorded: str) -> bool:
    """Send what an honest publisher once sent, byte by byte. Returns whether the other end hung up on it."""
    with connect(host, port) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(bytes.fromhex(recorded))
            while connection.recv(1 << 16):
                pass
        return True


if __name__ == "__main__":
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    verb, host, port, *more = sys.argv[1:]
    calls = {"flood": flood, "many": many, "replay": replay}
    sys.stdout.write(json.dumps(calls[verb](host, int(port), *more)))
