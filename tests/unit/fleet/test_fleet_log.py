"""Locks: what fleet.jsonl holds, and that a worker which does not answer costs nobody else a row."""

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from fakes.workers import FakeWorker
from fakes.world import World

from slipstream.fleet.fleet_log import FleetEvent, FleetLog, FleetRow, count_tokens
from slipstream.fleet.replicas import Replica, ReplicaState
from slipstream.rollout.types import Progress


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def a_replica(index: int, state: ReplicaState = ReplicaState.serving) -> Replica:
    return Replica(f"rollout-{index}", index, FakeWorker(World([0, 0]), index), state)


def worker_of(replica: Replica) -> FakeWorker:
    assert isinstance(replica.worker, FakeWorker)
    return replica.worker


async def counted(replicas: list[Replica], path: Path, is_enough: Callable[[list[dict[str, Any]]], bool]) -> None:
    """Count until the file says enough."""
    counting = asyncio.create_task(count_tokens(replicas, FleetLog(path), every_s=0.001))
    try:
        async with asyncio.timeout(60):
            while not is_enough(rows_of(path)):
                await asyncio.sleep(0.001)
    finally:
        counting.cancel()
        await asyncio.gather(counting, return_exceptions=True)


def test_a_row_is_its_head_and_its_facts(tmp_path: Path) -> None:
    log = FleetLog(tmp_path / "fleet.jsonl")
    log.write(FleetRow(12.34567, 1, "rollout-1.1", FleetEvent.serving, {"down_s": 2.5}))
    log.write(FleetRow(13.0, 0, "rollout-0", FleetEvent.imported))
    assert rows_of(tmp_path / "fleet.jsonl") == [
        {"time": 12.346, "worker": 1, "name": "rollout-1.1", "event": "serving", "down_s": 2.5},
        {"time": 13.0, "worker": 0, "name": "rollout-0", "event": "imported"},
    ]


def test_a_file_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = FleetLog(tmp_path / "absent" / "fleet.jsonl")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            log.write(FleetRow(1.0, 0, "rollout-0", FleetEvent.up))
    assert len(caplog.records) == 1
    assert "lacks rows from here on: [Errno 2]" in caplog.text


async def test_workers_in_service_are_asked_again_and_again_and_the_first_token_is_noted_once(tmp_path: Path) -> None:
    replicas = [a_replica(0), a_replica(1, ReplicaState.starting)]
    worker_of(replicas[0]).progress_made = Progress(10.0, 7, 1, 9.5)
    path = tmp_path / "fleet.jsonl"
    await counted(replicas, path, lambda rows: len(rows) >= 4)
    head = {"worker": 0, "name": "rollout-0"}
    assert rows_of(path)[:4] == [
        {"time": 9.5, **head, "event": "first_token"},
        *[{"time": 10.0, **head, "event": "tokens", "tokens": 7}] * 3,
    ]
    assert {row["worker"] for row in rows_of(path)} == {0}


async def test_a_worker_that_hangs_has_one_open_question_and_one_that_fails_has_no_row(tmp_path: Path) -> None:
    replicas, num_questions = [a_replica(0, ReplicaState.updating), a_replica(1), a_replica(2)], 0

    async def hang() -> None:
        nonlocal num_questions
        num_questions += 1
        await asyncio.Event().wait()

    worker_of(replicas[1]).before["progress"] = hang
    worker_of(replicas[2]).before["progress"] = AsyncMock(side_effect=ConnectionError("it died"))
    path = tmp_path / "fleet.jsonl"
    await counted(replicas, path, lambda rows: len(rows) >= 5)
    assert num_questions == 1
    assert {row["worker"] for row in rows_of(path)} == {0}
