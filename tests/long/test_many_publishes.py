"""Publishes in a row, two hundred of each kind: nothing grows, and engines hold the trainer's bytes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cases.any_publishes import KINDS, WHOLE, publish_in_a_row
from contract.test_delta_publish import MERGES, SYNC, check_publishes
from fakes.publish import committed
from fakes.publish_processes import Cluster

from slipstream.conf.schema import WeightSyncConfig


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


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_happens_between_two_hundred_publishes_who_serves_one_holds_its_bytes(kind: str) -> None:
    publish_in_a_row(kind, 200, seed=1)


@pytest.mark.parametrize(
    ("model", "tp_size", "sync"),
    [("qwen3_moe", 2, WHOLE), ("qwen3_tied", 2, SYNC), ("deepseek_v3", 1, SYNC), ("qwen3_moe", 2, MERGES)],
)
def test_after_two_hundred_publishes_an_engine_holds_what_its_own_loader_makes_of_the_export(
    model: str, tp_size: int, sync: WeightSyncConfig, tmp_path: Path
) -> None:
    check_publishes(model, tp_size, sync, tmp_path, num_publishes=200)
