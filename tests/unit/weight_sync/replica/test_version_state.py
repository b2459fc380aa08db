"""The version state machine under arbitrary messages, and what the wire accepts."""

import contextlib
from collections.abc import Callable
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from fakes.publish import engine_layout
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from slipstream.weight_sync.calls.verbs import verb_of, verbs_of
from slipstream.weight_sync.errors import ProtocolError, StaleEpoch
from slipstream.weight_sync.layout import Binding
from slipstream.weight_sync.replica.messages import (
    Begun,
    Bound,
    Committed,
    Described,
    EngineRank,
    Expected,
    PublishId,
    ReplicaVerbs,
)
from slipstream.weight_sync.replica.version_state import Phase, VersionState
from slipstream.weight_sync.typed_msgpack import Sent, pack, unpack

small = st.integers(0, 3)


class AnyMessageOrder(RuleBasedStateMachine):
    """Whatever the order of messages, a replica serves only what was begun, verified and committed in one epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.state = VersionState()
        self.begun: tuple[int, int, str] | None = None
        self.is_verified = False
        self.is_committed = False

    @rule(version=st.integers(-1, 3), epoch=small, digest=st.sampled_from("ab"))
    def begin(self, version: int, epoch: int, digest: str) -> None:
        last_epoch = self.state.epoch
        with contextlib.suppress(ProtocolError):
            self.state = self.state.begin(version, epoch, digest)
            assert epoch > last_epoch
            assert version >= 0
            self.begun, self.is_verified, self.is_committed = (version, epoch, digest), False, False

    @rule(version=small, epoch=small, digest=st.sampled_from("ab"))
    def verify(self, version: int, epoch: int, digest: str) -> None:
        with contextlib.suppress(ProtocolError):
            self.state = self.state.verified(version, epoch, digest)
            assert self.begun == (version, epoch, digest)
            assert not self.is_committed
            self.is_verified = True

    @rule(version=small, epoch=small)
    def commit(self, version: int, epoch: int) -> None:
        with contextlib.suppress(ProtocolError):
            self.state = self.state.committed(version, epoch)
            assert self.is_verified
            assert self.begun is not None
            assert self.begun[:2] == (version, epoch)
            self.is_committed = True

    @rule(epoch=small)
    def fail(self, epoch: int) -> None:
        self.state = self.state.failed(epoch)
        if epoch == self.state.epoch and not self.is_committed:
            self.is_verified = False

    @rule()
    def invalidate(self) -> None:
        self.state = self.state.invalidate()
        self.is_verified = self.is_committed = False

    @invariant()
    def serves_only_what_was_committed(self) -> None:
        assert self.state.is_serving == self.is_committed
        assert (self.state.phase is Phase.clean) == self.is_committed


AnyMessageOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=20, deadline=None)
TestAnyMessageOrder = AnyMessageOrder.TestCase


def test_an_epoch_is_used_once() -> None:
    state = VersionState().begin(7, 5, "d")
    for epoch in (4, 5):
        with pytest.raises(StaleEpoch, match="epoch 5 has begun"):
            state.begin(8, epoch, "d")


@pytest.mark.parametrize("leaves", [lambda s: s, VersionState.invalidate, lambda s: s.begin(8, 2, "left"),
                                    lambda s: s.begin(8, 2, "left").verified(8, 2, "left"),
                                    lambda s: s.begin(8, 2, "left").failed(2)])  # fmt: skip
@pytest.mark.parametrize("version", [0, 7, 8, 9])
def test_whatever_was_before_a_publish_of_any_version_and_plan_can_be_served(
    leaves: Callable[[VersionState], VersionState], version: int
) -> None:
    before = leaves(VersionState().begin(7, 1, "first").verified(7, 1, "first").committed(7, 1))
    after = before.begin(version, 3, "other").verified(version, 3, "other").committed(version, 3)
    assert after == VersionState(Phase.clean, version, 3, "other")


PUBLISH = PublishId("5e", version=3, epoch=4, digest="9f")
RANK = EngineRank(Sent(engine_layout(1)), Binding("127.0.0.1:15000", {"qk": 1 << 46}), "tcp")
GIVEN: dict[Callable[..., Any], tuple[object, ...]] = {
    ReplicaVerbs.describe: ("5e",),
    ReplicaVerbs.begin: (PUBLISH,),
    ReplicaVerbs.commit: (PUBLISH, [Expected("9f" * 32, bytes(16), b"\xff" * 16), Expected("", b"", b"")]),
    ReplicaVerbs.abort: (PUBLISH, "because"),
}
RETURNED: dict[Callable[..., Any], object] = {
    ReplicaVerbs.describe: Described((RANK,), own_epoch=3),
    ReplicaVerbs.begin: Begun((Bound("s"), Bound("t", 1, "9f" * 32)), idle_s=0.02, mark_s=0.001),
    ReplicaVerbs.commit: Committed(verify_s=0.5, commit_s=1, pause_s=2.25),
    ReplicaVerbs.abort: None,
}


def test_every_verb_survives_the_wire() -> None:
    assert {method.__name__ for method in GIVEN} == set(verbs_of(ReplicaVerbs)) and RETURNED.keys() == GIVEN.keys()
    for method, given in GIVEN.items():
        verb = verb_of(method)
        assert verb.arguments.decode(verb.given(*given)) == given
        assert verb.result.decode(pack(RETURNED[method])) == RETURNED[method]


@pytest.mark.parametrize(
    "given",
    [
        None,
        [],
        "begin",
        [["5e", "not a number", 4, "9f"]],
        [["5e", True, 4, "9f"]],
        [["5e", 3, 4]],
        [{"publisher": "5e", "version": 3, "epoch": 4, "digest": 7}],
        [{"publisher": "5e", "version": 3, "epoch": 4, "digest": "9f"}, "one too many"],
    ],
)
def test_nonsense_is_refused(given: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        verb_of(ReplicaVerbs.begin).arguments.decode(msgpack.packb(given))


def test_plain_data_packs_for_other_channels() -> None:
    rank = EngineRank(Sent(engine_layout(0)), Binding("s", {"qk": 5}), "tcp", ({"qk": 7},))
    assert unpack(EngineRank, pack(rank)) == rank and rank.slots == ({"qk": 5}, {"qk": 7})


def test_only_the_present_transaction_fails_and_only_before_it_committed() -> None:
    dirty = VersionState().begin(3, 4, "plan")
    verified = dirty.verified(3, 4, "plan")
    clean = verified.committed(3, 4)
    for epoch in (3, 5):
        assert verified.failed(epoch) == verified
    assert verified.failed(4) == dirty
    assert clean.failed(4) == clean and clean.invalidate() == dirty
    with pytest.raises(ProtocolError, match="names plan other, its begin named plan plan"):
        dirty.verified(3, 4, "other")
    for once in (verified, clean):
        with pytest.raises(ProtocolError, match="needs phase dirty"):
            once.verified(3, 4, "plan")
    assert (clean.is_serving, verified.is_serving, dirty.is_serving) == (True, False, False)


def test_a_number_of_numpy_arrives_as_a_number_and_what_is_no_value_is_refused() -> None:
    assert unpack(dict[str, float], pack({"wait_s": np.float64(1.5)})) == {"wait_s": 1.5}
    with pytest.raises(TypeError, match="a message cannot hold object"):
        pack([object()])
    for broken in (b"", b"\xc1", pack(["1"])):
        with pytest.raises(ProtocolError, match=r"expected list\[int\]"):
            unpack(list[int], broken)
