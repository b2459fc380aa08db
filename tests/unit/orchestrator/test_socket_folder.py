"""Locks: however long TMPDIR is, Unix sockets of a run, of Ray and of vLLM can be bound, and all say where they are."""

import os
import socket
import tempfile
import uuid
from pathlib import Path

import pytest

from slipstream.conf.errors import ConfigError
from slipstream.conf.load import load_run_config
from slipstream.orchestrator import socket_folder
from slipstream.orchestrator.cli import doctor, main
from slipstream.orchestrator.cluster.private_folder import make_private_folder, private_folders
from slipstream.orchestrator.inputs.machine_checks import check_sockets
from slipstream.orchestrator.machine import HERE
from slipstream.orchestrator.socket_folder import MOST_FOR_A_RUN, MOST_FOR_ENGINES, for_engines_alone

LENGTHS = (MOST_FOR_A_RUN, MOST_FOR_A_RUN + 1, MOST_FOR_ENGINES, MOST_FOR_ENGINES + 1, 90, 200)


@pytest.fixture(params=LENGTHS)
def tmpdir(short_tmpdir: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """TMPDIR, of so many bytes."""
    path = f"{short_tmpdir}/{'x' * (request.param - len(str(short_tmpdir)) - 1)}"
    os.mkdir(path)
    monkeypatch.setenv("TMPDIR", path)
    monkeypatch.setattr("tempfile.tempdir", None)
    assert tempfile.gettempdir() == path
    return path


def bound(path: Path) -> bool:
    """Whether a Unix socket can be there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))
    return path.exists()


def test_the_sockets_of_a_run_fit(tmpdir: str) -> None:
    """Ray's longest name, with the largest pid that Linux has."""
    folder, lock = make_private_folder()
    session = f"session_2026-11-27_18-57-41_123456_{2**22}"
    assert bound(folder.ray / session / "sockets" / "plasma_store")
    assert bound(folder.temporary / "vllm-12345678" / str(uuid.uuid4()))
    assert (str(folder.root.parent) == tmpdir) == (len(tmpdir) <= MOST_FOR_A_RUN), "TMPDIR, where it can be"
    assert folder in [found for found, _ in private_folders()]
    os.close(lock)
    folder.remove()


def test_the_sockets_of_engines_without_a_run_fit(tmpdir: str) -> None:
    said = for_engines_alone()
    with tempfile.TemporaryDirectory(prefix="vllm-") as folder:
        assert bound(Path(folder) / str(uuid.uuid4()))
    assert os.environ["TMPDIR"] == tempfile.gettempdir(), "what is started puts its own there"
    assert (said is None) == (tempfile.gettempdir() == tmpdir) == (len(tmpdir) <= MOST_FOR_ENGINES)
    assert said is None or tmpdir in said


def test_a_dry_run_and_doctor_say_where_a_run_puts_them(tmpdir: str) -> None:
    folder, lock = make_private_folder()
    os.close(lock)
    folder.remove()
    dry = check_sockets(load_run_config(["experiment=quickstart"]), HERE).finding
    (finding,) = [one for one in doctor.ports_and_ray(HERE) if one.name == "Unix sockets"]
    assert dry == finding.value
    assert dry.split(",")[0] == f"in {folder.root.parent}"
    assert tmpdir in dry


def test_commands_that_start_engines_alone_say_it_before_anything(
    tmpdir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["push", "--help"]) == 0
    assert ("Unix sockets" in capsys.readouterr().err) == (len(tmpdir) > MOST_FOR_ENGINES)


def test_a_machine_without_a_short_folder_is_refused_in_one_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(socket_folder, "_OTHERS", (str(tmp_path / "absent"),))
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(ConfigError, match=rf"TMPDIR={long} has \d+ bytes.*set TMPDIR to a shorter folder"):
        check_sockets(load_run_config(["experiment=quickstart"]), HERE)
    (finding,) = [one for one in doctor.ports_and_ray(HERE) if one.name == "Unix sockets"]
    assert finding.status is doctor.Status.fail
