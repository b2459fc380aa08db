"""A rank filled from its counterpart: what it reads, what it refuses, and that no failure lets it serve."""

import dataclasses
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.memory_transport import Fault, MemoryFabric, MemoryTransport
from fakes.publish import PlainEngine, engine_bytes, expected_of, repacked
from hypothesis import given, strategies as st

from slipstream.weight_sync.errors import (
    IntegrityError,
    LinkMismatch,
    PlanMismatch,
    ProtocolError,
    ReplicaDirty,
    StaleEpoch,
    TransferFailed,
    TransferTimeout,
)
from slipstream.weight_sync.integrity import hash_bytes
from slipstream.weight_sync.replica import recovery
from slipstream.weight_sync.replica.receiver import Receiver
from slipstream.weight_sync.replica.recovery import NUM_READS, Offer, Pulled, make_offer, parts_of, pull, slowest
from slipstream.weight_sync.replica.version_state import Phase
from slipstream.weight_sync.typed_msgpack import pack, unpack

DIGEST = "9f" * 32


class Pair:
    """A replica that holds version 3 of epoch 5, and one that just started. Two ranks each."""

    def __init__(self) -> None:
        self.fabric = MemoryFabric()
        self.links = [MemoryTransport(self.fabric) for _ in range(2)]
        """Links of the ranks that just started."""
        self.peer = PlainEngine([MemoryTransport(self.fabric) for _ in range(2)])
        self.fresh = PlainEngine(self.links)
        for rank in range(2):
            publish(self.peer, rank, version=3, epoch=5)

    @property
    def rank(self) -> Receiver:
        return self.fresh.receivers[0]

    def offer(self, rank: int = 0) -> Offer:
        return make_offer(self.peer.receivers[rank])


def publish(engine: PlainEngine, rank: int, *, version: int, epoch: int) -> None:
    """What a publish does to one rank, written by hand."""
    receiver = engine.receivers[rank]
    receiver.begin(version, epoch, DIGEST)
    sums: dict[str, tuple[int, int]] = {}
    for name, data in engine_bytes(version, rank).items():
        if name == "absorbed":
            continue
        wire = repacked(data) if name == "w2" else data[:7] if name == "embed" else data
        engine.params[rank][name][: len(wire)] = wire
        sums[name] = (2 * wire.numel(), hash_bytes(wire.contiguous()))
    receiver.verify(version, epoch, DIGEST, expected_of(sums))
    receiver.commit(version, epoch)


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_a_fresh_rank_holds_and_serves_the_peers_bytes(pair: Pair) -> None:
    assert pair.fresh.wrong_params(3) != []
    for rank, receiver in enumerate(pair.fresh.receivers):
        offer = unpack(Offer, pack(pair.offer(rank)))
        pulled = pull(receiver, offer, timeout_s=5)
        assert pulled.num_bytes == sum(param.num_bytes for param in receiver.sent_params)
        assert not receiver.state.is_serving, "the caller has not looked at the peer again"
        receiver.adopt(3, 5)
        assert receiver.state == pair.peer.receivers[rank].state
    assert pair.fresh.wrong_params(3) == [], "fills, repacked and derived parameters included"


def test_threads_that_read_have_the_ranks_gpu_as_their_own(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, read = set(), []
    link, receiver = pair.links[0], pair.rank
    monkeypatch.setattr(receiver, "enter_thread", lambda: entered.add(threading.get_ident()))
    reading = link.read
    monkeypatch.setattr(link, "read", lambda *a, **k: (read.append(threading.get_ident()), reading(*a, **k)))
    pull(receiver, pair.offer(), timeout_s=5)
    assert len(read) == NUM_READS
    assert set(read) <= entered


def test_a_recovered_rank_takes_the_next_publish_and_may_be_a_peer_itself(pair: Pair) -> None:
    pull(pair.rank, pair.offer(), timeout_s=5)
    pair.rank.adopt(3, 5)
    assert make_offer(pair.rank).hashes == pair.offer().hashes
    publish(pair.fresh, 0, version=4, epoch=6)
    assert [name for name in pair.fresh.wrong_params(4) if name.startswith("0:")] == []
    with pytest.raises(StaleEpoch):
        pair.rank.begin(5, 6, DIGEST)


def test_a_rank_without_a_committed_version_offers_nothing(pair: Pair) -> None:
    with pytest.raises(ReplicaDirty, match="dirty"):
        make_offer(pair.rank)
    pair.peer.receivers[0].begin(4, 6, DIGEST)
    with pytest.raises(ReplicaDirty, match="version 4, epoch 6"):
        pair.offer()


def test_an_offer_changes_with_every_publish_even_of_the_same_version(pair: Pair) -> None:
    before = pair.offer()
    assert pair.offer() == before
    publish(pair.peer, 0, version=3, epoch=6)
    assert pair.offer() != before


@pytest.mark.parametrize("fault", [Fault(corrupt=True), Fault(drop=True)])
def test_wrong_bytes_are_named_and_never_serve(pair: Pair, fault: Fault) -> None:
    offer = pair.offer()
    pair.fabric.inject(offer.binding.session, fault)
    with pytest.raises(IntegrityError, match="read from a peer"):
        pull(pair.rank, offer, timeout_s=5)
    assert not pair.rank.state.is_serving
    with pytest.raises(Exception, match="needs phase verified"):
        pair.rank.adopt(3, 5)


def test_bytes_that_a_publish_changes_meanwhile_are_found_out(pair: Pair) -> None:
    offer = pair.offer()
    publish(pair.peer, 0, version=4, epoch=6)
    with pytest.raises(IntegrityError):
        pull(pair.rank, offer, timeout_s=5)


def test_a_failed_read_leaves_a_fresh_connection_to_the_next_publish(pair: Pair) -> None:
    offer = pair.offer()
    before = pair.rank.describe().binding.session
    pair.fabric.inject(offer.binding.session, Fault(refuse=True))
    with pytest.raises(TransferFailed):
        pull(pair.rank, offer, timeout_s=5)
    publish(pair.fresh, 0, version=4, epoch=6)
    assert pair.rank.describe().binding.session != before
    assert pair.rank.state.is_serving


class HalfBrokenLink(MemoryTransport):
    """Of the transfers of a read, one fails when the others are over."""

    fails = 0
    """Which one, in the order of memory."""

    def read(self, session: str, dst_ptrs: Sequence[int], src_ptrs: Sequence[int], *args: Any, **kwargs: Any) -> None:
        assert kwargs["timeout_s"] == 5
        self.reads.append(list(src_ptrs))
        if src_ptrs[0] == self.order[self.fails]:
            while len(self.reads) < NUM_READS:
                time.sleep(0.001)
            raise TransferFailed("the link broke")
        super().read(session, dst_ptrs, src_ptrs, *args, **kwargs)

    def expect(self, receiver: Receiver, offer: Offer) -> None:
        sizes = [param.num_bytes for param in receiver.sent_params]
        names = [param.name for param in receiver.sent_params]
        self.order = [offer.binding.addresses[names[part.start]] for part in parts_of(sizes, NUM_READS)]
        self.reads: list[list[int]] = []


@pytest.mark.parametrize("fails", range(NUM_READS))
@pytest.mark.parametrize("has_hashes", [True, False])
def test_a_read_of_which_any_part_failed_is_an_error_and_its_link_is_closed(fails: int, has_hashes: bool) -> None:
    """With hashes off nothing else would notice what did not arrive."""
    pair = Pair()
    link = HalfBrokenLink(pair.fabric)
    fresh, offer = PlainEngine([link]), pair.offer()
    receiver = fresh.receivers[0]
    offer = offer if has_hashes else dataclasses.replace(offer, hashes={})
    link.fails = fails
    link.expect(receiver, offer)
    with pytest.raises(TransferFailed, match="the link broke"):
        pull(receiver, offer, timeout_s=5)
    assert len(link.reads) == NUM_READS
    assert link.closed == [offer.binding.session], "nothing of it may land any more"
    assert receiver.state.phase is Phase.dirty
    with pytest.raises(ProtocolError, match="needs phase verified"):
        receiver.adopt(3, 5)


def test_a_pull_says_how_long_reading_and_proving_took(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(recovery, "time", SimpleNamespace(monotonic=lambda: clock.now))
    read, prove = pair.links[0].read, pair.rank.verify_at_rest
    takes = iter([2.0, 0.0])

    def slow_read(*args: Any, **kwargs: Any) -> None:
        clock.now += next(takes)
        read(*args, **kwargs)

    def slow_proof(*args: Any) -> None:
        clock.now += 4.0
        prove(*args)

    pair.links[0].read = slow_read  # type: ignore[method-assign]
    monkeypatch.setattr(pair.rank, "verify_at_rest", slow_proof)
    pulled = pull(pair.rank, pair.offer(), timeout_s=5)
    assert (pulled.read_s, pulled.verify_s) == (2.0, 4.0)


def test_what_a_failed_read_had_not_copied_never_lands(pair: Pair) -> None:
    offer = pair.offer()
    pair.fabric.inject(offer.binding.session, *[Fault(stall=True)] * NUM_READS)
    with pytest.raises(TransferTimeout):
        pull(pair.rank, offer, timeout_s=0)
    assert pair.fabric.land_late_writes() == 0
    assert not any(tensor.any() for tensor in pair.fresh.params[0].values())


def test_a_read_that_never_began_leaves_the_rank_as_it_was(pair: Pair) -> None:
    """A stale offer names an epoch that this rank has seen."""
    publish(pair.fresh, 0, version=4, epoch=6)
    with pytest.raises(StaleEpoch):
        pull(pair.rank, pair.offer(), timeout_s=5)
    assert pair.rank.state.is_serving and pair.links[0].closed == []


def test_pulls_add_up_one_after_the_other_and_ranks_side_by_side() -> None:
    first, second = Pulled(10, 1.0, 0.25), Pulled(30, 0.5, 2.0)
    assert first.then(second) == Pulled(40, 1.5, 2.25)
    assert slowest([first, second]) == Pulled(40, 1.0, 2.0)


def test_an_offer_says_what_is_held_and_keeps_its_own_copy_of_the_hashes(pair: Pair) -> None:
    offer, peer = pair.offer(), pair.peer.receivers[0]
    assert (offer.version, offer.epoch, offer.plan, offer.link) == (3, 5, DIGEST, "memory")
    assert offer.binding == peer.describe().binding
    assert offer.hashes == {name: hash_bytes(tensor) for name, tensor in pair.peer.params[0].items()}
    peer.committed_hashes.clear()
    assert offer.hashes


def test_another_layout_or_link_is_refused_before_a_byte_moves(pair: Pair) -> None:
    before = {name: tensor.clone() for name, tensor in pair.fresh.params[0].items()}
    with pytest.raises(PlanMismatch, match="not interchangeable"):
        pull(pair.rank, pair.offer(rank=1), timeout_s=5)
    with pytest.raises(LinkMismatch, match="rdma"):
        pull(pair.rank, dataclasses.replace(pair.offer(), link="rdma"), timeout_s=5)
    assert all(torch.equal(before[name], tensor) for name, tensor in pair.fresh.params[0].items())
    assert pair.rank.state.epoch == 0


@given(sizes=st.lists(st.integers(0, 1 << 32), max_size=40), count=st.integers(1, 4))
def test_parts_are_all_pieces_in_order_and_about_as_large(sizes: list[int], count: int) -> None:
    parts = parts_of(sizes, count)
    assert [index for part in parts for index in range(len(sizes))[part]] == list(range(len(sizes)))
    assert all(part.start < part.stop for part in parts)
    assert len(parts) <= count
    for part in parts:
        assert sum(sizes[part]) <= sum(sizes) / count + max(sizes) + 1
    assert parts_of([10, 10, 20], 2) == [slice(0, 2), slice(2, 3)] and parts_of([0, 1, 1], 2)[0] == slice(0, 2)
    assert parts_of([1, 1, 0], 2) == [slice(0, 1), slice(1, 3)]
