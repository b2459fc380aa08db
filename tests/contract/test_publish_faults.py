"""Faults in the middle of a publish, between real processes over Mooncake and ZMQ.

Each ends in a named state within a bound, the other replica commits, and nothing but a committed version ever serves.
What a replica holds is read from its own memory. The bounds come from options: `timeout_s` of a replica, and the
timeout of the trainer's process group, which alone ends the wait for a rank that neither answers nor dies.

    sender killed, sender stopped, controller gone    RankLost on the other rank; replicas DIRTY, or not yet begun
    receiver killed                                   its control connection breaks: out, the other commits
    receiver stopped, link stalled                    its deadline passes: out, the other commits
    bits flipped, bytes skipped, replicas that        tests/unit/weight_sync/publish
    answer late, never, or are another process
    bytes that a restarted replica reads from a peer  tests/unit/weight_sync/replica/test_recovery.py
"""

import signal
import time
from collections.abc import Callable, Iterator

import pytest
from fakes.publish import committed
from fakes.publish_processes import Cluster

from slipstream.weight_sync.errors import RankLost
from slipstream.weight_sync.replica.version_state import Phase

TIMEOUT_S = 8.0
"""Time of a publish to one replica, and of a transfer without progress. Mooncake accepts no less."""
GROUP_TIMEOUT_S = 8.0
SLACK_S = 60.0
"""What a loaded machine may add. The waits that the bounds exclude are minutes."""

Make = Callable[..., Cluster]


@pytest.fixture
def clusters() -> Iterator[Make]:
    """Makes clusters with short deadlines."""
    made: list[Cluster] = []

    def make(**options: object) -> Cluster:
        made.append(Cluster(**{"timeout_s": TIMEOUT_S, **options}))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for cluster in made:
        for child in (*cluster.ranks, *cluster.replicas):
            if child.process.is_alive():
                child.signal(signal.SIGCONT)
        cluster.end_trainer()
        cluster.close()


def assert_holds(cluster: Cluster, replica: int, version: int) -> None:
    wrong, state = cluster.replicas[replica].ask("wrong", version)
    assert wrong == []
    assert (state.phase, state.version) == (Phase.clean, version)


def test_a_trainer_rank_that_dies_or_stops_mid_write_leaves_dirty_replicas_and_another_trainer_heals_them(
    clusters: Make,
) -> None:
    """Rank 1 is a sender, rank 0 is the sender that also controls. Three trainers die one after the other."""
    cluster = clusters(group_timeout_s=GROUP_TIMEOUT_S)
    assert committed(cluster.publish(0)) == [True, True]
    for version, (victim, kind) in enumerate(((1, "die"), (0, "die"), (1, "stop")), start=1):
        began = time.monotonic()
        for number, rank in enumerate(cluster.ranks):
            rank.tell("publish", version, (kind, 0) if number == victim else None)
        error = cluster.ranks[1 - victim].get(GROUP_TIMEOUT_S + SLACK_S)
        assert isinstance(error, RankLost), error
        assert time.monotonic() - began < GROUP_TIMEOUT_S + SLACK_S
        wrong, state = cluster.replicas[0].ask("wrong", version)
        assert (state.phase, state.version) == (Phase.dirty, version), "some bytes came, and nobody vouches for them"
        assert wrong, "rank 0's or rank 1's part is missing"
        cluster.end_trainer()
        cluster.start_trainer()
        assert committed(cluster.publish(version)) == [True, True], "another trainer heals it"
        assert_holds(cluster, 0, version)
        assert_holds(cluster, 1, version)


def test_a_receiver_that_stops_mid_write_costs_its_deadline_alone_and_one_that_dies_nothing(clusters: Make) -> None:
    cluster = clusters()
    assert committed(cluster.publish(0)) == [True, True]
    replica = cluster.replicas[0]
    replica.ask("when_written", signal.SIGSTOP)
    began = time.monotonic()
    report = cluster.publish(1)
    assert time.monotonic() - began < TIMEOUT_S + SLACK_S
    assert committed(report) == [False, True]
    assert "TransferTimeout" in (report.replicas[0].error or "")
    assert_holds(cluster, 1, 1)
    replica.signal(signal.SIGCONT)
    wrong, state = replica.ask("wrong", 1)
    assert state.version == 1
    assert state.phase is Phase.dirty or not wrong, "it serves what was proven, or not at all"
    assert committed(cluster.publish(2)) == [True, True]
    assert_holds(cluster, 0, 2)
    replica.ask("when_written", signal.SIGKILL)
    assert committed(cluster.publish(3)) == [False, True]
    assert_holds(cluster, 1, 3)


def test_a_link_that_stalls_after_begin_costs_its_replica_alone_and_nothing_lands_late(clusters: Make) -> None:
    """The replica's process is stopped when it has answered Begin: its end of the link takes no byte any more."""
    cluster = clusters()
    assert committed(cluster.publish(0)) == [True, True]
    replica, pid = cluster.replicas[0], cluster.replicas[0].process.pid
    for number, rank in enumerate(cluster.ranks):
        rank.tell("publish", 1, ("stall", 0, pid) if number == 0 else None)
    began = time.monotonic()
    reports = [rank.get() for rank in cluster.ranks]
    assert time.monotonic() - began < TIMEOUT_S + SLACK_S
    assert committed(reports[0]) == [False, True]
    assert "trainer rank 0" in (reports[0].replicas[0].error or "")
    assert_holds(cluster, 1, 1)
    replica.signal(signal.SIGCONT)
    assert committed(cluster.publish(2)) == [True, True], "on a fresh connection"
    assert_holds(cluster, 0, 2)
