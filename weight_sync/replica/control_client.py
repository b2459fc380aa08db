"""A publisher's end of the control channel: one socket to every replica, and the wait for their answers.

Owns the sockets, the deadline of each request, and noticing that a replica is gone. Does not own the messages
(`messages.py`), the replica's end (`control_server.py`), or what an answer means (`publish/transaction.py`).
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from slipstream.conf.errors import named_error
from slipstream.weight_sync.errors import ProtocolError, ReplicaError, TransferTimeout, WeightSyncError
from slipstream.weight_sync.replica.curve import connect_guarded, frames_of
from slipstream.weight_sync.replica.messages import Described, Failed, Message, Signer

logger = logging.getLogger(__name__)

WAIT_LOG_S = 30.0
"""How often a wait logs which replicas are late."""
HEARTBEAT_S, SILENCE_S = 5, 20
"""A replica is asked for a heartbeat every HEARTBEAT_S, and counts as gone if it then is silent for SILENCE_S, because
a machine that vanishes closes no connection. ZMQ's own thread answers, however busy Python is. Replicas do not ask for
heartbeats: a publisher whose process stopped for a while would lose all of them."""


class ReplicaClients:
    """A publisher's sockets to its replicas. Blocking; used by one thread.

    Requests go to many replicas at once; each answer has its own deadline. If a replica's connection breaks or is
    silent, its process is gone, and nothing more is sent to it until replace() names the one that replaces it.

    Args:
        endpoints: Addresses of all replicas; "" of one that is not there yet.
        key: The run's key.
        heartbeat_s, silence_s: Used instead of HEARTBEAT_S and SILENCE_S.
    """

    def __init__(
        self, endpoints: Sequence[str], key: bytes, *, heartbeat_s: float = HEARTBEAT_S, silence_s: float = SILENCE_S
    ) -> None:
        self._signer = Signer(key)
        self._heartbeat_ms, self._silence_ms = int(1000 * heartbeat_s), int(1000 * silence_s)
        self._endpoints: dict[int, str] = {}
        self._context = zmq.Context()
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._monitors: dict[int, zmq.Socket[bytes]] = {}
        self._incarnations: dict[int, str] = {}
        self._gone: dict[int, str] = {}
        self.answer_s: dict[int, float] = {}
        """Replica -> seconds that its last answer took."""
        self._name = secrets.token_hex(8)
        self._request_id = 0
        try:
            for replica, endpoint in enumerate(endpoints):
                if endpoint:
                    self.replace(replica, endpoint)
        except ProtocolError:
            self.close()
            raise

    def replace(self, replica: int, endpoint: str) -> None:
        """Send to this process from now on: the replica was started again, or is a further one."""
        socket, monitor = self._connect(endpoint)
        if replica in self._sockets:
            _close_socket(self._sockets[replica], self._monitors[replica])
        self._sockets[replica], self._monitors[replica] = socket, monitor
        self._endpoints[replica], self._incarnations[replica] = endpoint, ""
        self._gone.pop(replica, None)

    def give_up(self, replica: int, reason: str) -> None:
        """Send nothing to a replica until it is replaced."""
        self._gone[replica] = reason

    def _connect(self, endpoint: str) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """A socket and its monitor."""
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        connect_guarded(socket, self._signer.key)
        socket.setsockopt(zmq.HEARTBEAT_IVL, self._heartbeat_ms)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, self._silence_ms)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as e:
            _close_socket(socket, monitor)
            raise ProtocolError(f"{endpoint!r} is no address of a replica (tcp://host:port): {e}") from e
        return socket, monitor

    def call(
        self,
        kind: type[Message],
        fields: Mapping[int, Mapping[str, object]],
        timeouts_s: Mapping[int, float],
        **common: object,
    ) -> dict[int, Message | WeightSyncError]:
        """Send one request to each replica in `fields` and wait for all answers, each until its own deadline.

        Args:
            kind: Message class.
            fields: Replica -> the fields of its message that differ between replicas.
            timeouts_s: Replica -> seconds to wait for it.
            common: Fields of all messages: version, epoch, digest.

        Returns:
            Replica -> its reply, or an error in its place (never raised here).
        """
        results: dict[int, Message | WeightSyncError] = {}
        pending: dict[int, tuple[int, float]] = {}
        for replica, own in fields.items():
            if replica in self._gone:
                results[replica] = ReplicaError(self._gone[replica])
                continue
            self._request_id += 1
            message = kind(
                run_id=self._signer.run_id,
                client=self._name,
                incarnation=self._incarnations[replica],
                request_id=self._request_id,
                **common,  # type: ignore[arg-type]
                **own,  # type: ignore[arg-type]
            )
            self._sockets[replica].send_multipart(frames_of(self._signer.seal(message)))
            pending[replica] = (self._request_id, time.monotonic() + timeouts_s[replica])
        self._collect(kind.__name__, pending, results)
        return results

    def close(self) -> None:
        """Close all sockets."""
        for replica, socket in self._sockets.items():
            _close_socket(socket, self._monitors[replica])
        self._sockets, self._monitors = {}, {}
        self._context.destroy(linger=0)

    def _collect(
        self, verb: str, pending: dict[int, tuple[int, float]], results: dict[int, Message | WeightSyncError]
    ) -> None:
        poller = zmq.Poller()
        owners: dict[zmq.Socket[bytes], tuple[int, bool]] = {}
        for replica in pending:
            for socket, is_monitor in ((self._sockets[replica], False), (self._monitors[replica], True)):
                poller.register(socket, zmq.POLLIN)
                owners[socket] = (replica, is_monitor)
        began = time.monotonic()
        next_log = began + WAIT_LOG_S
        while pending:
            now = time.monotonic()
            for replica, (_, deadline) in list(pending.items()):
                if now >= deadline:
                    results[replica] = TransferTimeout(
                        f"{self._endpoints[replica]} did not answer {verb} within {now - began:.1f} s"
                    )
                    del pending[replica]
            if not pending:
                return
            if now >= next_log:
                late = ", ".join(self._endpoints[replica] for replica in pending)
                logger.warning("%s: waited %.0f s for %s", verb, now - began, late)
                next_log += WAIT_LOG_S
            wait_s = min(next_log, *(deadline for _, deadline in pending.values())) - now
            for socket, _ in poller.poll(max(1, int(wait_s * 1000) + 1)):
                replica, is_monitor = owners[socket]
                result = self._see_event(replica) if is_monitor else self._receive(replica, pending)
                if result is not None and replica in pending:
                    results[replica] = result
                    self.answer_s[replica] = time.monotonic() - began
                    del pending[replica]

    def _see_event(self, replica: int) -> WeightSyncError | None:
        recv_monitor_message(self._monitors[replica])
        self._gone[replica] = (
            f"the replica at {self._endpoints[replica]} is gone: its control connection broke or was refused, or it"
            " belongs to another run, or another push attached since"
        )
        return ReplicaError(self._gone[replica])

    def _receive(self, replica: int, pending: Mapping[int, tuple[int, float]]) -> Message | WeightSyncError | None:
        """Receive one answer: the reply, the error that it carries, or None if it does not answer the pending
        request."""
        try:
            reply = self._signer.open_reply(b"".join(self._sockets[replica].recv_multipart()))
        except ProtocolError as e:
            logger.warning("a message from %s was ignored: %s", self._endpoints[replica], e)
            return None
        if replica not in pending or (reply.client, reply.request_id) != (self._name, pending[replica][0]):
            logger.warning("a late %s from %s was ignored", type(reply).__name__, self._endpoints[replica])
            return None
        if isinstance(reply, Failed):
            return _error_from(reply, self._endpoints[replica])
        if isinstance(reply, Described):
            self._incarnations[replica] = reply.incarnation
        return reply


def _close_socket(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    socket.disable_monitor()
    socket.close(0)
    monitor.close(0)


def _error_from(reply: Failed, endpoint: str) -> WeightSyncError:
    """The replica's error as one of ours; a class of another package becomes ReplicaError."""
    cls = named_error(reply.error, WeightSyncError)
    if cls is not None:
        return cls(f"{endpoint}: {reply.text}")
    return ReplicaError(f"{endpoint}: {reply.error}: {reply.text}")
