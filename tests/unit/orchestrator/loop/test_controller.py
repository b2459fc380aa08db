"""Locks: what is trained on which version, in which order things happen, and what each failure costs.

The loop is the product's own; trainer, workers and rewards are fakes of a few lines (tests/fakes/loop.py).
"""

import asyncio
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from fakes.loop import Loop, make_config
from fakes.workers import FakeWorker

from slipstream.fleet.errors import NoReplicasLeft
from slipstream.orchestrator.errors import TrainingStopped
from slipstream.rollout.types import Prompt, Rollout


async def test_strictly_on_policy_trains_on_its_own_version_only(tmp_path: Path) -> None:
    loop = Loop(tmp_path, make_config(staleness=0))

    async def nothing_is_begun() -> None:
        for _ in range(9):
            await asyncio.sleep(0)
        assert loop.controller.buffer.num_outstanding == 0, "before its version is committed"

    loop.trainer.before["publish"] = nothing_is_begun
    await loop.run()
    for version, samples in loop.trainer.trained:
        assert {sample.oldest_version for sample in samples} == {version}
    # the diary's order: version v is published, sampled from, trained on; then v + 1 is published
    kinds = [entry for entry in loop.world.diary if entry[0] != "sample" or entry[1] < 1000]
    for step in range(4):
        part = kinds[step * 5 : step * 5 + 5]
        assert part[0] == ("publish", step)
        assert {(e[0], e[2]) for e in part[1:4]} == {("sample", step)}
        assert part[4] == ("train", step)
    assert [row["staleness/max"] for row in loop.rows] == [None, 0, 0, 0, 0]


@pytest.mark.parametrize("staleness", [1, 2, 3])
async def test_staleness_stays_within_the_bound_and_overlap_happens(tmp_path: Path, staleness: int) -> None:
    loop = Loop(tmp_path, make_config(staleness=staleness, num_steps=8))
    await loop.run()
    observed = [version - sample.oldest_version for version, samples in loop.trainer.trained for sample in samples]
    assert max(observed) == staleness
    assert sum(row["staleness/dropped_groups"] or 0 for row in loop.rows) == 0


async def test_groups_that_are_too_old_are_sampled_again_and_counted_in_their_steps_row(tmp_path: Path) -> None:
    loop, stale = Loop(tmp_path, make_config()), set[int]()

    async def late(prompt: Prompt, n: int, *_: object, worker: FakeWorker) -> list[Rollout]:
        rollouts = await FakeWorker.generate_group(worker, prompt, n)
        if loop.world.version != 2 or len(stale) == 2 or prompt.prompt_id in stale:
            return rollouts
        stale.add(prompt.prompt_id)
        return [replace(one, policy_versions=[1, 1]) for one in rollouts]

    for worker in loop.workers:
        worker.generate_group = partial(late, worker=worker)  # type: ignore[method-assign]
    await loop.run()
    assert [row["staleness/dropped_groups"] for row in loop.rows] == [None, 0, 0, 2, 0]
    assert [row["staleness/max"] for row in loop.rows] == [None, 0, 0, 0, 0]


async def test_every_step_has_one_row_and_all_prompts_are_used_once(tmp_path: Path) -> None:
    loop = Loop(tmp_path, make_config(num_steps=4))
    await loop.run()
    assert [row["step"] for row in loop.rows] == [0, 1, 2, 3, 4]
    assert [row["policy_version"] for row in loop.rows] == [0, 1, 2, 3, 4]
    assert [row["eval/reward"] for row in loop.rows] == [0.0, None, None, None, 0.0]
    assert [row["reward/mean"] for row in loop.rows][1:] == [0.5] * 4
    assert all(row["sync/replicas_committed"] == 2 for row in loop.rows)
    assert all(row["step/total_s"] > 0 for row in loop.rows)
    assert [row["eval/wait_s"] is None for row in loop.rows] == [False, True, True, True, False]
    for row in loop.rows[1:]:
        train_s = row["trainer/forward_backward_s"] + row["trainer/optimizer_s"]
        of_both_ranks = row["trainer/num_tokens"] / train_s
        assert row["trainer/tokens_per_s_per_rank"] == pytest.approx(of_both_ranks / 2)
    elsewhere = [name for name in loop.rows[1] if name.startswith(("distill/", "rollout/turns", "rollout/failed_"))]
    assert {loop.rows[1][name] for name in elsewhere} == {None} and len(elsewhere) > 5, "no teacher, and no agent"
    sampled = sorted(entry[1] for entry in loop.world.diary if entry[0] == "sample" and entry[1] < 1000)
    assert sampled == list(range(12))
    samples = [json.loads(line) for line in loop.folder.samples.read_text().splitlines()]
    assert {row["step"] for row in samples if row["kind"] == "held-out"} == {0, 4}
    training = [row for row in samples if row["kind"] == "training"]
    assert [(row["step"], row["group"], row["sibling"]) for row in training] == [
        (step, group, sibling) for step in (1, 2, 3, 4) for sibling in (0, 1) for group in (0, 1, 2)
    ]
    assert {tuple(row["log_ratios"]) for row in training} == {(0.125, 0.125)}, "what the trainer returned, less theirs"
    assert {(row["reward"], *row["advantages"]) for row in training} == {(0.0, -1.0), (1.0, 1.0)}
    assert {row["staleness"] for row in training} == {0}


async def test_step_that_is_not_finite_publishes_nothing_and_is_counted(tmp_path: Path) -> None:
    """Three of them end no run while others are between them."""
    loop = Loop(tmp_path, make_config(num_steps=7))
    loop.trainer.not_finite = {1, 3, 5}
    controller = await loop.run()
    assert loop.clock == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (6, 3), (7, 4)], "what logs carry"
    assert [entry[1] for entry in loop.world.diary if entry[0] == "publish"] == [0, 1, 2, 3, 4]
    assert (controller.step, controller.policy_version) == (7, 4)
    assert [row["optim/skipped"] for row in loop.rows] == [None, 0, 1, 0, 1, 0, 1, 0]
    assert loop.rows[2]["sync/total_s"] is None and loop.rows[2]["optim/grad_norm"] is None
    assert [version for version, _ in loop.trainer.trained] == [0, 1, 1, 2, 2, 3, 3]


async def test_three_refused_steps_in_a_row_stop_the_run(tmp_path: Path) -> None:
    loop = Loop(tmp_path, make_config(num_steps=9))
    loop.trainer.not_finite = {2, 3, 4}
    with pytest.raises(TrainingStopped, match="3 steps in a row"):
        await loop.run()
    assert loop.rows[-1]["step"] == 5
    assert (loop.saved.step, loop.saved.policy_version, loop.saved.buffer.num_batches) == (5, 2, 5)

    lower_rate = Loop(tmp_path, make_config(num_steps=9), resume_step=5)
    assert (await lower_rate.run()).policy_version == 6
    assert lower_rate.clock == [(5, 2), (6, 3), (7, 4), (8, 5), (9, 6)]
    assert [row["step"] for row in lower_rate.rows] == list(range(10))


async def test_replica_that_fails_a_publish_serves_no_more(tmp_path: Path) -> None:
    loop = Loop(tmp_path, make_config(num_steps=4))
    loop.trainer.failing_replicas = {2: {1}}
    await loop.run()
    published_2 = loop.world.diary.index(("publish", 2))
    assert {entry[2] for entry in loop.world.diary[published_2:] if entry[0] == "sample"} == {2, 3, 4}
    assert [row["rollout/replicas_serving"] for row in loop.rows[1:]] == [2, 1, 1, 1]
    assert [row["sync/replicas_committed"] for row in loop.rows] == [2, 2, 1, 1, 1]
    assert loop.trainer.excluded == [(0, []), (1, []), (2, []), (3, [1]), (4, [1])]


async def test_version_0_that_nobody_adopts_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    loop = Loop(tmp_path, make_config())
    loop.trainer.failing_replicas = {0: {0, 1}}
    with pytest.raises(NoReplicasLeft, match=r"adopted version 0, the first one\. .*lm_head\.weight"):
        await loop.run()


async def test_version_0_that_one_of_two_adopts_is_enough_to_begin(tmp_path: Path) -> None:
    loop = Loop(tmp_path, make_config(num_steps=2))
    loop.trainer.failing_replicas = {0: {1}}
    await loop.run()
    assert [row["sync/replicas_committed"] for row in loop.rows] == [1, 1, 1]
    assert not [task for task in asyncio.all_tasks() if "stranded" in repr(task)], "nobody waits for that any more"


async def test_all_workers_dead_saves_the_run_and_says_why(tmp_path: Path) -> None:
    loop = Loop(tmp_path, make_config(num_steps=9))
    for worker in loop.workers:
        worker.fails_after = 6
    with pytest.raises(NoReplicasLeft, match="rollout-0 died"):
        await loop.run()
    state = loop.saved
    assert state.step == state.buffer.num_batches == state.policy_version == loop.rows[-1]["step"]


async def test_replicas_that_all_fail_a_publish_leave_a_row_and_a_checkpoint_of_its_step(tmp_path: Path) -> None:
    loop = Loop(tmp_path, make_config(num_steps=9))
    loop.trainer.failing_replicas = {4: {0, 1}}
    with pytest.raises(NoReplicasLeft, match=r"lm_head\.weight"):
        await loop.run()
    state = loop.saved
    assert state.step == state.policy_version == state.buffer.num_batches == 4
    assert [row["step"] for row in loop.rows] == [0, 1, 2, 3, 4]
    assert loop.rows[-1]["sync/replicas_committed"] == 0


async def test_reward_that_always_fails_ends_the_run_with_its_name_and_a_checkpoint(tmp_path: Path) -> None:
    """8 groups in a row are too many; until then steps without a single sample pass, and leave nulls in their rows."""
    loop = Loop(tmp_path, make_config(num_steps=9))
    loop.rewards.fails = lambda: loop.world.version >= 2
    with pytest.raises(TrainingStopped, match=r"reward exact_match failed on every response of 8 groups"):
        await loop.run()
    assert loop.saved.step == 4
    assert [row["reward/failures"] for row in loop.rows] == [None, 0, 0, 6, 6]
    assert [row["loss/total"] for row in loop.rows] == [None, 0, 0, None, None]
    assert [row["optim/skipped"] for row in loop.rows] == [None, 0, 0, 1, 1]
    assert [row["optim/updates"] for row in loop.rows] == [None, 1, 1, 0, 0]
    assert [row["trainer/num_microbatches"] for row in loop.rows] == [None, 1, 1, 0, 0]
    assert [row["policy_version"] for row in loop.rows] == [0, 1, 2, 2, 2], "momentum alone must not move the policy"


@pytest.mark.parametrize(
    ("num_changed", "grad_norm", "lr", "is_loud"),
    [(0, 1.0, 0.1, True), (1, 1.0, 0.1, False), (None, 1.0, 0.1, False), (0, 0.0, 0.1, False), (0, 1.0, 0.0, False)],
)
async def test_step_that_never_reached_the_engines_is_loud_unless_it_changed_nothing(
    num_changed: int | None,
    grad_norm: float,
    lr: float,
    is_loud: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No gradient, or the first step of a warm-up."""
    loop = Loop(tmp_path, make_config(num_steps=1))
    loop.trainer.num_changed_params, loop.trainer.grad_norm, loop.trainer.lr = num_changed, grad_norm, lr
    await loop.run()
    assert ("sync/changed_params is 0" in caplog.text) == is_loud


@pytest.mark.parametrize("staleness", [0, 2])
async def test_only_worker_is_restarted_and_published_to_at_once_while_its_batch_waits(
    tmp_path: Path, staleness: int
) -> None:
    loop = Loop(tmp_path, make_config(staleness=staleness, num_steps=4), num_workers=1)
    loop.max_restarts = 1
    loop.workers[0].fails_after = 7
    await loop.run()
    assert [row["policy_version"] for row in loop.rows] == [0, 1, 2, 3, 4]
    diary = [entry for entry in loop.world.diary if entry[0] in ("restart", "publish", "reconnect")]
    restart = diary.index(("restart", 0))
    version = diary[restart - 1][1]
    assert diary[restart + 1] == ("reconnect", 0, "tcp://rollout-0")
    assert diary[restart + 2] in [("publish", version), ("publish", version + min(staleness, 1))], "or the step's own"
    assert all(entry[2] >= 0 for entry in loop.world.diary if entry[0] == "sample"), "dummy weights never sample"
    assert sum(row["rollout/restarts"] or 0 for row in loop.rows) == 1
    assert sum(row["rollout/recoveries"] or 0 for row in loop.rows) == 1
    assert {row["rollout/recovery_read_s"] for row in loop.rows} == {None}


async def test_an_only_worker_that_dies_twice_while_a_batch_waits_is_published_to_twice(tmp_path: Path) -> None:
    loop = Loop(tmp_path, make_config(), num_workers=1)
    loop.max_restarts, restart, num_left = 2, loop.restart, [0, None]
    loop.workers[0].fails_after = 7

    async def dies_at_once_at_first(index: int) -> FakeWorker:
        worker = await restart(index)
        worker.fails_after = num_left.pop(0)
        return worker

    loop.restart = dies_at_once_at_first  # type: ignore[method-assign]
    await loop.run()
    assert [row["policy_version"] for row in loop.rows] == [0, 1, 2, 3, 4]
    (row,) = (row for row in loop.rows if row["rollout/recoveries"])
    assert loop.controller is not None
    recoveries = loop.controller.services.supervisor.roster.recoveries
    assert row["rollout/recoveries"] == 2 and row["rollout/down_s"] == max(one.down_s for one in recoveries)


async def test_worker_that_recovers_from_its_peer_costs_the_trainer_one_introduction(tmp_path: Path) -> None:
    loop = Loop(tmp_path, make_config(num_steps=6))
    loop.max_restarts = 1
    loop.workers[1].fails_after = 3
    await loop.run()
    publishes = [entry for entry in loop.world.diary if entry[0] == "publish"]
    assert [entry[1] for entry in publishes] == list(range(7)), "no publish for the recovery's sake"
    assert [entry for entry in loop.world.diary if entry[0] == "reconnect"] == [("reconnect", 1, "tcp://rollout-1")]
    assert loop.rows[-1]["rollout/replicas_serving"] == 2
    assert sum(row["rollout/groups_failed"] for row in loop.rows[1:]) >= 1
    assert [len(samples) for _, samples in loop.trainer.trained] == [6] * 6, "its groups had a second try"
    assert sum(row["rollout/recoveries"] or 0 for row in loop.rows) == 1
    for row in loop.rows:  # seconds stand in the row of their recovery, and in no later one
        assert (row["rollout/down_s"] is not None) == bool(row["rollout/recoveries"])
        assert row["rollout/recovery_read_s"] == (0.5 if row["rollout/recoveries"] else None)


async def test_restarted_worker_with_another_layout_is_refused_and_the_others_commit(tmp_path: Path) -> None:
    loop = Loop(tmp_path, make_config(num_steps=6))
    loop.max_restarts = 1
    loop.workers[1].fails_after = 3
    loop.trainer.refuses_reconnect = {1}
    await loop.run()
    assert loop.rows[-1]["rollout/replicas_serving"] == 1
    assert [row["step"] for row in loop.rows] == list(range(7))
    assert loop.trainer.excluded[-1] == (6, [1])


async def test_resumed_run_ends_like_an_uninterrupted_one(tmp_path: Path) -> None:
    """One row a step and no prompt skipped, although rows 3 and 4 were written after the checkpoint."""
    config = make_config(staleness=1, num_steps=6, epochs_per_step=2)
    for folder in ("whole", "parts"):
        (tmp_path / folder).mkdir()
    whole, first = Loop(tmp_path / "whole", config), Loop(tmp_path / "parts", config)
    await whole.run()

    async def dies_at_version_4() -> None:
        if first.world.version == 4:
            raise ConnectionError("power cut")

    first.trainer.before["publish"] = dies_at_version_4
    with pytest.raises(ConnectionError):
        await first.run()
    assert [row["step"] for row in first.rows] == [0, 1, 2, 3, 4]

    second = Loop(tmp_path / "parts", config, resume_step=2)
    await second.run()
    assert [row["step"] for row in second.rows] == list(range(7))
    assert [row["policy_version"] for row in second.rows] == list(range(7))
    assert second.trainer.trained[0][0] == 2
    assert whole.prompts.cursor >= 18 and second.prompts.cursor >= 18
    used = {e[1] for loop in (first, second) for e in loop.world.diary if e[0] == "sample" and e[1] < 1000}
    assert set(range(18)) <= used, "no prompt is skipped by a resume"
    orders = [loop.controller._shuffle_rng.bit_generator.state for loop in (whole, second)]
    assert orders[0] == orders[1] != first.controller._shuffle_rng.bit_generator.state


async def test_an_evaluation_in_which_every_reward_fails_is_no_success(tmp_path: Path) -> None:
    loop = Loop(tmp_path, make_config(num_steps=0, run={"eval_every_steps": 1}))
    loop.rewards.fails = lambda: True
    with pytest.raises(TrainingStopped, match=r"reward exact_match failed on every response of 2 groups.*start again"):
        await loop.run()
