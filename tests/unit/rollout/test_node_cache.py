"""Equal configs have one path, which is whole whatever was there, and a folder that cannot be written is no error."""

from pathlib import Path

import pytest

from slipstream.rollout.node_cache import same_path


def model(folder: Path, config: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(config)
    (folder / "tokenizer.json").write_text(folder.name)
    return folder


def test_equal_configs_have_one_path_and_different_ones_two(tmp_path: Path, node_cache: Path) -> None:
    first, second, other = (model(tmp_path / name, config) for name, config in (("a", "{}"), ("b", "{}"), ("c", "[]")))
    kept = same_path(first)
    assert same_path(second) == kept
    assert same_path(other) != kept
    assert [(file.name, file.read_text()) for file in kept.iterdir()] == [("config.json", "{}")]


def test_a_copy_that_was_damaged_is_mended(tmp_path: Path, node_cache: Path) -> None:
    folder = model(tmp_path / "a", '{"model_type": "qwen3"}')
    (same_path(folder) / "config.json").write_text('{"model_')
    assert (same_path(folder) / "config.json").read_text() == '{"model_type": "qwen3"}'


def test_where_nothing_can_be_kept_the_runs_own_folder_is_used(
    tmp_path: Path, node_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node_cache.write_text("a file where the folder should be")
    folder = model(tmp_path / "a", "{}")
    assert same_path(folder) == folder
    assert "cannot be written" in caplog.text
