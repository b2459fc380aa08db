"""Faults in the middle of a publish, between real processes over Mooncake and ZMQ.

Each ends in a named state within a bound, the other replica commits, and nothing but a committed version ever serves.
What a replica holds is read from its own memory. The bounds come from options: `timeout_s` of a replica, and the
timeout of the trainer's process group, which alone ends the wait for a rank that neither answers nor dies.

    sender killed, sender stopped, controller gone    RankLost on the other rank; replicas DIRTY, or not yet begun
    receiver killed                                   its control connection breaks: out, the other commits
    receiver stopped, link stalled                    its deadline passes: out, the other commits
    message lost, connection cut                      the same; what the replica did is what it says later
    bits flipped, bytes skipped                       tests/unit/weight_sync/publish/test_publisher.py
"""

import os
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
MESSAGE_TIMEOUT_S = 8.0
"""The same where nothing is wrong with the link."""
PATIENT_S = 30.0
"""The same where no deadline is what is tried: a process that is gone is noticed at once, however busy the machine."""
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
            rank.tell("publish", version, (kind, 0) if number == victim else None, ())
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


def test_a_receiver_that_stops_mid_write_or_is_stopped_costs_its_deadline_alone(clusters: Make) -> None:
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


def test_a_link_that_stalls_after_begin_costs_its_replica_alone_and_nothing_lands_late(clusters: Make) -> None:
    """The replica's process is stopped when it has answered Begin: its end of the link takes no byte any more."""
    cluster = clusters()
    assert committed(cluster.publish(0)) == [True, True]
    replica, pid = cluster.replicas[0], cluster.replicas[0].process.pid
    for number, rank in enumerate(cluster.ranks):
        rank.tell("publish", 1, ("stall", 0, pid) if number == 0 else None, ())
    began = time.monotonic()
    reports = [rank.get() for rank in cluster.ranks]
    assert time.monotonic() - began < TIMEOUT_S + SLACK_S
    assert committed(reports[0]) == [False, True]
    assert "trainer rank 0" in (reports[0].replicas[0].error or "")
    assert_holds(cluster, 1, 1)
    replica.signal(signal.SIGCONT)
    assert committed(cluster.publish(2)) == [True, True], "on a fresh connection"
    assert_holds(cluster, 0, 2)


@pytest.mark.parametrize(
    ("kind", "message", "error", "phase"),
    [
        ("swallow", "begin", "TransferTimeout", Phase.clean),
        ("swallow", "commit", "TransferTimeout", Phase.dirty),
        ("swallow", "answer to commit", "TransferTimeout", Phase.clean),
        ("cut", "commit", "is gone", Phase.dirty),
    ],
)
def test_a_lost_message_costs_one_replica_which_never_serves_what_was_not_proven(
    proxied: Cluster, kind: str, message: str, error: str, phase: Phase
) -> None:
    version = publish_next(proxied)
    assert proxied.proxy is not None
    proxied.proxy.fault = (kind, message)
    began = time.monotonic()
    report = proxied.publish(version + 1)
    assert time.monotonic() - began < MESSAGE_TIMEOUT_S + SLACK_S
    assert committed(report) == [False, True]
    assert error in (report.replicas[0].error or "")
    assert_holds(proxied, 1, version + 1)
    _, state = proxied.replicas[0].ask("wrong", version)
    assert state.phase is phase
    if phase is Phase.clean:  # it was never asked to begin, or only the answer to a whole publish was lost
        assert_holds(proxied, 0, version if message == "begin" else version + 1)
    if kind == "cut":
        assert "is gone" in (proxied.publish(version + 2).replicas[0].error or ""), "until it is met again"
        proxied.reconnect(0)
    assert committed(proxied.publish(version + 3)) == [True, True]
    assert_holds(proxied, 0, version + 3)


def publish_next(cluster: Cluster) -> int:
    """Publish the version after those that replica 0 has committed. Returns it."""
    version = max(cluster.replicas[0].ask("versions"), default=-1) + 1
    assert committed(cluster.publish(version)) == [True, True]
    return version


@pytest.fixture(scope="module")
def proxied() -> Iterator[Cluster]:
    """Replica 0's control channel goes through a proxy."""
    cluster = Cluster(proxied=True, timeout_s=MESSAGE_TIMEOUT_S)
    yield cluster
    cluster.close()


def test_a_killed_replica_is_restarted_reads_a_peers_weights_and_rejoins(clusters: Make) -> None:
    """The trainer's ranks do nothing between the two publishes but meet the replica's new process."""
    cluster = clusters(timeout_s=PATIENT_S)
    assert committed(cluster.publish(0)) == [True, True]
    cluster.replicas[0].ask("when_written", signal.SIGKILL)
    assert committed(cluster.publish(1)) == [False, True]
    fresh = cluster.restart_replica(0)
    wrong, state = fresh.ask("wrong", 1)
    assert wrong and not state.is_serving
    offers = cluster.replicas[1].ask("offer")
    assert fresh.ask("pull", offers) == ""
    assert cluster.replicas[1].ask("offer") == offers
    assert not fresh.ask("wrong", 1)[1].is_serving
    fresh.ask("adopt", offers[0].version, offers[0].epoch)
    fresh.ask("release", offers)
    assert_holds(cluster, 0, 1)
    assert_holds(cluster, 1, 1)
    cluster.reconnect(0)
    report = cluster.publish(2)
    assert committed(report) == [True, True]
    assert_holds(cluster, 0, 2)


def test_a_peer_that_dies_or_moves_during_a_recovery_leaves_the_restarted_replica_dirty(clusters: Make) -> None:
    cluster = clusters(num_replicas=3, timeout_s=PATIENT_S)
    assert committed(cluster.publish(0)) == [True, True, True]
    fresh = cluster.restart_replica(0)
    old = cluster.replicas[1].ask("offer")
    assert committed(cluster.publish(1, exclude=[0])) == [False, True, True]
    assert fresh.ask("pull", old) == "IntegrityError", "the bytes are of another version than the offer's"
    assert fresh.ask("wrong", 0)[1].phase is Phase.dirty
    cluster.reconnect(0)
    assert committed(cluster.publish(2)) == [True, True, True]

    fresh = cluster.restart_replica(0)
    offers = cluster.replicas[2].ask("offer")
    pid = cluster.replicas[2].process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    assert fresh.ask("pull", offers) in ("TransferFailed", "TransferTimeout")
    assert time.monotonic() - began < PATIENT_S + SLACK_S
    assert fresh.ask("wrong", 2)[1].phase is Phase.dirty
    cluster.reconnect(0)
    assert committed(cluster.publish(3)) == [True, True, False]
    assert_holds(cluster, 0, 3)
