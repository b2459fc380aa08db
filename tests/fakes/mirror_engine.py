"""An engine of one rank that holds a checkpoint's tensors one to one, with a landing zone for changes."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from safetensors.torch import load_file

from fakes.memory_transport import MemoryTransport
from fakes.publish import PlainEngine
from slipstream.weight_sync.layout import DestLayout, Load, Param, PostLoad, Region, TensorMeta
from slipstream.weight_sync.replica.receiver import Receiver

REPACKED = "model.layers.0.self_attn.q_proj.weight"


class MirrorEngine(PlainEngine):
    """One engine rank with the checkpoint's tensors, one to one, and a landing zone. One parameter is repacked."""

    def __init__(self, metas: tuple[TensorMeta, ...], transport: MemoryTransport, landing_bytes: int) -> None:
        params = {meta.name: torch.zeros(meta.shape, dtype=getattr(torch, meta.dtype)) for meta in metas}
        kinds = {REPACKED: PostLoad.repack}
        whole = {m.name: (m.name, Region((0,) * len(m.shape), m.shape), tuple(range(len(m.shape)))) for m in metas}
        layout = DestLayout(
            0,
            tuple(Param(m.name, m.shape, m.dtype, kinds.get(m.name, PostLoad.identity)) for m in metas),
            tuple(Load(*whole[name], name, 0, tensor.stride()) for name, tensor in params.items()),
        )
        self.params = [params]
        self.receivers = [
            Receiver(
                params, layout, transport, repack=lambda _, tensor: tensor.copy_(tensor.flip(0).clone()),
                recompute=lambda: None, landing_bytes=landing_bytes,
            )
        ]  # fmt: skip
        self.calls, self.fail_on, self.aborted, self.abort_reasons = [], {}, threading.Event(), []

    def holds(self, folder: Path) -> bool:
        """Whether it holds a checkpoint, byte by byte."""
        wanted: dict[str, torch.Tensor] = {}
        for file in folder.glob("*.safetensors"):
            wanted |= load_file(file)
        if REPACKED in wanted:
            wanted[REPACKED] = wanted[REPACKED].flip(0)
        held = self.params[0]
        return wanted.keys() == held.keys() and all(torch.equal(held[name], wanted[name]) for name in wanted)
