"""Locks: a complete checkpoint is sent beside the run, the newest first, and none is lost to what fails meanwhile; what
a store is asked for is answered in time or given up with a cure, and stays in its folder.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest.mock import Mock

import pytest
from fsspec import filesystem
from fsspec.implementations.local import LocalFileSystem

from slipstream.conf.errors import ConfigError
from slipstream.conf.failures import in_daemon_thread
from slipstream.conf.json_files import JsonObject
from slipstream.conf.load import load_run_config
from slipstream.conf.schema import RunSection
from slipstream.orchestrator.checkpoints import object_store
from slipstream.orchestrator.checkpoints.loop_state import BufferState, RunState
from slipstream.orchestrator.checkpoints.object_store import CheckpointUploads, ObjectStore
from slipstream.orchestrator.checkpoints.run_checkpoint import (
    CheckpointStore,
    checkpoints_of,
    complete_checkpoints,
    fingerprint,
    step_of,
)
from slipstream.orchestrator.cli.main import main
from slipstream.orchestrator.errors import CheckpointError, ObjectStoreError, RunTakenOver
from slipstream.orchestrator.files.run_folder import RunFolder, open_run_folder, write_description

OPTIONS = ["experiment=quickstart", "cluster.dashboard=false"]


@pytest.fixture
def remote(tmp_path: Path) -> ObjectStore:
    return ObjectStore(f"file://{tmp_path}/store/run-1")


@pytest.fixture
def checkpoints(tmp_path: Path, remote: ObjectStore) -> CheckpointStore:
    options = fingerprint(load_run_config(OPTIONS))
    return CheckpointStore(tmp_path / "run-1" / "checkpoints", keep=1, options=options, remote=remote)


def write(checkpoints: CheckpointStore, step: int) -> Path:
    partial = checkpoints.begin(step)
    (partial / "trainer" / "rank-0.safetensors").write_bytes(bytes(1000))
    return checkpoints.finish(partial, RunState(step, step, {"epoch": 0}, {}, BufferState()))


def send_with(checkpoints: CheckpointStore, *steps: int) -> None:
    """Write checkpoints of these steps, and send what is not there."""
    checkpoints.begin_sending()
    for step in steps:
        write(checkpoints, step)
    checkpoints.finish_sending()


def record_of(checkpoints: CheckpointStore) -> dict[str, object]:
    return json.loads((checkpoints.folder / "remote.json").read_text())


def test_the_newest_that_waits_is_sent_and_what_is_being_sent_stays_on_disk(
    checkpoints: CheckpointStore, remote: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_sending, may_go_on, sent = threading.Event(), threading.Event(), []
    send = ObjectStore.send

    def slow(store: ObjectStore, path: Path, attempt: Callable[[Callable[[], None]], None]) -> None:
        sent.append(step_of(path))
        is_sending.set()
        assert may_go_on.wait(30)
        send(store, path, attempt)

    monkeypatch.setattr(ObjectStore, "send", slow)
    checkpoints.begin_sending()
    assert record_of(checkpoints) == {"url": remote.url, "step": None, "problem": ""}
    write(checkpoints, 1)
    assert is_sending.wait(30)
    for step in (2, 3, 4):
        write(checkpoints, step)
    assert [path.name for path in sorted(checkpoints.folder.glob("step-*"))] == ["step-000001", "step-000004"]
    may_go_on.set()
    checkpoints.finish_sending()
    assert sent == [1, 4]
    assert remote.steps() == [4]
    assert record_of(checkpoints) == {"url": remote.url, "step": 4, "problem": ""}
    alone = CheckpointStore(checkpoints.folder, keep=1, options={})
    for _ in range(2):  # the second time there is no record to remove
        alone.begin_sending()
        assert not (checkpoints.folder / "remote.json").exists(), "it is sent nowhere any more"


def test_a_spared_checkpoint_stays_there_too(checkpoints: CheckpointStore, remote: ObjectStore) -> None:
    send_with(checkpoints, 1)
    checkpoints.spared.add(1)
    for step in (2, 3):
        send_with(checkpoints, step)
    assert remote.steps() == [1, 3]


def test_what_is_left_of_a_checkpoint_that_was_half_removed_there_is_none(
    checkpoints: CheckpointStore, remote: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is newer than all that are complete is being sent, and what has another name is not ours."""
    for step in (1, 2):
        checkpoints.spared.add(step)
        send_with(checkpoints, step)
    with monkeypatch.context() as away, pytest.raises(ObjectStoreError):
        away.setattr(LocalFileSystem, "rm", Mock(side_effect=OSError("the network is away")))
        remote.prune(keep=1, spared=())
    assert remote.steps() == [2]
    others = ["000001", "notes-of-step-000001", "step-000003", "step-1-of-mine"]
    for name in others:
        (tmp_path / "store" / "run-1" / name).mkdir()
    remote.prune(keep=1, spared=())
    assert remote.folders() == sorted(["owner", "step-000002", *others])


def test_where_another_process_goes_on_nothing_is_sent_or_removed(
    checkpoints: CheckpointStore, remote: ObjectStore, tmp_path: Path
) -> None:
    owner = tmp_path / "store" / "run-1" / "owner"
    owner.parent.mkdir(parents=True)
    owner.write_text("process 6 on elsewhere")
    checkpoints.folder.parent.mkdir()
    RunFolder(checkpoints.folder.parent).metrics.touch()  # of its steps until then
    send_with(checkpoints, 1)
    checkpoints.begin_sending()
    owner.write_text("process 7 on elsewhere")
    for send in (lambda: write(checkpoints, 2), lambda: remote.prune(keep=0, spared=())):
        with pytest.raises(RunTakenOver, match="process 7 on elsewhere goes on with the run in file://"):
            send()
    checkpoints.finish_sending()
    assert remote.steps() == [1]
    newest = checkpoints.newest()
    assert newest is not None and step_of(newest) == 2, "it is on this machine's disk"
    with pytest.raises(RunTakenOver):
        remote.send(newest, lambda send: send())
    assert checkpoints.to_resume("run-1") == newest, "whoever resumes has it from then on"
    remote.send(newest, lambda send: send())
    assert remote.steps() == [1, 2]


def test_a_file_is_tried_again_and_then_given_up_for_the_next_checkpoint(
    checkpoints: CheckpointStore, remote: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "PAUSES_S", (0.0, 0.0))
    tries, put, failing = [], ObjectStore._put, 3  # pyright: ignore[reportPrivateUsage]

    def fails(store: ObjectStore, path: Path, name: str) -> None:
        tries.append(name)
        if len(tries) <= failing:
            raise ObjectStoreError("the network is away")
        put(store, path, name)

    monkeypatch.setattr(ObjectStore, "_put", fails)
    send_with(checkpoints, 1)
    assert tries == ["step-000001/groups.jsonl"] * 3
    assert record_of(checkpoints)["problem"] == "the network is away"
    tries.clear()
    failing = 2
    send_with(checkpoints)  # it is not there: sent again
    assert tries[:3] == ["step-000001/groups.jsonl"] * 3 and tries[-1] == "step-000001/manifest.json"
    assert remote.steps() == [1]
    tries.clear()
    send_with(checkpoints)  # it is there
    assert not tries and record_of(checkpoints)["step"] == 1
    write(checkpoints, 2)  # nobody sends any more
    send_with(checkpoints)
    assert remote.steps() == [2]


def test_a_store_that_hangs_does_not_hold_up_a_checkpoint(
    checkpoints: CheckpointStore, remote: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, check_own = threading.Event(), ObjectStore.check_own

    def hangs(store: ObjectStore) -> None:
        assert answers.wait(30)
        check_own(store)

    monkeypatch.setattr(ObjectStore, "check_own", hangs)
    monkeypatch.setattr(object_store, "CHECK_S", 0.01)
    checkpoints.begin_sending()
    write(checkpoints, 1)
    assert not answers.is_set(), "it was not waited for"
    answers.set()
    checkpoints.finish_sending()
    assert remote.steps() == [1]


def test_a_store_that_hangs_does_not_keep_a_run_from_ending(
    remote: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(ObjectStore, "send", lambda *_: answers.wait(60))
    monkeypatch.setattr(object_store, "_SAY_EVERY_S", 0.01)
    uploads = CheckpointUploads(remote, tmp_path / "remote.json", keep=1, spared=set[int])
    uploads.begin([])
    uploads.offer(tmp_path / "step-000001")
    try:
        in_daemon_thread(uploads.close, 0.1).result(30)
        assert uploads.needs(tmp_path / "step-000001"), "it was given up while it was being sent"
    finally:
        answers.set()


def test_what_was_sent_may_go_from_the_disk(
    remote: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ObjectStore, "send", lambda *_: None)
    uploads = CheckpointUploads(remote, tmp_path / "remote.json", keep=1, spared=set[int])
    uploads.begin([])
    uploads.offer(tmp_path / "step-000001")
    for _ in range(3000):
        if uploads.needs(tmp_path / "step-000001"):
            time.sleep(0.01)
    assert not uploads.needs(tmp_path / "step-000001")
    uploads.close()


def test_a_checkpoint_that_is_there_is_said_to_be_there_although_older_ones_cannot_be_removed(
    checkpoints: CheckpointStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ObjectStore, "prune", Mock(side_effect=ObjectStoreError("nothing may be removed")))
    send_with(checkpoints, 1)
    assert record_of(checkpoints)["step"] == 1 and record_of(checkpoints)["problem"] == ""
    assert "nothing may be removed" in caplog.text and "disk alone" not in caplog.text


def test_a_new_run_does_not_mix_its_checkpoints_with_those_of_another_one_of_its_name(
    checkpoints: CheckpointStore, remote: ObjectStore, tmp_path: Path
) -> None:
    """Two machines begin a run within one second. The second one would take the place of the first one, which would
    learn of it, and end, at its first checkpoint.
    """
    other = CheckpointStore(tmp_path / "elsewhere" / "run-1" / "checkpoints", keep=1, options={}, remote=remote)
    checkpoints.begin_sending()
    with pytest.raises(ConfigError, match=r"another run of this name, of process .*; start this one again"):
        other.begin_sending()
    write(checkpoints, 1)
    checkpoints.finish_sending()
    with pytest.raises(ConfigError, match=r"another run of this name, up to step 1; choose another run\.name"):
        other.begin_sending()
    remote.check_own()  # it is the first one's still


def fill(folder: Path, options: JsonObject, place: bytes, steps: Mapping[int, bool]) -> CheckpointStore:
    """A run's checkpoints that hold a place's name; False: a byte is another one."""
    (folder / "checkpoints").mkdir(parents=True)
    store = CheckpointStore(folder / "checkpoints", keep=9, options=options)
    for step, is_whole in steps.items():
        partial = store.begin(step)
        (partial / "trainer" / "rank-0.safetensors").write_bytes(place)
        path = store.finish(partial, RunState(step, step, {"drawn": step}, {}, BufferState()))
        if not is_whole:
            (path / "trainer" / "rank-0.safetensors").write_bytes(place.upper())
    return store


@pytest.mark.parametrize(
    ("here", "there", "step", "place"),
    [
        ({}, {1: True, 3: True}, 3, b"there"),
        ({2: True}, {1: True, 3: True, 4: True}, 4, b"there"),
        ({2: True}, {3: True}, 3, b"there"),
        ({3: True}, {3: True}, 3, b"here"),
        ({3: True, 4: False}, {3: True}, 3, b"here"),
        ({4: True}, {3: True}, 4, b"here"),
        ({2: True, 3: False}, {3: True}, 3, b"there"),
        ({}, {1: True, 2: True, 3: False}, 2, b"there"),
        ({2: True}, {1: True, 3: False}, 2, b"here"),
        ({}, {1: False}, None, b""),
    ],
)
def test_a_resume_goes_on_from_the_newest_whole_checkpoint_of_both_places(
    here: dict[int, bool], there: dict[int, bool], step: int | None, place: bytes,
    remote: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    options = fingerprint(load_run_config(OPTIONS))
    sent = fill(tmp_path / "sent", options, b"there", there)
    (tmp_path / "sent" / "metrics.jsonl").write_text("there")
    for number in there:
        remote.send(sent.folder / f"step-{number:06d}", lambda put: put())
    folder = fill(tmp_path / "run-1", options, b"here", here).folder
    store = CheckpointStore(folder, keep=9, options=options, remote=remote)
    is_there = place == b"there"
    if all(there.values()):
        found = store.step_to_resume("x")
        assert found.prompts == {"drawn": step}
        assert (found.step, len(found.damaged)) == (step, 0 if is_there else list(here.values()).count(False))
    if is_there:
        with monkeypatch.context() as away, pytest.raises(ObjectStoreError):  # the next resume makes up for it
            away.setattr(ObjectStore, "take_files", Mock(side_effect=ObjectStoreError("the network is away")))
            store.to_resume("x")
    if step is None:
        with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
            store.to_resume("x")
        return
    assert store.to_resume("x") == folder / f"step-{step:06d}" == store.newest()
    assert (folder / f"step-{step:06d}" / "trainer" / "rank-0.safetensors").read_bytes() == place
    assert (tmp_path / "run-1" / "metrics.jsonl").exists() == is_there
    assert not list(folder.glob(".step-*"))


@pytest.mark.parametrize("best", [1, 2, 3, 9, None])
def test_a_resume_on_another_machine_has_the_best_checkpoint_too(
    best: int | None, remote: ObjectStore, tmp_path: Path
) -> None:
    """That of step 1 is read; step 2 has a damaged one, the newest is fetched once, and there is none of step 9."""
    sent = fill(tmp_path / "sent", {}, b"there", {1: True, 2: False, 3: True})
    (sent.folder / "best.json").write_text(json.dumps({"step": best}))
    for step in (1, 2, 3):
        remote.send(sent.folder / f"step-{step:06d}", lambda put: put())
    store = CheckpointStore(tmp_path / "run-1" / "checkpoints", keep=1, options={}, remote=remote)
    assert step_of(store.to_resume("x")) == 3
    assert [step_of(path) for path in complete_checkpoints(store.folder)] == ([1, 3] if best == 1 else [3])
    assert not list(store.folder.glob(".step-*"))


def test_resume_takes_a_url(
    remote: ObjectStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    above = remote.url.rpartition("/")[0]
    config = load_run_config([*OPTIONS, "run.seed=7", f"run.checkpoint_dir={above}/"])
    folder = RunFolder(tmp_path / "run-1")
    folder.root.mkdir()
    write_description(folder, config, [])
    checkpoints = checkpoints_of(config, folder)
    send_with(checkpoints, 3)
    assert record_of(checkpoints)["url"] == remote.url, "an object store takes a double slash for a folder"
    assert checkpoints.to_resume(None) is None
    elsewhere = tmp_path / "another machine"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert main(["resume", remote.url, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert f"go to {above}, too" in shown and "goes on from step 3\n" in shown
    assert not list(elsewhere.iterdir())
    for words, message in (
        (["resume", above], "holds no config.yaml of a run; it has: run-1"),
        (["resume", "nothing://bucket/run"], "Protocol not known: nothing; give s3://"),
        (["train", "--dry-run", *OPTIONS, "run.checkpoint_dir=no://b"], "run.checkpoint_dir=no://b cannot be written"),
        (["resume", remote.url, "run.checkpoint_dir=null"], "run.checkpoint_dir has no effect with slipstream resume"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err
    other = checkpoints_of(load_run_config([*OPTIONS, f"run.checkpoint_dir={above}"]), RunFolder(elsewhere / "run-1"))
    with pytest.raises(CheckpointError, match=r"run\.seed: 7 there, 0 now"):
        other.step_to_resume(remote.url)
    section = RunSection(resume=remote.url, checkpoint_dir=above)
    assert open_run_folder(section, now=None).root == elsewhere / "runs" / "run-1"  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"checkpoint_dir": "/mnt/disk"}, "must be a URL such as s3://bucket/runs or file:///mnt/disk/runs"),
        ({"checkpoint_dir": "sftp://me:secret@host/runs"}, "holds a password"),
        ({"resume": "s3://bucket/runs/run-1"}, "give run.checkpoint_dir=s3://bucket/runs"),
        ({"resume": "s3://bucket/runs/run-1", "checkpoint_dir": "s3://other"}, "give run.checkpoint_dir=s3://bucket/"),
    ],
)
def test_options_that_cannot_be(words: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        RunSection(**words)  # pyright: ignore[reportArgumentType]
    assert "secret" not in str(refused.value)


def test_a_store_that_says_nothing_is_named(remote: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()

    def hangs(files: LocalFileSystem, path: str) -> bool:
        answers.wait(30)
        return False

    monkeypatch.setattr(LocalFileSystem, "exists", hangs)
    monkeypatch.setattr(object_store, "ANSWER_S", 0.01)
    with pytest.raises(ObjectStoreError, match=r"store/run-1 has not answered within 0 s"):
        remote.text("config.yaml")
    answers.set()
    monkeypatch.setattr(object_store, "ANSWER_S", 30)
    assert remote.text("config.yaml") is None


@pytest.mark.parametrize(
    ("error", "cure"),
    [
        (
            PermissionError("denied"),
            "PermissionError: denied; its credentials must be allowed to list, read, write and",
        ),
        (FileNotFoundError("none"), "FileNotFoundError: none; a run makes no bucket"),
        (OSError("the network is away"), "OSError: the network is away$"),
    ],
)
def test_what_a_driver_raises_is_told_with_what_to_do(
    error: OSError, cure: str, remote: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalFileSystem, "exists", Mock(side_effect=error))
    with pytest.raises(ObjectStoreError, match=rf"store/run-1 cannot be read \(config\.yaml\): {cure}"):
        remote.text("config.yaml")


def test_the_name_of_a_run_is_no_pattern(tmp_path: Path) -> None:
    for name in ("run[1]", "run*", "run-1"):
        (tmp_path / name / f"step-{len(name):06d}").mkdir(parents=True)
        (tmp_path / name / f"step-{len(name):06d}" / "manifest.json").touch()
        assert ObjectStore(f"file://{tmp_path}/{name}").steps() == [len(name)]
    assert ObjectStore(f"file://{tmp_path}/run*").steps() == [4]


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_of_a_run_whose_name_is_a_pattern_only_its_own_checkpoints_are_removed(scheme: str, tmp_path: Path) -> None:
    one, other = (ObjectStore(f"{scheme}://{tmp_path}/{name}") for name in ("run-[12]", "run-1"))
    for store in (one, other):
        store.check()
        store.claim()
        for step in (1, 2):
            checkpoint = tmp_path / "here" / f"step-{step:06d}"
            checkpoint.mkdir(parents=True, exist_ok=True)
            for name in ("manifest.json", "rank-0.safetensors"):
                (checkpoint / name).touch()
            store.send(checkpoint, lambda put: put())
    one.prune(keep=1, spared=())
    left = [len(filesystem(scheme).find(store.url.partition("://")[2])) for store in (one, other)]
    assert (one.steps(), other.steps(), left) == ([2], [1, 2], [3, 5]), "owner, and two files of each checkpoint"


def test_a_manifest_that_names_files_elsewhere_is_refused(remote: ObjectStore, tmp_path: Path) -> None:
    folder = tmp_path / "store" / "run-1" / "step-000001"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"files": {"../../secret": {}}}))
    with pytest.raises(ObjectStoreError, match="outside of its folder"):
        remote.take(1, tmp_path / "here")
