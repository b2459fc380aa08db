"""An engine rank that merges adapters itself: A and B arrive, and it writes W + s B A into its live parameters.

    at start      base <- the checkpoint on this machine, in the form in which a publish would bring it
                  parameters <- base; their digest is what this rank `holds`
    a publish     A and B -> the factors, one-sided
    Commit        base digest? factors whole? -> parameters <- base, merged in place -> all hashed (receiver.py)

Parameters are merged in runs of loads (merging/factors.py), one launch for the experts of a layer, in coordinates of
the checkpoint and by the function or kernel with which the trainer merges: an element has the same bits in any cut, so
what is hashed here is what was hashed there.

Hashes of parameters and the commit are receiver.py's. Invariant: nothing is written into a live parameter unless the
base is the sender's and all factors have arrived.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from slipstream.weight_sync.errors import IntegrityError, WatermarkError
from slipstream.weight_sync.integrity import RangeHashes
from slipstream.weight_sync.layout import DestLayout, Load, PostLoad, Region
from slipstream.weight_sync.merging.factors import Merge, Run, is_factor, runs_of, with_factors
from slipstream.weight_sync.merging.merge import merger
from slipstream.weight_sync.merging.merge_operands import MergeOperands
from slipstream.weight_sync.page_lock import host_bytes

ReadRegion = Callable[[str, Region, Tensor], None]
"""Copies a rectangle of a checkpoint tensor into a view of its shape, cast to its format."""


class OwnMerge:
    """See the module's docstring.

    Args:
        layout: Of this rank, as its engine's loader was recorded.
        merges: Of all adapted matrices of the model.
        on_device: Keep the base beside the live parameters; else in host memory.

    Raises PlanError where a matrix does not lie row by row in its parameter, WatermarkError where there is no room.
    """

    def __init__(
        self, layout: DestLayout, params: Mapping[str, Tensor], merges: Sequence[Merge], *, on_device: bool
    ) -> None:
        self._params = {name: tensor.detach() for name, tensor in params.items()}
        self._loads = list(layout.loads)
        self._runs = runs_of(layout, {merge.tensor: merge for merge in merges})
        self.layout = with_factors(layout, self._runs)
        """The rank's layout, and the factors that it needs."""
        again = written_again(layout, self._runs)
        device = next(iter(self._params.values())).device
        try:
            self.factors = {
                param.name: torch.zeros(param.shape, dtype=getattr(torch, param.dtype), device=device)
                for param in self.layout.params
                if is_factor(param.name)
            }
            """Where A and B arrive, by name."""
            self._base = {name: _like(self._params[name], on_device=on_device) for name in sorted(again)}
        except (RuntimeError, OSError) as e:  # torch.OutOfMemoryError is the former
            raise WatermarkError(
                f"rank {layout.rank}: no room for the base from which weight_sync.remote_merge merges, "
                f"{sum(self._params[name].nbytes for name in again)} bytes {'on the GPU' if on_device else 'of host'}"
                " memory, beside the engine; set weight_sync.remote_merge=host, more memory or more tp_size, or none"
            ) from e
        self._factor_hashes = RangeHashes(list(self.factors.values()), [0] * len(self.factors))
        self._steps: list[Callable[[], object]] = []
        self.digest = ""
        """held_digest of the base over this rank's parameters; the receiver hashes it."""
        self._is_in_doubt = False
        """Whether a merge was not proven: from then on all bytes are asked for, as the next one would be as wrong."""

    @property
    def holds(self) -> str:
        """The digest, if the next publish may send factors alone."""
        return "" if self._is_in_doubt else self.digest

    @torch.no_grad()
    def read_base(self, read: ReadRegion) -> None:
        """Fill the base, and all parameters with it, in the form in which a publish would bring them."""
        for load in self._loads:
            target = self._base.get(load.param, self._params[load.param])
            view = _view(target, load)
            read(load.tensor, load.region, view.permute([load.axes.index(dim) for dim in range(len(load.axes))]))
        self._put_base()

    def check_factors(self, wanted: Mapping[str, int]) -> None:
        """Raise IntegrityError if a factor does not have the wanted hash; then no parameter was written."""
        arrived = zip(self.factors, self._factor_hashes.values(), strict=True)
        wrong = [name for name, value in arrived if value != wanted[name]]
        if wrong:
            raise IntegrityError(
                f"rank {self.layout.rank}: {len(wrong)} of {len(self.factors)} factors are not those that were sent "
                f"({wrong[0]}, ...); nothing was merged"
            )

    @torch.no_grad()
    def apply(self) -> None:
        """Write W + s B A into the parameters. Call proven() once they are hashed."""
        self._is_in_doubt = True
        self._put_base()
        self._steps = self._steps or [self._step(run) for run in self._runs]
        for step in self._steps:
            step()

    def proven(self) -> None:
        """Say that what was merged has the sender's hashes."""
        self._is_in_doubt = False

    def _put_base(self) -> None:
        for name, tensor in self._base.items():
            self._params[name].copy_(tensor, non_blocking=True)

    def _step(self, run: Run) -> Callable[[], object]:
        """The merge of a run, in place: an element is read before it is written, by whoever writes it."""
        (load, merge), (a, b) = run.bands[0], run.factors
        rows, columns = load.region.shape
        rank, whole_columns = merge.a.shape
        from_load = self._params[load.param].view(-1)[load.offset :]
        live_GRN = from_load.as_strided((len(run.bands), rows, columns), (run.distance, *load.stride))
        operands = MergeOperands(
            live_GRN,
            self.factors[b].view(-1, rows, rank),
            self.factors[a].view(-1, rank, whole_columns),
            merge.scale,
            merge.first_row + load.region.start[0],
            merge.rows_a_factor,
            run.pitch,
            load.region.start[1],
            merge.key,
            merge.stack_row,
        )
        return merger(operands, live_GRN)


def written_again(layout: DestLayout, runs: Sequence[Run]) -> set[str]:
    """The parameters of which a base is kept, because a merge writes them anew: adapted ones, and repacked ones, whose
    bytes at rest are not those that a publish brings."""
    again = {load.param for run in runs for load, _ in run.bands}
    return again | {param.name for param in layout.params if param.post_load is PostLoad.repack}


def _like(param: Tensor, *, on_device: bool) -> Tensor:
    """Memory for the base of a parameter; on the host page-locked, where a GPU is to read it."""
    if on_device:
        return torch.zeros_like(param)
    return host_bytes(param.nbytes, is_locked=param.is_cuda).view(param.dtype).view(param.shape)


def _view(whole: Tensor, load: Load) -> Tensor:
    """A load's part of a parameter, or of its base, as the destination walks it."""
    shape = [load.region.shape[axis] for axis in load.axes]
    return whole.view(-1)[load.offset :].as_strided(shape, load.stride)
