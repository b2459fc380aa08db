"""One rank's side of the states that outlive it: each finished step is copied, and sent to keepers beside what follows.

    use(addresses)        keepers to send to, and memory for copies
    readiness()           whether the state before is whole at the keepers, and long enough ago
    begin(number, state)  copy now, send in a thread

Copying holds up the step for as long as the GPU's bus takes. So a state is skipped where copies would take more than a
twentieth of the time, and while the state before it is still being sent.

"""

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from slipstream.conf.json_files import JsonObject
from slipstream.trainer.checkpoint.background import BackgroundWrites, HostCopies
from slipstream.trainer.checkpoint.keeper import Address, Readiness, hold
from slipstream.trainer.checkpoint.rank_state import rank_state_parts

logger = logging.getLogger(__name__)

_PAUSE = 20.0
"""Time between two copies, as a multiple of the time that a copy takes."""


class KeptStates:
    def __init__(self, rank: int, key: bytes, device: torch.device) -> None:
        self._rank, self._key = rank, key
        self._copies, self._sends = HostCopies(device), BackgroundWrites()
        self._keepers: Sequence[Address] = ()
        self._life = 0
        self._not_before = 0.0

    def use(self, keepers: Sequence[Address], num_bytes: int, life: int) -> None:
        """Send to these from now on, as ranks of this life. Copies take so many bytes."""
        self._keepers, self._life = keepers, life
        self._sends.begin(partial(self._copies.prepare, num_bytes))

    def settle(self) -> None:
        """Wait until what was begun is sent, or could not be."""
        self._sends.settle()

    def readiness(self) -> Readiness:
        """Say, without waiting, whether a state can be sent now, later or never."""
        try:
            is_sent = self._sends.are_done()
        except (OSError, RuntimeError) as error:
            logger.warning("rank %d: a step's state could not be kept in another process: %s", self._rank, error)
            self._keepers = ()
        if not self._keepers:
            return Readiness.never
        return Readiness.now if is_sent and time.monotonic() >= self._not_before else Readiness.later

    def begin(self, number: int, tensors: Mapping[str, Tensor], layout: JsonObject, progress: dict[str, int]) -> None:
        """Copy a state, and begin to send it, if this rank is ready."""
        began = time.monotonic()
        self._copies.begin()
        copied = {name: self._copies.copy(tensor) for name, tensor in tensors.items()}
        self._copies.wait()
        self._not_before = time.monotonic() + _PAUSE * (time.monotonic() - began)
        parts = rank_state_parts(copied, layout, progress)
        for keeper in self._keepers:
            self._sends.begin(partial(hold, keeper, self._key, self._rank, number, parts, self._life))
