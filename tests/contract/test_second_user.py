"""What another user of the machine gets at a port of ours. The stranger runs as `nobody` where the tests are root."""

import contextlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
import torch
from fakes.memory_transport import MemoryFabric, MemoryTransport
from fakes.publish import KEY, EndpointThread, PlainEngine
from fakes.stranger import FLOOD_BYTES, as_stranger

from slipstream.conf.schema import TransportKind
from slipstream.weight_sync.replica.clients import ReplicaClients
from slipstream.weight_sync.replica.messages import Begun, Described, PublishId, ReplicaVerbs
from slipstream.weight_sync.transport.mooncake import MooncakeTransport

STRANGER_AT_MOONCAKE = """
import ctypes, json, os, sys
os.environ["MC_FORCE_TCP"] = "1"
from slipstream.weight_sync.transport.mooncake import engine_module
module = engine_module()
session, *addresses = sys.argv[1:]
if os.getuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
engine = module.TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
buffer = ctypes.create_string_buffer(b"EVIL", 4096)
assert engine.register_memory(ctypes.addressof(buffer), 4096) == 0
codes = []
for address in map(int, addresses):
    for transfer in (engine.transfer_sync_write, engine.transfer_sync_read):
        codes.append(transfer(session, ctypes.addressof(buffer), address, 4))
print(json.dumps(codes))
"""
"""Mooncake's own client in a process of another user. Writes and reads four bytes at each address."""
GROWTH_BYTES = 64 << 20
"""What a server may grow by while it is sent a gigabyte; its own start-up is not in it."""


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
    theirs.close()
    assert process.pid is not None
    yield Server(ours.recv(), process.pid)
    ours.close()
    process.join(120)
    assert process.exitcode == 0


def describe(client: ReplicaClients) -> Described:
    answer = client.call(ReplicaVerbs.describe, {0: (client.publisher,)}, {0: 60.0})[0]
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
    begun = honest.call(ReplicaVerbs.begin, {0: (PublishId(honest.publisher, 3, 7, "d"),)}, {0: 60.0})[0]
    assert isinstance(begun, Begun)
    honest.close()
    listening.close()
    assert len(recorded) > 500

    assert describe(publisher).own_epoch == 7
    another = EndpointThread(PlainEngine([MemoryTransport(MemoryFabric())]))
    for port in (server.port, int(another.address.rsplit(":", 1)[1])):
        assert as_stranger("replay", "127.0.0.1", port, bytes(recorded).hex())
    assert describe(publisher).own_epoch == 7
    assert another.endpoint.state.epoch == 0, "of the same run, and nothing has begun there"
    another.close()


def listeners() -> dict[int, bytes]:
    """Ports on which this process listens on every address, and the network device that they are bound to."""
    found: dict[int, bytes] = {}
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(file.name))) as one:
            if one.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            address, port = one.getsockname()[:2]
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and address in ("0.0.0.0", "::"):
                found[port] = one.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0")
    return found


def test_mooncakes_ports_are_reached_over_loopback_alone() -> None:
    before = listeners()
    transport = MooncakeTransport(TransportKind.tcp, timeout_s=10.0)
    devices = {port: device for port, device in listeners().items() if port not in before}
    assert list(devices.values()) == [b"lo", b"lo"], "Mooncake listens on two ports"
    assert int(transport.session.rsplit(":", 1)[1]) in devices
    addresses = [one.address for card in psutil.net_if_addrs().values() for one in card if one.family == socket.AF_INET]
    for port in devices:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        for address in addresses:
            if not address.startswith("127."):
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection((address, port), timeout=5)
    transport.close()


def test_another_user_reaches_registered_memory_over_mooncake_and_no_other() -> None:
    """The first half is no promise but what docs/security.md says: a Mooncake that refuses it is a better one."""
    transport = MooncakeTransport(TransportKind.tcp, timeout_s=10.0)
    addresses: list[str] = []
    weights, private = torch.zeros(4096, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8)
    transport.register([weights])
    addresses = [str(memory.data_ptr()) for memory in (weights, private)]
    done = subprocess.run(
        [sys.executable, "-c", STRANGER_AT_MOONCAKE, transport.session, *addresses],
        capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    written, read, *refused = json.loads(done.stdout.splitlines()[-1])
    assert (written, read, bytes(weights[:4].tolist())) == (0, 0, b"EVIL")
    assert all(code != 0 for code in refused)
    assert not private.any()
    transport.close()
