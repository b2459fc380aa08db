"""What a receiver does in which order: the device, the link, its peer and changes."""

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from cases.written_rank import DIGEST, Rank, expected_of, wire_bytes
from fakes import publish
from fakes.memory_transport import MemoryFabric, MemoryTransport
from fakes.publish import engine_bytes, engine_layout, repacked

from slipstream.weight_sync.errors import IntegrityError, ProtocolError, StaleEpoch
from slipstream.weight_sync.integrity import hash_bytes
from slipstream.weight_sync.layout import DestLayout, Fill, Load, Param, Region
from slipstream.weight_sync.replica.landing import held_digest
from slipstream.weight_sync.replica.receiver import Receiver
from slipstream.weight_sync.replica.version_state import Phase


class Queue:
    """A device that does what it is told in order, and only once somebody waits for it."""

    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []
        self.diary: list[str] = []

    def then(self, what: str, work: Callable[[], object]) -> None:
        self.work.append(lambda: (self.diary.append(what), work()))

    def synchronize(self) -> None:
        self.diary.append("synchronize")
        todo, self.work = self.work, []
        for work in todo:
            work()


class QueuedRank(Rank):
    """A receiver whose hooks only tell the device; the link's last bytes, too, are still on their way through it."""

    def __init__(self, layout: DestLayout | None = None) -> None:
        queue = self.queue = Queue()
        super().__init__(
            layout,
            repack=lambda name, tensor: queue.then(f"repack {name}", lambda: tensor.copy_(repacked(tensor.clone()))),
            recompute=lambda: queue.then("recompute", lambda: self.params["absorbed"].copy_(self.params["norm"] * 2)),
            synchronize=queue.synchronize,
        )
        renew = self.transport.renew

        def noted() -> None:
            queue.diary.append("renew")
            renew()

        self.transport.renew = noted  # type: ignore[method-assign]

    def write(self, version: int, *, skip: tuple[str, ...] = ()) -> None:
        for name, data in wire_bytes(version).items():
            self.queue.then("land", lambda name=name, data=data: self.params[name][: len(data)].copy_(data))


def test_the_device_is_waited_for_before_anybody_writes_reads_or_serves() -> None:
    """Kernels of the step before may still read what Begin lets others write; the last bytes may still be on their way
    when they are hashed; derived parameters are hashed after they were computed."""
    rank = QueuedRank()
    receiver, queue = rank.receiver, rank.queue
    for version in (4, 5):
        queue.then("the step before", lambda: None)
        receiver.begin(version, version, DIGEST)
        assert queue.work == [] and receiver.state.phase is Phase.dirty
        rank.write(version)
        receiver.verify(version, version, DIGEST, expected_of(version))
        assert receiver.state.phase is Phase.verified
        receiver.commit(version, version)
        assert queue.work == [] and receiver.state.is_serving
        assert receiver.committed_hashes == {name: hash_bytes(tensor) for name, tensor in rank.params.items()}
    one = ["the step before", *["land"] * 5, "repack w2", "recompute"]
    assert [entry for entry in queue.diary if entry != "synchronize"] == one * 2
    assert queue.diary.count("synchronize") == 6, "once in each of begin, verify and commit"


def test_a_link_is_renewed_after_the_device_and_only_where_an_epoch_was_left_open() -> None:
    rank = QueuedRank()
    rank.receiver.begin(4, 1, DIGEST)
    rank.receiver.begin(4, 2, DIGEST)
    assert rank.queue.diary == ["synchronize", "synchronize", "renew"]
    with pytest.raises(StaleEpoch):
        rank.receiver.begin(4, 2, DIGEST)
    assert rank.queue.diary.count("renew") == 1


def test_a_rank_is_dirty_before_the_device_is_waited_for() -> None:
    rank = QueuedRank()
    rank.publish(4)

    rank.queue.then("the step before", Mock(side_effect=RuntimeError("the device is lost")))
    with pytest.raises(RuntimeError, match="the device is lost"):
        rank.receiver.begin(5, 2, DIGEST)
    assert rank.receiver.state.phase is Phase.dirty and rank.receiver.state.epoch == 2


def test_what_came_from_a_peer_is_proven_with_what_is_derived_of_it() -> None:
    """Bytes at rest arrive; derived parameters are computed here, before all is compared with what the peer says."""
    peer = QueuedRank()
    peer.publish(4)
    hashes = peer.receiver.committed_hashes
    assert set(hashes) == set(peer.params)

    def fresh(*, damaged: str = "") -> QueuedRank:
        rank = QueuedRank()
        rank.receiver.begin(4, 1, DIGEST)
        for param in rank.receiver.sent_params:
            data = peer.params[param.name]
            rank.queue.then("land", lambda data=data, name=param.name: rank.params[name].copy_(data))
        if damaged:
            rank.queue.then("damage", lambda: rank.params[damaged].view(torch.int16).view(-1)[3:4].bitwise_xor_(1))
        return rank

    rank = fresh()
    rank.receiver.verify_at_rest(4, 1, DIGEST, hashes)
    assert rank.receiver.state.phase is Phase.verified and rank.queue.diary[-1] == "recompute"
    assert torch.equal(rank.params["absorbed"], peer.params["absorbed"])
    rank.receiver.adopt(4, 1)
    assert rank.receiver.state == peer.receiver.state
    assert rank.receiver.committed_hashes == hashes
    for damaged, said, wrong in (
        ("w2", hashes, "1 of 6 parameters read .*: w2"), ("embed", hashes, "1 of 6 parameters read .*: embed"),
        ("norm", hashes, "2 of 6 parameters read .*: norm, absorbed"),
        ("", dict.fromkeys(hashes, 0), "6 of 6 parameters read .*: qk, norm, embed, w13, w2 and 1 more"),
        ("", hashes | {"absorbed": 0}, "1 of 6 parameters read .*: absorbed"),
        ("", {name: value for name, value in hashes.items() if name != "qk"}, "1 of 6 parameters read .*: qk"),
    ):  # fmt: skip
        rank = fresh(damaged=damaged)
        with pytest.raises(IntegrityError, match=f"{wrong}$"):
            rank.receiver.verify_at_rest(4, 1, DIGEST, said)
        assert rank.receiver.state.phase is Phase.dirty
    rank = fresh(damaged="w2")
    rank.receiver.verify_at_rest(4, 1, DIGEST, {})
    rank.receiver.adopt(4, 1)
    assert rank.receiver.committed_hashes == {}, "with hashes off nothing is known of them"
    with pytest.raises(ProtocolError, match="plan"):
        fresh().receiver.verify_at_rest(4, 1, "00" * 32, hashes)


def test_a_rank_that_was_filled_by_a_peer_knows_nothing_of_earlier_bytes() -> None:
    """Its next publish names bytes that did not arrive as what they are."""
    rank = QueuedRank()
    rank.publish(4)
    rank.receiver.begin(4, 2, DIGEST)
    rank.receiver.verify_at_rest(4, 2, DIGEST, {})
    rank.receiver.adopt(4, 2)
    rank.receiver.begin(5, 3, DIGEST)
    with pytest.raises(IntegrityError, match=r"norm .* hash [0-9a-f]{16}, sent [0-9a-f]{16}") as told:
        rank.receiver.verify(5, 3, DIGEST, expected_of(5))
    assert "the version before" not in str(told.value)


def test_changes_are_taken_against_what_was_held_and_once_in_an_epoch() -> None:
    params = {"w": torch.ones(32, dtype=torch.bfloat16)}
    layout = DestLayout(
        0, (Param("w", (32,), "bfloat16"),), (Load("w", Region((0,), (32,)), (0,), "w", 0, (1,)),)
    )  # fmt: skip
    transport = MemoryTransport(MemoryFabric())
    receiver = Receiver(params, layout, transport, landing_bytes=256)
    expected = publish.expected_of({"w": (64, hash_bytes(params["w"]))})
    receiver.begin(1, 1, DIGEST)
    receiver.verify(1, 1, DIGEST, expected)
    receiver.commit(1, 1)
    held = receiver.begin(2, 2, DIGEST).holds
    with pytest.raises(IntegrityError, match="were not sent"):  # said before changes are looked at
        receiver.verify(2, 2, DIGEST, replace(expected, num_bytes=bytes(8), base="other"))
    refused = [
        ({"base": "other"}, f"against other, it held {held[:12]}"), ({"base": held}, "held nothing known"),
        ({"changes": bytes(40)}, "against nothing, it held nothing known"),
    ]  # fmt: skip
    for given, said in refused:
        with pytest.raises(ProtocolError, match=said):
            receiver.verify(2, 2, DIGEST, replace(expected, **given))
    receiver.verify(2, 2, DIGEST, expected)
    receiver.commit(2, 2)
    receiver.invalidate()
    for version in (3, 4):  # memory that was released, and an epoch that did not commit
        assert receiver.begin(version, version, DIGEST).holds == ""
    params["w"].fill_(2.0)
    receiver.verify_at_rest(4, 4, DIGEST, {})
    receiver.adopt(4, 4)
    of_peer = held_digest(publish.expected_of({"w": (64, hash_bytes(params["w"]))}), (True,))
    assert receiver.begin(5, 5, DIGEST).holds == of_peer != held, "bytes that a peer wrote are hashed, and so are known"
    params["w"].fill_(1.0)
    receiver.verify(5, 5, DIGEST, expected)
    receiver.commit(5, 5)
    for _ in range(2):
        receiver.close_landing()
    assert [one.num_bytes for one in transport.registered] == [64]
    binding = receiver.begin(6, 6, DIGEST)
    assert (binding.holds, set(binding.addresses)) == ("", {"w"}), "every byte is sent from now on"


def test_fills_have_their_own_values_and_places() -> None:
    """The sender has 35 elements of eight rows of the embedding; of the five left, two are -inf and three are 1."""
    layout = replace(engine_layout(0), fills=(Fill("embed", 35, 2, float("-inf")), Fill("embed", 37, 3, 1.0)))
    rank = QueuedRank(layout)
    for version in (4, 5):
        rank.params["embed"][7] = 99.0
        rank.publish(version, version)
        assert rank.params["embed"][7].tolist() == [float("-inf")] * 2 + [1.0] * 3
        assert torch.equal(rank.params["embed"][:7], engine_bytes(version, 0)["embed"][:7])
        assert rank.receiver.committed_hashes["embed"] == hash_bytes(rank.params["embed"])


def test_only_what_is_sent_is_registered_and_bound() -> None:
    rank = QueuedRank()
    sent = ["qk", "norm", "embed", "w13", "w2"]
    assert [param.name for param in rank.receiver.sent_params] == sent
    described = rank.receiver.describe()
    assert described.binding.addresses == {name: rank.params[name].data_ptr() for name in sent}
    assert described.binding.session == rank.transport.session and described.link == "memory"
    assert sum(held.num_bytes for held in rank.transport.registered) >= sum(
        param.num_bytes for param in rank.receiver.sent_params
    )
    absorbed = rank.params["absorbed"].data_ptr()
    assert not any(held.address <= absorbed < held.stop for held in rank.transport.registered)
