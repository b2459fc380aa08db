"""Who is heard on a control channel: the run's publishers, the latest of them, once; and who is gone."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from fakes.memory_transport import MemoryFabric, MemoryTransport
from fakes.publish import KEY, EndpointThread, PlainEngine

from slipstream.conf.errors import ConfigError
from slipstream.weight_sync.errors import IntegrityError, ReplicaError, StaleEpoch, TransferTimeout
from slipstream.weight_sync.replica.control_client import WAIT_LOG_S, ReplicaClients
from slipstream.weight_sync.replica.curve import MAX_FRAME_BYTES, connect_guarded, frames_of, serve_guarded
from slipstream.weight_sync.replica.messages import (
    Abort,
    Aborted,
    Begin,
    Begun,
    Commit,
    Describe,
    Described,
    Message,
    Signer,
)
from slipstream.weight_sync.replica.version_state import Phase, VersionState


class Replica:
    """An engine of one rank with an endpoint."""

    def __init__(self) -> None:
        self.engine = PlainEngine([MemoryTransport(MemoryFabric())])
        self._thread = EndpointThread(self.engine)
        self.address, self.endpoint = self._thread.address, self._thread.endpoint

    def close(self) -> None:
        self._thread.close()


@pytest.fixture
def replica() -> Iterator[Replica]:
    made = Replica()
    yield made
    made.close()


@pytest.fixture
def clients() -> Iterator[list[ReplicaClients]]:
    made: list[ReplicaClients] = []
    yield made
    for one in made:
        one.close()


def ask(client: ReplicaClients, kind: type[Message], timeout_s: float = 10.0, **fields: Any) -> object:
    return client.call(kind, {0: fields}, {0: timeout_s})[0]


class RawClient:
    """A socket that says what it is told to say."""

    def __init__(self, address: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        connect_guarded(self.socket, KEY)
        self.socket.connect(address)

    def ask(self, *frames: bytes) -> bytes:
        self.socket.send_multipart(frames)
        assert self.socket.poll(10_000), "no answer"
        return b"".join(self.socket.recv_multipart())

    def close(self) -> None:
        self.socket.close(0)
        self.context.term()


def test_an_endpoint_ignores_what_is_not_signed_fresh_and_its_own(replica: Replica) -> None:
    signer, endpoint = Signer(KEY), replica.endpoint
    client = RawClient(replica.address)

    def head(request_id: int, incarnation: str = "") -> dict:
        return {"run_id": signer.run_id, "client": "raw", "request_id": request_id, "incarnation": incarnation}

    good = signer.seal(Describe(**head(1)))
    forged = Signer(b"k" * 32).seal(Describe(**head(1)))
    rejected = endpoint.num_rejected
    for frames in ([b"garbage"], [b""], [forged], [good[:-1]], [good, b"more"], frames_of(bytes(100_000))):
        client.socket.send_multipart(frames)
    reply = signer.open_reply(client.ask(good))
    assert isinstance(reply, Described)
    assert endpoint.num_rejected == rejected + 6

    client.socket.send_multipart([good])  # recorded and sent again
    stranger = signer.seal(Begin(**head(2, "another incarnation"), version=1, epoch=99, digest="d"))
    answer = signer.open_reply(client.ask(stranger))
    assert (getattr(answer, "error", None), endpoint.num_rejected) == ("StaleEpoch", rejected + 7)
    assert endpoint.state.epoch == 0

    abort = signer.seal(Abort(**head(3, reply.incarnation), epoch=5, reason="none of ours"))
    signer.open_reply(client.ask(abort))
    assert not endpoint.state.is_serving
    client.close()


def test_publishers_are_heard_whatever_their_clocks_say(
    replica: Replica, clients: list[ReplicaClients], monkeypatch: pytest.MonkeyPatch
) -> None:
    for now in (2 << 60, 1 << 60, 1):
        monkeypatch.setattr(time, "time_ns", lambda now=now: now)
        clients.append(ReplicaClients([replica.address], KEY))
        described = ask(clients[-1], Describe, 2.0)
        assert isinstance(described, Described)
        begun = ask(clients[-1], Begin, version=1, epoch=described.own_epoch + 1, digest="d")
        assert isinstance(begun, Begun)


def test_the_publisher_that_described_last_has_the_replica_from_its_begin_on(
    replica: Replica, clients: list[ReplicaClients]
) -> None:
    clients += [first := ReplicaClients([replica.address], KEY), second := ReplicaClients([replica.address], KEY)]
    assert isinstance(ask(first, Describe), Described)
    assert isinstance(ask(second, Describe), Described)
    assert isinstance(ask(first, Begin, version=1, epoch=1, digest="d"), Begun), "to look on is not to take over"
    assert isinstance(ask(second, Begin, version=1, epoch=2, digest="d"), Begun)
    common = {"version": 1, "epoch": 3, "digest": "d"}
    for answer in (
        ask(first, Begin, **common),
        ask(first, Commit, **common, expected=()),
        ask(first, Abort, **common, reason="mine"),
    ):
        assert isinstance(answer, StaleEpoch)
        assert "another publisher" in str(answer)
    assert replica.endpoint.state.epoch == 2
    assert replica.engine.calls[-1] == "begin", "nothing was aborted"
    assert isinstance(ask(first, Describe), Described)
    assert isinstance(ask(first, Begin, version=1, epoch=3, digest="d"), Begun)
    assert isinstance(ask(second, Describe), Described)
    assert isinstance(ask(second, Begin, version=1, epoch=4, digest="d"), Begun)
    assert isinstance(ask(first, Begin, version=1, epoch=5, digest="d"), StaleEpoch), "however often they describe"


def test_nothing_recorded_is_heard_again_and_nothing_of_another_endpoint_counts(replica: Replica) -> None:
    signer, other = Signer(KEY), Replica()
    there, here = RawClient(other.address), RawClient(replica.address)

    def message(kind: type[Message], request_id: int, incarnation: str = "", **fields: object) -> bytes:
        head = {"run_id": signer.run_id, "client": "raw", "incarnation": incarnation, "request_id": request_id}
        return signer.seal(kind(**head, **fields))  # type: ignore[arg-type]

    recorded = [message(Describe, 7)]
    described = signer.open_reply(there.ask(recorded[0]))
    recorded.append(message(Begin, 8, described.incarnation, version=1, epoch=9, digest="d"))
    assert isinstance(signer.open_reply(there.ask(recorded[1])), Begun)
    for one in recorded:
        here.ask(one)
    assert (replica.endpoint.state.epoch, replica.endpoint.num_rejected) == (0, 0)

    own = signer.open_reply(here.ask(message(Describe, 9)))
    begin = message(Begin, 10, own.incarnation, version=1, epoch=1, digest="d")
    assert isinstance(signer.open_reply(here.ask(begin)), Begun)
    calls = list(replica.engine.calls)
    for one in (*recorded, begin):
        here.socket.send_multipart([one])
    abort = signer.open_reply(here.ask(message(Abort, 11, own.incarnation, epoch=1, reason="over")))
    assert abort.request_id == 11
    assert replica.endpoint.num_rejected == 3
    assert replica.engine.calls == [*calls, "abort"]
    for one in (there, here, other):
        one.close()


def test_a_recorded_answer_is_no_answer_to_another_publisher(clients: list[ReplicaClients]) -> None:
    signer, context = Signer(KEY), zmq.Context()
    router = context.socket(zmq.ROUTER)
    serve_guarded(router, KEY)
    address = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"

    def answer_as_before() -> None:
        peer, sealed = router.recv_multipart()
        request = signer.open_request(sealed)
        for name, epoch in (("another publisher", 5), (request.client, 1)):
            head = {"run_id": signer.run_id, "client": name, "request_id": request.request_id}
            router.send_multipart([peer, signer.seal(Described(**head, ranks=(), own_epoch=epoch, own_version=0))])  # type: ignore[arg-type]

    thread = threading.Thread(target=answer_as_before)
    thread.start()
    clients.append(client := ReplicaClients([address], KEY))
    answer = ask(client, Describe)
    thread.join(60)
    assert isinstance(answer, Described)
    assert answer.own_epoch == 1
    router.close(0)
    context.term()


@pytest.mark.parametrize(
    ("raised", "seen"),
    [(IntegrityError, IntegrityError), (ConfigError, ReplicaError), (KeyError, ReplicaError)],
)
def test_an_error_of_a_replica_keeps_its_class_if_it_is_one_of_the_weight_syncs(
    replica: Replica, clients: list[ReplicaClients], raised: type[Exception], seen: type[Exception]
) -> None:
    clients.append(client := ReplicaClients([replica.address], KEY))
    replica.engine.fail_on["describe"] = raised("torn")
    answer = ask(client, Describe)
    assert type(answer) is seen
    assert "torn" in str(answer)


def test_garbage_is_logged_once_and_then_now_and_then(replica: Replica, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    client, signer = RawClient(replica.address), Signer(KEY)

    def garbage(count: int, request_id: int) -> list[str]:
        caplog.clear()
        for _ in range(count):
            client.socket.send(b"garbage")
        client.ask(signer.seal(Describe(run_id=signer.run_id, client="raw", request_id=request_id)))
        return [record.getMessage() for record in caplog.records]

    (line,) = garbage(20, 1)
    assert line.startswith("1 control messages ignored (1 in all): a control message of 7 bytes is not signed")
    replica.endpoint.rejected_log_s = 0.0
    (line,) = garbage(1, 2)
    assert line.startswith("20 control messages ignored (21 in all)")
    client.close()


def test_a_message_longer_than_a_frame_arrives_whole(replica: Replica, clients: list[ReplicaClients]) -> None:
    clients.append(client := ReplicaClients([replica.address], KEY))
    described = ask(client, Describe)
    assert isinstance(described, Described)
    assert isinstance(ask(client, Begin, version=1, epoch=1, digest="d"), Begun)
    reason = "".join(chr(ord("a") + i % 26) for i in range(3 * MAX_FRAME_BYTES + 5))
    assert isinstance(ask(client, Abort, epoch=1, reason=reason), Aborted)
    assert replica.engine.abort_reasons == [reason]


def test_who_has_another_key_is_told_at_once_that_this_is_another_run(
    replica: Replica, clients: list[ReplicaClients]
) -> None:
    clients.append(client := ReplicaClients([replica.address], b"the key of another run"))
    answer = ask(client, Describe, 60.0)
    assert isinstance(answer, ReplicaError)
    assert "belongs to another run" in str(answer)


class Cable:
    """Carries a connection to a replica until it is cut: then nothing arrives, and nobody is told."""

    def __init__(self, address: str) -> None:
        self._to = int(address.rsplit(":", 1)[1])
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self.is_cut = False
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._carry, daemon=True).start()

    def _carry(self) -> None:
        near, _ = self._listening.accept()
        far = socket.create_connection(("127.0.0.1", self._to))
        self._ends = [near, far]
        for one, other in ((near, far), (far, near)):
            threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed
            while data := source.recv(1 << 16):
                if not self.is_cut:
                    sink.sendall(data)

    def close(self) -> None:
        for end in (*self._ends, self._listening):
            end.close()


def test_a_replica_that_vanished_without_a_word_is_gone_before_its_deadline(
    replica: Replica, clients: list[ReplicaClients]
) -> None:
    cable = Cable(replica.address)
    clients.append(client := ReplicaClients([cable.address], KEY, heartbeat_s=0.2, silence_s=2.0))
    assert isinstance(ask(client, Describe), Described)
    cable.is_cut = True
    answer = ask(client, Begin, 60.0, version=1, epoch=1, digest="d")
    assert isinstance(answer, ReplicaError)
    assert "is gone" in str(answer)
    cable.close()


def test_a_silent_replica_is_waited_for_until_its_own_deadline(replica: Replica, clients: list[ReplicaClients]) -> None:
    cable = Cable(replica.address)
    clients.append(client := ReplicaClients([cable.address], KEY, heartbeat_s=60.0, silence_s=60.0))
    assert isinstance(ask(client, Describe), Described)
    cable.is_cut = True
    began = time.monotonic()
    assert isinstance(ask(client, Begin, 0.2, version=1, epoch=1, digest="d"), TransferTimeout)
    assert time.monotonic() - began < WAIT_LOG_S / 2
    cable.close()


def test_an_endpoint_that_ended_serves_no_version() -> None:
    ended = Replica()
    ended.endpoint.adopt(VersionState(Phase.clean, version=0, epoch=1, digest="d"))
    assert ended.endpoint.state.is_serving
    ended.close()
    assert not ended.endpoint.state.is_serving


def test_a_replica_whose_loop_is_busy_for_longer_than_a_silence_is_not_gone(
    replica: Replica, clients: list[ReplicaClients], monkeypatch: pytest.MonkeyPatch
) -> None:

    async def busy(version: int, epoch: int, digest: str) -> None:
        time.sleep(4)  # noqa: ASYNC251 - what is tried

    monkeypatch.setattr(replica.engine, "pause", busy)
    clients.append(client := ReplicaClients([replica.address], KEY, heartbeat_s=0.2, silence_s=2.0))
    assert isinstance(ask(client, Describe), Described)
    assert isinstance(ask(client, Begin, version=1, epoch=1, digest="d"), Begun)
    assert client.answer_s[0] >= 4.0, "they count against its deadline"
