"""Promises of trainer/rank_states.py: resume is exact, from disk and from memory, and a state is of one moment."""

import json
import math
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from cases.rank_helpers import SYNC_KEY, are_equal, count, make_rank, make_samples, save_state, step, values_of

from slipstream.conf.schema import AlgorithmConfig, OptimConfig
from slipstream.trainer.checkpoint.keeper import Keeper, Readiness, hold, take
from slipstream.trainer.checkpoint.rank_state import write_rank_state
from slipstream.trainer.errors import CheckpointError
from slipstream.trainer.rank import TrainerRank


def test_resume_continues_bitwise_in_a_new_rank(tmp_path):
    optim = OptimConfig(lr=1e-2, warmup_steps=2, final_lr_fraction=0.1)
    straight = make_rank(optim=optim)
    step(straight)
    step(straight)
    save_state(straight, tmp_path)
    step(straight)
    resumed = make_rank(optim=optim)
    resumed.states.load_state(tmp_path)
    assert resumed.policy_version == 2
    step(resumed)
    assert are_equal(values_of(straight), values_of(resumed))


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (4, 2)])
def test_a_run_resumed_with_other_updates_a_step_is_where_it_was_in_the_schedule(tmp_path, before, after):
    """The rate falls along a cosine over the 10 steps: after five of them the next update is the first of step 6."""
    optim = OptimConfig(lr=1e-2, final_lr_fraction=0.0)
    rank = make_rank(optim=optim, algorithm=AlgorithmConfig(minibatches_per_step=before))
    for _ in range(5):
        for number in range(before):
            rank.optimizer_step(ends_version=number == before - 1)
    save_state(rank, tmp_path)
    resumed = make_rank(optim=optim, algorithm=AlgorithmConfig(minibatches_per_step=after))
    resumed.states.load_state(tmp_path)
    rates = [resumed.optimizer_step(ends_version=number % after == after - 1).lr for number in range(5 * after)]
    assert rates[0] == pytest.approx(5e-3 * (1 + math.cos(math.pi * 5 * after / (10 * after - 1))))
    assert rates[-1] == 0.0


def test_a_new_rank_goes_on_bitwise_from_a_kept_state():
    """The step before the last one has a state, too; what was copied does not change while it is sent."""

    def keep_step(rank: TrainerRank, number: int) -> None:
        step(rank)
        while rank.states.keep(number) is Readiness.later:
            time.sleep(0.01)

    keeper, rank = Keeper("127.0.0.1", SYNC_KEY), make_rank()
    keeper.go_back(0, life=1)
    rank.states.keep_states([keeper.address], life=1)
    after = {}
    for number in (1, 2, 3):
        keep_step(rank, number)
        after[number] = values_of(rank)
    while keeper.kept() != {0: [2, 3]}:
        time.sleep(0.01)
    reborn = make_rank()
    with pytest.raises(OSError, match="broke off"):
        reborn.states.load_kept(keeper.address, 1)
    reborn.states.load_kept(("nowhere", 0), 2, take(keeper.address, SYNC_KEY, 0, 2))
    assert reborn.policy_version == 2 and are_equal(values_of(reborn), after[2])
    keep_step(reborn, 3)
    assert are_equal(values_of(reborn), after[3])
    keeper.close()


def test_a_rank_that_settles_has_sent_its_state_and_drops_what_it_was_asked_for(tmp_path):
    rank, keeper, samples = make_rank(), Keeper("127.0.0.1", SYNC_KEY), make_samples()
    rank.states.keep_states([keeper.address], life=0)
    while rank.states.keep(1) is Readiness.later:
        time.sleep(0.01)
    rank.states.begin_checkpoint(tmp_path / "unwritable" / "\0")
    rank.forward_backward([samples], count(samples))
    assert rank.states.settle() == 0
    assert keeper.kept() == {0: [1]} and rank.states.has_written(), "nobody wants that checkpoint any more"
    assert rank.optimizer_step(ends_version=False).grad_norm == 0
    assert rank.states.settle() is None, "in the midst of a step"
    rank.states.load_kept(keeper.address, 1)
    assert rank.states.settle() == 0
    keeper.close()


def test_a_rank_whose_keeper_is_gone_says_so_once_and_trains_on(caplog):
    rank, keeper = make_rank(), Keeper("127.0.0.1", SYNC_KEY)
    rank.states.keep_states([keeper.address], life=0)
    keeper.close()
    found = []
    while not found or found[-1] is not Readiness.never:
        found.append(rank.states.keep(len(found)))
        time.sleep(0.01)
    assert found.count(Readiness.now) == 1
    assert rank.states.keep(99) is Readiness.never
    assert caplog.text.count("a step's state could not be kept in another process") == 1
    step(rank)
    assert rank.policy_version == 1


@pytest.mark.parametrize("other", [Readiness.later, Readiness.never])
def test_no_rank_keeps_a_state_that_another_rank_cannot(other, monkeypatch):
    """This one is ready; the sums say of the other who can never send, then who cannot yet."""
    rank, keeper = make_rank(), Keeper("127.0.0.1", SYNC_KEY)
    rank.states.keep_states([keeper.address], life=0)
    rank.states._kept._sends.finish()
    others = [other is Readiness.never, other is Readiness.later]
    monkeypatch.setattr(rank._control, "sum", lambda mine: mine + others.pop(0))
    assert rank.states.keep(1) is other
    rank.states._kept._sends.finish()
    assert keeper.kept() == {}
    keeper.close()


def test_a_state_is_left_out_while_another_is_sent_and_where_copies_would_take_much_of_the_time(monkeypatch):
    rank, keeper = make_rank(), Keeper("127.0.0.1", SYNC_KEY)
    may_send, now = threading.Event(), [100.0]

    def held(*arguments: Any) -> None:
        assert may_send.wait(60)
        hold(*arguments)

    monkeypatch.setattr("slipstream.trainer.checkpoint.kept_states.hold", held)
    monkeypatch.setattr("slipstream.trainer.checkpoint.kept_states.time", SimpleNamespace(monotonic=lambda: now[0]))
    wait = rank.states._kept._copies.wait

    def takes_a_second() -> None:
        wait()
        now[0] += 1.0

    monkeypatch.setattr(rank.states._kept._copies, "wait", takes_a_second)
    rank.states.keep_states([keeper.address], life=0)
    rank.states._kept._sends.finish()
    assert rank.states.keep(1) is Readiness.now
    now[0] += 20.1
    assert rank.states.keep(2) is Readiness.later, "the first is on its way"
    may_send.set()
    rank.states._kept._sends.finish()
    now[0] -= 0.2
    assert rank.states.keep(2) is Readiness.later, "a copy that takes a second each 20"
    now[0] += 0.2
    assert rank.states.keep(2) is Readiness.now
    keeper.close()


def test_a_checkpoint_holds_what_was_when_it_began_though_steps_follow(tmp_path, monkeypatch):
    """The next one uses the same memory, and holds what is then."""

    def write_later(*arguments: Any) -> None:
        assert may_write.wait(60), "nobody lets it write"
        write_rank_state(*arguments)

    monkeypatch.setattr("slipstream.trainer.rank_states.write_rank_state", write_later)
    rank, may_write = make_rank(), threading.Event()
    for name in ("first", "second"):
        step(rank)
        before = values_of(rank)
        rank.states.save_adapter(tmp_path / name / "expected")
        may_write.clear()
        rank.states.begin_checkpoint(tmp_path / name / "trainer", tmp_path / name / "adapter")
        step(rank)
        assert not rank.states.has_written()
        assert not are_equal(before, values_of(rank))
        may_write.set()
        rank.states._writes.finish()
        assert rank.states.has_written()
        resumed = make_rank()
        resumed.states.load_state(tmp_path / name / "trainer")
        assert are_equal(before, values_of(resumed))
        for file in ("adapter_model.safetensors", "adapter_config.json"):
            written, expected = (tmp_path / name / folder / file for folder in ("adapter", "expected"))
            assert written.read_bytes() == expected.read_bytes()


def test_a_state_of_another_layout_is_refused_before_anything_changes(tmp_path):
    """What else is refused, and how it is said: checkpoint/test_rank_state.py."""
    rank = make_rank()
    save_state(rank, tmp_path)
    step(rank)
    before = values_of(rank)
    meta = json.loads((tmp_path / "rank-0.json").read_text())
    meta["layout"]["trainer.num_ranks"] = 4
    (tmp_path / "rank-0.json").write_text(json.dumps(meta))
    with pytest.raises(CheckpointError, match=r"trainer\.num_ranks=4, this run has 1"):
        rank.states.load_state(tmp_path)
    assert are_equal(before, values_of(rank))
