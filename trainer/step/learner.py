"""Learner: what a rank trains, the gradients that add up, and the updates made of them.

Owns the order of parameters and of their shards on this rank, and the policy version, which rises by one with every
step that changed the policy. Does not own forward passes (policy_forward.py), the global decisions of an update
(optim.py), or files (trainer/checkpoint).
"""

import logging

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.conf.schema import OptimConfig
from slipstream.trainer.errors import TrainerError
from slipstream.trainer.model.decoder import Decoder
from slipstream.trainer.model.shard_decoder import dense_trainable, expert_trainable
from slipstream.trainer.parallel import sharded_rows
from slipstream.trainer.step.optim import ShardedAdamW, TrainableShard
from slipstream.trainer.types import OptimStats

logger = logging.getLogger(__name__)


class Learner:
    def __init__(self, decoder: Decoder, config: OptimConfig, num_steps: int, updates_per_step: int) -> None:
        self.policy_version = 0
        self._rank, self._device = decoder.layout.rank, decoder.layout.device
        self._local_loss = 0.0
        self.is_in_a_step = False
        """Whether an update was applied that no version counts yet."""
        self._trainable = [*dense_trainable(decoder), *expert_trainable(decoder)]
        self.shards = [TrainableShard(name, sharded_rows(name, param).detach()) for name, param in self._trainable]
        group = dist.group.WORLD if decoder.layout.world_size > 1 else None
        self._updates_per_step = updates_per_step
        num_updates = num_steps * updates_per_step
        self._optimizer = ShardedAdamW(self.shards, config, num_updates, group=group, device=self._device)

    @property
    def progress(self) -> dict[str, int]:
        """The counters in a checkpoint."""
        return {"policy_version": self.policy_version, "num_updates": self._optimizer.num_updates}

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's trainable parameters."""
        return sum(shard.values.nbytes for shard in self.shards)

    def check_version(self, version: int) -> None:
        """Raise TrainerError if a batch is for another version."""
        if version != self.policy_version:
            raise TrainerError(
                f"rank {self._rank}: a batch for policy version {version} came to version {self.policy_version}"
            )

    def add_loss(self, loss: float) -> None:
        """The loss whose gradients were added; only its finiteness is used."""
        self._local_loss += loss

    def update(self, *, ends_version: bool) -> OptimStats:
        """Apply the gradients and drop them; see TrainerRank.optimizer_step."""
        for (name, param), shard in zip(self._trainable, self.shards, strict=True):
            if sharded_rows(name, param).data_ptr() != shard.values.data_ptr():
                raise TrainerError(
                    f"rank {self._rank}: the storage of {name} was replaced; the optimizer would update the old one"
                )
        gradients = [None if p.grad is None else sharded_rows(name, p.grad) for name, p in self._trainable]
        result = self._optimizer.step(gradients, self._local_loss)
        self.drop_gradients()
        self.is_in_a_step = self.is_in_a_step or result.is_finite
        if ends_version and self.is_in_a_step:
            self._begin_version(self.policy_version + 1)
        if not result.is_finite:
            logger.warning(
                "rank %d refused an update at version %d: gradient norm %s, or a loss, is not finite",
                self._rank, self.policy_version, result.grad_norm,
            )  # fmt: skip
        return OptimStats(self.policy_version, result.grad_norm, result.lr, result.is_finite)

    def drop_gradients(self) -> None:
        """Forget gradients and loss: the next update begins at zero."""
        for _, param in self._trainable:
            param.grad = None
        self._local_loss = 0.0

    def state_tensors(self) -> dict[str, Tensor]:
        """Parameters, moments and random state of this rank, by name."""
        tensors = {f"{shard.name}.value": shard.values for shard in self.shards}
        tensors |= self._optimizer.state_tensors()
        tensors["rng.cpu"] = torch.get_rng_state()
        if self._device.type == "cuda":
            tensors["rng.device"] = torch.cuda.get_rng_state(self._device)
        return tensors

    def restore(self, tensors: dict[str, Tensor], progress: dict[str, int]) -> None:
        for shard in self.shards:
            shard.values.copy_(tensors[f"{shard.name}.value"])
        self._optimizer.load_state_tensors(tensors, progress["num_updates"])
        torch.set_rng_state(tensors["rng.cpu"])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(tensors["rng.device"], self._device)
        self.drop_gradients()
        self._begin_version(progress["policy_version"])

    def _begin_version(self, version: int) -> None:
        """The schedule's place follows from the version: the run may have been resumed with other updates a step."""
        self.policy_version, self.is_in_a_step = version, False
        self._optimizer.place = version * self._updates_per_step
