"""The protocol of a source of weights: it can write out rectangles of checkpoint tensors.

Every rank makes these calls in a publish:

    begin(version)          collective; the source may gather what a merge needs (small LoRA factors)
      read(tensor, region)  rank-local, any number of times, in plan order; never collective
    end()                   always, after success and after failure; drops what begin() gathered

Between begin() and end() the weights must not change; the caller must ensure that.
"""

from typing import Protocol

import torch

from slipstream.weight_sync.layout import Region, SourceLayout


class WeightSource(Protocol):
    """What one trainer rank can write out."""

    @property
    def temporary_bytes(self) -> int:
        """The most device memory, in bytes, that begin() plus one read() ever hold on this rank; 0 if they hold none.

        Constant, and known as soon as layout() is. It is subtracted from the watermark before staging is sized. It
        covers gathered LoRA factors *and* the scratch of a merge, which read() bounds by merging in row chunks.
        """
        ...

    def layout(self) -> SourceLayout:
        """The rectangles that this rank can read, in checkpoint coordinates. Static after loading."""
        ...

    def begin(self, version: int) -> int:
        """Prepare to read `version`. Collective over the trainer's ranks. Returns temporary device bytes held until
        end(); at most `temporary_bytes`."""
        ...

    def read(self, tensor: str, region: Region, out: torch.Tensor) -> None:
        """Write the values of `region` of checkpoint tensor `tensor` into `out`, merged and cast to `out.dtype`.

        Args:
            tensor: Checkpoint name. The region lies inside one of this rank's shards.
            region: The rectangle, in elements of the checkpoint tensor.
            out: Shape `region.shape`, any strides (a permuted view of a staging slot), on the staging device.
                Written with copy_ on the current stream, without synchronizing.
        """
        ...

    def end(self) -> None:
        """Drop what begin() prepared. Rank-local."""
        ...
