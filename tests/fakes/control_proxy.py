"""A proxy between a publisher and a replica, which cuts the control channel or swallows a message."""

import contextlib
import threading

import msgspec
import zmq

from fakes.publish import KEY
from slipstream.weight_sync.calls.curve import connect_guarded, serve_guarded
from slipstream.weight_sync.calls.verbs import Answer, Request


class ControlProxy:
    """Stands between a publisher and one endpoint, with the run's key, and does one thing to the first message of a
    name ("commit", "answer to commit"): cut breaks the connections at both sides; swallow loses that message alone.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.fault: tuple[str, str] | None = None
        self._asked: dict[int, str] = {}
        self._port = 0
        self._connect()
        self.address = f"tcp://127.0.0.1:{self._port}"
        threading.Thread(target=self._carry, daemon=True).start()

    def _connect(self) -> None:
        self._front, self._back = self._context.socket(zmq.ROUTER), self._context.socket(zmq.DEALER)
        for socket in (self._front, self._back):
            socket.setsockopt(zmq.LINGER, 0)
        serve_guarded(self._front, KEY)
        if self._port:
            while True:  # libzmq gives the port back a moment after the socket that had it was closed
                with contextlib.suppress(zmq.ZMQError):
                    self._front.bind(self.address)
                    break
        else:
            self._port = self._front.bind_to_random_port("tcp://127.0.0.1")
        connect_guarded(self._back, KEY)
        self._back.connect(self._endpoint)
        self._peer = b""

    def _name(self, socket: zmq.Socket[bytes], data: bytes) -> str:
        if socket is self._back:
            return f"answer to {self._asked.get(msgspec.msgpack.decode(data, type=Answer).number)}"
        request = msgspec.msgpack.decode(data, type=Request)
        self._asked[request.number] = request.verb
        return request.verb

    def _carry(self) -> None:
        while True:
            ready, _, _ = zmq.select([self._front, self._back], [], [])
            for socket in ready:
                frames = socket.recv_multipart()
                if socket is self._front:
                    self._peer, *frames = frames
                if self.fault is not None and self.fault[1] == self._name(socket, b"".join(frames)):
                    kind, self.fault = self.fault[0], None
                    if kind == "cut":
                        self._front.close(0)
                        self._back.close(0)
                        self._connect()
                        break
                elif socket is self._front:
                    self._back.send_multipart(frames)
                else:
                    self._front.send_multipart([self._peer, *frames])
