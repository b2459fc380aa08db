"""Publishes in a row between real processes: nothing grows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fakes.publish_processes import Cluster, committed


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.close()


def test_two_hundred_publishes_grow_nothing_and_skip_and_repeat_no_version(cluster: Cluster) -> None:
    processes = (*cluster.ranks, *cluster.replicas)
    num_warm = 40
    for version in range(num_warm):
        assert committed(cluster.publish(version)) == [True, True]
    before = [process.ask("resources") for process in processes]
    for version in range(num_warm, num_warm + 200):
        assert committed(cluster.publish(version)) == [True, True]
    after = [process.ask("resources") for process in processes]
    for replica in cluster.replicas:
        assert replica.ask("versions") == list(range(num_warm + 200))
    for was, now in zip(before, after, strict=True):
        assert now["registrations"] == was["registrations"] > 0
        assert now["files"] <= was["files"]
        assert now["threads"] <= was["threads"]
        assert now["rss_bytes"] - was["rss_bytes"] < 3 << 20, "15 KiB a publish would be a leak"
