"""Publishes between real processes: planted errors, and what a rank or a replica costs that cannot take part."""

import os
import signal
from collections.abc import Iterator

import pytest
from fakes.publish import committed
from fakes.publish_processes import Cluster
from fakes.stopped import stop_process

from slipstream.weight_sync.publish.report import EXCLUDED


@pytest.fixture(scope="module")
def clusters() -> Iterator[list[Cluster]]:
    """Every cluster of this module; ended together."""
    made: list[Cluster] = []
    yield made
    for cluster in made:
        cluster.close()


@pytest.fixture
def cluster(clusters: list[Cluster]) -> Cluster:
    """The last test's cluster if all of it lives, else another."""
    if not clusters or not all(child.process.is_alive() for child in (*clusters[-1].ranks, *clusters[-1].replicas)):
        clusters.append(Cluster())
    return clusters[-1]


@pytest.mark.parametrize("kind", ["flip", "skip", "offset"])
def test_a_planted_error_is_named_and_costs_one_replica(cluster: Cluster, kind: str) -> None:
    assert committed(cluster.publish(2)) == [True, True]
    report = cluster.publish(3, fault=(kind, 1))
    assert committed(report) == [True, False]
    error = report.replicas[1].error or ""
    assert error.startswith("IntegrityError: ")
    assert "version 3" in error
    assert "rank 0" in error
    wrong, state = cluster.replicas[1].ask("wrong", 3)
    assert not state.is_serving
    damaged = [name.removeprefix("0:") for name in wrong if name.startswith("0:") and name != "0:absorbed"]
    assert any(f"{name} (from " in error for name in damaged)
    assert cluster.replicas[0].ask("wrong", 3)[0] == []

    assert committed(cluster.publish(4)) == [True, True]
    assert cluster.replicas[1].ask("wrong", 4)[0] == []


def test_a_rank_that_cannot_read_its_weights_fails_everywhere_and_blocks_nobody(cluster: Cluster) -> None:
    report = cluster.publish(5, source_error=RuntimeError("gather broke"))
    assert committed(report) == [False, False]
    assert "trainer rank 1: RuntimeError: gather broke" in (report.replicas[0].error or "")
    assert committed(cluster.publish(6)) == [True, True]


def test_a_stopped_replica_that_is_excluded_is_not_waited_for_and_may_come_back(cluster: Cluster) -> None:
    assert committed(cluster.publish(0)) == [True, True]
    pid = cluster.replicas[0].process.pid
    assert pid is not None
    stop_process(pid)
    try:
        for version in (1, 2):
            report = cluster.publish(version, exclude=[0])
            assert committed(report) == [False, True]
            assert report.replicas[0].error == EXCLUDED, "it was not asked"
            assert cluster.replicas[1].ask("wrong", version)[0] == []
    finally:
        os.kill(pid, signal.SIGCONT)
    assert cluster.replicas[0].ask("wrong", 0)[0] == [], "nothing was written to it"
    assert committed(cluster.publish(3)) == [True, True]
    assert cluster.replicas[0].ask("wrong", 3)[0] == []
