"""Meshes, and what a rank holds of a parameter.

    ranks   0 1 2 3   (num_ranks = 4, ep_size = 2)
    ep      [0 1] [2 3]     an ep group holds every expert once, in nearly equal shares (moe/block.py)
    expert  [0 2] [1 3]     FSDP2 shards an expert bank over the ranks with the same ep_rank
    dense   [0 1 2 3]       everything else is sharded over all ranks, except frozen vectors, which every rank holds
    cp      [0 1] [2 3]     with cp_size = 2: a cp group trains the same microbatches, each rank its tokens of them

Does not own the process group: whoever starts the rank initializes torch.distributed (when world_size > 1). Does not
own which module is sharded over which mesh (model/build_decoder.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from slipstream.trainer.errors import LayoutError

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """This rank's place. Meshes and groups that would have one member are None."""

    world_size: int
    ep_size: int
    rank: int
    device: torch.device
    dense_mesh: DeviceMesh | None
    """All ranks."""
    expert_mesh: DeviceMesh | None
    """The num_ranks / ep_size ranks that hold the same experts; the dense mesh itself when ep_size is 1."""
    ep_group: dist.ProcessGroup | None
    """The ep_size ranks that together hold every expert."""
    cp_size: int = 1
    cp_group: dist.ProcessGroup | None = None
    """The cp_size ranks that share the tokens of a microbatch (model/context.py)."""

    @property
    def cp_rank(self) -> int:
        return self.rank % self.cp_size

    @property
    def ep_rank(self) -> int:
        return self.rank % self.ep_size

    def most_of_ep_group(self, value: int) -> int:
        """The largest value of the ep group's ranks. Collective; the host waits for the device."""
        return value if self.ep_group is None else self._reduced(value, dist.ReduceOp.MAX, self.ep_group)

    def least_of_ranks(self, value: int) -> int:
        """The smallest value of all ranks. Collective; the host waits for the device."""
        mesh = self.dense_mesh
        return value if mesh is None else self._reduced(value, dist.ReduceOp.MIN, mesh.get_group())

    def _reduced(self, value: int, by: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> int:
        found = torch.tensor([value], device=self.device)
        dist.all_reduce(found, by, group=group)
        return int(found)

    @classmethod
    def single(cls, device: torch.device | str) -> ParallelLayout:
        """One rank, without torch.distributed."""
        return cls(1, 1, 0, torch.device(device), None, None, None)

    @classmethod
    def create(
        cls, world_size: int, ep_size: int, rank: int, device: torch.device | str, cp_size: int = 1
    ) -> ParallelLayout:
        """Build the meshes. Collective when world_size > 1, once torch.distributed is initialized."""
        device = torch.device(device)
        if world_size == 1:
            return cls.single(device)
        dense = init_device_mesh(device.type, (world_size,), mesh_dim_names=("dense",))
        expert_mesh, ep_group = dense, dist.group.WORLD
        if 1 < ep_size < world_size:  # otherwise one of the two groups is all ranks and the other is one rank
            grid = init_device_mesh(device.type, (world_size // ep_size, ep_size), mesh_dim_names=("expert_data", "ep"))
            expert_mesh, ep_group = grid["expert_data"], grid["ep"].get_group()
        cp_group = dist.group.WORLD
        if 1 < cp_size < world_size:
            grid = init_device_mesh(device.type, (world_size // cp_size, cp_size), mesh_dim_names=("data", "cp"))
            cp_group = grid["cp"].get_group()
        return cls(
            world_size,
            ep_size,
            rank,
            device,
            dense_mesh=dense,
            expert_mesh=expert_mesh if ep_size < world_size else None,
            ep_group=ep_group if ep_size > 1 else None,
            cp_size=cp_size,
            cp_group=cp_group if cp_size > 1 else None,
        )


def take_device(device: str, rank: int) -> torch.device:
    """This rank's device, with the process prepared for it."""
    if device == "cuda":
        taken = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(taken)
        return taken
    if "OMP_NUM_THREADS" not in os.environ:  # ranks share the machine's cores with engines: more threads slow both down
        torch.set_num_threads(1)
    return torch.device("cpu")


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The host's tensor there. The host does not wait: neither for the copy nor for what the device does before it."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def device_bytes(device: torch.device) -> int:
    """Memory of a GPU, or of this machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def local_part(tensor: Tensor) -> tuple[Tensor, int]:
    """A live view of this rank's rows (dim 0) of a parameter, and the first one's index in the whole."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), 0
    mesh = tensor.device_mesh
    start, stop = rows_of_rank(tensor.shape[0], mesh.get_local_rank(), mesh.size())
    with torch.no_grad():
        local = tensor.to_local()
    if local.shape[0] != stop - start:
        raise LayoutError(
            f"a shard has {local.shape[0]} rows where row sharding over {mesh.size()} ranks gives {stop - start}"
        )
    return local, start


def sharded_rows(name: str, tensor: Tensor) -> Tensor:
    """This rank's rows of a parameter or gradient; refuses a placement that would count elements twice."""
    if not isinstance(tensor, DTensor):
        return tensor
    if not all(isinstance(placement, Shard) for placement in tensor.placements):
        raise LayoutError(
            f"{name} is placed as {tensor.placements}; trainable parameters are sharded, never replicated"
        )
    return tensor.to_local()


def where_they_lie(
    parameters: Iterable[Tensor], prepare: Callable[[], Sequence[Callable[[], object]]]
) -> Callable[[], None]:
    """A function that calls what `prepare` returned for the place where this rank's rows of these parameters lie. FSDP2
    may move a shard's storage: `prepare` is called then, and at the first call. Every publish asks for every adapter's
    address, which must be cheap."""
    each = list({id(parameter): parameter for parameter in parameters}.values())
    prepared: Sequence[Callable[[], object]] = ()
    places: list[int] | None = None

    @torch.no_grad()
    def run() -> None:
        nonlocal prepared, places
        found = [(one._local_tensor if isinstance(one, DTensor) else one).data_ptr() for one in each]
        if found != places:
            prepared, places = prepare(), found
        for one in prepared:
            one()

    return run


def cut_by_size(items: Iterable[Item], size_of: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """All items, in order, in lists of at most that size together; more if one item's is."""
    part: list[Item] = []
    total = 0
    for item in items:
        size = size_of(item)
        if part and total + size > most:
            yield part
            part, total = [], 0
        part.append(item)
        total += size
    if part:
        yield part


def rows_of_rank(num_rows: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """First row, and one past the last, as FSDP2 and torch.chunk cut: ceil(rows / ranks) rows per rank; the last ranks
    may have fewer or none."""
    rows_a_rank = -(-num_rows // num_ranks)
    return min(rows_a_rank * rank, num_rows), min(rows_a_rank * (rank + 1), num_rows)


def whole(tensor: Tensor) -> Tensor:
    """All rows of a parameter, without a graph. If it is sharded, this is collective on the mesh that shards it. Not
    DTensor.full_tensor(), whose exchange on gloo has a long name (see gather_wholes)."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    local, _ = local_part(tensor)
    num_ranks, num_rows = tensor.device_mesh.size(), tensor.shape[0]
    rows_a_rank = -(-num_rows // num_ranks)
    sent = local.detach().contiguous()
    if len(sent) < rows_a_rank:  # of the last ranks, so that what is added comes after all rows
        sent = torch.cat([sent, sent.new_zeros(rows_a_rank - len(sent), *sent.shape[1:])])
    out = sent.new_empty(num_ranks * rows_a_rank, *sent.shape[1:])
    dist.all_gather_into_tensor(out, sent, group=tensor.device_mesh.get_group())
    return out[:num_rows]


def gather_wholes(tensors: Sequence[DTensor], outs: Sequence[Tensor]) -> None:
    """Write `whole` of many parameters into `outs`. Collective, in the order given.

    Parameters that are cut evenly share one exchange per mesh, because an exchange costs the host 0.2 ms. On gloo they
    are packed for that: no collective there may have a name of more than 15 characters, such as ALLGATHER_COALESCED.
    Gloo's two workers write that name into one string without a lock, and free a long one twice (docs/gloo_race.md).
    """
    even: dict[dist.ProcessGroup, list[tuple[Tensor, Tensor]]] = {}
    for tensor, out in zip(tensors, outs, strict=True):
        if tensor.shape[0] % tensor.device_mesh.size() == 0:
            even.setdefault(tensor.device_mesh.get_group(), []).append((out, local_part(tensor)[0]))
        else:
            out.copy_(whole(tensor))
    for group, pairs in even.items():
        whole_ones, parts = map(list, zip(*pairs, strict=True))
        if dist.get_backend(group) == "gloo":
            _gather_packed(whole_ones, parts, group)
        else:
            group.allgather_into_tensor_coalesced(whole_ones, parts).wait()


def _gather_packed(outs: list[Tensor], parts: list[Tensor], group: dist.ProcessGroup) -> None:
    sent = torch.cat([part.flatten().view(torch.uint8) for part in parts])
    received = sent.new_empty(group.size() * len(sent))
    dist.all_gather_into_tensor(received, sent, group=group)
    rows_of_ranks = received.view(group.size(), -1).split([part.nbytes for part in parts], dim=1)
    for out, rows in zip(outs, rows_of_ranks, strict=True):
        out.view(group.size(), -1).view(torch.uint8).copy_(rows)
