"""Where trainer ranks meet, which groups they make, and what torch's gloo bears. What real ranks compute together is in
moe/test_moe_parallel.py and test_context_ranks.py.

Two workers of a gloo group write the name of a collective without a lock, and free a name of more than 15 characters
twice (docs/gloo_race.md). So no collective of ours has such a name.
"""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch.distributed as dist
from cases.rank_helpers import count, make_rank, make_samples, save_state, spawn
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from slipstream.conf.schema import TrainMode
from slipstream.trainer.delivery.merged_source import TrainerWeightSource
from slipstream.trainer.errors import TrainerError
from slipstream.trainer.parallel import ParallelLayout
from slipstream.trainer.process_group import _meeting_point
from slipstream.weight_sync.publish.collectives import Meeting

WORLD_SIZE = 4


@pytest.fixture
def _joined() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=WORLD_SIZE, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_joined")
@pytest.mark.parametrize(("ep_size", "expert_ranks", "ep_ranks"), [(1, 4, None), (2, 2, 2), (4, None, 4)])
def test_a_group_is_made_only_where_it_is_neither_one_rank_nor_all(
    ep_size: int, expert_ranks: int | None, ep_ranks: int | None
) -> None:
    """A communicator costs device memory, and a second join of NCCL in one process dies where groups are split off."""
    layout = ParallelLayout.create(WORLD_SIZE, ep_size, rank=0, device="cpu")
    assert (layout.expert_mesh and layout.expert_mesh.size()) == expert_ranks
    assert (layout.ep_group and layout.ep_group.size()) == ep_ranks
    groups = dist.distributed_c10d._world.pg_map
    assert len(groups) == (3 if ep_size == 2 else 1), "all ranks; of a grid, its two axes"


def test_ranks_meet_on_the_given_address_alone() -> None:
    """Although another socket of the same process keeps the port reserved, as `TrainerActor.pick_rendezvous` does."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        stores: dict[int, dist.Store] = {}

        def join(rank: int) -> None:
            stores[rank] = _meeting_point(f"tcp://127.0.0.1:{port}", rank, 2)["store"]

        ranks = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(60)
        stores[1].set("who", "rank 1")
        assert stores[0].get("who") == b"rank 1"
        listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        assert [address.ip for address in listening if address.port == port] == ["127.0.0.1"]


def test_a_file_is_a_meeting_point_too() -> None:
    assert _meeting_point("file:///tmp/x", 0, 2) == {"init_method": "file:///tmp/x"}


def test_a_meeting_point_without_a_port_is_refused() -> None:
    with pytest.raises(TrainerError, match=r"tcp://host:port, got 'tcp://localhost'"):
        _meeting_point("tcp://localhost", 0, 2)


SHORT = {
    "_allgather_base_": "ALLGATHER",
    "_reduce_scatter_base_": "ALLREDUCE",
    "allgather_": "ALLGATHER",
    "allreduce_": "ALLREDUCE",
    "alltoall_base_": "ALLTOALL",
    "barrier": "BARRIER",
    "broadcast_": "BROADCAST",
    "gather_": "GATHER",
    "recv_": "no worker",
    "reduce_": "REDUCE",
    "scatter_": "SCATTER",
    "send": "no worker",
}
"""Operators of c10d, and what ProcessGroupGloo calls them (opTypeToString). One that is missing here has a longer name,
as allgather_into_tensor_coalesced_ has, or nobody has looked yet."""
CASES = [(2, TrainMode.lora), (1, TrainMode.full)]


def work(rank: int, world_size: int, rendezvous: str, folder: Path, ep_size: int, mode: TrainMode) -> set[str]:
    """One rank's whole life; returns the operators of c10d that it called."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        trainer = make_rank(rank, world_size, rendezvous, ep_size=ep_size, mode=mode)
        samples = make_samples()
        trainer.forward_backward([[samples[rank]], [samples[2 + rank]]], count(samples))
        trainer.optimizer_step()
        trainer.states.begin_checkpoint(folder / "state", folder / "beside" if mode is TrainMode.lora else None)
        save_state(trainer, folder / "state")
        trainer.states.load_state(folder / "state")
        trainer.states.save_merged(folder / "merged")
        if mode is TrainMode.lora:
            trainer.states.save_adapter(folder / "adapter")
            assert isinstance(trainer.delivery.source, TrainerWeightSource)
            assert trainer.delivery.source.begin(0), "some A are gathered"
            trainer.delivery.source.end()
        meeting = Meeting(rank, world_size, trainer._control.group)
        meeting.deal(int, int, lambda: (1, [1, 2]))
        meeting.attempts(int, lambda: 1)
        meeting.everywhere(int, lambda: 1)
        meeting.add_up(np.zeros(3, dtype=np.int64))
        trainer.shutdown()
    return {event.key.removeprefix("c10d::") for event in profiled.key_averages() if event.key.startswith("c10d::")}


@pytest.fixture(scope="module")
def called(tmp_path_factory: pytest.TempPathFactory) -> list[set[str]]:
    return [ranks[0] | ranks[1] for ranks in spawn(work, 2, tmp_path_factory.mktemp("ranks"), CASES)]


@pytest.mark.parametrize("case", range(len(CASES)), ids=["lora-ep2", "full-fsdp2"])
def test_no_collective_on_gloo_has_a_long_name(called: list[set[str]], case: int) -> None:
    assert {"_allgather_base_", "_reduce_scatter_base_", "allreduce_", "barrier"} <= called[case]
    assert called[case] - SHORT.keys() == set()
    assert max(map(len, SHORT.values())) <= 15
