"""A push asks its ranks and engines in the one order that costs no engine more than itself, over fakes of both."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.checkpoints import TINY, save_checkpoint

from slipstream.orchestrator.errors import PushError
from slipstream.orchestrator.machine import Machine
from slipstream.orchestrator.push.command import Push
from slipstream.orchestrator.push.push_options import PushOptions
from slipstream.orchestrator.push.push_report import check_all_serve
from slipstream.rollout.errors import EngineError
from slipstream.rollout.served.client import RankReport
from slipstream.weight_sync.publish.report import PublishReport, ReplicaReport

REPORT = PublishReport(0, 1, (), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 8, 0, 0, None)
LINES: list[str] = []
"""What engines and ranks were asked, in order."""
FAILS: dict[str, Exception] = {}
"""Line -> what it raises."""


def note(line: str) -> None:
    LINES.append(line)
    if line in FAILS:
        raise FAILS[line]


class NotingEngine:
    """ServedEngine of one rank at the endpoint "tcp://NAME"."""

    def __init__(self, url: str, **_: Any) -> None:
        self.url, self.host = url, "127.0.0.1"
        self.attached = [RankReport(0, 1, self._endpoint, seconds={"record": 0.1})]

    @property
    def _endpoint(self) -> str:
        return f"tcp://{self.url}"

    def is_healthy(self) -> bool:
        return True

    def attach(self, *_: Any, **__: Any) -> list[str]:
        return [self._endpoint]

    def start(self) -> None:
        note(f"start {self.url}")

    def finish(self) -> None:
        note(f"finish {self.url}")

    def abandon(self, reason: str) -> None:
        note(f"abandon {self.url}")

    def undo(self, reason: str) -> None:
        note(f"undo {self.url}")


class NotingRank:
    """RankProcess that answers at once."""

    def __init__(self, rank: int, *_: Any) -> None:
        self.rank = rank
        self.num_bytes_read = 0
        self._answers: list[Callable[[], tuple[Any, ...]]] = [lambda: ("read", 8, 0.5, 0)]
        self._endpoints: list[str] = []

    def result(self, _: float) -> Any:
        return self._answers.pop(0)() if self._answers else None

    def connect(self, endpoints: list[str]) -> None:
        self._endpoints = endpoints

        def connected() -> tuple[Any, ...]:
            note(f"connected {self.rank}")
            return "connected", {"connect": 0.25}

        self._answers.append(connected)

    def publish(self) -> None:
        def done() -> tuple[Any, ...]:
            note(f"published {self.rank}")
            replicas = tuple(
                ReplicaReport(e, f"lost {e}" not in FAILS, None if f"lost {e}" not in FAILS else "LinkBroke: x")
                for e in self._endpoints
            )
            return "done", replace(REPORT, replicas=replicas), "tcp"

        self._answers.append(done)

    def stop(self) -> None:
        """Nothing runs."""


@pytest.fixture
def push(tmp_path: Path) -> Push:
    """Into the engines a, b and c, which serve; by two ranks."""
    LINES.clear()
    FAILS.clear()
    save_checkpoint(tmp_path, TINY, seed=0)
    options = PushOptions(checkpoint=tmp_path, to=("a", "b", "c"), num_ranks=2)
    return Push(options, machine=Machine(count_gpus=lambda: 0), make_engine=NotingEngine, make_rank=NotingRank)


STARTS = ["start a", "start b", "start c"]


def test_engines_stop_when_every_rank_has_met_them_and_serve_when_all_of_theirs_committed(push: Push) -> None:
    report = push.run()
    assert sorted(LINES[:2]) == ["connected 0", "connected 1"]
    assert LINES[2:] == [*STARTS, "published 0", "published 1", "finish a", "finish b", "finish c"]
    assert report.engines == {"a": "", "b": "", "c": ""}
    assert (report.num_bytes, report.connect_s, report.link) == (16, 0.25, "tcp")
    check_all_serve(report)


def test_a_rank_that_cannot_meet_the_engines_stops_none_of_them(push: Push) -> None:
    FAILS["connected 1"] = PushError("LinkMismatch: nvlink, tcp")
    with pytest.raises(PushError, match="LinkMismatch"):
        push.run()
    assert not [line for line in LINES if not line.startswith("connected")]


def test_an_engine_that_cannot_be_started_lets_those_before_it_serve_on(push: Push) -> None:
    FAILS["start c"] = EngineError("c answered 500")
    with pytest.raises(EngineError, match="c answered 500"):
        push.run()
    assert LINES[2:] == [*STARTS, "undo a", "undo b"]


def test_engines_that_may_have_been_written_stay_paused_when_a_rank_fails(push: Push) -> None:
    FAILS["published 0"] = PushError("rank 0 ended with code -9")
    with pytest.raises(PushError, match="rank 0 ended"):
        push.run()
    assert LINES[-3:] == ["abandon a", "abandon b", "abandon c"]


def test_an_engine_that_cannot_finish_or_did_not_commit_costs_itself_alone(push: Push) -> None:
    FAILS.update({"finish a": EngineError("a cannot be reached"), "lost tcp://b": RuntimeError()})
    report = push.run()
    assert LINES[-4:] == ["finish a", "abandon a", "abandon b", "finish c"]
    assert report.engines == {"a": "a cannot be reached", "b": "rank 0: LinkBroke: x", "c": ""}
    with pytest.raises(PushError, match="2 of 3 engines do not serve the checkpoint: a, b; push again"):
        check_all_serve(report)
