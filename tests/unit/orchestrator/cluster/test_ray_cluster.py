"""What a run is called in Ray, and that it need not wait for a cluster that does not answer."""

import shutil
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import RayActorError

from slipstream.conf.errors import ConfigError
from slipstream.conf.schema import ClusterConfig, RunConfig
from slipstream.orchestrator.cluster.ray_cluster import RayCluster, as_ray_says
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
