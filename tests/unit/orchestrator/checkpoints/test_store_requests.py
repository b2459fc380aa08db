"""Locks: what an object store is asked for is answered in time or given up with a cure, and stays in its folder."""

import json
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
from fsspec.implementations.local import LocalFileSystem

from slipstream.orchestrator.checkpoints import object_store
from slipstream.orchestrator.checkpoints.object_store import ObjectStore
from slipstream.orchestrator.errors import ObjectStoreError


@pytest.fixture
def remote(tmp_path: Path) -> ObjectStore:
    return ObjectStore(f"file://{tmp_path}/store/run-1")


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


def test_a_manifest_that_names_files_elsewhere_is_refused(remote: ObjectStore, tmp_path: Path) -> None:
    folder = tmp_path / "store" / "run-1" / "step-000001"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"files": {"../../secret": {}}}))
    with pytest.raises(ObjectStoreError, match="outside of its folder"):
        remote.take(1, tmp_path / "here")
