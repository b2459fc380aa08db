"""Locks: a checkpoint is complete or absent, comes back exactly, and is refused when damaged or of another run."""

import errno
import fcntl
import json
import os
import shutil
import time
import zlib
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases.run_states import make_state, make_store, write

from slipstream.conf.schema import RunConfig, RunSection
from slipstream.orchestrator.checkpoints.run_checkpoint import (
    checkpoints_of,
    complete_checkpoints,
    hold,
    named_checkpoints,
    step_of,
)
from slipstream.orchestrator.errors import CheckpointError
from slipstream.orchestrator.files.run_folder import RunFolder
from slipstream.rollout.types import Group, Prompt, Rollout, Routes, Turn


def test_a_resume_reads_the_files_once_and_again_when_one_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(make_store(tmp_path))
    for file in path.rglob("*"):
        os.utime(file, (1e9, 1e9))
    read: list[int] = []
    crc32 = zlib.crc32
    monkeypatch.setattr(zlib, "crc32", lambda chunk, crc=0: read.append(len(chunk)) or crc32(chunk, crc))
    for _ in range(2):  # the check before the start, and the run
        store = make_store(tmp_path)
        assert store.newest_whole("runs/x")[0] == path and store.read(path).step == 7
    num_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and file.name != "manifest.json")
    assert sum(read) == num_bytes
    (path / "trainer" / "rank0.bin").write_bytes(bytes(range(256)) * 39 + bytes(256))
    os.utime(path / "trainer" / "rank0.bin", (1.1e9, 1.1e9))  # as what is copied in its place
    with pytest.raises(CheckpointError, match="its manifest says"):
        make_store(tmp_path).newest_whole("runs/x")


def test_a_file_that_may_have_changed_within_a_tick_of_the_clock_is_read_again(tmp_path: Path) -> None:
    """A file system's clock can stand still from one write to the next: size and time are those of before."""
    file = write(make_store(tmp_path)) / "trainer" / "rank0.bin"
    now = time.time_ns()
    os.utime(file, ns=(now, now))
    make_store(tmp_path).newest_whole("runs/x")
    file.write_bytes(bytes(range(256)) * 39 + bytes(256))
    os.utime(file, ns=(now, now))
    with pytest.raises(CheckpointError, match=r"rank0\.bin is .* its manifest says"):
        make_store(tmp_path).newest_whole("runs/x")


def test_state_comes_back_exactly(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    state = store.read(write(store))
    assert state == make_state()
    rng = np.random.default_rng(0)
    rng.bit_generator.state = state.shuffle_rng
    assert rng.random() == np.random.default_rng(5).random()


def test_newest_complete_one_is_resumed_and_older_ones_are_removed(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep=2)
    for step in (5, 10, 15):
        write(store, step)
    store.begin(20)  # a crash while writing
    (store.folder / "step-000025").write_text("somebody's note")
    (store.folder / "step-last").mkdir()
    (store.folder / "step-000001").mkdir()  # of a copy that broke off: it counts for nothing
    assert store.newest() == tmp_path / "checkpoints" / "step-000015"
    assert [path.name for path in named_checkpoints(store.folder)] == [f"step-0000{step}" for step in ("01", 10, 15)]
    assert step_of(store.newest()) == 15
    write(store, 20)  # the resumed run reaches the step again
    assert step_of(store.newest()) == 20


def test_a_run_keeps_as_many_as_it_was_told(tmp_path: Path) -> None:
    store = checkpoints_of(RunConfig(run=RunSection(keep_checkpoints=3)), RunFolder(tmp_path))
    for step in (1, 2, 3, 4):
        write(store, step)
    assert [step_of(path) for path in complete_checkpoints(tmp_path / "checkpoints")] == [2, 3, 4]


@pytest.mark.parametrize("name", ["trainer/rank0.bin", "state.json", "groups.jsonl"])
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_a_flipped_bit_in_any_chunk_of_a_file_is_refused_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, place: float
) -> None:
    monkeypatch.setattr("slipstream.orchestrator.checkpoints.manifest._CHUNK_BYTES", 100)
    store = make_store(tmp_path)
    file = write(store) / name
    content = bytearray(file.read_bytes())
    content[int(place * (len(content) - 1))] ^= 1
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
    (path / "trainer" / "rank0.bin").unlink()
    with pytest.raises(CheckpointError, match=r"lacks trainer/rank0\.bin"):
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
    for find in (store.newest_whole, store.to_resume):
        said = r"holds no whole checkpoint: .*step-000010 lacks .*step-000005 lacks"
        with pytest.raises(CheckpointError, match=said):
            find("runs/x")
    assert [step_of(one) for one in named_checkpoints(folder)] == [5, 10], "and none loses its name"


def test_a_file_that_cannot_be_read_is_named_and_the_checkpoint_before_it_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path, keep=2)
    before, newest = (write(store, step) for step in (5, 10))
    opened = Path.open

    def fails(path: Path, *given: Any, **more: Any) -> object:
        if path == newest / "trainer" / "rank0.bin":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return opened(path, *given, **more)

    monkeypatch.setattr(Path, "open", fails)
    path, damaged = store.newest_whole("runs/x")
    assert path == before
    said = f"{newest} is damaged: {newest}/trainer/rank0.bin cannot be read ({os.strerror(errno.EIO)})"
    assert damaged == {newest: said}


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_every_field_of_a_waiting_group_comes_back(tmp_path: Path, dtype: type) -> None:
    """A field that is added to one of these types needs a value here, and a place in the file."""
    routes = Routes(np.arange(24, dtype=dtype).reshape(3, 4, 2), np.array([True, False, True]))
    turn = Turn(0, [9], 1, "fork", "more", "so", routes)
    rollout = Rollout(
        [5, 6],
        [-0.1, -0.2],
        [3, 4],
        "so",
        "length",
        2,
        routes,
        (Turn(None, [1], 1, "start"), turn),
        "raised",
        2.5,
        [-1.0, -2.0],
    )
    prompt = Prompt(3, (1, 2), "k =", {"lines": ["a"]}, [{"role": "user", "content": "k ="}])
    group = Group(prompt, [rollout], [0.5], [{"math": 0.25}], ["42"])
    for value in (turn, rollout, prompt, group):
        for field in fields(value):
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            given = getattr(value, field.name)
            assert given is not None and (default is MISSING or given is not default), field.name
            assert isinstance(given, (Prompt, Routes)) or given or field.name == "parent", field.name
    state, store = make_state(), make_store(tmp_path)
    state.buffer.groups[40] = group
    state.buffer.in_flight[41] = prompt
    buffer = store.read(store.finish(store.begin(7), state)).buffer
    assert buffer.in_flight[41] == prompt
    assert buffer.num_batches == state.buffer.num_batches
    back = buffer.groups[40]
    assert (back.prompt, back.rewards, back.parts, back.answers) == (prompt, [0.5], [{"math": 0.25}], ["42"])
    np.testing.assert_equal(asdict(back), asdict(group))
    kept = (back.rollouts[0].routes, back.rollouts[0].turns[1].routes)
    assert [one and one.experts.dtype for one in kept] == [dtype, dtype]
    again = store.read(store.finish(store.begin(8), replace(state, step=8, buffer=buffer)))
    np.testing.assert_equal(asdict(again.buffer), asdict(buffer))


def test_a_checkpoint_is_durable_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file, every folder, the run's rows and, once it has its name, the folder that holds the name."""
    folder, synced = tmp_path / "checkpoints", []
    rows = ("config.yaml", "metrics.jsonl", "evaluations.jsonl", "timeline.jsonl", "samples.jsonl", "startup.jsonl")
    for name in rows:
        (tmp_path / name).touch()
    real = os.fsync

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((os.path.relpath(path, folder), (folder / "step-000007").exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write(make_store(tmp_path))
    partial = ".step-000007.partial"
    names = ("groups.jsonl", "manifest.json", "state.json", "trainer/rank0.bin", "trainer")
    expected = [*(f"{partial}/{name}" for name in names), partial, *(f"../{name}" for name in rows)]
    assert sorted(synced[:-1]) == sorted((path, False) for path in expected)
    assert synced[-1] == (".", True)


def test_what_a_crash_left_is_not_part_of_the_next_checkpoint(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    (store.begin(7) / "trainer" / "rank9.bin").write_bytes(b"half")
    assert list(store.begin(7).rglob("*")) == [store.folder / ".step-000007.partial" / "trainer"]
    store.discard_unfinished()
    assert list(store.folder.iterdir()) == []
    store.discard(store.folder / "not there")


def test_a_folder_that_lost_its_manifest_is_no_checkpoint_and_gives_its_name_away(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    path = write(store)
    (path / "manifest.json").unlink()
    (path / "left.bin").touch()
    assert store.newest() is None and store.of_step(7) is None
    assert write(store) == store.of_step(7) == path
    assert not (path / "left.bin").exists()
    assert store.of_step(8) is store.of_step(6) is None


def test_older_checkpoints_go_and_spared_ones_stay_and_held_ones_until_who_holds_them_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holds: list[int] = []
    os_open = os.open
    monkeypatch.setattr(os, "open", lambda *given, **more: holds.append(os_open(*given, **more)) or holds[-1])
    store = make_store(tmp_path, keep=2)
    store.spared = {1}
    assert hold(write(store, 0))
    monkeypatch.undo()
    with (store.folder / "step-000000" / "manifest.json").open() as another:
        fcntl.flock(another, fcntl.LOCK_SH | fcntl.LOCK_NB)  # a second one holds it as well, and waits for nobody
    for step in (1, 2, 3, 4):
        write(store, step)
    assert [step_of(path) for path in complete_checkpoints(store.folder)] == [0, 1, 3, 4]
    assert {path.name for path in store.folder.glob(".*")} == set() and not hold(store.folder / "step-000002")
    store.spared = set()
    os.close(holds[-1])
    store.prune()
    assert [step_of(path) for path in complete_checkpoints(store.folder)] == [3, 4]
    assert step_of(None) == 0


@pytest.mark.parametrize("given", [2, None])
def test_another_format_is_refused(tmp_path: Path, given: int | None) -> None:
    store = make_store(tmp_path)
    path = write(store)
    state = json.loads((path / "state.json").read_text())
    state = state | {"format": given} if given else {key: state[key] for key in state if key != "format"}
    (path / "state.json").write_text(json.dumps(state))
    files = {str(file.relative_to(path)): {"num_bytes": file.stat().st_size, "crc32": zlib.crc32(file.read_bytes())}
             for file in path.rglob("*") if file.is_file() and file.name != "manifest.json"}  # fmt: skip
    assert json.loads((path / "manifest.json").read_text()) == {
        "format": 1,
        "files": files | {"state.json": json.loads((path / "manifest.json").read_text())["files"]["state.json"]},
    }
    (path / "manifest.json").write_text(json.dumps({"format": 1, "files": files}))
    with pytest.raises(CheckpointError, match=f"has format {given}, this version reads 1"):
        store.read(path)
    for damage, problem in (("[]", "must hold a JSON object, got list"), ("{", "cannot be read"),
                            ('{"files": []}', "its manifest lists no files")):  # fmt: skip
        (path / "manifest.json").write_text(damage)
        with pytest.raises(CheckpointError, match=problem):
            store.read(path)


def test_a_damaged_checkpoint_moves_aside_also_where_one_was_before(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    for _ in range(2):
        write(store, 5)
        (write(store, 10) / "state.json").write_text("{}")
        assert step_of(store.to_resume("runs/x")) == 5
        assert (store.folder / "damaged-step-000010" / "manifest.json").exists()


def test_folders_of_a_containers_image_which_cannot_be_renamed_are_removed_and_put_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """overlayfs refuses it with EXDEV, unless a folder was made in the container itself."""
    store = make_store(tmp_path, keep=2)
    for step in (7, 8, 9):
        write(store, step)
    (store.folder / "step-000009" / "trainer" / "rank0.bin").write_bytes(b"damaged")
    image = {(store.folder / name).stat().st_ino for name in ("step-000008", "step-000009")}
    rename = os.rename

    def in_a_container(source: Path, target: Path) -> None:
        if Path(source).stat().st_ino in image:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source))
        rename(source, target)

    monkeypatch.setattr(os, "rename", in_a_container)
    assert step_of(store.to_resume("runs/x")) == 8
    assert (store.folder / "damaged-step-000009" / "manifest.json").is_file()
    for step in (9, 10):
        write(store, step)
    assert {path.name for path in store.folder.iterdir()} == {"step-000009", "step-000010", "damaged-step-000009"}


def test_nothing_to_resume_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    assert make_store(tmp_path).to_resume(None) is None
    with pytest.raises(CheckpointError, match=r"runs/x holds no complete checkpoint"):
        make_store(tmp_path).to_resume("runs/x")
