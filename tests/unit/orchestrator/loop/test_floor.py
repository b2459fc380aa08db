"""Promises of orchestrator/loop/floor.py, and of the controller that asks for it."""

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from fakes.clock import on_jumping_clock
from fakes.fleet import serve, supervised
from fakes.loop import Loop, make_config
from fakes.world import World

from slipstream.conf.schema import SamplingConfig
from slipstream.fleet.router import Router
from slipstream.orchestrator.loop import controller
from slipstream.orchestrator.loop.floor import FLOOR_TIMEOUT_S, MAX_SCORED_TOKENS, measure_floor
from slipstream.rollout.types import Group, Prompt, Rollout


def a_run(tmp_path: Path, temperature: float = 1.0, **changes: int) -> Loop:
    return Loop(tmp_path, make_config(rollout={"sampling": SamplingConfig(temperature=temperature)}, **changes))


async def test_floor_is_measured_at_the_first_step_and_then_this_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fakes' prefill is half a nat above their decoding: k3 = e^0.5 - 1.5."""
    monkeypatch.setattr(controller, "FLOOR_EVERY_STEPS", 3)
    loop = a_run(tmp_path, num_steps=7)
    loop.trainer.extra_sums = {"parity/k3_sum": 4.0, "parity/num_tokens": 10.0}
    await loop.run()
    k3 = math.exp(0.5) - 1.5
    wanted = [None, k3, None, k3, None, None, k3, None]
    assert [row["parity/floor_k3"] for row in loop.rows] == [value and pytest.approx(value) for value in wanted]
    assert loop.rows[3]["parity/k3_over_floor"] == pytest.approx(0.4 / k3)
    assert loop.rows[3]["parity/floor_log_ratio_max"] == 0.5
    assert loop.rows[2]["parity/k3_over_floor"] is None
    assert loop.world.scored == [(version, [1, 7, 5, 2]) for version in (0, 0, 0, 2, 2, 2, 5, 5, 5)]


async def test_a_step_that_fails_leaves_no_scoring_behind(tmp_path: Path) -> None:
    async def hangs(*_: object) -> None:
        await asyncio.Event().wait()

    loop = a_run(tmp_path, num_steps=2)
    loop.trainer.before["optimizer_step"] = AsyncMock(side_effect=ConnectionError("the trainer is gone"))
    for worker in loop.workers:
        worker.score = hangs  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        await loop.run()
    assert not [task for task in asyncio.all_tasks() if "_floor_of" in repr(task)]


async def test_a_worker_that_cannot_score_costs_a_warning_and_no_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = a_run(tmp_path, num_steps=2)
    for worker in loop.workers:
        worker.scores_fail = True
    await loop.run()
    assert loop.rows[-1]["step"] == 2 and loop.rows[1]["parity/floor_k3"] is None
    assert "the floor of the mismatch was not measured: ConnectionError" in caplog.text


async def test_no_floor_where_prefill_has_another_distribution(tmp_path: Path) -> None:
    loop = a_run(tmp_path, temperature=0.5, num_steps=1)
    await loop.run()
    assert not loop.world.scored


def a_group(num_prompt: int, versions: list[int]) -> Group:
    rollout = Rollout([5] * len(versions), [-1.0] * len(versions), versions, "", "stop")
    return Group(Prompt(0, (1,) * num_prompt, ""), [rollout], [1.0])


@on_jumping_clock
async def test_an_engine_that_does_not_answer_costs_a_minute_and_no_step() -> None:
    async def score(*_: object) -> list[float]:
        await asyncio.sleep(9999)
        return []

    router: Any = SimpleNamespace(score=score)
    began = asyncio.get_running_loop().time()
    assert await measure_floor(router, [a_group(2, [3, 3])] * 4, 3, max_model_len=99) == {}
    assert asyncio.get_running_loop().time() - began == FLOOR_TIMEOUT_S


async def test_the_floor_is_the_mean_over_tokens_and_the_farthest_of_them() -> None:
    """Decoded at -1 each; prefilled at -1.5 and -1: d = -0.5 and 0."""

    async def score(tokens: list[int], version: int) -> list[float]:
        assert (tokens, version) == ([1, 1, 5, 5], 3)
        return [-9.0, -1.5, -1.0, -9.0]

    router: Any = SimpleNamespace(score=score)
    found = await measure_floor(router, [a_group(2, [3, 3])], 3, max_model_len=99)
    assert found["parity/floor_log_ratio_max"] == 0.5
    assert found["parity/floor_k3"] == pytest.approx((math.exp(-0.5) + 0.5 - 1) / 2)


async def serving(version: int) -> tuple[Router, World]:
    """A router of one worker, and what that was asked."""
    supervisor, (worker,) = supervised(1)
    worker.world.committed[0] = version
    await serve(supervisor)
    return Router(supervisor, request_timeout_s=5), worker.world


@pytest.mark.parametrize(
    ("group", "max_model_len", "scored_tokens"),
    [
        (a_group(2, [3, 3]), 99, 4),
        (a_group(2, [2, 3]), 99, None),  # begun under an older version
        (a_group(2, [3] * 2000), 9999, MAX_SCORED_TOKENS),
        (a_group(MAX_SCORED_TOKENS, [3, 3]), 9999, None),  # no room for the response
        (a_group(2, [3] * 8), 10, 9),  # an engine takes one token less than it can hold
    ],
)
async def test_scored_are_tokens_of_the_engines_version_as_far_as_they_fit(
    group: Group, max_model_len: int, scored_tokens: int | None
) -> None:
    router, world = await serving(3)
    found = await measure_floor(router, [group], 3, num_sequences=4, max_model_len=max_model_len)
    assert [len(tokens) for _, tokens in world.scored] == ([] if scored_tokens is None else [scored_tokens])
    assert bool(found) == (scored_tokens is not None)


async def test_the_first_response_of_each_of_the_first_groups_is_scored() -> None:
    router, world = await serving(3)
    groups = [Group(Prompt(n, (n,), ""), a_group(1, [3]).rollouts * 2, [1.0, 0.0]) for n in range(4)]
    groups[1] = replace(groups[1], rollouts=a_group(1, [2]).rollouts * 2)  # of an older version
    await measure_floor(router, groups, 3, num_sequences=2, max_model_len=99)
    assert world.scored == [(3, [0, 5]), (3, [2, 5])]
