"""States of finished steps in the memory of a process beside the trainer ranks, which outlives them.

    rank r       --hold(r, number, parts)-->  Keeper     after a step, beside what follows it
    rank r anew  <--give(r, number)---------  Keeper     after a rank has died

States are numbered. A keeper has room for two states of a rank: the newest whole one, and the one that arrives, which
overwrites an older one. A rank sends a state only when the states before it are whole for all ranks (rank_states.py).
So there is always a number that every rank has. A rank that was given up, since its node was out of reach, may come
back when all ranks live anew, and send what it had begun to: lives are counted, and of an earlier one nothing is held.

Needs no torch. Invariant: whoever does not know the run's key gets nothing and stores nothing. Bytes alone pass:
nothing is unpickled.
"""

import json
import logging
import os
import socket
import struct
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from enum import Enum
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge

import numpy as np

logger = logging.getLogger(__name__)

SILENCE_S = 60
"""A connection over which no byte has passed for so long is broken."""
_BACKLOG = 256
_MAX_REQUEST_BYTES = 1024
_TOUCHED_BYTES = 64 << 20

COPIES_THERE, COPIES_HERE = 2, 1
"""Copies of a state that a keeper has room for, and that a rank has for itself."""

Address = tuple[str, int]


def num_copies(num_nodes: int) -> int:
    """Copies of a rank's state: its own, and those of the keepers of its node and of the next one with ranks."""
    return COPIES_HERE + COPIES_THERE * min(num_nodes, 2)


class Readiness(Enum):
    """When one rank could keep a state. The least ready rank counts for all."""

    now = 0
    later = 1
    never = 2
    """Its keeper is gone."""


class Keeper:
    def __init__(self, host: str, key: bytes) -> None:
        self._key = key
        self._listener = Listener((host, 0), backlog=_BACKLOG)
        self._lock = threading.Lock()
        self._whole: dict[int, dict[int, memoryview]] = {}
        """Rank -> number -> state."""
        self._life = 0
        self._accepting = threading.Thread(target=self._accept, daemon=True, name="keeper")
        self._accepting.start()

    @property
    def address(self) -> Address:
        """Where ranks reach it."""
        host, port = self._listener.address  # pyright: ignore[reportAssignmentType] - of a socket of the internet
        return str(host), int(port)

    def kept(self) -> dict[int, list[int]]:
        """The numbers of the states that each rank has here."""
        with self._lock:
            return {rank: sorted(states) for rank, states in self._whole.items()}

    def go_back(self, number: int, life: int) -> None:
        """Forget later states: ranks of this life go on from this one."""
        with self._lock:
            self._life = life
            for states in self._whole.values():
                for later in [one for one in states if one > number]:
                    del states[later]

    def close(self) -> None:
        host, port = self.address
        self._listener.close()
        with socket.socket() as waking:  # accept() does not see that its socket was closed
            waking.connect_ex((host, port))

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with closing(connection), _socket_of(connection) as sock:
            try:
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
                request = json.loads(connection.recv_bytes(_MAX_REQUEST_BYTES))
                rank, number = int(request["rank"]), int(request["number"])
                if request["verb"] == "hold":
                    self._hold(rank, number, int(request["num_bytes"]), int(request["life"]), sock)
                    connection.send_bytes(b"held")
                else:
                    with self._lock:
                        state = self._whole[rank][number]
                    connection.send_bytes(str(len(state)).encode())
                    sock.sendall(state)
            except (OSError, EOFError, ValueError, LookupError, AuthenticationError) as error:
                logger.warning("a connection ended early: %s: %s", type(error).__name__, error)

    def _hold(self, rank: int, number: int, num_bytes: int, life: int, sock: socket.socket) -> None:
        with self._lock:
            self._refuse_earlier(life)
            whole = self._whole.get(rank, {})
            newest = max((one for one in whole if one < number), default=None)
            self._whole[rank] = {} if newest is None else {newest: whole.pop(newest)}
            free = next((state for state in whole.values() if len(state) == num_bytes), None)
        state = _memory(num_bytes) if free is None else free
        _receive(sock, state)
        with self._lock:
            self._refuse_earlier(life)
            self._whole[rank][number] = state

    def _refuse_earlier(self, life: int) -> None:
        if life < self._life:
            raise ValueError(f"a state of trainer ranks that were given up (life {life}; it is {self._life} now)")


def hold(address: Address, key: bytes, rank: int, number: int, parts: Sequence[memoryview], life: int) -> None:
    """Let a keeper hold a state of this rank: these bytes, one part after the other. Returns when it is whole there;
    raises OSError if the keeper is gone, or silent, or ranks have begun another life."""
    num_bytes = sum(part.nbytes for part in parts)
    request = {"verb": "hold", "rank": rank, "number": number, "num_bytes": num_bytes, "life": life}
    with _asking(address, key, **request) as (connection, sock):
        for part in parts:
            sock.sendall(part)
        connection.recv_bytes()


def take(address: Address, key: bytes, rank: int, number: int) -> memoryview:
    """The state that a keeper holds. Raises OSError if it is gone, or silent, or has no such state."""
    with _asking(address, key, verb="give", rank=rank, number=number) as (connection, sock):
        state = _memory(int(connection.recv_bytes()))
        _receive(sock, state)
        return state


class Taking:
    """take() in a thread. A rank that is started again imports and loads meanwhile, for longer than its state takes."""

    def __init__(self, address: Address, key: bytes, rank: int, number: int) -> None:
        self._of = address, number
        self._state = ThreadPoolExecutor(1).submit(take, address, key, rank, number)

    def of(self, address: Address, number: int) -> memoryview | None:
        """The state, if it is this one. Raises as take()."""
        return self._state.result() if self._of == (address, number) else None


@contextmanager
def _asking(address: Address, key: bytes, **request: object) -> Generator[tuple[Connection, socket.socket]]:
    """A connection on which a request was sent, and its socket."""
    try:
        with closing(Client(address)) as connection, _socket_of(connection) as sock:
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
            connection.send_bytes(json.dumps(request).encode())
            yield connection, sock
    except (EOFError, AuthenticationError) as error:
        host, port = address
        raise OSError(f"the keeper at {host}:{port} broke off ({type(error).__name__})") from error


def _memory(num_bytes: int) -> memoryview:
    """Fresh memory, all of it there. A host gives it page by page: 6 GiB to one thread in 5 s, to 32 in 0.4."""
    whole = np.empty(num_bytes, np.uint8)
    parts = [whole[start : start + _TOUCHED_BYTES] for start in range(0, num_bytes, _TOUCHED_BYTES)]
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        list(threads.map(lambda part: part.fill(0), parts))
    return whole.data


def _receive(sock: socket.socket, into: memoryview) -> None:
    start = 0
    while start < len(into):
        got = sock.recv_into(into[start:])
        if not got:
            raise EOFError(f"{start} of {len(into)} bytes came")
        start += got


@contextmanager
def _socket_of(connection: Connection) -> Generator[socket.socket]:
    """The connection's socket: the connection itself copies what it sends and receives."""
    with socket.socket(fileno=socket.dup(connection.fileno())) as sock:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", SILENCE_S, 0))
        yield sock
