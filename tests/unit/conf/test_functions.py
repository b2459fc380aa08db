"""Functions that options name: found, imported, and kept beside the run, or refused in one line that says why."""

import hashlib
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.conf.errors import ConfigError
from slipstream.conf.functions import absolute, import_function, is_function_path, keep_copy, source_of
from slipstream.conf.json_files import read_json_object


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_file_is_named_from_the_root_for_other_processes_and_a_module_as_it_is(folder: Path) -> None:
    assert absolute("own.py:f") == absolute(f"{folder}/own.py:f") == f"{folder}/own.py:f"
    assert absolute("package.module:f") == "package.module:f"
    assert is_function_path("package.module:f") and not is_function_path("exact_match")


def test_a_file_is_imported_beside_its_neighbours_and_hides_no_module(folder: Path) -> None:
    (folder / "json.py").write_text("import neighbour_of_own\ndef f(): return neighbour_of_own.WORTH\nWORTH = 3\n")
    (folder / "neighbour_of_own.py").write_text("WORTH = 0.25\n")
    assert import_function("algorithm.loss", "json.py:f")() == 0.25
    assert sys.modules["json"] is json and sys.path[-1] == str(folder)
    assert import_function("algorithm.loss", "json:dumps") is json.dumps
    with pytest.raises(
        ConfigError, match=r"^algorithm\.loss=json\.py:WORTH: 'json\.py' has no function 'WORTH'; it has f$"
    ):
        import_function("algorithm.loss", "json.py:WORTH")


def test_a_module_of_the_working_folder_is_found_behind_those_that_are_installed(folder: Path) -> None:
    """The command's own path has no working folder."""
    sys.path[:] = [entry for entry in sys.path if entry not in ("", str(folder))]
    for name in ("of_here", "json"):
        (folder / f"{name}.py").write_text("def f(): return 0.5\n")
    assert source_of("of_here:f") == folder / "of_here.py"
    assert import_function("algorithm.advantage", "of_here:f")() == 0.5
    assert source_of("json:dumps") == Path(json.__file__)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("absent.py:f", r"there is no file /.*/absent\.py$"),
        ("absent_one.inside:f", r".*ModuleNotFoundError.*; start the run in the folder.* OPTION=FOLDER/FILE\.py:f$"),
        ("json.absent_one:f", r"importing 'json\.absent_one' failed: ModuleNotFoundError.*FOLDER/FILE\.py:f$"),
        ("needs.py:f", r"importing 'needs\.py' failed: ModuleNotFoundError: No module named 'absent_one'$"),
        ("broken.py:f", r"importing 'broken\.py' failed: ZeroDivisionError: .*zero$"),
    ],
)
def test_what_cannot_be_imported_is_refused_with_a_cure_where_there_is_one(
    folder: Path, value: str, message: str
) -> None:
    (folder / "needs.py").write_text("import absent_one\n")
    (folder / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=rf"^OPTION={value}: {message}"):
        import_function("OPTION", value)


def test_the_file_of_a_function_is_found_without_importing_it(folder: Path) -> None:
    (folder / "a_namespace").mkdir()
    sys.path.append(str(folder))
    assert source_of("own.py:f") == folder / "own.py"
    assert source_of("json.decoder:f") == Path(json.decoder.__file__)
    assert source_of("a_namespace:f") is None and source_of("absent_one:f") is None


def test_each_content_that_a_run_had_is_kept(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    own, copy = folder / "own.py", folder / "loss_source.py"
    for content in ("first", "second", "second", "third"):
        own.write_text(content)
        keep_copy("algorithm.loss=own.py:f", own, copy)
        assert copy.read_text() == content
        assert f"{own}, sha256 {hashlib.sha256(content.encode()).hexdigest()}; a copy is kept" in caplog.text
    kept = {path.name: path.read_text() for path in folder.glob("loss_source*")}
    assert kept == {"loss_source.1.py": "first", "loss_source.2.py": "second", "loss_source.py": "third"}
    assert caplog.text.count("resumed with another file than before") == 2
    caplog.clear()
    keep_copy("algorithm.loss=own.py:f", own, None)
    assert "sha256" in caplog.text and "a copy is kept" not in caplog.text
    keep_copy("algorithm.loss=own.py:f", folder / "absent.py", folder / "other.py")
    assert "absent.py was not copied" in caplog.text and not (folder / "other.py").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1]", "must hold a JSON object, got a list"),
        (b"{", "is not JSON: "),
        (b"[" * 10_000, "is not JSON: "),
        (b'{"a": "\xff"}', "is not UTF-8 text"),
    ],
)
def test_a_file_that_is_no_json_object_is_named(folder: Path, content: bytes, message: str) -> None:
    path = folder / "config.json"
    with pytest.raises(FileNotFoundError):
        read_json_object(path)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^{path} {message}"):
        read_json_object(path)
    with pytest.raises(ConfigError, match=f"^{folder} cannot be read: Is a directory$"):
        read_json_object(folder)
    path.write_bytes('{"a": "\u00e9"}'.encode())
    assert read_json_object(path) == {"a": "\u00e9"}
