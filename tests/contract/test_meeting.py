"""Three trainer ranks over gloo: each one learns what it should, and what fails on one is raised on all that wait."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from slipstream.conf.errors import SlipstreamError
from slipstream.weight_sync.api import register_tensors
from slipstream.weight_sync.errors import PlanError, ProtocolError
from slipstream.weight_sync.layout import Region, SourceLayout, SourceShard, TensorMeta
from slipstream.weight_sync.publish import collectives
from slipstream.weight_sync.publish.collectives import (
    Meeting,
    all_gather_bytes,
    broadcast_bytes,
    gather_bytes,
    scatter_bytes,
    values,
)
from slipstream.weight_sync.typed_msgpack import Sent, unpack

NUM_RANKS = 3
OF_RANKS = [b"a", b"", b"abc"]
"""A message of each rank, all of different lengths."""
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "slipstream.weight_sync.publish.collectives"])


class MakesFolder:
    """What an attacker pickles."""

    path = f"{tempfile.gettempdir()}/slipstream-unpickled-{os.getpid()}"

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def source_layout(rank: int) -> SourceLayout:
    metas = (TensorMeta("w", (6, 4), "bfloat16"), TensorMeta("scale", (), "float32"))
    return SourceLayout(
        rank, metas, (SourceShard("w", Region((2 * rank, 0), (2, 4))), SourceShard("no", Region((), ())))
    )


def raises(error: Exception) -> Any:
    raise error


def everyone_hears_rank0(meeting: Meeting) -> Any:
    return meeting.on_rank0(int, lambda: meeting.rank + 7)


def an_error_of_rank0(meeting: Meeting) -> Any:
    return meeting.on_rank0(int, lambda: raises(PlanError("no such tensor")))


def a_foreign_error_of_rank0(meeting: Meeting) -> Any:
    return meeting.on_rank0(int, lambda: raises(KeyError("embed")))


def parts(meeting: Meeting) -> Any:
    return meeting.deal(str, str, lambda: ("for all", [f"for {rank}" for rank in range(NUM_RANKS)]))


def parts_that_rank0_cannot_make(meeting: Meeting) -> Any:
    return meeting.deal(
        str, str, lambda: ("for all", [raises(PlanError(f"no part {rank}")) for rank in range(NUM_RANKS)])
    )


def all_to_rank0(meeting: Meeting) -> Any:
    return meeting.gather(int, meeting.rank)


def all_to_all(meeting: Meeting) -> Any:
    return meeting.everywhere(int, lambda: meeting.rank)


def an_error_of_the_last(meeting: Meeting) -> Any:
    return meeting.everywhere(int, lambda: meeting.rank if meeting.rank < 2 else raises(PlanError("torn")))


def an_error_gathered(meeting: Meeting) -> Any:
    outcomes = meeting.attempts(int, lambda: meeting.rank if meeting.rank < 2 else raises(PlanError("torn")))
    return meeting.on_rank0(list[int], lambda: values(outcomes))


def a_sum(meeting: Meeting) -> Any:
    table = np.full((2, 3), 10**meeting.rank, np.int64)
    meeting.add_up(table)
    return table.tolist() if meeting.rank == 0 else None


def bytes_that_are_a_pickle(meeting: Meeting) -> Any:
    """As a rank that is none of ours might send them: they would make a folder where they are unpickled."""
    gathered = gather_bytes(pickle.dumps(MakesFolder()), dist.group.WORLD)
    for data in gathered:
        with pytest.raises((ProtocolError, ValueError)):
            unpack(tuple[str, str, Any], data)
    return Path(MakesFolder.path).exists()


def bytes_of_different_lengths(meeting: Meeting) -> Any:
    group = dist.group.WORLD
    return (
        broadcast_bytes(OF_RANKS[meeting.rank], group),
        scatter_bytes(OF_RANKS, group),
        gather_bytes(OF_RANKS[meeting.rank], group),
        all_gather_bytes(OF_RANKS[meeting.rank], group),
    )


def a_message_over_the_limit(meeting: Meeting) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "MAX_BYTES", 1000)
        return meeting.gather(str, "x" * (2000 if meeting.rank == 1 else 5))


def a_value_that_cannot_be_sent(meeting: Meeting) -> Any:
    return meeting.everywhere(int, lambda: object() if meeting.rank == 1 else 5)  # type: ignore[arg-type]


def layouts_of_all(meeting: Meeting) -> Any:
    found = meeting.attempts(tuple[Sent[SourceLayout], int], lambda: (Sent(source_layout(meeting.rank)), meeting.rank))
    return found == [((Sent(source_layout(rank)), rank), None) for rank in range(NUM_RANKS)] if found else None


def tensors_of_which_one_cannot_be_sent(meeting: Meeting) -> Any:
    """As a user's own rank does it: only the last one passes a tensor that is not contiguous."""
    whole = torch.zeros(2, 3)
    register_tensors({"w": whole.t() if meeting.rank == 2 else whole}, rank=meeting.rank, group=dist.group.WORLD)


def tensors_of_all(meeting: Meeting) -> Any:
    source = register_tensors({f"w{meeting.rank}": torch.zeros(2)}, rank=meeting.rank, group=dist.group.WORLD)
    return [meta.name for meta in source.layout().tensors]


TOO_LONG = "trainer ranks send messages of [9, 2006, 9] bytes; at most 1000 are read"
UNSENDABLE = "a value of type object cannot be sent to the other ranks: a message cannot hold object"
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
    (bytes_that_are_a_pickle, [False] * 3),
    (
        bytes_of_different_lengths,
        [(b"a", own, OF_RANKS if rank == 0 else [], OF_RANKS) for rank, own in enumerate(OF_RANKS)],
    ),
    (a_message_over_the_limit, [f"ProtocolError: {TOO_LONG}"] * 3),
    (a_value_that_cannot_be_sent, [f"WeightSyncError: trainer rank 1: {UNSENDABLE}"] * 3),
    (layouts_of_all, [True, None, None]),
    (a_sum, [[[111] * 3] * 2, None, None]),
]
"""What they do together, and what comes of it on each rank; of an error its class and text."""


def outcome_of(step: Callable[[Meeting], Any], meeting: Meeting) -> Any:
    try:
        return step(meeting)
    except SlipstreamError as e:
        return f"{type(e).__name__}: {str(e).split(' <', 1)[0]}"


def run_rank(rank: int, rendezvous: str, answers: Queue[tuple[int, list[Any]]]) -> None:
    """All cases, one after the other: an error leaves no rank behind in a collective."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=600)
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
        return dict(answers.get(timeout=600) for _ in ranks)
    finally:
        for process in ranks:
            process.join(timeout=120)
            process.kill()


@pytest.mark.parametrize("number", range(len(CASES)), ids=[step.__name__ for step, _ in CASES])
def test_ranks_that_meet_share_what_they_have_and_what_fails(met: dict[int, list[Any]], number: int) -> None:
    assert [met[rank][number] for rank in range(NUM_RANKS)] == CASES[number][1]


def test_a_rank_alone_meets_nobody() -> None:
    alone = Meeting(0, 1, None)
    assert alone.deal(str, str, lambda: ("for all", ["for 0"])) == ("for all", "for 0")
    assert alone.gather(int, 5) == alone.everywhere(int, lambda: 5) == [5]
    with pytest.raises(PlanError, match=r"^no such tensor$"):
        an_error_of_rank0(alone)
    with pytest.raises(PlanError, match=r"^torn$"):
        alone.everywhere(int, lambda: raises(PlanError("torn")))
    with pytest.raises(ValueError, match="2 trainer ranks need a process group"):
        Meeting(0, 2, None)
