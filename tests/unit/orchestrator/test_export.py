"""What a run exports: whole or not at all, and of its last step."""

import errno
import os
from pathlib import Path

import pytest
from fakes.trainer import FakeTrainer
from fakes.world import World

from slipstream.conf.load import load_run_config
from slipstream.orchestrator.errors import RunTakenOver
from slipstream.orchestrator.files.run_folder import RunFolder
from slipstream.orchestrator.training import export_policy

CONFIG = load_run_config(["experiment=quickstart"])


class OnAFullDisk(FakeTrainer):
    """Writes one of the two files of an adapter."""

    async def export(self, folder: Path) -> None:
        await super().export(folder)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "adapter_config.json"))


def with_an_export(root: Path) -> RunFolder:
    """A run's folder with what it exported before it was resumed."""
    folder = RunFolder(root / "run")
    folder.adapter.mkdir(parents=True)
    (folder.adapter / "adapter_model.safetensors").write_text("16")
    return folder


def files_of(folder: RunFolder) -> dict[str, str]:
    files = [path for path in folder.root.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder.root)): path.read_text() for path in files}


async def test_an_export_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    folder = with_an_export(tmp_path)
    (folder.adapter / "model.safetensors.index.json").touch()  # a file that only the one before had
    (folder.root / ".adapter.partial" / "of a killed controller").mkdir(parents=True)
    assert await export_policy(FakeTrainer(World(22), 1), CONFIG, folder) == folder.adapter
    assert files_of(folder) == {"adapter/adapter_model.safetensors": "22"}


async def test_an_export_is_durable_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the machine goes down just then, a resume must not find an empty file and nothing left to do."""
    folder, flushed, fsync = RunFolder(tmp_path), set[str](), os.fsync

    def noted(descriptor: int) -> None:
        if not folder.adapter.exists():
            flushed.add(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    await export_policy(FakeTrainer(World(22), 1), CONFIG, folder)
    assert flushed == {".adapter.partial", ".adapter.partial/adapter_model.safetensors"}


async def test_an_export_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    folder = with_an_export(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        await export_policy(OnAFullDisk(World(22), 1), CONFIG, folder)
    assert files_of(folder) == {"adapter/adapter_model.safetensors": "16"}, "and gives its room back"


async def test_a_process_that_was_given_up_exports_nothing(tmp_path: Path) -> None:
    folder = with_an_export(tmp_path)
    folder.alive.parent.mkdir()
    folder.alive.write_text("process 7 on elsewhere")
    before = files_of(folder)
    with pytest.raises(RunTakenOver):
        await export_policy(FakeTrainer(World(22), 1), CONFIG, folder)
    assert files_of(folder) == before
