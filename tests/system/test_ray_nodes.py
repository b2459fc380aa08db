"""A run over several nodes of a Ray cluster, one of which is lost on the way, and then an engine of another."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from system.conftest import ENDLESS, RUN_TIMEOUT_S, Nodes, RunUnderWay, assert_workers_came_back, own_import


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    """Room for three processes of a run on 127.0.0.2, and for one each on .3 and .4."""
    with own_import():
        nodes = Nodes(3, 1, 1)
    try:
        yield nodes
    finally:
        nodes.close()


@pytest.mark.timeout(2 * RUN_TIMEOUT_S)
def test_a_run_loses_a_node_and_an_engine_and_both_workers_come_back(tmp_path: Path, nodes: Nodes) -> None:
    """Every process meets the others under its own node's address. Steps go on while a worker is away. The one of the
    lost node comes back on another one, the one whose engine is killed on its own; each reads the current weights from
    the worker of the other node, and samples what the trainer computes.
    """
    with RunUnderWay([*ENDLESS, f"cluster.ray_address={nodes.address}"], tmp_path) as run:
        run.wait_until(lambda rows: len(rows) >= 2)
        assert "127.0.0.2: 2 x trainer, 1 x rollout; 127.0.0." in run.log
        at = dict(re.findall(r"(rollout-\d) is process \d+ at tcp://([\d.]+):", run.log))
        (lost,) = set(at.values()) - {"127.0.0.2"}
        (spare,) = {"127.0.0.3", "127.0.0.4"} - {lost}
        (left,) = (name for name, address in at.items() if address == "127.0.0.2")
        (gone,) = set(at) - {left}
        nodes.lose(lost)
        run.wait_for_returns(1)
        run.engine_of(left).kill()
        run.wait_for_returns(2)
        engines = [run.engine_of(f"{worker}.1") for worker in (left, gone)]
        engines[0].suspend()  # it will not notice that its worker is gone
        run.stop()
    assert psutil.wait_procs(engines, timeout=120)[1] == []
    log, rows = run.log, run.rows
    assert f"node {lost} is lost" in log
    returns = [row for row in rows if row["rollout/recoveries"]]
    for row, worker, address, peer in zip(
        returns, (gone, left), (spare, "127.0.0.2"), (left, f"{gone}.1"), strict=True
    ):
        assert re.search(rf"{worker}\.1 is process \d+ at tcp://{re.escape(address)}:", log)
        assert re.search(rf"{worker}\.1 read \d+ bytes of version \d+ from {re.escape(peer)} ", log) or (
            row["rollout/recovery_read_s"] is None  # a publish came first
        )
    assert_workers_came_back(rows, times=2)
    assert {row["sync/replicas_relayed"] for row in rows} == {0}
