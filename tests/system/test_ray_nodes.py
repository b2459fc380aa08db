"""A run over several nodes of a Ray cluster: one joins, and another is lost."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from system.conftest import ENDLESS, RUN_TIMEOUT_S, Nodes, RunUnderWay, assert_all_end, assert_workers_came_back


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    """Room for three processes of a run on 127.0.0.2, and for one on .3."""
    nodes = Nodes(3, 1)
    try:
        yield nodes
    finally:
        nodes.close()


@pytest.mark.timeout(2 * RUN_TIMEOUT_S)
def test_a_run_loses_a_node_and_its_worker_comes_back_on_another(tmp_path: Path, nodes: Nodes) -> None:
    """Every process meets the others under its own node's address. Steps go on while a worker is away, and a node that
    joins gets a further one by itself, of at most three. The one of the lost node comes back on the joined one, reads
    the current weights from a worker of another node, and samples what the trainer computes. (An engine that is killed
    on a node that lives: test_workers.py.)
    """
    words = [*ENDLESS, f"cluster.ray_address={nodes.address}", "rollout.num_workers=2..3"]
    with RunUnderWay(words, tmp_path) as run:
        run.wait_until(lambda rows: len(rows) >= 2)
        assert "127.0.0.2: 2 x trainer, 1 x rollout; 127.0.0.3: 1 x rollout" in run.log
        assert "there is room for 2 of 3 rollout workers" in run.log
        at = dict(re.findall(r"(rollout-\d) is process \d+ at tcp://([\d.]+):", run.log))
        lost, spare = "127.0.0.3", nodes.join()
        run.wait_until(lambda rows: rows[-1]["sync/replicas_committed"] == 3)
        assert re.search(rf"rollout-2 is process \d+ at tcp://{re.escape(spare)}:", run.log)
        (gone,) = (name for name, address in at.items() if address == lost)
        nodes.lose(lost)
        run.wait_for_returns(1)
        rows = run.rows  # the last one may be of a step whose publish the engine does not answer
        engine = run.engine_of(f"{gone}.1")
        engine.suspend()  # it will not notice that its worker is gone
        run.stop()
    assert_all_end([engine])
    log = run.log
    assert f"node {lost} is lost" in log
    (row,) = (row for row in rows if row["rollout/recoveries"])
    assert re.search(rf"{gone}\.1 is process \d+ at tcp://{re.escape(spare)}:", log)
    assert re.search(rf"{gone}\.1 read \d+ bytes of version \d+ from rollout-", log) or (
        row["rollout/recovery_read_s"] is None  # a publish came first
    )
    assert (rows[1]["rollout/replicas_wanted"], rows[-1]["rollout/replicas_wanted"]) == (2, 3)
    assert_workers_came_back(rows, times=1, num_workers=3)
    assert {row["sync/replicas_relayed"] for row in rows} == {0}
