"""The reference of the KL penalty and of DPO: the policy before training, without a second copy of the model.

Owns how the initial weights replace the trained ones for a forward pass. LoRA: adapters are switched off. Full
training, and adapters that started from other adapters: each rank keeps its initial shards and swaps them with the
trained ones.

Invariant: after `active()` the trained shards hold the same bits as before.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from slipstream.trainer.model.decoder import Decoder
from slipstream.trainer.model.forward import Forward


class ReferencePolicy:
    """Switches a decoder to the policy before training and back."""

    def __init__(self, decoder: Decoder, trained_shards: Sequence[Tensor] | None) -> None:
        """Args: `trained_shards`, local tensors that alias the trained parameters, which are copied; None if the policy
        before training is the one without adapters."""
        self._decoder = decoder
        self._swapped = None if trained_shards is None else [(one, one.detach().clone()) for one in trained_shards]

    @contextmanager
    def active(self) -> Iterator[Forward]:
        """What computes the reference inside, without gradients. All ranks enter and leave together."""
        with torch.no_grad():
            if self._swapped is None:
                yield self._decoder.by.without_adapters()
                return
            self._exchange(self._swapped)
            try:
                yield self._decoder.by
            finally:
                self._exchange(self._swapped)

    def _exchange(self, swapped: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Swap trained and initial values in place, and drop gathered copies of the old ones."""
        for trained, initial in swapped:
            kept = trained.clone()
            trained.copy_(initial)
            initial.copy_(kept)
        # What stayed gathered would go on computing with the values that were just swapped out.
        if self._decoder.whole is not None:
            self._decoder.whole.renew()
        for module in self._decoder.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
