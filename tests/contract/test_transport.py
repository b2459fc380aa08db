"""What every link must do, over the memory link and over Mooncake's TCP link between two real processes."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Protocol

import pytest
import torch
from fakes.memory_transport import MemoryFabric, MemoryTransport
from fakes.stopped import stop_process

from slipstream.weight_sync.errors import TransferFailed, TransferTimeout, TransportError
from slipstream.weight_sync.transport.base import Transport
from slipstream.weight_sync.transport.mooncake import MooncakeTransport

NUM_BYTES = 3 << 20
TIMEOUT_S = 60.0

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch", "fakes.publish", "slipstream.weight_sync.publish.publisher", "slipstream.weight_sync.transport.mooncake"]
)


class Peer(Protocol):
    session: str
    address: int

    def bytes(self) -> torch.Tensor: ...

    def renew(self) -> None: ...

    def vanish(self) -> None: ...


class MemoryPeer:
    """The receiving end in this process."""

    def __init__(self, fabric: MemoryFabric) -> None:
        self._transport = MemoryTransport(fabric)
        self._memory = torch.zeros(NUM_BYTES, dtype=torch.uint8)
        self._transport.register([self._memory])
        self.session, self.address = self._transport.session, self._memory.data_ptr()

    def bytes(self) -> torch.Tensor:
        return self._memory.clone()

    def renew(self) -> None:
        self._transport.renew()
        self.session = self._transport.session

    def vanish(self) -> None:
        self._transport.close()


def serve_memory(pipe: Connection) -> None:
    """A process that offers memory over Mooncake and answers questions about it."""
    transport = MooncakeTransport(timeout_s=TIMEOUT_S)
    memory = torch.zeros(NUM_BYTES, dtype=torch.uint8)
    transport.register([memory])
    pipe.send((transport.session, memory.data_ptr()))
    while True:
        question = pipe.recv()
        if question == "renew":
            transport.renew()
            pipe.send(transport.session)
        else:
            pipe.send(memory.numpy().tobytes())


class ProcessPeer:
    """The receiving end in a process of its own."""

    def __init__(self) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=serve_memory, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.session, self.address = self._pipe.recv()

    def bytes(self) -> torch.Tensor:
        self._pipe.send("bytes")
        return torch.frombuffer(bytearray(self._pipe.recv()), dtype=torch.uint8)

    def renew(self) -> None:
        self._pipe.send("renew")
        self.session = self._pipe.recv()

    def vanish(self) -> None:
        self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(120)


@pytest.fixture(params=["memory", "mooncake"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Transport, Callable[[], Peer]]]:
    """A sending transport, and a maker of peers that it can reach."""
    if request.param == "memory":
        fabric = MemoryFabric()
        yield MemoryTransport(fabric), lambda: MemoryPeer(fabric)
        return
    peers: list[ProcessPeer] = []

    def make() -> Peer:
        peers.append(ProcessPeer())
        return peers[-1]

    transport = MooncakeTransport(timeout_s=TIMEOUT_S)
    yield transport, make
    transport.close()
    for peer in peers:
        peer.kill()


def random_bytes(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_a_write_lands_where_it_was_sent_and_nowhere_else(ends) -> None:
    transport, make_peer = ends
    peer, data = make_peer(), random_bytes()
    transport.register([data])
    assert transport.session != peer.session
    sizes = [1, 7, 4096, 65_537, 1 << 20]
    sources = [data.data_ptr() + 13 * i for i in range(5)]
    starts = [0, 1, 100_001, 300_000, 2 << 20]
    transport.write(peer.session, sources, [peer.address + s for s in starts], sizes, timeout_s=TIMEOUT_S)
    wanted = torch.zeros(NUM_BYTES, dtype=torch.uint8)
    for i, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        wanted[start : start + size] = data[13 * i : 13 * i + size]
    assert torch.equal(peer.bytes(), wanted)


def test_more_pieces_than_one_native_batch_holds(ends) -> None:
    transport, make_peer = ends
    peer, data = make_peer(), random_bytes(1)
    transport.register([data])
    num_pieces = 3000
    offsets = [1000 * i for i in range(num_pieces)]
    transport.write(
        peer.session,
        [data.data_ptr() + o for o in offsets],
        [peer.address + o for o in offsets],
        [1000] * num_pieces,
        timeout_s=TIMEOUT_S,
    )
    assert torch.equal(peer.bytes()[: 1000 * num_pieces], data[: 1000 * num_pieces])


def test_a_read_brings_what_a_write_left_and_touches_nothing_else(ends) -> None:
    transport, make_peer = ends
    peer, data, copy = make_peer(), random_bytes(3), torch.zeros(NUM_BYTES, dtype=torch.uint8)
    transport.register([data, copy])
    transport.write(peer.session, [data.data_ptr()], [peer.address], [NUM_BYTES], timeout_s=TIMEOUT_S)
    starts, sizes = [3, 70_001, 1 << 20], [5, 4096, 1 << 20]
    places = [0, 1000, 10_000]
    transport.read(
        peer.session, [copy.data_ptr() + p for p in places], [peer.address + s for s in starts], sizes,
        timeout_s=TIMEOUT_S,
    )  # fmt: skip
    wanted = torch.zeros(NUM_BYTES, dtype=torch.uint8)
    for place, start, size in zip(places, starts, sizes, strict=True):
        wanted[place : place + size] = data[start : start + size]
    assert torch.equal(copy, wanted)
    assert torch.equal(peer.bytes(), data)


def test_a_read_that_fails_needs_a_reset_as_a_write_does(ends) -> None:
    transport, make_peer = ends
    peer, data = make_peer(), torch.zeros(NUM_BYTES, dtype=torch.uint8)
    with pytest.raises(TransferFailed, match="not in registered memory"):
        transport.read(peer.session, [data.data_ptr()], [peer.address], [100], timeout_s=TIMEOUT_S)
    transport.register([data])
    with pytest.raises(TransferFailed, match="reset the session first"):
        transport.read(peer.session, [data.data_ptr()], [peer.address], [100], timeout_s=TIMEOUT_S)
    transport.reset(peer.session)
    transport.read(peer.session, [data.data_ptr()], [peer.address], [100], timeout_s=TIMEOUT_S)
    peer.vanish()
    with pytest.raises(TransportError, match=peer.session):
        transport.read(peer.session, [data.data_ptr()], [peer.address], [100], timeout_s=TIMEOUT_S)


def test_registering_again_or_overlapping_is_fine(ends) -> None:
    transport, make_peer = ends
    peer, data = make_peer(), random_bytes(2)
    transport.register([data[:1000], data[500:2000]])
    transport.register([data])
    transport.register([data, data])
    transport.write(peer.session, [data.data_ptr()], [peer.address], [NUM_BYTES], timeout_s=TIMEOUT_S)
    assert torch.equal(peer.bytes(), data)


def test_unregistered_memory_is_forgotten_and_its_neighbour_is_not(ends) -> None:
    transport, make_peer = ends
    peer, data, other = make_peer(), random_bytes(2), random_bytes(3)
    transport.register([data[:1000], data[1000:], other])
    transport.unregister([data[:1000], other])
    with pytest.raises(TransferFailed, match="not in registered memory"):
        transport.write(peer.session, [other.data_ptr()], [peer.address], [100], timeout_s=TIMEOUT_S)
    transport.reset(peer.session)  # a fresh engine registers what is left
    transport.write(peer.session, [data.data_ptr() + 1000], [peer.address + 1000], [100], timeout_s=TIMEOUT_S)
    assert torch.equal(peer.bytes()[1000:1100], data[1000:1100])
    transport.unregister([other])  # once more is harmless


def test_a_source_outside_registered_memory_is_refused(ends) -> None:
    transport, make_peer = ends
    peer, data = make_peer(), random_bytes()
    with pytest.raises(TransferFailed, match="not in registered memory"):
        transport.write(peer.session, [data.data_ptr()], [peer.address], [100], timeout_s=TIMEOUT_S)


def test_a_failed_session_is_refused_until_reset(ends) -> None:
    transport, make_peer = ends
    peer, data = make_peer(), random_bytes()
    transport.register([data])
    with pytest.raises(TransferFailed, match=peer.session):
        transport.write(peer.session, [data.data_ptr()], [peer.address + NUM_BYTES], [100], timeout_s=TIMEOUT_S)
    with pytest.raises(TransferFailed, match="reset the session first"):
        transport.write(peer.session, [data.data_ptr()], [peer.address], [100], timeout_s=TIMEOUT_S)
    transport.reset(peer.session)
    transport.write(peer.session, [data.data_ptr()], [peer.address], [NUM_BYTES], timeout_s=TIMEOUT_S)
    assert torch.equal(peer.bytes(), data)


def test_a_peer_that_vanished_fails_and_spares_others(ends) -> None:
    transport, make_peer = ends
    gone, other, data = make_peer(), make_peer(), random_bytes()
    transport.register([data])
    transport.write(gone.session, [data.data_ptr()], [gone.address], [NUM_BYTES], timeout_s=TIMEOUT_S)
    gone.vanish()
    with pytest.raises(TransportError, match=gone.session):
        transport.write(gone.session, [data.data_ptr()], [gone.address], [NUM_BYTES], timeout_s=TIMEOUT_S)
    transport.write(other.session, [data.data_ptr()], [other.address], [NUM_BYTES], timeout_s=TIMEOUT_S)
    assert torch.equal(other.bytes(), data)


def test_a_renewed_peer_is_reached_under_its_next_name_alone(ends) -> None:
    transport, make_peer = ends
    peer, data = make_peer(), random_bytes()
    transport.register([data])
    transport.write(peer.session, [data.data_ptr()], [peer.address], [100], timeout_s=TIMEOUT_S)
    before = peer.session
    peer.renew()
    assert peer.session != before
    with pytest.raises(TransportError):
        transport.write(before, [data.data_ptr()], [peer.address], [100], timeout_s=TIMEOUT_S)
    transport.write(peer.session, [data.data_ptr()], [peer.address], [NUM_BYTES], timeout_s=TIMEOUT_S)
    assert torch.equal(peer.bytes(), data)


def test_the_link_says_what_it_is(ends) -> None:
    transport, _ = ends
    assert transport.link in ("memory", "tcp")
    assert transport.session
    assert os.environ.get("MC_INTRANODE_NVLINK") is None


def test_a_stopped_mooncake_peer_times_out_and_nothing_lands_late() -> None:
    """The write fails within its deadline; after reset and renew, what was in flight changes nothing."""
    transport, peer = MooncakeTransport(timeout_s=2.0), ProcessPeer()
    data, zeros = random_bytes(), torch.zeros(NUM_BYTES, dtype=torch.uint8)
    transport.register([data, zeros])
    transport.write(peer.session, [data.data_ptr()], [peer.address], [1000], timeout_s=TIMEOUT_S)
    pid = peer.process.pid
    assert pid is not None
    stop_process(pid)
    try:
        with pytest.raises(TransferTimeout, match="no progress"):
            transport.write(peer.session, [data.data_ptr()], [peer.address], [NUM_BYTES], timeout_s=2.0)
        transport.reset(peer.session)
    finally:
        os.kill(pid, signal.SIGCONT)
    peer.renew()
    transport.write(peer.session, [zeros.data_ptr()], [peer.address], [NUM_BYTES], timeout_s=TIMEOUT_S)
    assert not peer.bytes().any()
    transport.close()
    peer.kill()
