"""What a run is called in Ray, that no cluster is waited for that does not answer, how often one of its own is started,
and that this takes no import of Ray.
"""

import contextlib
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import RayActorError

from slipstream.conf.errors import ConfigError
from slipstream.conf.schema import ClusterConfig, RunConfig
from slipstream.orchestrator.cluster import own_ray
from slipstream.orchestrator.cluster.own_ray import OwnRay, starting_ray
from slipstream.orchestrator.cluster.ray_cluster import RayCluster, as_ray_says
from slipstream.orchestrator.errors import PlacementError
from slipstream.orchestrator.files.run_folder import RunFolder


async def test_runs_that_began_in_the_same_second_have_names_of_their_own(tmp_path: Path) -> None:
    """Ray refuses a second placement group of the same name, and two users' folders may well have one."""
    folders = [RunFolder(tmp_path / user / "grpo-20261123-171943") for user in ("one", "two")]
    names = {RayCluster(RunConfig(), folder, None, needs_gpus=False, on_lost=list).name for folder in folders}
    assert len(names) == 2
    assert all(name.startswith("grpo-20261123-171943-") for name in names)


async def test_the_end_of_a_run_waits_for_no_cluster_that_it_tried_to_join(tmp_path, monkeypatch) -> None:
    """Python waits at its end for all threads but daemons, and `ray.init` may ask for ten minutes."""
    in_daemon: list[bool] = []

    def asks(**_: object) -> None:
        in_daemon.append(threading.current_thread().daemon)
        raise ConnectionError("nobody answers")

    monkeypatch.setattr(ray, "init", asks)
    config = RunConfig(cluster=ClusterConfig(ray_address="127.0.0.1:9"))
    cluster = RayCluster(config, RunFolder(tmp_path), None, needs_gpus=False, on_lost=list)
    with pytest.raises(ConfigError, match=r"ray_address=127\.0\.0\.1:9 is no Ray cluster .*nobody answers"):
        await cluster.start()
    assert in_daemon == [True]


@pytest.mark.parametrize(("free_bytes", "is_named"), [(0, True), (1 << 30, False)])
def test_a_process_that_dies_where_the_temporary_folder_is_full_says_so(
    free_bytes: int, is_named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray tells nothing but that its process has gone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free_bytes))
    said = as_ray_says(
        RayActorError(error_msg="Worker unexpectedly exits with a connection error code 2. End of file.")
    )
    assert said.startswith("died without a word: by SIGKILL")
    assert said.endswith(" is full, where each process has files: make room there") == is_named


class BusyMachine(OwnRay):
    """A server of Ray ends while it starts, so many times."""

    def __init__(self, config: RunConfig, folder: RunFolder, times: int = 1) -> None:
        super().__init__(config, folder)
        self.happened: list[str] = []
        self._times = times

    async def begin(self) -> None:
        self.happened.append("began")

    async def _next_word(self) -> dict[str, str]:
        if self.happened.count("began") > self._times:
            return {"address": "127.0.0.1:6379", "dashboard": "127.0.0.1:8266"}
        return {"lost": "raylet", "how": "it exited with code 1"}

    async def end(self) -> None:
        self.happened.append("ended")


async def test_ray_is_started_again_when_one_of_its_servers_ends_while_it_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine = BusyMachine(RunConfig(), RunFolder(tmp_path))
    await machine.begin()
    assert await machine.address() == "127.0.0.1:6379"
    assert machine.dashboard == "127.0.0.1:8266", "where Ray's page is, and not where it was looked for first"
    assert machine.happened == ["began", "ended", "began"]
    assert "raylet: it exited with code 1" in caplog.text
    for times in (own_ray.NUM_TRIES - 1, own_ray.NUM_TRIES):
        busier = BusyMachine(RunConfig(), RunFolder(tmp_path), times)
        await busier.begin()
        refused = pytest.raises(PlacementError, match="raylet: it exited with code 1")
        with refused if times == own_ray.NUM_TRIES else contextlib.nullcontext():
            assert await busier.address() == "127.0.0.1:6379"
        assert busier.happened == ["began", *["ended", "began"] * (own_ray.NUM_TRIES - 1)]


async def test_it_ends_with_the_run_and_is_not_begun_beside_another_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_ray, "OwnRay", BusyMachine)
    machines: list[BusyMachine] = []
    with pytest.raises(RuntimeError, match="no such row"):
        async with starting_ray(RunConfig(), RunFolder(tmp_path)) as own:
            assert isinstance(own, BusyMachine)
            machines.append(own)
            raise RuntimeError("no such row")
    assert [machine.happened for machine in machines] == [["began", "ended"]]
    async with starting_ray(RunConfig(cluster=ClusterConfig(ray_address="auto")), RunFolder(tmp_path)) as none:
        assert none is None


async def test_python_that_optimizes_and_the_users_modules_are_the_commands_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's own processes would compile every library that they import, while others wait for them 15 s; and a json.py
    in the working folder would be imported in place of Python's."""
    (python := tmp_path / "python").write_text(
        f"#!/bin/sh\nenv > {tmp_path}/environment\necho $1 > {tmp_path}/first\ncat > /dev/null\n"
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    machine = OwnRay(RunConfig(), RunFolder(tmp_path))
    await machine.begin()
    await machine.end()
    given = (tmp_path / "environment").read_text()
    assert "PYTHONSAFEPATH=1" in given
    assert "PYTHONOPTIMIZE" not in given
    assert (tmp_path / "first").read_text() == "-P\n"


def test_it_imports_no_ray() -> None:
    imports = "import sys, slipstream.orchestrator.cluster.own_ray, slipstream.orchestrator.run"
    code = f"{imports}; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=240, check=False).returncode == 0
