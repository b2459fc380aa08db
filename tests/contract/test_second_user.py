"""What another user of the machine gets at a port of ours. The stranger runs as `nobody` where the tests are root."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from fakes.memory_transport import MemoryFabric, MemoryTransport
from fakes.publish import KEY, EndpointThread, PlainEngine
from fakes.stranger import FLOOD_BYTES, as_stranger

from weight_sync.replica.control_client import ReplicaClients
from weight_sync.replica.messages import Begin, Begun, Describe, Described

GROWTH_BYTES = 64 << 20
"""Of a server that is sent a gigabyte; its own start-up is not in it."""


@dataclass
class Server:
    """A replica's endpoint in a process of its own."""

    port: int
    pid: int

    def peak_bytes(self) -> int:
        """The most memory that the process ever held."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def serve(pipe: Connection) -> None:
    """A process: serve until the pipe closes."""
    thread = EndpointThread(PlainEngine([MemoryTransport(MemoryFabric())]))
    pipe.send(int(thread.address.rsplit(":", 1)[1]))
    with contextlib.suppress(EOFError):
        pipe.recv()


@pytest.fixture
def server() -> Iterator[Server]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    assert process.pid is not None
    assert ours.poll(120)
    yield Server(ours.recv(), process.pid)
    ours.close()
    process.join(20)
    assert process.exitcode == 0


def describe(client: ReplicaClients) -> Described:
    answer = client.call(Describe, {0: {}}, {0: 60.0})[0]
    assert isinstance(answer, Described), answer
    return answer


@pytest.fixture
def publisher(server: Server) -> Iterator[ReplicaClients]:
    client = ReplicaClients([f"tcp://127.0.0.1:{server.port}"], KEY)
    describe(client)
    yield client
    client.close()


@pytest.mark.parametrize("verb", ["flood", "many"])
def test_a_gigabyte_without_the_key_costs_the_server_no_memory_and_the_publisher_no_answer(
    server: Server, publisher: ReplicaClients, verb: str
) -> None:
    before = server.peak_bytes()
    said: list[object] = []
    stranger = threading.Thread(target=lambda: said.append(as_stranger(verb, "127.0.0.1", server.port)))
    stranger.start()
    answers = 0
    while stranger.is_alive():
        describe(publisher)
        answers += 1
    stranger.join()
    (taken,) = said
    assert answers > 0
    assert server.peak_bytes() - before < GROWTH_BYTES, taken
    if isinstance(taken, dict):
        assert len(taken) == 6
        assert max(taken.values()) < FLOOD_BYTES, "every shape is hung up on"
    describe(publisher)


def test_a_recorded_publish_is_nothing_to_say_for_another_user(server: Server, publisher: ReplicaClients) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    recorded = bytearray()

    def carry() -> None:
        near, _ = listening.accept()
        far = socket.create_connection(("127.0.0.1", server.port))
        threading.Thread(target=pump, args=(far, near, None), daemon=True).start()
        pump(near, far, recorded)

    def pump(source: socket.socket, sink: socket.socket, copy: bytearray | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if copy is not None:
                    copy += data
                sink.sendall(data)

    threading.Thread(target=carry, daemon=True).start()
    honest = ReplicaClients([f"tcp://127.0.0.1:{listening.getsockname()[1]}"], KEY)
    describe(honest)
    begun = honest.call(Begin, {0: {}}, {0: 60.0}, version=3, epoch=7, digest="d")[0]
    assert isinstance(begun, Begun)
    honest.close()
    listening.close()
    assert len(recorded) > 500

    before = describe(publisher)
    assert as_stranger("replay", "127.0.0.1", server.port, bytes(recorded).hex())
    after = describe(publisher)
    assert (before.own_epoch, before.own_version) == (after.own_epoch, after.own_version) == (7, 3)
