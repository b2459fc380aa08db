"""The version state machine under arbitrary messages, and what the wire accepts."""

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


class AnyMessageOrder(RuleBasedStateMachine):
    """Whatever the order of messages, a replica takes those that fit and no other, and serves only what was begun,
    verified and committed in one epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.state = VersionState()
        self.begun: tuple[int, int, str] = -1, 0, ""
        self.phase = Phase.dirty

    def take(self, fits: bool, step: Callable[[], VersionState]) -> bool:
        try:
            self.state = step()
        except ProtocolError:
            assert not fits
        else:
            assert fits
        return fits

    @rule(version=st.integers(-1, 3), epoch=st.integers(0, 9), digest=st.sampled_from("ab"))
    def begin(self, version: int, epoch: int, digest: str) -> None:
        fits = version >= 0 and epoch > self.begun[1]
        if self.take(fits, lambda: self.state.begin(version, epoch, digest)):
            self.begun, self.phase = (version, epoch, digest), Phase.dirty
        elif version >= 0:
            with pytest.raises(StaleEpoch, match=f"epoch {self.begun[1]} has begun"):
                self.state.begin(version, epoch, digest)

    @rule(data=st.data())
    def verify(self, data: st.DataObject) -> None:
        given = data.draw(st.sampled_from([self.begun, self.begun, (2, self.begun[1], "a"), (self.begun[0], 3, "b")]))
        fits = given == self.begun and self.phase is Phase.dirty
        if self.take(fits, lambda: self.state.verified(*given)):
            self.phase = Phase.verified

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        given = data.draw(st.sampled_from([self.begun[:2], self.begun[:2], (2, self.begun[1]), (self.begun[0], 3)]))
        fits = given == self.begun[:2] and self.phase is Phase.verified
        if self.take(fits, lambda: self.state.committed(*given)):
            self.phase = Phase.clean

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        epoch = data.draw(st.sampled_from([self.begun[1], self.begun[1] + 1, self.begun[1] - 1]))
        self.state = self.state.failed(epoch)
        if epoch == self.begun[1] and self.phase is not Phase.clean:
            self.phase = Phase.dirty

    @rule()
    def invalidate(self) -> None:
        self.state, self.phase = self.state.invalidate(), Phase.dirty

    @invariant()
    def is_what_came_of_it(self) -> None:
        assert self.state == VersionState(self.phase, *self.begun)
        assert self.state.is_serving == (self.phase is Phase.clean)


AnyMessageOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=20, deadline=None)
TestAnyMessageOrder = AnyMessageOrder.TestCase


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


def test_a_number_of_numpy_arrives_as_a_number_and_what_is_no_value_is_refused() -> None:
    assert unpack(dict[str, float], pack({"wait_s": np.float64(1.5)})) == {"wait_s": 1.5}
    with pytest.raises(TypeError, match="a message cannot hold object"):
        pack([object()])
    for broken in (b"", b"\xc1", pack(["1"])):
        with pytest.raises(ProtocolError, match=r"expected list\[int\]"):
            unpack(list[int], broken)
