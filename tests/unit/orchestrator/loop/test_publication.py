"""Locks: what one publish calls in which order, with which deadlines, and what a worker that cannot join costs."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.trainer import outcome, publish_report
from fakes.workers import FakeWorker
from fakes.world import World

from slipstream.conf.schema import Relay, SyncMode, WeightSyncConfig
from slipstream.fleet.replicas import Held, Replica
from slipstream.orchestrator.loop import publication
from slipstream.orchestrator.loop.publication import Publication
from slipstream.weight_sync.errors import PlanMismatch
from slipstream.weight_sync.publish.report import PublishReport


class Diary:
    """A supervisor and a trainer that note what they are told, in one list."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.replicas = [Replica(f"rollout-{index}", index, FakeWorker(World(), index)) for index in range(3)]
        self.exclude: list[int] = []
        self.joining: list[Replica] = []
        self.strangers: set[int] = set()
        """Whom the trainer refuses to meet."""
        self.is_committed = True

    async def hold(self, *, pauses: bool = True) -> Held:
        self.calls.append(("hold", pauses))
        return Held(self.exclude, self.joining)

    async def fail(self, replica: Replica, reason: str, *, told_by_others: bool) -> None:
        assert told_by_others
        self.calls.append(("fail", replica.place, reason))

    async def settle(self, outcomes: Sequence[object]) -> None:
        self.calls.append(("settle", outcomes))

    async def reconnect(self, replica: int, endpoint: str, timeout_s: float, base_endpoint: str = "") -> None:
        self.calls.append(("reconnect", replica, endpoint, timeout_s, base_endpoint))
        if replica in self.strangers:
            raise PlanMismatch("another layout")

    async def publish(self, timeout_s: float, exclude: Sequence[int] = (), trace: Path | None = None) -> PublishReport:
        self.calls.append(("publish", timeout_s, list(exclude), trace))
        return publish_report(7, [outcome(self.is_committed)] * 3)

    def publication(self, version: int = 7, **options: Any) -> Publication:
        services: Any = SimpleNamespace(supervisor=self, trainer=self, traces=Path("traces"))
        return Publication(WeightSyncConfig(**options), services, version)


@pytest.fixture
def diary() -> Diary:
    return Diary()


@pytest.mark.parametrize("is_committed", [True, False])
@pytest.mark.parametrize(("mode", "pauses"), [(SyncMode.merged, True), (SyncMode.adapter, False)])
async def test_replicas_are_held_written_to_and_settled(
    diary: Diary, mode: SyncMode, pauses: bool, is_committed: bool
) -> None:
    """Whether or not any of them committed. Groups go on during the publish of an adapter alone. A lost trainer is
    noticed after two deadlines: 2 * 60 + 60 s."""
    diary.exclude, diary.is_committed = [1], is_committed
    report = await diary.publication(mode=mode).run()
    assert diary.calls == [("hold", pauses), ("publish", 180.0, [1], None), ("settle", report.replicas)]


async def test_the_trainer_meets_restarted_workers_before_it_writes_and_leaves_out_those_that_it_cannot(
    diary: Diary,
) -> None:
    """A worker without a base gets one first, which takes three more replies."""
    diary.joining, diary.exclude, diary.strangers = diary.replicas[:2], [2], {0}
    diary.replicas[1].base_wanted_at = "tcp://base"
    for replica in diary.joining:
        replica.is_known = False
    report = await diary.publication(timeout_s=10).run()
    assert [replica.is_known for replica in diary.replicas] == [False, True, True]
    assert diary.calls == [
        ("hold", True),
        ("reconnect", 0, "tcp://rollout-0", 80.0, ""),
        ("fail", 0, "PlanMismatch: another layout"),
        ("reconnect", 1, "tcp://rollout-1", 80.0 + 3 * 10, "tcp://base"),
        ("publish", 80.0, [2, 0], None),
        ("settle", report.replicas),
    ]


async def test_a_lost_trainer_is_an_error_and_no_replicas_fault(diary: Diary) -> None:
    async def lost(*_: object) -> None:
        raise ConnectionError("the trainer is gone")

    diary.joining, diary.reconnect = diary.replicas[:1], lost  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        await diary.publication().run()
    assert diary.calls == [("hold", True)]


@pytest.mark.parametrize(("every", "version", "is_traced"), [(0, 6, False), (3, 7, False), (3, 6, True), (1, 1, True)])
async def test_every_nth_version_has_a_timeline(diary: Diary, every: int, version: int, is_traced: bool) -> None:
    await diary.publication(version, trace_every_steps=every).run()
    assert diary.calls[1][3] == (Path(f"traces/publish-{version:06d}.json") if is_traced else None)


async def test_a_relay_writes_as_often_as_it_wants(diary: Diary, monkeypatch: pytest.MonkeyPatch) -> None:
    async def relay(write: Any, supervisor: object) -> PublishReport:
        assert supervisor is diary
        diary.calls.append(("relay",))
        await write([1, 2])
        return await write([0], 1)

    monkeypatch.setattr(publication, "publish_by_relay", relay)
    report = await diary.publication(6, timeout_s=10, relay=Relay.node, trace_every_steps=6).run()
    assert diary.calls == [
        ("hold", True),
        ("relay",),
        ("publish", 80.0, [1, 2], Path("traces/publish-000006.json")),
        ("publish", 80.0, [0], Path("traces/publish-000006-round1.json")),
        ("settle", report.replicas),
    ]
