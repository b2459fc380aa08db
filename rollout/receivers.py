"""What each rank of an engine can be asked about the weights that it receives: declared and done here.

    rollout worker's process                                        engine rank's process
      BaseReplica     --vLLM's collective_rpc, between two steps-->   WeightReceiver --> Receivers      its own weights
      AdapterReplica  --a socket, while it samples----->   a thread       --> SlotReceivers  adapter slots

Whoever asks names a method of these classes; its annotations say how arguments and result travel. Owns: which receiver
is meant, and this rank's entry of what is said to all ranks. Does not own: what a Receiver does, the order of the
steps, or what is asked once at an engine's start (in_vllm/worker_extension.py).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from slipstream.weight_sync.replica.messages import Bound, Expected
from slipstream.weight_sync.replica.receiver import Receiver
from slipstream.weight_sync.replica.recovery import Offer, Pulled, make_offer, pull

WEIGHTS = 0
"""The `slot` of an engine's own weights, for which a rank has one receiver."""
_NOISE_STD = 0.5
"""Standard deviation of the probe's noise: far above any trained factor, to show despite small norms and bfloat16."""


class Receivers:
    """One rank's receivers, by slot. Lists in arguments have one entry per rank of the engine; each takes its own."""

    def __init__(self, receivers: Sequence[Receiver]) -> None:
        self._receivers = receivers
        self._rank = receivers[0].layout.rank

    def begin(self, slot: int, version: int, epoch: int, digest: str) -> Bound:
        """Receiver.begin. Returns where to write."""
        binding = self._receivers[slot].begin(version, epoch, digest)
        return Bound(binding.session, slot, binding.holds)

    def verify(self, slot: int, version: int, epoch: int, digest: str, expected: Sequence[Expected]) -> None:
        self._receivers[slot].verify(version, epoch, digest, expected[self._rank])

    def commit(self, slot: int, version: int, epoch: int) -> None:
        self._receivers[slot].commit(version, epoch)

    def abort(self, slot: int, epoch: int, reason: str) -> None:
        self._receivers[slot].abort(epoch, reason)

    def offer(self, slot: int) -> Offer:
        return make_offer(self._receivers[slot])

    def pull(self, slot: int, offers: Sequence[Offer], timeout_s: float) -> Pulled:
        """recovery.pull from the peer's same rank."""
        return pull(self._receivers[slot], offers[self._rank], timeout_s=timeout_s)

    def adopt(self, slot: int, version: int, epoch: int) -> None:
        self._receivers[slot].adopt(version, epoch)

    def release(self, offers: Sequence[Offer]) -> None:
        """Close the link to the peer, which all receivers of a rank share: open, it would keep the peer's memory mapped
        here, and pinned after the peer's death. No part of pull(): it takes a second, in which the peer may move on."""
        self._receivers[0].transport.reset(offers[self._rank].binding.session)


class SlotReceivers(Receivers):
    """Receivers of a rank's adapter slots, which can be filled with noise for a probe. Both arguments are by slot."""

    def __init__(self, receivers: Sequence[Receiver], params: Sequence[Mapping[str, Tensor]]) -> None:
        super().__init__(receivers)
        self._params = params

    @torch.inference_mode()
    def fill(self, slot: int, noisy: Sequence[str], seed: int) -> None:
        """Put noise into these parameters of a slot, and zeros into all others."""
        for name, tensor in self._params[slot].items():
            if name in noisy:
                generator = torch.Generator(tensor.device).manual_seed(seed)
                tensor.normal_(0.0, _NOISE_STD, generator=generator)
            else:
                tensor.zero_()
        if any(tensor.is_cuda for tensor in self._params[slot].values()):
            torch.cuda.current_stream().synchronize()
        self._receivers[slot].invalidate()
