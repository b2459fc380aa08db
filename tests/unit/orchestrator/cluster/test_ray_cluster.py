"""What a run is called in Ray."""

from pathlib import Path

from slipstream.conf.schema import RunConfig
from slipstream.orchestrator.cluster.ray_cluster import RayCluster
from slipstream.orchestrator.files.run_folder import RunFolder


async def test_runs_that_began_in_the_same_second_have_names_of_their_own(tmp_path: Path) -> None:
    """Ray refuses a second placement group of the same name, and two users' folders may well have one."""
    folders = [RunFolder(tmp_path / user / "grpo-20261123-171943") for user in ("one", "two")]
    names = {RayCluster(RunConfig(), folder, None, needs_gpus=False, on_lost=list).name for folder in folders}
    assert len(names) == 2
    assert all(name.startswith("grpo-20261123-171943-") for name in names)
