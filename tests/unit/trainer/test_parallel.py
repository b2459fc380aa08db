"""Promises of trainer/parallel.py that need no second process; those of real ranks are in test_moe_parallel.py."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from slipstream.trainer.parallel import ParallelLayout

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
