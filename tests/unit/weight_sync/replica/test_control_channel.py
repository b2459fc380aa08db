"""Who is heard at a replica's endpoint: the run's publishers, the latest of them; and who is gone."""

import contextlib
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.memory_transport import MemoryFabric, MemoryTransport
from fakes.publish import KEY, EndpointThread, PlainEngine

from slipstream.conf.errors import ConfigError
from slipstream.weight_sync.calls import connection
from slipstream.weight_sync.calls.curve import MAX_FRAME_BYTES
from slipstream.weight_sync.errors import IntegrityError, ProtocolError, ReplicaError, StaleEpoch, TransferTimeout
from slipstream.weight_sync.replica import clients as clients_module, endpoint as endpoint_module
from slipstream.weight_sync.replica.clients import ReplicaClients
from slipstream.weight_sync.replica.endpoint import ReplicaEndpoint
from slipstream.weight_sync.replica.messages import Begun, Committed, Described, PublishId, ReplicaVerbs
from slipstream.weight_sync.replica.version_state import Phase, VersionState


class Replica:
    """An engine of one rank with an endpoint."""

    def __init__(self) -> None:
        self.engine = PlainEngine([MemoryTransport(MemoryFabric())])
        self._thread = EndpointThread(self.engine)
        self.address, self.endpoint = self._thread.address, self._thread.endpoint

    def close(self) -> None:
        self._thread.close()


class Publisher:
    """Asks one replica, as rank 0 does."""

    def __init__(self, address: str, key: bytes = KEY) -> None:
        self.clients = ReplicaClients([address], key)

    def ask(self, verb: Any, *given: object, timeout_s: float = 60.0) -> object:
        return self.clients.call(verb, {0: given}, {0: timeout_s})[0]

    def describe(self, timeout_s: float = 60.0) -> object:
        return self.ask(ReplicaVerbs.describe, self.clients.publisher, timeout_s=timeout_s)

    def publish(self, epoch: int) -> PublishId:
        return PublishId(self.clients.publisher, 1, epoch, "d")

    def begin(self, epoch: int, timeout_s: float = 60.0) -> object:
        return self.ask(ReplicaVerbs.begin, self.publish(epoch), timeout_s=timeout_s)


@pytest.fixture
def replica() -> Iterator[Replica]:
    made = Replica()
    yield made
    made.close()


@pytest.fixture
def publishers() -> Iterator[list[Publisher]]:
    made: list[Publisher] = []
    yield made
    for one in made:
        one.clients.close()


@pytest.fixture
def publisher(replica: Replica, publishers: list[Publisher]) -> Publisher:
    """One that has met the replica."""
    publishers.append(met := Publisher(replica.address))
    assert isinstance(met.describe(), Described)
    return met


def test_the_publisher_that_described_last_has_the_replica_from_its_begin_on(
    replica: Replica, publishers: list[Publisher]
) -> None:
    publishers += [first := Publisher(replica.address), second := Publisher(replica.address)]
    assert isinstance(first.describe(), Described)
    assert isinstance(second.describe(), Described)
    assert isinstance(first.begin(1), Begun), "to look on is not to take over"
    assert first.ask(ReplicaVerbs.abort, first.publish(1), "gave up") is None, "nor later in that publish"
    assert isinstance(second.begin(2), Begun)
    for answer in (
        first.begin(3),
        first.ask(ReplicaVerbs.commit, first.publish(3), ()),
        first.ask(ReplicaVerbs.abort, first.publish(3), "mine"),
        first.ask(ReplicaVerbs.abort, first.publish(2), "and that of another one"),
    ):
        assert isinstance(answer, StaleEpoch)
        assert "another publisher" in str(answer)
    assert replica.endpoint.state.epoch == 2
    assert replica.engine.calls[-1] == "begin", "nothing was aborted"
    assert isinstance(first.describe(), Described)
    assert isinstance(first.begin(3), Begun)
    assert isinstance(second.describe(), Described)
    assert isinstance(second.begin(4), Begun)
    assert isinstance(first.begin(5), StaleEpoch), "however often they describe"
    assert isinstance(first.describe(), Described)
    assert isinstance(first.begin(4), StaleEpoch), "of an epoch that has begun"
    assert isinstance(second.begin(5), Begun), "so nothing was taken over"


def test_who_never_described_and_who_met_an_earlier_process_are_not_heard(
    replica: Replica, publishers: list[Publisher]
) -> None:
    publishers.append(stranger := Publisher(replica.address))
    for answer in (
        stranger.begin(1),
        stranger.ask(ReplicaVerbs.commit, stranger.publish(0), ()),
        stranger.ask(ReplicaVerbs.abort, stranger.publish(0), "none of mine"),
    ):
        assert isinstance(answer, StaleEpoch)
        assert "this replica restarted, or never met this publisher: connect again" in str(answer)
    assert (replica.endpoint.state, replica.engine.calls) == (VersionState(), [])


def test_calls_of_several_publishers_are_done_one_after_the_other(
    replica: Replica, publishers: list[Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publisher that comes does not end what another one has asked for."""
    began, go_on, begin = threading.Event(), threading.Event(), replica.engine.begin

    async def slow(*given: Any) -> Any:
        began.set()
        while not go_on.is_set():
            await clients_module.asyncio.sleep(0.01)
        return await begin(*given)

    monkeypatch.setattr(replica.engine, "begin", slow)
    publishers += [first := Publisher(replica.address), second := Publisher(replica.address)]
    assert isinstance(first.describe(), Described)
    answers: dict[str, object] = {}
    threads = [threading.Thread(target=lambda: answers.update(begun=first.begin(1)))]
    threads[0].start()
    assert began.wait(60)
    threads.append(threading.Thread(target=lambda: answers.update(described=second.describe())))
    threads[1].start()
    time.sleep(0.2)
    assert not answers
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert isinstance(answers["begun"], Begun) and isinstance(answers["described"], Described)
    assert answers["described"].own_epoch == 1


@pytest.mark.parametrize(
    ("raised", "seen", "says"),
    [
        (IntegrityError, IntegrityError, "torn"),
        (ConfigError, ReplicaError, "ConfigError: torn"),
        (KeyError, ReplicaError, "describe failed with KeyError: 'torn'"),
    ],
)
def test_an_error_of_a_replica_keeps_its_class_if_it_is_one_of_the_weight_syncs(
    replica: Replica, publishers: list[Publisher], raised: type[Exception], seen: type[Exception], says: str
) -> None:
    publishers.append(publisher := Publisher(replica.address))
    replica.engine.fail_on["describe"] = raised("torn")
    answer = publisher.describe()
    assert type(answer) is seen
    assert str(answer) == f"{replica.address}: {says}"


def test_a_replica_that_was_given_up_is_asked_nothing_until_it_is_replaced(
    replica: Replica, publishers: list[Publisher]
) -> None:
    """The one that replaces it has another address; the others are asked all the while."""
    publishers.append(publisher := Publisher(replica.address))
    clients, (other, again) = publisher.clients, (Replica(), Replica())
    try:
        clients.replace(1, other.address)
        clients.give_up(1, "it was out of service")

        def described() -> list[object]:
            given, limits = dict.fromkeys((0, 1), (clients.publisher,)), dict.fromkeys((0, 1), 10.0)
            answers = clients.call(ReplicaVerbs.describe, given, limits)
            return [answers[place] for place in (0, 1)]

        first, second = described()
        assert isinstance(first, Described)
        assert isinstance(second, ReplicaError) and str(second) == "it was out of service"
        assert other.engine.calls == []
        link = clients._connections[1]
        clients.replace(1, again.address)
        assert not link.is_open
        assert [type(answer) for answer in described()] == [Described] * 2
        assert (other.engine.calls, again.engine.calls) == ([], ["describe"])
    finally:
        other.close()
        again.close()


@pytest.mark.parametrize("aborts", [True, False])
@pytest.mark.parametrize("verb", ["pause", "begin", "verify", "commit"])
def test_a_call_that_fails_leaves_the_replica_dirty_and_its_own_error_is_told(
    replica: Replica, publisher: Publisher, monkeypatch: pytest.MonkeyPatch, verb: str, aborts: bool
) -> None:
    """Also where the engine cannot even be told of it."""

    async def nothing_to_prove(*_: object) -> None: ...

    replica.engine.fail_on[verb] = IntegrityError("torn")
    if not aborts:
        replica.engine.fail_on["abort"] = RuntimeError("the engine is gone")
    if verb == "commit":
        monkeypatch.setattr(replica.engine, "verify", nothing_to_prove)
    answer = publisher.begin(1)
    if verb in ("verify", "commit"):
        assert isinstance(answer, Begun)
        answer = publisher.ask(ReplicaVerbs.commit, publisher.publish(1), ())
    assert type(answer) is IntegrityError and str(answer) == f"{replica.address}: torn"
    assert replica.endpoint.state == VersionState(Phase.dirty, version=1, epoch=1, digest="d")
    assert replica.engine.calls[-2:] == [verb, "abort"]
    assert replica.engine.abort_reasons == ["IntegrityError: torn"] * aborts


def test_a_message_longer_than_a_frame_arrives_whole(replica: Replica, publisher: Publisher) -> None:
    assert isinstance(publisher.begin(1), Begun)
    reason = "".join(chr(ord("a") + i % 26) for i in range(3 * MAX_FRAME_BYTES + 5))
    assert publisher.ask(ReplicaVerbs.abort, publisher.publish(1), reason) is None
    assert replica.engine.abort_reasons == [reason]


def test_an_abort_of_another_epoch_and_of_what_is_served_changes_nothing(
    replica: Replica, publisher: Publisher
) -> None:
    assert isinstance(publisher.begin(2), Begun)
    assert publisher.ask(ReplicaVerbs.abort, publisher.publish(1), "over") is None
    replica.endpoint.adopt(VersionState(Phase.clean, version=1, epoch=3, digest="d"))
    assert publisher.ask(ReplicaVerbs.abort, publisher.publish(3), "over") is None
    assert replica.endpoint.state.is_serving
    assert not replica.engine.abort_reasons


def test_what_is_older_than_the_publish_under_way_or_than_what_is_served_is_not_adopted(
    replica: Replica, publisher: Publisher
) -> None:
    assert isinstance(publisher.begin(3), Begun)
    read = [VersionState(Phase.clean, version=1, epoch=epoch, digest="d") for epoch in range(4)]
    with pytest.raises(StaleEpoch, match="epoch 2 cannot be adopted: epoch 3 has begun"):
        replica.endpoint.adopt(read[2])
    replica.endpoint.adopt(read[3])  # what did not come to its end is read from a peer to which it did
    with pytest.raises(StaleEpoch, match="epoch 3 cannot be adopted"):
        replica.endpoint.adopt(read[3])


@pytest.mark.parametrize("pauses", [True, False])
async def test_a_replica_says_how_long_each_of_its_phases_took(monkeypatch: pytest.MonkeyPatch, pauses: bool) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(endpoint_module, "time", SimpleNamespace(monotonic=lambda: clock.now))

    class Engine:
        """Each verb takes a number of seconds of its own."""

        def __getattr__(self, verb: str) -> Callable[..., Any]:
            async def takes_time(*_: object) -> list[Any]:
                clock.now += {"describe": 0.0, "pause": 1.0, "begin": 2.0, "verify": 8.0, "commit": 16.0}[verb]
                return []

            return takes_time

    endpoint = ReplicaEndpoint(Engine(), KEY, pauses=pauses)  # type: ignore[arg-type]
    publish = PublishId("publisher", version=1, epoch=1, digest="d")
    await endpoint.describe("publisher")
    begun = await endpoint.begin(publish)
    assert (begun.idle_s, begun.mark_s) == (1.0, 2.0)
    clock.now += 4.0  # for the writes
    assert await endpoint.commit(publish, ()) == Committed(8.0, 16.0, 31.0 if pauses else 0.0)
    assert endpoint.state == VersionState(Phase.clean, version=1, epoch=1, digest="d")


def test_who_has_another_key_is_told_at_once_that_this_is_another_run(
    replica: Replica, publishers: list[Publisher]
) -> None:
    publishers.append(publisher := Publisher(replica.address, b"the key of another run"))
    answer = publisher.describe(60.0)
    assert isinstance(answer, ReplicaError)
    assert "belongs to another run" in str(answer)
    assert replica.engine.calls == []


def test_an_address_that_is_none_is_named_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with pytest.raises(ProtocolError, match="'nowhere' is no address of a process"):
        ReplicaClients(["", "nowhere"], KEY)
    assert set(threading.enumerate()) <= before


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


def see_silence(monkeypatch: pytest.MonkeyPatch, heartbeat_s: float, silence_s: float) -> None:
    monkeypatch.setattr(connection, "HEARTBEAT_S", heartbeat_s)
    monkeypatch.setattr(connection, "SILENCE_S", silence_s)


def test_a_replica_that_vanished_without_a_word_is_gone_before_its_deadline(
    replica: Replica, publishers: list[Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    see_silence(monkeypatch, 0.2, 2.0)
    cable = Cable(replica.address)
    publishers.append(publisher := Publisher(cable.address))
    assert isinstance(publisher.describe(), Described)
    cable.is_cut = True
    for answer in (publisher.begin(1, 60.0), publisher.begin(1, 60.0)):
        assert isinstance(answer, ReplicaError)
        assert "is gone" in str(answer)
    cable.close()


def test_a_silent_replica_is_waited_for_until_its_own_deadline_and_named_meanwhile(
    replica: Replica, publishers: list[Publisher], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    see_silence(monkeypatch, 60.0, 60.0)
    monkeypatch.setattr(clients_module, "WAIT_LOG_S", 0.1)
    cable = Cable(replica.address)
    publishers.append(publisher := Publisher(cable.address))
    assert isinstance(publisher.describe(), Described)
    publisher.clients.replace(1, replica.address)
    cable.is_cut = True
    caplog.set_level(logging.WARNING)
    given = (publisher.publish(1),)
    answers = publisher.clients.call(ReplicaVerbs.begin, {0: given, 1: given}, {0: 1.0, 1: 600.0})
    assert isinstance(answers[0], TransferTimeout) and isinstance(answers[1], Begun)
    assert publisher.clients.answer_s[0] >= 1.0
    assert re.search(rf"begin: waited \d s for {cable.address}\n", caplog.text)
    cable.close()


def test_an_endpoint_that_ended_serves_no_version() -> None:
    ended = Replica()
    ended.endpoint.adopt(VersionState(Phase.clean, version=0, epoch=1, digest="d"))
    assert ended.endpoint.state.is_serving
    ended.close()
    assert not ended.endpoint.state.is_serving


def test_a_replica_whose_loop_is_busy_for_longer_than_a_silence_is_not_gone(
    replica: Replica, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:

    async def busy(version: int, epoch: int, digest: str) -> None:
        time.sleep(4)  # noqa: ASYNC251 - what is tried

    monkeypatch.setattr(replica.engine, "pause", busy)
    see_silence(monkeypatch, 0.2, 2.0)
    assert isinstance(publisher.begin(1), Begun)
    assert publisher.clients.answer_s[0] >= 4.0, "they count against its deadline"
