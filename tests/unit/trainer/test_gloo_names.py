"""What torch's gloo bears: two workers per group write the name of a collective without a lock, and free a name of more
than 15 characters twice (docs/gloo_race.md). So no collective of ours has such a name.
"""

from pathlib import Path

import numpy as np
import pytest
from cases.rank_helpers import count, make_rank, make_samples, save_state, spawn
from torch.profiler import ProfilerActivity, profile

from slipstream.conf.schema import TrainMode
from slipstream.trainer.delivery.merged_source import TrainerWeightSource
from slipstream.weight_sync.publish.collectives import Meeting

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
