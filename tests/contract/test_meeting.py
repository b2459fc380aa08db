"""Three trainer ranks over gloo: each one learns what it should, and what fails on one is raised on all that wait."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from conf.errors import SlipstreamError
from weight_sync.api import register_tensors
from weight_sync.errors import PlanError
from weight_sync.publish.collectives import Meeting, attempt, values

NUM_RANKS = 3
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "weight_sync.publish.collectives"])


def raises(error: Exception) -> Any:
    raise error


def everyone_hears_rank0(meeting: Meeting) -> Any:
    return meeting.on_rank0(lambda: meeting.rank + 7)


def an_error_of_rank0(meeting: Meeting) -> Any:
    return meeting.on_rank0(lambda: raises(PlanError("no such tensor")))


def a_foreign_error_of_rank0(meeting: Meeting) -> Any:
    return meeting.on_rank0(lambda: raises(KeyError("embed")))


def parts(meeting: Meeting) -> Any:
    return meeting.deal(lambda: ("for all", [f"for {rank}" for rank in range(NUM_RANKS)]))


def parts_that_rank0_cannot_make(meeting: Meeting) -> Any:
    return meeting.deal(lambda: ("for all", [raises(PlanError(f"no part {rank}")) for rank in range(NUM_RANKS)]))


def all_to_rank0(meeting: Meeting) -> Any:
    return meeting.gather(meeting.rank)


def all_to_all(meeting: Meeting) -> Any:
    return meeting.everywhere(lambda: meeting.rank)


def an_error_of_the_last(meeting: Meeting) -> Any:
    return meeting.everywhere(lambda: meeting.rank if meeting.rank < 2 else raises(PlanError("torn")))


def an_error_gathered(meeting: Meeting) -> Any:
    outcomes = meeting.gather(attempt(lambda: meeting.rank if meeting.rank < 2 else raises(PlanError("torn"))))
    return meeting.on_rank0(lambda: values(outcomes))


def a_sum(meeting: Meeting) -> Any:
    table = np.full((2, 3), 10**meeting.rank, np.int64)
    meeting.add_up(table)
    return table.tolist() if meeting.rank == 0 else None


def tensors_of_which_one_cannot_be_sent(meeting: Meeting) -> Any:
    """As a user's own rank does it: only the last one passes a tensor that is not contiguous."""
    whole = torch.zeros(2, 3)
    register_tensors({"w": whole.t() if meeting.rank == 2 else whole}, rank=meeting.rank, group=dist.group.WORLD)


def tensors_of_all(meeting: Meeting) -> Any:
    source = register_tensors({f"w{meeting.rank}": torch.zeros(2)}, rank=meeting.rank, group=dist.group.WORLD)
    return [meta.name for meta in source.layout().tensors]


CASES: list[tuple[Callable[[Meeting], Any], list[Any]]] = [
    (everyone_hears_rank0, [7, 7, 7]),
    (an_error_of_rank0, ["PlanError: no such tensor"] * 3),
    (a_foreign_error_of_rank0, ["WeightSyncError: KeyError: 'embed'"] * 3),
    (parts, [("for all", "for 0"), ("for all", "for 1"), ("for all", "for 2")]),
    (parts_that_rank0_cannot_make, ["PlanError: no part 0"] * 3),
    (all_to_rank0, [[0, 1, 2], [], []]),
    (all_to_all, [[0, 1, 2]] * 3),
    (an_error_of_the_last, ["PlanError: trainer rank 2: torn"] * 3),
    (an_error_gathered, ["PlanError: trainer rank 2: torn"] * 3),
    (
        tensors_of_which_one_cannot_be_sent,
        ["ConfigError: trainer rank 2: w is not contiguous (strides (1, 3)); pass a contiguous tensor"] * 3,
    ),
    (tensors_of_all, [["w0", "w1", "w2"]] * 3),
    (a_sum, [[[111] * 3] * 2, None, None]),
]
"""What they do together, and what comes of it on each rank; of an error its class and text."""


def outcome_of(step: Callable[[Meeting], Any], meeting: Meeting) -> Any:
    try:
        return step(meeting)
    except SlipstreamError as e:
        return f"{type(e).__name__}: {e}"


def run_rank(rank: int, rendezvous: str, answers: Queue[tuple[int, list[Any]]]) -> None:
    """All cases, one after the other: an error leaves no rank behind in a collective."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=60)
    )
    meeting = Meeting(rank, NUM_RANKS, dist.group.WORLD)
    answers.put((rank, [outcome_of(step, meeting) for step, _ in CASES]))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def met(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    """What each rank saw, case by case."""
    rendezvous = f"file://{Path(tmp_path_factory.mktemp('meeting')) / 'store'}"
    answers: Queue[tuple[int, list[Any]]] = CONTEXT.Queue()
    ranks = [CONTEXT.Process(target=run_rank, args=(rank, rendezvous, answers)) for rank in range(NUM_RANKS)]
    for process in ranks:
        process.start()
    try:
        return dict(answers.get(timeout=120) for _ in ranks)
    finally:
        for process in ranks:
            process.join(timeout=10)
            process.kill()


@pytest.mark.parametrize("number", range(len(CASES)), ids=[step.__name__ for step, _ in CASES])
def test_ranks_that_meet_share_what_they_have_and_what_fails(met: dict[int, list[Any]], number: int) -> None:
    assert [met[rank][number] for rank in range(NUM_RANKS)] == CASES[number][1]


def test_a_rank_alone_meets_nobody() -> None:
    alone = Meeting(0, 1, None)
    assert alone.deal(lambda: ("for all", ["for 0"])) == ("for all", "for 0")
    assert alone.gather(5) == alone.everywhere(lambda: 5) == [5]
    with pytest.raises(PlanError, match=r"^no such tensor$"):
        an_error_of_rank0(alone)
    with pytest.raises(PlanError, match=r"^torn$"):
        alone.everywhere(lambda: raises(PlanError("torn")))
    with pytest.raises(ValueError, match="2 trainer ranks need a process group"):
        Meeting(0, 2, None)
