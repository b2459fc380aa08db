"""Who may send bytes over a control socket: CURVE keys that both ends derive from the run's key.

Owns those keys, and the frames of a message. Does not own the messages nor their signatures (messages.py).

Without CURVE, libzmq gathers all frames of a message before anybody sees the first of them: MAXMSGSIZE limits one
frame, and nothing limits their number, so whoever reaches the port fills memory. With it, libzmq closes a connection
whose first words do not prove that the other end knows the server's public key. That key is derived from the run's key
and never crosses a connection in the clear. What a connection may send before that is one frame of MAX_FRAME_BYTES,
within libzmq's ZMQ_HANDSHAKE_IVL (30 s); longer messages are therefore cut into frames, which only a member of the run
can send.
"""

from __future__ import annotations

import hmac
from typing import Any

import zmq
from zmq.utils import z85

MAX_FRAME_BYTES = 64 << 10
"""Longest frame of a message, before encryption."""
CURVE_OVERHEAD_BYTES = 64
"""What libzmq adds to a frame when it encrypts it (33 bytes in 4.3.5), rounded up."""


def serve_guarded(socket: zmq.Socket[Any], key: bytes) -> None:
    """Make a socket that will be bound refuse whoever does not know the key."""
    secret = _server_secret(key)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))
    _limit_frames(socket)


def connect_guarded(socket: zmq.Socket[Any], key: bytes) -> None:
    """Make a socket that will be connected speak to holders of the key alone."""
    public, secret = zmq.curve_keypair()
    socket.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(_server_secret(key)))
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    _limit_frames(socket)


def frames_of(data: bytes) -> list[bytes]:
    """The frames of one message; joined, they are the message again."""
    return [data[start : start + MAX_FRAME_BYTES] for start in range(0, max(len(data), 1), MAX_FRAME_BYTES)]


def _limit_frames(socket: zmq.Socket[Any]) -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + CURVE_OVERHEAD_BYTES)


def _server_secret(key: bytes) -> bytes:
    return z85.encode(hmac.digest(key, b"slipstream curve server", "sha256"))
