"""Dense parameters that a rank has whole while it computes: gathered once a call, their gradients summed once.

    between calls     modules have this rank's rows (DTensor): what is trained, published, saved and loaded
    a call begins     others' rows are gathered beside them; modules have plain parameters
      microbatches    as on one rank: no collective, and gradients of whole parameters add up
    it ends           gradients are summed over ranks into those of rows; modules have rows again

A rank's rows are a view of the whole, so that an update writes them there, and only others' rows are ever stale. What
is trained is gathered at every call, what is frozen at the first one. Memory for it is held throughout (`extra_bytes`).

Owns that memory, the exchange and the sums. Does not own which parameters these are, nor the choice between this and
FSDP2, which gathers layer by layer (build_decoder.py). Invariant: all ranks use it together; a sum is in float32, in
the order of the backend's reduce-scatter, and the same in every layout of experts.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from slipstream.trainer.parallel import cut_by_size, gather_wholes, rows_of_rank

Place = tuple[nn.Module, str]

BUCKET_BYTES = 256 << 20
"""Bytes of float32 gradients that are summed over ranks in one exchange, whole; more if one parameter's are."""


@dataclass(frozen=True, slots=True)
class _Held:
    owner: nn.Module
    name: str
    whole: nn.Parameter
    rows: nn.Parameter
    """A DTensor; its local part is a view of `whole`."""

    @property
    def values(self) -> DTensor:
        values = self.rows.data
        assert isinstance(values, DTensor)
        return values

    def add_gradient(self, local: Tensor) -> None:
        mesh, placements = self.values.device_mesh, self.values.placements
        gradient = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=self.rows.shape, stride=self.rows.stride()
        )
        self.rows.grad = gradient if self.rows.grad is None else self.rows.grad + gradient


class WholeWeights:
    def __init__(self, places: Iterable[Place], mesh: DeviceMesh) -> None:
        """Cut parameters, which are whole and have no values yet, into rows of the mesh's ranks. `places`: no parameter
        twice."""
        self._mesh, self._has_frozen = mesh, False
        self._held = [_cut(owner, name, mesh) for owner, name in places]
        self._trained = [held for held in self._held if held.whole.requires_grad]

    @property
    def trainable(self) -> list[nn.Parameter]:
        return [held.whole for held in self._trained]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, modules have whole parameters. Afterwards this rank's rows have the gradients of all ranks, added to
        those that they had. Collective at either end; after an error nothing is exchanged, and gradients are dropped.
        """
        if not self._has_frozen:
            self._gather([held for held in self._held if not held.whole.requires_grad])
            self._has_frozen = True
        self.renew()
        for held in self._held:
            setattr(held.owner, held.name, held.whole)
        try:
            yield
            self._sum_gradients()
        finally:
            for held in self._held:
                held.whole.grad = None
                setattr(held.owner, held.name, held.rows)

    def renew(self) -> None:
        """Gather what is trained: ranks changed their rows. Collective."""
        self._gather(self._trained)

    @staticmethod
    @torch.no_grad()
    def _gather(held: Sequence[_Held]) -> None:
        gather_wholes([one.values for one in held], [one.whole.detach() for one in held])

    @torch.no_grad()
    def _sum_gradients(self) -> None:
        num_ranks, group = self._mesh.size(), self._mesh.get_group()
        given = [held for held in self._trained if held.whole.grad is not None]
        for bucket in cut_by_size(given, lambda held: 4 * held.whole.numel(), BUCKET_BYTES):
            parts = [_by_rank(held.whole.grad, num_ranks) for held in bucket if held.whole.grad is not None]
            for held in bucket:
                held.whole.grad = None
            sizes = [part.shape[1] for part in parts]
            packed_RN = torch.cat(parts, 1)
            del parts
            own_N = packed_RN.new_empty(packed_RN.shape[1])
            dist.reduce_scatter_tensor(own_N, packed_RN.view(-1), group=group)
            for held, part in zip(bucket, own_N.split(sizes), strict=True):
                local = held.values.to_local()
                held.add_gradient(part[: local.numel()].view(local.shape).to(local.dtype))


def extra_bytes(places: Iterable[Place], num_ranks: int) -> int:
    """Memory that whole parameters and their gradients take beside this rank's rows of both."""
    parameters = [owner.get_parameter(name) for owner, name in places]
    num_bytes = sum(one.numel() * one.element_size() * (2 if one.requires_grad else 1) for one in parameters)
    return num_bytes - num_bytes // num_ranks


def _cut(owner: nn.Module, name: str, mesh: DeviceMesh) -> _Held:
    whole = owner.get_parameter(name)
    start, stop = rows_of_rank(len(whole), mesh.get_local_rank(), mesh.size())
    values = whole.detach()
    rows = DTensor.from_local(
        values[start:stop], mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    held = _Held(owner, name, whole, nn.Parameter(rows, requires_grad=whole.requires_grad))
    setattr(owner, name, held.rows)
    return held


def _by_rank(gradient: Tensor, num_ranks: int) -> Tensor:
    """float32 [ranks, numbers of a rank's rows], zeros where the last ranks have fewer rows."""
    missing = -len(gradient) % num_ranks
    if missing:
        gradient = torch.cat([gradient, gradient.new_zeros(missing, *gradient.shape[1:])])
    return gradient.reshape(num_ranks, -1).float()
