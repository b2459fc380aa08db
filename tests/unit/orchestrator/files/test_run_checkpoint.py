"""Locks: a checkpoint is complete or absent, comes back exactly, and is refused when damaged or of another run."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conf.schema import RunConfig, RunSection
from orchestrator.errors import CheckpointError
from orchestrator.files.run_checkpoint import BufferState, CheckpointStore, RunState, fingerprint, step_of
from rollout.types import Group, Prompt, Rollout, Routes, Turn


def make_state(step: int = 7) -> RunState:
    prompt = Prompt(3, (1, 2), "k =", {"answer": "k", "level": 2})
    rollouts = [Rollout([5, 2], [-0.1, -1.0 / 3.0], [6, 7], "a", "stop"), Rollout([5], [-0.3], [6], "", "length")]
    return RunState(
        step=step,
        policy_version=step - 1,
        prompts={"epoch": 1, "position": 9},
        shuffle_rng=dict(np.random.default_rng(5).bit_generator.state),
        buffer=BufferState(
            step, {30: Group(prompt, rollouts, [0.1 + 0.2, None], [{"math": 0.3}, {"math": None}])}, {31: prompt}
        ),
    )


def make_store(folder: Path, config: RunConfig | None = None, keep: int = 2) -> CheckpointStore:
    return CheckpointStore(folder / "checkpoints", keep=keep, options=fingerprint(config or RunConfig()))


def write(store: CheckpointStore, step: int = 7) -> Path:
    partial = store.begin(step)
    (partial / "trainer" / "rank0.bin").write_bytes(bytes(range(256)) * 40)
    return store.finish(partial, make_state(step))


def test_state_comes_back_exactly(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    state = store.read(write(store))
    assert state == make_state()
    rng = np.random.default_rng(0)
    rng.bit_generator.state = state.shuffle_rng
    assert rng.random() == np.random.default_rng(5).random()


def test_episodes_come_back_exactly(tmp_path: Path) -> None:
    routes = Routes(np.arange(8, dtype=np.uint8).reshape(2, 2, 2), np.array([True, False]))
    turns = (Turn(None, [1, 2], 1, "start", "given", "said", routes), Turn(0, [9], 1, "fork", "more", "so"))
    episode = Rollout([5, 6], [-0.1, -0.2], [3, 4], "so", "stop", 1, None, turns, "raised", 2.5)
    prompt = Prompt(3, (1, 2), "k =", {"lines": ["a"]}, [{"role": "user", "content": "k ="}])
    state, store = make_state(), make_store(tmp_path)
    state.buffer.groups[32] = Group(prompt, [episode], [None])
    found = store.read(store.finish(store.begin(7), state)).buffer.groups[32]
    assert found.prompt == prompt
    (back,) = found.rollouts
    plain = [replace(rollout, turns=tuple(replace(turn, routes=None) for turn in rollout.turns)) for rollout in
             (back, episode)]  # fmt: skip
    assert plain[0] == plain[1]
    assert back.turns[0].routes is not None
    assert np.array_equal(back.turns[0].routes.experts, routes.experts)
    assert np.array_equal(back.turns[0].routes.is_recorded, routes.is_recorded)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_routes_of_a_finished_group_come_back_exactly(tmp_path: Path, dtype: type) -> None:
    routes = Routes(np.arange(24, dtype=dtype).reshape(3, 4, 2), np.array([True, False, True]))
    state, store = make_state(), make_store(tmp_path)
    state.buffer.groups[30].rollouts[0] = replace(state.buffer.groups[30].rollouts[0], routes=routes)
    found, without = store.read(store.finish(store.begin(7), state)).buffer.groups[30].rollouts
    assert found.routes is not None and without.routes is None
    assert found.routes.experts.dtype == dtype
    assert np.array_equal(found.routes.experts, routes.experts)
    assert np.array_equal(found.routes.is_recorded, routes.is_recorded)


def test_newest_complete_one_is_resumed_and_older_ones_are_removed(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep=2)
    for step in (5, 10, 15):
        write(store, step)
    store.begin(20)  # a crash while writing
    assert store.newest() == tmp_path / "checkpoints" / "step-000015"
    assert [p.name for p in sorted((tmp_path / "checkpoints").glob("step-*"))] == ["step-000010", "step-000015"]
    assert step_of(store.newest()) == 15


def test_crash_before_the_rename_leaves_the_previous_one(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    write(store, 5)
    partial = store.begin(10)
    (partial / "trainer" / "rank0.bin").write_bytes(b"half")
    assert store.newest() == tmp_path / "checkpoints" / "step-000005"
    write(store, 10)  # the resumed run reaches the step again
    assert step_of(store.newest()) == 10


@pytest.mark.parametrize("name", ["trainer/rank0.bin", "state.json", "groups.jsonl"])
def test_one_flipped_bit_is_refused_and_named(tmp_path: Path, name: str) -> None:
    store = make_store(tmp_path)
    file = write(store) / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match=f"damaged: {name}"):
        store.read(store.newest())


def test_a_damaged_newest_one_is_named_and_the_one_before_it_resumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store(tmp_path, keep=3)
    for step in (5, 10, 15):
        write(store, step)
    (tmp_path / "checkpoints" / "step-000015" / "state.json").write_text("{}")
    (tmp_path / "checkpoints" / "step-000010" / "manifest.json").write_text("{}")
    path, damaged = store.newest_whole("runs/x")
    assert (step_of(path), [step_of(other) for other in damaged]) == (5, [15, 10])
    assert store.newest() == tmp_path / "checkpoints" / "step-000015", "looking changes nothing"
    assert store.to_resume("runs/x") == path
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "step-000015 is damaged: state.json" in caplog.text
    assert "going on from the checkpoint before it, step-000005" in caplog.text
    assert store.read(path).step == 5
    assert write(store, 10) == store.newest(), "the resumed run reaches the step again"
    (path / "trainer" / "rank0.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"is damaged: trainer/rank0\.bin"):
        make_store(tmp_path).read(path)


def test_a_folder_without_its_manifest_is_named_like_any_damaged_one(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep=3)
    for step in (5, 10):
        write(store, step)
    folder = tmp_path / "checkpoints"
    (folder / "step-000010" / "manifest.json").unlink()
    shutil.copytree(folder / "step-000005", folder / "step-000005-of-mine")  # no name of ours: nobody looks into it
    path, damaged = store.newest_whole("runs/x")
    assert path.name == "step-000005"
    assert list(damaged.values()) == [
        f"{folder}/step-000010 lacks manifest.json, without which nothing says that it is whole"
    ]
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds no whole checkpoint: .*step-000010 lacks .*step-000005 lacks"):
        store.newest_whole("runs/x")


def test_missing_file_is_refused_and_named(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    (write(store) / "trainer" / "rank0.bin").unlink()
    with pytest.raises(CheckpointError, match=r"lacks trainer/rank0\.bin"):
        store.read(store.newest())


def test_other_options_are_refused_and_named_but_length_may_change(tmp_path: Path) -> None:
    path = write(make_store(tmp_path))
    longer = RunConfig(run=RunSection(num_steps=9999, eval_every_steps=1))
    assert make_store(tmp_path, longer).read(path).step == 7
    config = RunConfig()
    other = replace(config, trainer=replace(config.trainer, lora=replace(config.trainer.lora, rank=8)))
    with pytest.raises(CheckpointError, match=r"trainer\.lora\.rank: 16 there, 8 now"):
        make_store(tmp_path, other).read(path)


def test_nothing_to_resume_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    assert make_store(tmp_path).to_resume(None) is None
    with pytest.raises(CheckpointError, match=r"runs/x holds no complete checkpoint"):
        make_store(tmp_path).to_resume("runs/x")
