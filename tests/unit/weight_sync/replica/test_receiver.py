"""An engine rank's proof: what it accepts, what it names, and when it serves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from fakes import publish
from fakes.memory_transport import MemoryFabric, MemoryTransport
from fakes.publish import PlainEngine, engine_bytes, engine_layout, engine_params, repacked

from weight_sync.errors import IntegrityError, PlanMismatch, ProtocolError, StaleEpoch
from weight_sync.integrity import hash_bytes
from weight_sync.replica.messages import Expected
from weight_sync.replica.receiver import Receiver

DIGEST = "9f" * 32


def wire_bytes(version: int) -> dict[str, torch.Tensor]:
    """What the trainer sends to rank 0: engine bytes before the repacking, without derived parameters and fills."""
    held = engine_bytes(version, 0)
    held["w2"] = repacked(held["w2"])
    held["embed"] = held["embed"][:7]
    del held["absorbed"]
    return held


def sums_of(version: int) -> dict[str, tuple[int, int]]:
    return {name: (2 * t.numel(), hash_bytes(t)) for name, t in wire_bytes(version).items()}


def expected_of(version: int) -> Expected:
    return publish.expected_of(sums_of(version))


class Rank:
    """One receiver and its memory."""

    def __init__(self) -> None:
        self.transport = MemoryTransport(MemoryFabric())
        engine = PlainEngine([self.transport])
        self.receiver, self.params = engine.receivers[0], engine.params[0]

    def write(self, version: int, *, skip: tuple[str, ...] = ()) -> None:
        for name, data in wire_bytes(version).items():
            if name not in skip:
                self.params[name][: len(data)] = data

    def publish(self, version: int, epoch: int) -> None:
        self.receiver.begin(version, epoch, DIGEST)
        self.write(version)
        self.receiver.verify(version, epoch, DIGEST, expected_of(version))
        self.receiver.commit(version, epoch)


@pytest.fixture
def rank() -> Rank:
    return Rank()


def test_a_proven_version_is_served(rank: Rank) -> None:
    assert not rank.receiver.state.is_serving
    rank.publish(4, 1)
    assert rank.receiver.state.is_serving
    assert rank.receiver.state.version == 4
    for name, wanted in engine_bytes(4, 0).items():
        assert torch.equal(rank.params[name], wanted), name


def test_versions_follow_each_other(rank: Rank) -> None:
    for version in range(3):
        rank.publish(version, version + 1)
    assert torch.equal(rank.params["w2"], engine_bytes(2, 0)["w2"])


def test_hashes_at_rest_are_of_the_bytes_at_rest(rank: Rank) -> None:
    rank.publish(4, 1)
    assert rank.receiver.committed_hashes == {name: hash_bytes(t) for name, t in rank.params.items()}


def test_hashes_at_rest_are_of_each_version_wherever_its_derived_bytes_lie(rank: Rank) -> None:
    """What was prepared for the commit before must hold on to neither values nor addresses."""
    for version in range(4):
        if version in (2, 3):
            rank.params["absorbed"].data = torch.zeros_like(rank.params["absorbed"])
        rank.publish(version, version + 1)
        assert rank.receiver.committed_hashes == {name: hash_bytes(t) for name, t in rank.params.items()}


def flip_a_bit(rank: Rank) -> None:
    rank.params["w13"].view(torch.int16).view(-1)[7] ^= 1


def shift_by_an_element(rank: Rank) -> None:
    rank.params["qk"].copy_(rank.params["qk"].reshape(-1).roll(1).view(4, 5))


def swap_experts(rank: Rank) -> None:
    rank.params["w13"].copy_(rank.params["w13"].flip(0).clone())


@pytest.mark.parametrize(("damage", "param"), [(flip_a_bit, "w13"), (shift_by_an_element, "qk"), (swap_experts, "w13")])
def test_wrong_bytes_are_named_and_not_served(rank: Rank, damage: Callable[[Rank], None], param: str) -> None:
    rank.receiver.begin(4, 1, DIGEST)
    rank.write(4)
    damage(rank)
    with pytest.raises(IntegrityError, match=rf"1 of 5 parameters .* {param} \(from layers"):
        rank.receiver.verify(4, 1, DIGEST, expected_of(4))
    with pytest.raises(ProtocolError, match="needs phase verified"):
        rank.receiver.commit(4, 1)
    assert not rank.receiver.state.is_serving


def test_bytes_that_did_not_change_although_the_source_did_are_named(rank: Rank) -> None:
    rank.publish(4, 1)
    rank.receiver.begin(5, 2, DIGEST)
    rank.write(5, skip=("norm",))
    with pytest.raises(IntegrityError, match=r"norm .*still holds the bytes of the version before"):
        rank.receiver.verify(5, 2, DIGEST, expected_of(5))


def test_bytes_never_written_are_named(rank: Rank) -> None:
    rank.receiver.begin(4, 1, DIGEST)
    rank.write(4, skip=("qk",))
    with pytest.raises(IntegrityError, match=r"qk .*is all zeros"):
        rank.receiver.verify(4, 1, DIGEST, expected_of(4))


def test_a_short_count_is_named(rank: Rank) -> None:
    rank.receiver.begin(4, 1, DIGEST)
    rank.write(4)
    sums = sums_of(4)
    sums["norm"] = (8, sums["norm"][1])
    sums["qk"] = (0, 0)
    with pytest.raises(IntegrityError, match=r"qk \(sent 0 of 40 bytes\), norm \(sent 8 of 10 bytes\)"):
        rank.receiver.verify(
            4, 1, DIGEST, publish.expected_of(sums, sizes={name: size for name, (size, _) in sums_of(4).items()})
        )


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
    rank.receiver.begin(4, 1, DIGEST)
    rank.write(4)
    with pytest.raises(PlanMismatch, match="the publisher planned for parameters"):
        rank.receiver.verify(4, 1, DIGEST, publish.expected_of(change(sums_of(4))))
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
    rank.receiver.begin(4, 1, DIGEST)
    rank.write(4)
    with pytest.raises(ProtocolError, match="for 5 parameters of 8 each"):
        rank.receiver.verify(4, 1, DIGEST, change(expected_of(4)))


def test_without_hashes_counts_are_still_proven(rank: Rank) -> None:
    rank.receiver.begin(4, 1, DIGEST)
    rank.write(4)
    rank.receiver.verify(4, 1, DIGEST, publish.expected_of(sums_of(4), has_hashes=False))
    rank.receiver.commit(4, 1)
    assert rank.receiver.state.is_serving


def test_another_plan_is_refused(rank: Rank) -> None:
    rank.receiver.begin(4, 1, DIGEST)
    rank.write(4)
    with pytest.raises(ProtocolError, match="plan"):
        rank.receiver.verify(4, 1, "00" * 32, expected_of(4))


def test_a_stale_epoch_is_refused_and_harmless(rank: Rank) -> None:
    rank.publish(4, 3)
    with pytest.raises(StaleEpoch):
        rank.receiver.begin(5, 3, DIGEST)
    assert rank.receiver.state.is_serving


def test_a_moved_parameter_is_named(rank: Rank) -> None:
    rank.params["qk"].set_(torch.zeros(4, 5, dtype=torch.bfloat16))
    with pytest.raises(ProtocolError, match=r"moved .*qk"):
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
    def broken() -> None:
        raise RuntimeError("recompute broke")

    params = engine_params(0)
    receiver = Receiver(
        params,
        engine_layout(0),
        MemoryTransport(MemoryFabric()),
        repack=lambda _n, t: t.copy_(repacked(t.clone())),
        recompute=broken,
    )
    receiver.begin(4, 1, DIGEST)
    for name, data in wire_bytes(4).items():
        params[name][: len(data)] = data
    receiver.verify(4, 1, DIGEST, expected_of(4))
    with pytest.raises(RuntimeError, match="recompute broke"):
        receiver.commit(4, 1)
    assert not receiver.state.is_serving


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.pop("qk"), "qk, which the engine does not have"),
        (lambda p: p.update(qk=p["qk"].float()), "float32"),
        (lambda p: p.update(qk=torch.zeros(5, 4, dtype=torch.bfloat16).t()), "cannot be written one-sided"),
    ],
)
def test_memory_that_contradicts_the_layout_is_refused(change: Callable[[dict], object], message: str) -> None:
    params = engine_params(0)
    change(params)
    with pytest.raises(ProtocolError, match=message):
        Receiver(params, engine_layout(0), MemoryTransport(MemoryFabric()), repack=lambda _n, _t: None)


def test_a_repacked_parameter_needs_its_hook() -> None:
    with pytest.raises(ProtocolError, match=r"w2 .*no repack hook"):
        Receiver(engine_params(0), engine_layout(0), MemoryTransport(MemoryFabric()))
