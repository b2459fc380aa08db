"""A run over several nodes of a Ray cluster, one of which is lost on the way."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from system.conftest import ENDLESS, RUN_TIMEOUT_S, Nodes, RunUnderWay


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    """Room for three processes of a run on 127.0.0.2, and for one each on .3 and .4."""
    nodes = Nodes(3, 1, 1)
    try:
        yield nodes
    finally:
        nodes.close()


@pytest.mark.timeout(2 * RUN_TIMEOUT_S)
def test_a_run_loses_a_node_and_its_worker_comes_back_on_another_one(tmp_path: Path, nodes: Nodes) -> None:
    """Every process meets the others under its own node's address. Steps go on while a worker is away; where it comes
    back it reads the current weights from the worker of the other node, and samples what the trainer computes.
    """
    with RunUnderWay([*ENDLESS, f"cluster.ray_address={nodes.address}"], tmp_path) as run:
        run.wait_until(lambda rows: len(rows) >= 3)
        assert "127.0.0.2: 2 x trainer, 1 x rollout; 127.0.0." in run.log
        at = dict(re.findall(r"(rollout-\d) is process \d+ at tcp://([\d.]+):", run.log))
        (lost,) = set(at.values()) - {"127.0.0.2"}
        (spare,) = {"127.0.0.3", "127.0.0.4"} - {lost}
        left = next(name for name, address in at.items() if address == "127.0.0.2")
        nodes.lose(lost)
        run.wait_until(lambda rows: any(row["rollout/recoveries"] for row in rows))
        num_rows = len(run.rows)
        run.wait_until(lambda rows: len(rows) >= num_rows + 4)
        engines = [run.engine_of(worker) for worker in (left, *re.findall(r"(rollout-\d\.1) is process", run.log))]
        engines[0].suspend()  # it will not notice that its worker is gone
        run.stop()
    assert psutil.wait_procs(engines, timeout=10)[1] == []
    log, rows = run.log, run.rows
    assert f"node {lost} is lost" in log
    assert re.search(rf"rollout-\d\.1 is process \d+ at tcp://{re.escape(spare)}:", log)
    back = next(number for number, row in enumerate(rows) if row["rollout/recoveries"])
    assert re.search(rf"rollout-\d\.1 read \d+ bytes of version \d+ from {left} ", log) or (
        rows[back]["rollout/recovery_read_s"] is None  # a publish came first
    )
    assert [row["policy_version"] for row in rows] == list(range(len(rows))), "no step was lost or repeated"
    assert len([row for row in rows[:back] if row["rollout/replicas_serving"] == 1]) >= 2, "steps went on meanwhile"
    assert {row["sync/replicas_committed"] for row in rows[back + 1 :]} == {2}
    assert all(0 <= row["parity/k3"] < 1e-3 for row in rows[1:])
