"""What this trainer rank can write out, rectangle by rectangle: the trainer's side of a publish.

Owns the lifetime of gathered LoRA factors during one publish. Does not own the translation into checkpoint
names nor the merge (shards.py), the plan, or any transfer (weight_sync).

Invariant: `read` never communicates, so ranks may read in any order and any number of times. Only `begin` is
collective: under FSDP2 a rank holds the rows of B that belong to its rows of W, but only a part of A.

Callers: weight_sync.publisher and weight_sync.pipeline, through `weight_sync.source.WeightSource`.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from trainer.errors import LayoutError
from trainer.merge import merge_scratch_bytes
from trainer.model.decoder import Decoder
from trainer.shards import HeldTensor, gather_lora_a, local_shards
from weight_sync.layout import Region, SourceLayout, SourceShard


class TrainerWeightSource:
    """WeightSource over the shards of one rank's decoder. Construction is collective."""

    def __init__(self, decoder: Decoder, rank: int) -> None:
        """Take stock of what this rank holds; gathers A once to know how many bytes `begin` will hold."""
        self._decoder = decoder
        self._rank = rank
        self._held: dict[str, list[HeldTensor]] = defaultdict(list)
        shards: list[SourceShard] = []
        scratch_bytes = 0
        for held in local_shards(decoder):
            self._held[held.tensor].append(held)
            shards.append(SourceShard(held.tensor, held.region))
            if held.delta is not None:
                scratch_bytes = max(scratch_bytes, merge_scratch_bytes(held.base.shape[1], held.delta.b.shape[1]))
        dtype = str(decoder.dtype).removeprefix("torch.")
        self._layout = SourceLayout(rank, tuple(decoder.spec.checkpoint_tensors(dtype)), tuple(shards))
        self._gathered: dict[str, Tensor] | None = None
        self._temporary_bytes = self.begin(version=-1) + scratch_bytes
        self.end()

    @property
    def temporary_bytes(self) -> int:
        """Gathered A factors plus the scratch of the largest merge, in bytes."""
        return self._temporary_bytes

    def layout(self) -> SourceLayout:
        """The rectangles this rank can write without communication."""
        return self._layout

    @torch.no_grad()
    def begin(self, version: int) -> int:
        """Gather every sharded A, in the same order on every rank. Returns the bytes held until `end`."""
        if self._gathered is not None:
            raise LayoutError(f"rank {self._rank}: begin({version}) before the end of the publish in progress")
        self._gathered = gather_lora_a(self._decoder)
        return sum(a.numel() * a.element_size() for a in self._gathered.values())

    @torch.no_grad()
    def read(self, tensor: str, region: Region, out: Tensor) -> None:
        """Write merged values of `region` into `out`, cast to out.dtype; see the protocol."""
        if self._gathered is None:
            raise LayoutError(f"rank {self._rank}: read({tensor}) outside begin() and end()")
        for held in self._held.get(tensor, ()):
            if held.region.intersect(region) == region:
                held.read(region, out, self._gathered)
                return
        holds = [held.region for held in self._held.get(tensor, ())]
        raise LayoutError(f"rank {self._rank} cannot read {region} of {tensor}: it holds {holds or 'none of it'}")

    def end(self) -> None:
        """Drop the gathered factors; harmless when nothing was begun."""
        self._gathered = None
