"""What a run is called in Ray, and how often it tries to start it."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.schema import RunConfig
from orchestrator.cluster.ray_cluster import RayCluster, ServerEnded
from orchestrator.errors import PlacementError
from orchestrator.files.run_folder import RunFolder


async def test_runs_that_began_in_the_same_second_have_names_of_their_own(tmp_path: Path) -> None:
    """Ray refuses a second placement group of the same name, and two users' folders may well have one."""
    folders = [RunFolder(tmp_path / user / "grpo-20261123-171943") for user in ("one", "two")]
    names = {
        RayCluster(RunConfig(), folder, needs_gpus=False, has_workers=False, on_lost=list).name for folder in folders
    }
    assert len(names) == 2
    assert all(name.startswith("grpo-20261123-171943-") for name in names)


class BusyMachine(RayCluster):
    """A server of Ray ends while it starts, so many times."""

    def __init__(self, folder: RunFolder, times: int) -> None:
        super().__init__(RunConfig(), folder, needs_gpus=False, has_workers=False, on_lost=list)
        self.happened: list[str] = []
        self._times = times

    async def _start_host(self) -> str:
        self.happened.append("started")
        if self.happened.count("started") > self._times:
            return "127.0.0.1:6379"
        raise ServerEnded("Ray did not start: raylet: it exited with code 1")

    async def _end_host(self) -> None:
        self.happened.append("ended")


async def test_ray_gets_a_second_try_when_one_of_its_servers_ends_while_it_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine = BusyMachine(RunFolder(tmp_path), times=1)
    assert await machine._start_own() == "127.0.0.1:6379"
    assert machine.happened == ["started", "ended", "started"]
    assert "it exited with code 1; once more" in caplog.text
    busier = BusyMachine(RunFolder(tmp_path), times=2)
    with pytest.raises(PlacementError, match="raylet: it exited with code 1"):
        await busier._start_own()
    assert busier.happened == ["started", "ended", "started"]
