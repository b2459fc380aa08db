"""An engine of any layout, over plain tensors: its ranks receive everything, changes, or factors that they merge."""

import threading
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from safetensors.torch import load_file

from fakes.memory_transport import MemoryTransport
from fakes.publish import PlainEngine
from slipstream.weight_sync.layout import DestLayout, Load, Param, PostLoad, Region, TensorMeta
from slipstream.weight_sync.merging.factors import Merge
from slipstream.weight_sync.replica.own_merge import OwnMerge
from slipstream.weight_sync.replica.receiver import Receiver

REPACKED = "model.layers.0.self_attn.q_proj.weight"
"""The parameter that a MirrorEngine repacks."""
Read = Callable[[str, Region, torch.Tensor], None]


class RankedEngine(PlainEngine):
    """See the module's docstring.

    Args:
        layouts: Of its ranks. What is repacked there, is flipped.
        links: One a rank.
        landing_bytes: Of the zone for changes.
        merges: What it merges for itself, if it does.
        read_base: Where it finds its base then.
    """

    def __init__(
        self,
        layouts: Sequence[DestLayout],
        links: Sequence[MemoryTransport],
        *,
        landing_bytes: int = 0,
        merges: Sequence[Merge] = (),
        read_base: Read | None = None,
    ) -> None:
        self.layouts, self.links = layouts, links
        self.params, self.receivers, self.merges = [], [], []
        for layout, link in zip(layouts, links, strict=True):
            params = {p.name: torch.zeros(p.shape, dtype=getattr(torch, p.dtype)) for p in layout.params}
            own, named = None, params
            if read_base is not None:
                own = OwnMerge(layout, params, merges, on_device=False)
                own.read_base(read_base)
                named, layout = params | own.factors, own.layout
                self.merges.append(own)
            self.params.append(params)
            self.receivers.append(
                Receiver(
                    named, layout, link, repack=lambda _, tensor: tensor.copy_(tensor.flip(0).clone()),
                    recompute=lambda: None, landing_bytes=landing_bytes, own_merge=own,
                )
            )  # fmt: skip
        self.calls, self.fail_on, self.aborted, self.abort_reasons = [], {}, threading.Event(), []

    def wrong(self, wanted: Mapping[str, torch.Tensor]) -> list[str]:
        """Tensors of a checkpoint whose parts it does not hold, byte by byte."""
        found = []
        for layout, params in zip(self.layouts, self.params, strict=True):
            flipped = {param.name for param in layout.params if param.post_load is PostLoad.repack}
            for load in layout.loads:
                held = params[load.param].flip(0) if load.param in flipped else params[load.param]
                part = wanted[load.tensor][tuple(map(slice, load.region.start, load.region.stop))].contiguous()
                held = held.reshape(-1).as_strided(part.shape, load.stride, load.offset).contiguous()
                if not torch.equal(held.view(torch.uint8), part.view(torch.uint8)):
                    found.append(load.tensor)
        return found


class MirrorEngine(RankedEngine):
    """One rank with the checkpoint's tensors, one to one, of which one is repacked."""

    def __init__(self, metas: Sequence[TensorMeta], link: MemoryTransport, landing_bytes: int = 0) -> None:
        kinds = {REPACKED: PostLoad.repack}
        layout = DestLayout(
            0,
            tuple(Param(m.name, m.shape, m.dtype, kinds.get(m.name, PostLoad.identity)) for m in metas),
            tuple(whole_load(meta) for meta in metas),
        )
        super().__init__([layout], [link], landing_bytes=landing_bytes)

    def holds(self, folder: Path) -> bool:
        """Whether it holds a checkpoint, byte by byte."""
        wanted: dict[str, torch.Tensor] = {}
        for file in folder.glob("*.safetensors"):
            wanted |= load_file(file)
        return wanted.keys() == self.params[0].keys() and not self.wrong(wanted)


def whole_load(meta: TensorMeta) -> Load:
    """A tensor into a parameter of its name."""
    dims = range(len(meta.shape))
    strides = tuple(prod(meta.shape[dim + 1 :]) for dim in dims)
    return Load(meta.name, Region((0,) * len(dims), meta.shape), tuple(dims), meta.name, 0, strides)
