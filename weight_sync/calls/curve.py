"""Protects sockets from strangers: CURVE keys that both ends derive from the run's key.

Owns those keys, and the frames of a message. Does not own the messages (verbs.py).

Both ends prove in the handshake that they know the run's key: the server's two keys are derived from it, and neither is
ever sent. What follows is encrypted and authenticated with keys of this one connection, so nothing can be read,
changed, or recorded and sent again.

libzmq collects all frames of a message before it hands over the first. MAXMSGSIZE limits one frame, but nothing limits
their number: without CURVE anyone who reaches the port could fill the memory. With it a stranger may send one frame of
at most MAX_FRAME_BYTES, within libzmq's ZMQ_HANDSHAKE_IVL (30 s), before its connection is closed. So longer messages
are cut into frames, which only a member of the run can send.
"""

import hmac
from typing import Any

import zmq
from zmq.utils import z85

from slipstream.weight_sync.errors import ProtocolError

MAX_FRAME_BYTES = 64 << 10
"""Longest frame of a message, before encryption."""
MIN_KEY_BYTES = 16
CURVE_OVERHEAD_BYTES = 64
"""Bytes that libzmq adds to a frame when it encrypts it (33 in 4.3.5), rounded up."""


def serve_guarded(socket: zmq.Socket[Any], key: bytes) -> None:
    """Make a socket that will be bound refuse peers that do not know the key."""
    secret = _server_secret(key)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))
    _limit_frames(socket)


def connect_guarded(socket: zmq.Socket[Any], key: bytes) -> None:
    """Make a socket that will be connected speak only to holders of the key."""
    public, secret = zmq.curve_keypair()
    socket.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(_server_secret(key)))
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    _limit_frames(socket)


def frames_of(data: bytes) -> list[bytes]:
    """Cut one message into frames; joined, they are the message again."""
    return [data[start : start + MAX_FRAME_BYTES] for start in range(0, max(len(data), 1), MAX_FRAME_BYTES)]


def _limit_frames(socket: zmq.Socket[Any]) -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + CURVE_OVERHEAD_BYTES)


def _server_secret(key: bytes) -> bytes:
    if len(key) < MIN_KEY_BYTES:
        raise ProtocolError(f"the run's key must have at least {MIN_KEY_BYTES} bytes, got {len(key)}")
    return z85.encode(hmac.digest(key, b"slipstream curve server", "sha256"))
