"""The arithmetic of bench/small_model.py."""

from pathlib import Path

import pytest

from bench.small_model import PROFILE_RATE, PROFILE_S, engine_cores, functions_of, split


@pytest.mark.parametrize("num", [1, 2, 3, 4])
def test_engines_share_all_requests_in_whole_groups(num: int) -> None:
    shares = split(512, num)
    assert sum(shares) == 512
    assert {share % 16 for share in shares} == {0}
    assert max(shares) - min(shares) in (0, 16)


def test_a_function_is_in_each_sample_of_what_it_calls_once() -> None:
    samples = PROFILE_S * PROFILE_RATE
    stacks = "MainThread;step (core.py:1);schedule (scheduler.py:5);schedule (scheduler.py:9)"
    raw = f"{stacks} {samples // 2}\nMainThread;step (core.py:2) {samples // 4}\noutput;encode (msgpack.py:3) 8\n"
    found = functions_of(raw)
    assert found["threads"] == {"MainThread": 0.75, "output": round(8 / samples, 3)}
    assert found["within"]["step (core.py"] == 0.75
    assert found["within"]["schedule (scheduler.py"] == 0.5
    assert found["alone"]["schedule (scheduler.py:9)"] == 0.5


def test_cores_are_those_of_the_runs_engines(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("rollout-0 is process 7 at tcp://x; its engine is process 8\n")
    start, steps = [0.1] * 40, [0.8] * 20
    assert engine_cores(tmp_path, {7: start, 8: start + steps, 9: steps}) == [0.8]
