"""The trainer's process group: joining it, leaving it, and agreement between ranks about host-side facts.

Owns torch.distributed's start and end in a trainer process. Does not own meshes (parallel.py) nor any tensor traffic of
training.

Invariants: host-side agreement runs over a gloo group of its own, so it never waits for device work and never touches
the device. Rank 0 listens for the other ranks on the given address and on no other.
"""

import hashlib
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from slipstream.trainer.errors import TrainerError

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Longest wait for the other ranks inside one collective."""


class ControlGroup:
    """All trainer ranks. With one rank there is no process group, and every method is local."""

    def __init__(self, rank: int, world_size: int, rendezvous: str, device: torch.device) -> None:
        """Join. Collective: NCCL for a GPU's tensors or gloo for a CPU's, and gloo for control. Only once per process:
        splitting a default group that is not the first one of its process ends in a SIGSEGV (pytorch #191952).
        `rendezvous`: "tcp://host:port", where rank 0 will listen, or "file:///path"; unused with one rank."""
        self.rank = rank
        self.world_size = world_size
        self.group: dist.ProcessGroup | None = None
        if world_size == 1:
            return
        is_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if is_gpu else "gloo",
            **_meeting_point(rendezvous, rank, world_size),
            rank=rank,
            world_size=world_size,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=device if is_gpu else None,
            # An exchange shares the device with a product whose blocks would go first. Groups of meshes have it, too.
            pg_options=dist.ProcessGroupNCCL.Options(is_high_priority_stream=True) if is_gpu else None,
        )
        group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        assert isinstance(group, dist.ProcessGroup)
        self.group = group

    def agree(self, what: str, value: object) -> None:
        """Raise TrainerError on every rank unless all of them hold the same value, compared by its repr."""
        mine = list(hashlib.sha256(repr(value).encode()).digest())
        # Every rank sees every digest, so that all raise and none is left waiting in the next collective.
        others = [rank for rank, digest in enumerate(self.of_ranks(mine)) if digest != mine]
        if others:
            raise TrainerError(f"rank {self.rank}: ranks {others} hold other {what} than this rank's {value!r}")

    def sum(self, value: int) -> int:
        return sum(one for (one,) in self.of_ranks([value]))

    def of_ranks(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's values, as many on each."""
        if self.group is None:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.int64)
        found = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(found, mine, group=self.group)
        return [one.tolist() for one in found]

    def leave(self) -> None:
        """Leave the process group. Idempotent."""
        if self.group is not None:
            self.group = None
            dist.destroy_process_group()


def _meeting_point(rendezvous: str, rank: int, world_size: int) -> dict[str, Any]:
    """The arguments of init_process_group that say where ranks meet. With init_method="tcp://..." rank 0 would listen
    on every interface of the machine and let anyone in. So it is given a socket that listens on the given address
    alone."""
    url = urlsplit(rendezvous)
    if url.scheme != "tcp":
        return {"init_method": rendezvous}
    if not url.hostname or not url.port:
        raise TrainerError(f"rank {rank}: rendezvous must be tcp://host:port, got {rendezvous!r}")
    listener = socket.create_server((url.hostname, url.port), backlog=world_size) if rank == 0 else None
    store = dist.TCPStore(
        url.hostname,
        url.port,
        world_size,
        is_master=rank == 0,
        timeout=COLLECTIVE_TIMEOUT,
        master_listen_fd=listener.detach() if listener is not None else None,
    )
    return {"store": store}
