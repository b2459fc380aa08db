"""Ranks that are started again make the calls again that their state lacks, and no others; or the run ends, and why. On
which nodes states are kept, which is the newest that all have, and what they take.
"""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.trainer_ranks import ADDRESS, Actor, Cast
from ray.exceptions import RayError

from slipstream.fleet.errors import WaitTimeout
from slipstream.orchestrator.cluster import ray_handles, rebirth as rebirth_module
from slipstream.orchestrator.cluster.ray_handles import RayTrainerGroup
from slipstream.orchestrator.cluster.rebirth import Keepers, Ranks, Rebirth, _nodes_of_keepers
from slipstream.orchestrator.errors import CheckpointLost, TrainingStopped
from slipstream.trainer.checkpoint.keeper import Readiness
from slipstream.trainer.types import OptimStats


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(actor: Actor) -> None:
        was_dead, actor.is_dead = actor.is_dead, True
        actor.cast.ended.append(actor)
        if was_dead:
            raise RayError("it is dead")

    monkeypatch.setattr(rebirth_module, "kill_actor", kill)


async def step(group: RayTrainerGroup) -> OptimStats:
    await group.forward_backward([[], []], SimpleNamespace())  # type: ignore[arg-type]
    return await group.optimizer_step()


async def started(num_steps: int = 0, **options: Any) -> tuple[Cast, RayTrainerGroup]:
    cast = Cast(**options)
    group = await cast.group()
    for _ in range(num_steps):
        await step(group)
    return cast, group


async def test_a_step_whose_end_was_not_told_is_computed_again_though_its_state_is_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cast, group = await started()
    for version in (1, 2, 3):
        assert (await step(group)).policy_version == version
        assert group.unkept_steps == 1, "its state may be on its way"
    await group.forward_backward([[], []], SimpleNamespace())  # type: ignore[arg-type]
    cast.lives[0][1].dies_in = {"optimizer_step"}
    with caplog.at_level(logging.INFO):
        assert (await group.optimizer_step()).policy_version == 4
    assert cast.ended == cast.lives[0], "the others, too"
    assert cast.names(1) == ["load_kept", "connect", "keep_states", "forward_backward", "optimizer_step"]
    assert cast.lives[1][1].calls[0] == ("load_kept", ADDRESS, 3)
    assert cast.told == [[], [(ADDRESS, 3), (ADDRESS, 3)]]
    assert cast.lives[1][1].calls[1:3] == [
        ("connect", ["tcp://a", "tcp://b"], [], []), ("keep_states", [ADDRESS], 1),
    ]  # fmt: skip
    assert cast.lives[1][1].calls[-1] == ("optimizer_step", True, 4)
    said = caplog.text
    assert "trainer-1 died of SIGKILL; all of 2 trainer ranks are started again (1 of trainer.max_restarts=3)" in said
    assert "with state 3; made again: forward_backward" in said
    assert len(group.down_s) == 1


async def test_of_states_that_were_under_way_the_one_before_is_taken_and_a_finished_step_computed_again() -> None:
    cast, group = await started(3)
    cast.kept = {2}  # some rank's third had not arrived
    cast.lives[0][0].dies_in = {"publish"}
    await group.publish(5.0)
    assert cast.names(1)[3:] == ["forward_backward", "optimizer_step", "publish"]
    assert cast.lives[1][0].version == 3


async def test_steps_without_a_kept_state_are_computed_again_and_states_counted_on() -> None:
    cast, group = await started()
    for number, readiness in enumerate((Readiness.now, Readiness.later, Readiness.later)):
        cast.readiness = readiness
        await step(group)
        assert group.unkept_steps == number + 1
    cast.readiness = Readiness.now
    cast.lives[0][0].dies_in = {"forward_backward"}
    await step(group)
    assert cast.lives[1][0].version == 4
    assert [call for call in cast.lives[1][1].calls if call[0] == "optimizer_step"] == [
        ("optimizer_step", True, number) for number in (2, 3, 4)
    ], "as counted anew"
    cast.lives[1][0].dies_in = {"publish"}
    await group.publish(5.0)
    assert cast.names(2) == ["load_kept", "connect", "keep_states", "publish"]


async def test_ranks_whose_keeper_is_gone_send_to_the_one_in_its_place(caplog: pytest.LogCaptureFixture) -> None:
    """Until it has a whole state, a death would end the run."""
    cast, group = await started(2)
    cast.readiness, cast.kept = Readiness.never, set()
    await step(group)
    assert cast.names(0).count("keep_states") == 2
    assert caplog.text.count("a process that kept states is gone; another one keeps them from the next step on") == 1
    assert group.unkept_steps is None
    cast.readiness = Readiness.now
    await step(group)
    assert cast.kept - {2} == {3} and group.unkept_steps == 1
    cast.lives[0][1].dies_in = {"publish"}
    await group.publish(5.0)
    assert cast.names(1) == ["load_kept", "connect", "keep_states", "publish"]


async def test_a_death_before_the_keeper_in_its_place_has_a_state_ends_the_run() -> None:
    cast, group = await started()
    for cast.readiness in (Readiness.now, Readiness.now, Readiness.never):
        await step(group)
    cast.kept, cast.lives[0][1].is_dead = set(), True
    with pytest.raises(TrainingStopped, match="No state of its last steps is left: go on with slipstream resume"):
        await step(group)


async def test_ranks_whose_keeper_stays_gone_train_on_and_a_death_ends_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cast, group = await started(1)
    cast.readiness, cast.no_keeper = Readiness.never, RayError("its node is gone")
    for _ in range(2):
        await step(group)
    assert caplog.text.count("another one cannot be had: its node is gone; a trainer rank that dies will end this") == 1
    assert cast.lives[0][0].calls[-1] == ("optimizer_step", True, None)
    assert group.unkept_steps is None
    cast.lives[0][1].is_dead = True
    with pytest.raises(TrainingStopped, match=r"^trainer-1 died of SIGKILL$"):
        await step(group)


async def test_before_the_second_state_everything_since_the_start_is_made_again() -> None:
    cast, group = await started()
    await group.load_state("folder")  # type: ignore[arg-type]
    await step(group)
    cast.kept = set()
    cast.lives[0][1].dies_in = {"score"}
    await group.score([[], []], 1)
    assert cast.names(1)[2:] == ["load_state", "forward_backward", "optimizer_step", "score"]


async def test_engines_out_of_service_are_left_out_and_others_met_where_they_are_now() -> None:
    cast, group = await started(1)
    await group.reconnect(1, "tcp://b2", 5.0)
    await group.publish(5.0, exclude=[0])
    cast.lives[0][0].dies_in = {"forward_backward"}
    await step(group)
    assert ("connect", ["tcp://a", "tcp://b2"], [], [0]) in cast.lives[1][0].calls
    await group.reconnect(0, "tcp://a2", 5.0)
    cast.lives[1][0].dies_in = {"forward_backward"}
    await step(group)
    assert ("connect", ["tcp://a2", "tcp://b2"], [], []) in cast.lives[2][0].calls
    await group.reconnect(3, "tcp://d", 5.0)  # a further worker, before another one
    cast.lives[2][0].dies_in = {"forward_backward"}
    await step(group)
    assert ("connect", ["tcp://a2", "tcp://b2", "", "tcp://d"], [], []) in cast.lives[3][0].calls


async def test_calls_that_fail_at_once_start_ranks_again_once() -> None:
    cast, group = await started(1)
    cast.lives[0][1].is_dead = True
    stats, written, _ = await asyncio.gather(step(group), group.has_written(), group.disconnect([1]))
    assert stats.policy_version == 2 and written and len(cast.lives) == 2


async def test_ranks_that_die_while_nobody_calls_them_are_up_again_before_what_was_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_handles, "_LOOK_S", 0.01)
    cast, group = await started(1)
    batch: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(group.meanwhile(batch))
    cast.lives[0][1].is_dead = True
    while len(group.down_s) < 1:
        await asyncio.sleep(0.01)
    assert len(cast.lives) == 2 and not waiting.done()
    batch.set_result("a batch")
    assert await waiting == "a batch" and len(cast.lives) == 2
    stranded: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(group.meanwhile(stranded))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert stranded.cancelled()


async def test_a_checkpoint_under_way_is_begun_again_or_told_to_be_lost() -> None:
    cast, group = await started(2)
    cast.is_written = False
    await group.begin_checkpoint("folder", None)  # type: ignore[arg-type]
    assert not await group.has_written()
    cast.lives[0][1].is_dead = True
    await step(group)  # of the state that the checkpoint is of
    assert cast.names(1)[3] == "begin_checkpoint" and not await group.has_written()
    cast.lives[1][0].is_dead = True
    await step(group)
    assert "begin_checkpoint" not in cast.names(2), "a step has passed"
    with pytest.raises(CheckpointLost):
        await group.has_written()
    cast.is_written = True
    await group.begin_checkpoint("another", None)  # type: ignore[arg-type]
    assert await group.has_written()
    cast.lives[2][0].is_dead = True
    await group.publish(5.0)
    assert "begin_checkpoint" not in cast.names(3), "its files were there"


async def test_restarts_that_fail_count_and_the_last_one_ends_the_run() -> None:
    cast, group = await started(1, max_restarts=3)
    cast.start_fails = 1
    cast.lives[0][0].is_dead = True
    await step(group)
    assert len(cast.lives) == 2 and len(group.down_s) == 1
    cast.lives[1][0].is_dead = True
    await step(group)
    cast.lives[2][1].is_dead = True
    with pytest.raises(TrainingStopped, match=r"trainer-1\.3 died of SIGKILL.*trainer.max_restarts=3 are used up"):
        await step(group)


async def test_the_pause_after_a_start_that_failed_doubles_and_the_first_start_comes_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A full disk, or the memory of a GPU that is not free yet, would use up all restarts within seconds."""
    (cast, group), pauses, sleep = await started(max_restarts=4, backoff_s=3.0), list[float](), asyncio.sleep

    async def at_once(delay: float) -> None:
        if delay:
            pauses.append(delay)
        await sleep(0)

    await step(group)
    monkeypatch.setattr(asyncio, "sleep", at_once)
    cast.start_fails = 4
    cast.lives[0][0].is_dead = True
    with pytest.raises(TrainingStopped, match="are used up"):
        await step(group)
    assert pauses == [3.0, 6.0, 12.0], "none before the first, and none after the last"


async def test_without_a_death_or_a_state_the_error_ends_the_run() -> None:
    cast, group = await started()

    def fails(*_: Any) -> RuntimeError:
        return RuntimeError("trainer-0 failed with ValueError: a batch")

    cast.lives[0][0].answer = fails  # type: ignore[method-assign]
    real = cast.result_of

    async def result_of(answer: Any, who: str, kind: type) -> Any:
        try:
            return await real(answer, who, kind)
        finally:
            cast.dead.clear()

    cast.result_of = result_of  # type: ignore[method-assign]
    with pytest.raises(TrainingStopped, match="failed with ValueError"):
        await step(group)
    assert len(cast.lives) == 1
    lost, group = await started(3)
    lost.kept = {1}
    lost.lives[0][0].is_dead = True
    with pytest.raises(TrainingStopped, match="No state of its last steps is left"):
        await step(group)


@pytest.mark.parametrize(("max_restarts", "lack"), [(0, ""), (3, "5.0 GB of a's memory, which has 1.0 GB left")])
async def test_where_ranks_may_not_be_started_again_a_death_ends_the_run_as_it_is(
    max_restarts: int, lack: str, caplog: pytest.LogCaptureFixture
) -> None:
    cast, group = await started(max_restarts=max_restarts, lack=lack)
    assert ("a trainer rank that dies will end this run" in caplog.text) == bool(lack)
    assert lack in caplog.text
    await step(group)
    assert "keep_states" not in cast.names(0)
    cast.lives[0][1].is_dead = True
    with pytest.raises(TrainingStopped, match=r"^trainer-1 died of SIGKILL$"):
        await step(group)
    assert len(cast.lives) == 1


class AnotherController:
    """Has the actors of a controller that was killed, and what that one wrote down."""

    def __init__(self, cast: Cast, group: RayTrainerGroup) -> None:
        self.cast, self.living = cast, group.living
        cast.dead = {}
        cast.rebirth = Rebirth(
            cast, cast.start, cast, cast.call_all, max_restarts=3, start_timeout_s=5.0,  # type: ignore[arg-type]
        )  # fmt: skip

    async def group(self) -> RayTrainerGroup:
        actors = [actor for actor in self.cast.lives[-1] if not actor.is_dead]
        for actor in self.cast.lives[-1]:
            actor.calls.clear()
            if actor.is_dead:  # as RayCluster.find_actor has it
                self.cast.dead[actor.name] = "died while the run had no controller"
        ranks = Ranks(actors, self.living.names, self.living.facts)  # type: ignore[arg-type]
        await self.cast.rebirth.take_over(self.living)
        return RayTrainerGroup(self.cast, ranks, self.cast.rebirth, is_lora=True)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of Ray."""

    async def call_all(cast: Cast, ranks: Ranks, what: str, call: Any, timeout_s: float) -> list[Any]:
        return await cast.call_all(ranks, what, call, timeout_s)

    monkeypatch.setattr("slipstream.orchestrator.cluster.ray_handles.call_all", call_all)


async def steps(cast: Cast, num: int) -> RayTrainerGroup:
    group = await cast.group()
    await group.keep()
    for _ in range(num):
        await step(group)
    return group


async def test_another_controller_takes_living_ranks_back_to_the_step_that_has_a_row() -> None:
    cast = Cast()
    group = await steps(cast, 2)
    another = AnotherController(cast, group)
    await step(group)  # after the other one wrote down where ranks are
    group = await another.group()
    assert await group.return_to(2)
    assert [call[0] for call in cast.lives[0][0].calls] == ["settle", "keep_states", "load_kept"]
    assert cast.lives[0][0].version == 2 and group.known == {"tcp://a", "tcp://b"} and len(cast.lives) == 1
    assert (await step(group)).policy_version == 3
    assert cast.lives[0][0].calls[-1] == ("optimizer_step", True, 4), "states are counted on"


async def test_ranks_that_still_have_the_step_that_has_a_row_read_nothing() -> None:
    cast = Cast()
    group = await AnotherController(cast, await steps(cast, 2)).group()
    assert await group.return_to(2)
    assert [call[0] for call in cast.lives[0][0].calls] == ["settle", "keep_states"]


async def test_of_a_rank_that_died_meanwhile_all_are_started_again() -> None:
    cast = Cast()
    group = await steps(cast, 2)
    another = AnotherController(cast, group)
    cast.lives[0][1].is_dead = True
    group = await another.group()
    assert await group.return_to(2)
    assert cast.names(1) == ["load_kept", "connect", "keep_states"] and cast.lives[1][1].version == 2
    assert group.num_ranks == 2
    cast.lives[1][0].dies_in = {"forward_backward"}
    assert (await step(group)).policy_version == 3, "and so are those after it"


async def test_without_a_kept_state_ranks_are_used_as_they_are_or_not_at_all() -> None:
    for num_more, is_usable in ((0, True), (1, False)):
        cast = Cast()
        group = await steps(cast, 2)
        cast.readiness = Readiness.later
        await step(group)
        another = AnotherController(cast, group)
        for _ in range(num_more):
            await step(group)
        group = await another.group()
        assert await group.return_to(3) == is_usable
        assert "load_kept" not in [call[0] for call in cast.lives[0][0].calls]
        cast.kept = set()
        cast.lives[0][1].is_dead = True
        with pytest.raises(TrainingStopped, match="No state of its last steps is left"):
            await step(group)  # what ranks did before is not known to this controller


async def test_ranks_that_do_not_answer_are_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cast = Cast()
    group = await AnotherController(cast, await steps(cast, 1)).group()
    answered = cast.call_all

    async def call_all(ranks: Ranks, what: str, call: Any, timeout_s: float) -> list[Any]:
        if what == "settle":
            raise WaitTimeout("gave up after 60 s of waiting for settle")
        return await answered(ranks, what, call, timeout_s)

    monkeypatch.setattr(cast, "call_all", call_all)
    assert await group.return_to(1)
    assert len(cast.lives) == 2 and cast.lives[1][0].version == 1


def test_a_state_is_kept_on_its_node_and_on_the_next_one() -> None:
    nodes = ["a", "a", "b", "b", "c"]
    assert [_nodes_of_keepers(node, nodes) for node in ("a", "b", "c")] == [["a", "b"], ["b", "c"], ["c", "a"]]
    assert _nodes_of_keepers("a", ["a", "a"]) == ["a"]


class KeeperActors:
    """A cluster of keepers alone."""

    def __init__(self, kept: dict[str, dict[int, list[int]]], free: int = 1000) -> None:
        self._kept, self._free = kept, free
        self.went_back: list[tuple[str, int, int]] = []
        self.loss: Exception | None = None

    async def new_actor_of_node(self, _: type, name: str, node: str) -> Any:
        remote = SimpleNamespace
        return SimpleNamespace(
            begin=remote(remote=lambda *_: ((node, 1), self._free)),
            kept=remote(remote=lambda: self._kept.get(node)),
            go_back=remote(remote=lambda number, life: self.went_back.append((node, number, life)) or "done"),
        )

    async def result_of(self, answer: Any, _: str, error_type: type[Exception]) -> Any:
        if answer is None:
            raise self.loss or error_type("it died with its node")
        return answer


async def test_the_newest_state_that_all_ranks_have_is_found_where_it_is() -> None:
    keepers = Keepers(KeeperActors({"a": {0: [3, 4], 1: [3]}, "b": {1: [3, 4], 0: [3]}}), b"", is_one_node=False)  # type: ignore[arg-type]
    assert await keepers.of(["a", "b"]) == [[("a", 1), ("b", 1)], [("b", 1), ("a", 1)]]
    assert await keepers.newest(2, 9, 1) == (4, [("a", 1), ("b", 1)])
    assert (await keepers.newest(2, 3, 1))[0] == 3
    left = KeeperActors({"a": {0: [3, 4], 1: [3]}})
    halves = Keepers(left, b"", is_one_node=False)  # type: ignore[arg-type]
    await halves.of(["a", "b"])
    assert await halves.newest(2, 9, 1) == (3, [("a", 1), ("a", 1)]), "node b is gone"
    left.loss = RayError("its node does not exist any more")
    assert (await halves.newest(2, 9, 1))[0] == 3
    assert left.went_back == [("a", 3, 1)] * 2, "later states count no more"
    empty = Keepers(KeeperActors({}), b"", is_one_node=True)  # type: ignore[arg-type]
    assert await empty.newest(2, 9, 1) == (0, [])


async def test_room_is_counted_for_three_copies_and_five_with_several_nodes() -> None:
    for nodes, needed in ((["a", "a"], 600), (["a", "b"], 500)):
        for free, is_enough in ((needed, True), (needed - 1, False)):
            keepers = Keepers(KeeperActors({}, free), b"", is_one_node=False)  # type: ignore[arg-type]
            await keepers.of(nodes)
            assert (await keepers.lacks_room(nodes, [100, 100]) == "") == is_enough, (nodes, free)
