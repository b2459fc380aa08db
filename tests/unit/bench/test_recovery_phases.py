"""Locks: how phases and the return to the former throughput are computed from rows of fleet.jsonl."""

from typing import Any

import pytest

from bench.recovery_phases import (
    counts_of,
    marks_after,
    median_phases,
    phases_of,
    recovery_of,
    returned_at,
    tokens_at,
    tokens_per_s,
)


def row(time: float, event: str, name: str = "rollout-0", **facts: Any) -> dict[str, Any]:
    return {"time": time, "worker": int(name[8]), "name": name, "event": event, **facts}


def tokens(name: str, begin: float, end: float, per_s: float, first: float = 0.0) -> list[dict[str, Any]]:
    """A row every two seconds."""
    times = [begin + 2.0 * index for index in range(int((end - begin) / 2) + 1)]
    return [row(at, "tokens", name, tokens=first + per_s * (at - begin)) for at in times]


def test_a_phase_begins_where_the_one_before_it_ended() -> None:
    marks = {"failed": 10.5, "process_up": 12.0, "imported": 15.0, "engine_up": 20.0}
    assert phases_of(10.0, marks) == {"noticed": 0.5, "process up": 1.5, "imports": 3.0, "engine up": 5.0}


def test_what_was_done_beside_an_earlier_phase_takes_no_time_and_none_is_counted_twice() -> None:
    marks = {"process_up": 2.0, "imported": 6.0, "freed": 4.0, "engine_up": 9.0}
    phases = phases_of(0.0, marks)
    assert phases == {"process up": 2.0, "imports": 4.0, "waits for memory": 0.0, "engine up": 3.0}
    assert sum(phases.values()) == 9.0


def test_marks_are_of_the_worker_that_was_killed_since_its_kill_and_of_the_start_that_succeeded() -> None:
    rows = [
        row(1.0, "process_up"), row(2.0, "first_token"), row(3.0, "up", "rollout-1"),
        row(11.0, "failed"), row(11.1, "restarting", attempt=1), row(12.0, "process_up", "rollout-0.1"),
        row(13.0, "freed", "rollout-0.1"), row(19.0, "restarting", attempt=2), row(19.5, "freed", "rollout-0.2"),
        row(21.0, "imported", "rollout-0.2"), row(20.0, "process_up", "rollout-0.2"),
        row(25.0, "serving", "rollout-0.2"),
    ]  # fmt: skip
    assert marks_after(rows, 0, killed_at=10.0) == {
        "failed": 11.0, "freed": 19.5, "process_up": 20.0, "imported": 21.0, "serving": 25.0
    }  # fmt: skip


def test_tokens_lie_on_lines_between_samples_from_the_first_token_on_and_stay_after_the_last() -> None:
    rows = [row(4.0, "first_token"), row(6.0, "tokens", tokens=20), row(8.0, "tokens", tokens=60)]
    counts = counts_of([*rows, *tokens("rollout-1", 0.0, 8.0, 1.0)])
    alone = counts_of(rows, worker=0)
    assert [tokens_at(alone, at) for at in (3.0, 4.0, 5.0, 7.0, 9.0)] == [0.0, 0.0, 10.0, 40.0, 60.0]
    assert tokens_at(counts, 5.0) == 15.0
    assert tokens_per_s(counts, 5.0, 7.0) == pytest.approx((47.0 - 15.0) / 2)


def test_the_former_throughput_is_back_at_the_first_window_that_has_97_percent_of_it() -> None:
    # 90, 98 and 100 tokens/s: the window of 10 s that begins at 16 is the first with 97 on average (4 x 90 + 6 x 98
    # = 94.8 at 16; 2 x 90 + 8 x 98 = 96.4 at 18; 98 at 20).
    slow, good = tokens("rollout-0", 10.0, 20.0, 90.0), tokens("rollout-0", 20.0, 40.0, 98.0, first=900.0)
    counts = counts_of([*slow, *good[1:]])
    assert returned_at(counts, 100.0, 10.0, 10.0) == 20.0
    assert returned_at(counts, 99.0, 10.0, 10.0) == 18.0, "96.4 is 97 % of 99"
    assert returned_at(counts, 102.0, 10.0, 10.0) is None
    rush = counts_of(tokens("rollout-0", 0.0, 4.0, 300.0))
    assert returned_at(rush, 100.0, 0.0, 10.0) is None, "a window that is not over says nothing"


def test_a_recovery_compares_the_fleet_and_the_worker_with_what_they_were_before() -> None:
    killed_at = 40.0
    rows = [
        *tokens("rollout-0", 0.0, 40.0, 100.0), *tokens("rollout-1", 0.0, 90.0, 100.0),
        row(40.5, "failed"), row(50.0, "process_up", "rollout-0.1"),
        row(59.0, "read", "rollout-0.1", bytes=4_000_000_000, read_s=2.0), row(59.5, "serving", "rollout-0.1"),
        row(60.0, "first_token", "rollout-0.1"), *tokens("rollout-0.1", 60.0, 64.0, 50.0),
        *tokens("rollout-0.1", 64.0, 90.0, 100.0, first=200.0)[1:],
    ]  # fmt: skip
    found = recovery_of(rows, 0, killed_at, steady_s=20.0, window_s=10.0)
    assert found["former_tokens_per_s"] == 200.0
    assert found["worker_former_tokens_per_s"] == 100.0
    assert found["former_windows_tokens_per_s"] == [200.0, 200.0]
    assert found["away_tokens_per_s"] == 100.0
    assert found["first_token_s"] == 20.0
    assert found["returned_s"] == 24.0, "62: 0.97 x 200 = 194 > (2 x 150 + 8 x 200) / 10 = 190"
    assert found["worker_returned_s"] == 24.0
    assert found["read_gb_per_s"] == 2.0
    assert found["phases"] == {
        "noticed": 0.5, "process up": 9.5, "weights": 9.5, "first token": 0.5, "former throughput": 4.0
    }  # fmt: skip
    assert sum(found["phases"].values()) == found["returned_s"]


def test_before_its_first_token_a_recovery_has_the_phases_so_far() -> None:
    rows = [*tokens("rollout-0", 0.0, 40.0, 100.0), row(41.0, "failed")]
    found = recovery_of(rows, 0, 40.0, steady_s=20.0, window_s=10.0)
    assert found["phases"] == {"noticed": 1.0}
    assert found["returned_s"] is None


def test_medians_are_of_the_repeats_that_have_the_phase() -> None:
    ways = [{"noticed": 1.0, "weights": 4.0}, {"noticed": 3.0}, {"noticed": 2.0, "weights": 6.0}]
    assert median_phases(ways) == {"noticed": 2.0, "weights": 5.0}
