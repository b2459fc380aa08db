"""An engine rank's proof: what it accepts, what it names, and when it serves."""

import re
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from cases.written_rank import DIGEST, Rank, expected_of, sums_of, wire_bytes
from fakes import publish
from fakes.memory_transport import MemoryFabric, MemoryTransport
from fakes.publish import engine_bytes, engine_layout, engine_params

from slipstream.weight_sync.errors import IntegrityError, PlanMismatch, ProtocolError, StaleEpoch
from slipstream.weight_sync.integrity import HASH_MASK, hash_bytes
from slipstream.weight_sync.layout import DestLayout, Fill, Param, Region
from slipstream.weight_sync.replica.messages import Expected
from slipstream.weight_sync.replica.receiver import Receiver
from slipstream.weight_sync.replica.version_state import Phase


@pytest.fixture
def rank() -> Rank:
    return Rank()


def test_proven_versions_are_served(rank: Rank) -> None:
    assert not rank.receiver.state.is_serving
    for version in (4, 5, 6):
        rank.publish(version, version)
        assert rank.receiver.state.is_serving
        assert rank.receiver.state.version == version
        for name, wanted in engine_bytes(version, 0).items():
            assert torch.equal(rank.params[name], wanted), name
    assert rank.receiver.begin(7, 7, DIGEST).holds == "", "changes have nowhere to land"


def test_hashes_at_rest_are_of_each_version_wherever_its_derived_bytes_lie(rank: Rank) -> None:
    """What was prepared for the commit before must hold on to neither values nor addresses."""
    for version in range(4):
        if version in (2, 3):
            rank.params["absorbed"].data = torch.zeros_like(rank.params["absorbed"])
        rank.publish(version, version + 1)
        assert rank.receiver.committed_hashes == {name: hash_bytes(t) for name, t in rank.params.items()}
        assert len(rank.receiver._whole) == 1, "what was prepared for other addresses is gone"


DAMAGES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "a bit": (lambda params: params["w13"].view(torch.int16).view(-1)[7:8].bitwise_xor_(1), "w13 (from layers"),
    "a shift": (
        lambda params: params["qk"].copy_(params["qk"].reshape(-1).roll(1).view(4, 5)),
        "qk (from layers.0.q.weight and 1 more)",
    ),
    "experts": (lambda params: params["w13"].copy_(params["w13"].flip(0).clone()), "w13 (from layers"),
    "never written": (lambda params: params["qk"].zero_(), "qk (from layers.0.q.weight and 1 more) is all zeros"),
}


@pytest.mark.parametrize(("damage", "said"), DAMAGES.values(), ids=DAMAGES)
def test_wrong_bytes_are_named_and_not_served(rank: Rank, damage: Callable[[dict], object], said: str) -> None:
    rank.begin(4)
    damage(rank.params)
    with pytest.raises(IntegrityError, match=rf"1 of 5 parameters .* {re.escape(said)}"):
        rank.verify(4)
    with pytest.raises(ProtocolError, match="needs phase verified"):
        rank.receiver.commit(4, 1)
    assert not rank.receiver.state.is_serving


def test_bytes_that_did_not_change_although_the_source_did_are_named(rank: Rank) -> None:
    rank.publish(4, 1)
    rank.begin(5, 2, skip=("norm",))
    with pytest.raises(IntegrityError, match=r"norm .*still holds the bytes of the version before"):
        rank.verify(5, epoch=2)


def test_a_parameter_of_zeros_is_proven_like_any_other(rank: Rank) -> None:
    """Its hash is 0. A B of a fresh adapter is one, and so are many biases."""
    zeros = publish.expected_of(sums_of(4) | {"norm": (10, 0)})
    rank.begin(4)
    with pytest.raises(IntegrityError, match=r"1 of 5 parameters .* norm "):
        rank.verify(4, zeros)
    rank.params["norm"].zero_()
    rank.verify(4, zeros)


@pytest.mark.parametrize("has_hashes", [True, False])
@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"norm": 8, "qk": 0}, r"2 parameters were not .*qk \(sent 0 of 40 bytes\), norm \(sent 8 of 10 bytes\)$"),
        (dict.fromkeys(("qk", "norm", "embed", "w13", "w2"), 0), r"5 parameters .*w2 \(sent 0 of 80 bytes\)$"),
        ({"w2": 82}, r"1 parameters were not sent: .*w2 \(sent 82 of 80 bytes\)$"),
    ],
)
def test_counts_are_proven_before_hashes_and_each_is_named(
    rank: Rank, counts: dict[str, int], message: str, has_hashes: bool
) -> None:
    rank.begin(4, skip=("w13",))
    sums = {name: (counts.get(name, size), value) for name, (size, value) in sums_of(4).items()}
    sizes = {name: size for name, (size, _) in sums_of(4).items()}
    with pytest.raises(IntegrityError, match=message):
        rank.verify(4, publish.expected_of(sums, sizes=sizes, has_hashes=has_hashes))
    assert rank.receiver.state.phase is Phase.dirty


@pytest.mark.parametrize(
    "change",
    [
        lambda sums: sums | {"absorbed": (10, 0)},
        lambda sums: {name: sums[name] for name in sums if name != "qk"},
        lambda sums: dict(sorted(sums.items())),
        lambda sums: sums | {"norm": (8, sums["norm"][1])},
    ],
    ids=["one more", "one less", "another order", "another size"],
)
def test_what_is_said_of_other_parameters_is_refused(rank: Rank, change: Callable[[dict], dict]) -> None:
    rank.begin(4)
    with pytest.raises(PlanMismatch, match="the publisher planned for parameters"):
        rank.verify(4, publish.expected_of(change(sums_of(4))))
    assert not rank.receiver.state.is_serving


@pytest.mark.parametrize(
    "change",
    [
        lambda said: replace(said, num_bytes=bytes(32)),
        lambda said: replace(said, hashes=said.hashes[8:]),
        lambda said: replace(said, hashes=said.hashes + bytes(8)),
    ],
)
def test_missing_entries_are_refused(rank: Rank, change: Callable[[Expected], Expected]) -> None:
    rank.begin(4)
    with pytest.raises(ProtocolError, match="for 5 parameters of 8 each"):
        rank.verify(4, change(expected_of(4)))


def test_without_hashes_counts_are_still_proven(rank: Rank) -> None:
    rank.publish(3, 1)
    rank.begin(4, 2)
    rank.verify(4, publish.expected_of(sums_of(4), has_hashes=False), epoch=2)
    rank.receiver.commit(4, 2)
    assert rank.receiver.state.is_serving
    assert rank.receiver.committed_hashes == {}, "those of the version before say nothing"


def test_another_plan_is_refused(rank: Rank) -> None:
    rank.begin(4)
    with pytest.raises(ProtocolError, match="plan"):
        rank.receiver.verify(4, 1, "00" * 32, expected_of(4))


def test_what_came_from_a_peer_in_an_epoch_before_is_not_adopted(rank: Rank) -> None:
    hashes = {name: hash_bytes(tensor) for name, tensor in rank.params.items()}
    for epoch, known in ((1, hashes), (2, {})):
        rank.receiver.begin(4, epoch, DIGEST)
        rank.receiver.verify_at_rest(4, epoch, DIGEST, known)
    with pytest.raises(StaleEpoch, match="epoch 1"):
        rank.receiver.adopt(4, 1)
    assert not rank.receiver.state.is_serving
    rank.receiver.adopt(4, 2)
    assert rank.receiver.state.is_serving and rank.receiver.committed_hashes == {}


def test_parameters_that_moved_up_or_down_are_named(rank: Rank) -> None:
    one, other = (rank.params[name].view(-1)[:1] for name in ("norm", "qk"))
    rank.params["norm"].set_(other)
    rank.params["qk"].set_(one)
    with pytest.raises(ProtocolError, match=r"^2 parameters of rank 0 moved .*(norm.*qk|qk.*norm)"):
        rank.receiver.begin(4, 1, DIGEST)
    assert not rank.receiver.state.is_serving


def test_after_a_failed_epoch_the_old_session_is_gone(rank: Rank) -> None:
    first = rank.receiver.begin(4, 1, DIGEST).session
    second = rank.receiver.begin(4, 2, DIGEST).session
    assert first != second
    rank.write(4)
    rank.receiver.verify(4, 2, DIGEST, expected_of(4))
    rank.receiver.commit(4, 2)
    assert rank.receiver.begin(5, 3, DIGEST).session == second


def test_a_commit_hook_that_raises_leaves_the_rank_dirty() -> None:
    rank = Rank(recompute=Mock(side_effect=RuntimeError("recompute broke")))
    with pytest.raises(RuntimeError, match="recompute broke"):
        rank.publish(4)
    assert rank.receiver.state.phase is Phase.dirty
    with pytest.raises(ProtocolError, match="needs phase verified"):
        rank.receiver.commit(4, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.pop("qk"), "qk, which the engine does not have"),
        (lambda p: p.update(qk=p["qk"].float()), "float32"),
        (lambda p: p.update(qk=p["qk"].view(5, 4)), r"qk is bfloat16\(5, 4\), its layout says bfloat16\(4, 5\)"),
        (lambda p: p.update(qk=torch.zeros(5, 4, dtype=torch.bfloat16).t()), "cannot be written one-sided"),
        (lambda p: None, r"w2 .*no repack hook"),
    ],
)
def test_memory_that_contradicts_the_layout_is_refused(change: Callable[[dict], object], message: str) -> None:
    params, hook = engine_params(0), None if "hook" in message else lambda _n, _t: None
    change(params)
    with pytest.raises(ProtocolError, match=message):
        Receiver(params, engine_layout(0), MemoryTransport(MemoryFabric()), repack=hook)
    empty = DestLayout(0, (Param("empty", (0, 5), "bfloat16"),), ())
    with pytest.raises(ProtocolError, match=r"empty cannot be written one-sided: shape \(0, 5\)"):
        Receiver({"empty": torch.zeros(0, 5, dtype=torch.bfloat16)}, empty, MemoryTransport(MemoryFabric()))


def test_what_is_derived_is_computed_of_fills_and_of_what_was_repacked() -> None:
    """A commit sets fills, then repacks, then recomputes: whatever is derived may be derived of any of them."""
    layout = replace(engine_layout(0), fills=(Fill("embed", 35, 5, 2.0),))
    rank = Rank(layout, recompute=lambda: held["absorbed"].copy_(held["embed"][7] * held["w2"].view(-1)[:5]))
    held = rank.params
    for version in (4, 5):
        held["embed"][7] = 99.0
        rank.publish(version, version)
        assert torch.equal(held["absorbed"], 2.0 * engine_bytes(version, 0)["w2"].view(-1)[:5])


def test_a_fill_between_sent_bytes_is_hashed_around() -> None:
    """A fill in the middle: what is sent lies on both sides of it."""
    layout = engine_layout(0)
    loads = [load for load in layout.loads if load.param != "embed"]
    (embed,) = (load for load in layout.loads if load.param == "embed")
    rows = [replace(embed, region=Region((row, 0), (1, 5)), offset=(row + (row > 2)) * 5) for row in range(7)]
    layout = replace(layout, loads=(*loads, *rows), fills=(Fill("embed", 15, 5, 2.0),))
    order = {param.name: number for number, param in enumerate(layout.params)}
    layout = replace(layout, loads=tuple(sorted(layout.loads, key=lambda load: order[load.param])))
    rank = Rank(layout)
    whole = torch.arange(40, dtype=torch.bfloat16).view(8, 5)
    whole[3] = 2.0
    rank.begin(4)
    rank.params["embed"].copy_(whole)
    rank.params["embed"][3] = 77.0
    raw = whole.view(torch.uint8).view(-1)
    pieces = hash_bytes(raw[:30]) + hash_bytes(raw[40:], offset_bytes=40)
    rank.verify(4, publish.expected_of(sums_of(4) | {"embed": (70, pieces & HASH_MASK)}))
    rank.receiver.commit(4, 1)
    assert torch.equal(rank.params["embed"], whole)
    assert rank.receiver.committed_hashes["embed"] == hash_bytes(whole)


def test_a_repacked_parameter_with_fills_is_refused() -> None:
    layout = engine_layout(0)
    loads = [load for load in layout.loads if load.param != "w2"]
    (first, _) = (load for load in layout.loads if load.param == "w2")
    with pytest.raises(ProtocolError, match="w2 is repacked after loading and has fill bytes"):
        Rank(replace(layout, loads=(*loads, first), fills=(*layout.fills, Fill("w2", 20, 20))))


def test_an_abort_leaves_a_rank_dirty_and_one_that_committed_as_it_is(rank: Rank) -> None:
    rank.begin(4)
    rank.verify(4)
    rank.receiver.abort(9, "another epoch")
    assert rank.receiver.state.phase is Phase.verified
    rank.receiver.abort(1, "the publisher gave up")
    assert rank.receiver.state.phase is Phase.dirty
    rank.publish(4, 2)
    rank.receiver.abort(2, "too late")
    assert rank.receiver.state.is_serving
    rank.receiver.invalidate()
    assert rank.receiver.state.phase is Phase.dirty


def test_a_derived_parameter_may_lie_in_any_way(rank: Rank) -> None:
    """Nobody writes to it; its hash is that of its elements in order."""
    layout = engine_layout(0)
    params = (*layout.params[:-1], replace(layout.params[-1], shape=(3, 2)))
    held = engine_params(0) | {"absorbed": torch.arange(6, dtype=torch.bfloat16).view(2, 3).t()}
    transport = MemoryTransport(MemoryFabric())
    receiver = Receiver(held, replace(layout, params=params), transport, repack=lambda *_: None)
    receiver.begin(4, 1, DIGEST)
    for name, data in wire_bytes(4).items():
        held[name][: len(data)] = data
    receiver.verify(4, 1, DIGEST, expected_of(4))
    receiver.commit(4, 1)
    assert receiver.committed_hashes["absorbed"] == hash_bytes(held["absorbed"].contiguous())
    receiver.begin(4, 2, DIGEST)
    receiver.verify_at_rest(4, 2, DIGEST, dict(receiver.committed_hashes))
    del held["absorbed"]
    with pytest.raises(ProtocolError, match="absorbed, which the engine does not have"):
        Receiver(held, replace(layout, params=params), transport, repack=lambda *_: None)
