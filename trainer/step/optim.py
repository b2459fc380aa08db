"""AdamW on this rank's shards: the schedule, the global gradient norm, clipping, and the refusal of non-finite steps.

Owns the decision whether a step happens, and how large it is. Does not own the moments (adamw.py), the policy version
(learner.py) nor where shards lie (parallel.py): it sees plain local tensors, of which no two ranks hold the same part.

Invariants: all ranks take the same decision, because it depends only on one all-reduced pair of numbers. The norm
counts each element of the model once, in any layout of dense parameters and experts. If the norm or a loss is not
finite, nothing changes: not the parameters, the moments or the schedule.

    gradients (summed over ranks) -> sum of squares -> ONE all-reduce -> norm -> clip -> AdamW on local shards
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.conf.schema import OptimConfig
from slipstream.trainer.step.adamw import make_update_rule


def learning_rate(config: OptimConfig, step: int, num_steps: int) -> float:
    """Learning rate of update `step` (from 0) of `num_steps`.

    Linear warm-up of w updates: lr * (step + 1) / (w + 1), so no update has rate 0. After it, lr * (f + (1 - f) * (1 +
    cos(pi * p)) / 2) with f = final_lr_fraction, and p from 0 to 1 at the last step (SGDR, Loshchilov & Hutter 2017,
    arXiv:1608.03983, eq. 5).
    """
    warm_up = config.warmup_updates(num_steps)
    if step < warm_up:
        return config.lr * (step + 1) / (warm_up + 1)
    num_decay_steps = max(num_steps - 1 - warm_up, 1)
    progress = min((step - warm_up) / num_decay_steps, 1.0)
    final = config.final_lr_fraction
    return config.lr * (final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress)))


@dataclass(slots=True)
class TrainableShard:
    """This rank's part of one trainable parameter, which no other rank holds."""

    name: str
    values: Tensor
    """Aliases the parameter's storage; plain float32 or bfloat16, may be empty."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome of one optimizer step; the same on every rank."""

    grad_norm: float
    """Global norm before clipping."""
    lr: float
    is_finite: bool


class ShardedAdamW:
    """AdamW over local shards, with the global decisions around it."""

    def __init__(
        self,
        shards: Sequence[TrainableShard],
        config: OptimConfig,
        num_updates: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        """Args: `num_updates` is the length of the schedule. `group` spans all trainer ranks and can reduce tensors of
        `device`; None means a single rank."""
        self._shards = list(shards)
        self._config = config
        self._length = num_updates
        self._group = group
        self._device = device
        self.num_updates = 0
        self.place = 0
        """The next update's place in the schedule."""
        self._held = [shard for shard in self._shards if shard.values.numel()]
        self._rule = make_update_rule([shard.values for shard in self._held], config) if self._held else None

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None], local_loss: float) -> StepResult:
        """Update all shards on all ranks, or none. Collective.

        Args:
            gradients: one per shard, already summed over ranks. None (no token reached the parameter) counts as zeros,
                so that moments decay in the same way in any layout of experts.
            local_loss: this rank's share of the batch's loss; only its finiteness is used.
        """
        full = [
            torch.zeros_like(shard.values) if grad is None else grad.to(shard.values.dtype)
            for shard, grad in zip(self._shards, gradients, strict=True)
        ]
        grad_norm, is_finite = self._global_norm([grad for grad in full if grad.numel()], local_loss)
        lr = learning_rate(self._config, self.place, self._length)
        if not is_finite:
            return StepResult(grad_norm, lr, is_finite=False)

        if 0 < self._config.max_grad_norm < grad_norm:
            torch._foreach_mul_(full, self._config.max_grad_norm / grad_norm)
        if self._rule is not None:
            self._rule.step([grad for grad in full if grad.numel()], lr)
        self.num_updates += 1
        self.place += 1
        return StepResult(grad_norm, lr, is_finite=True)

    def _global_norm(self, gradients: list[Tensor], local_loss: float) -> tuple[float, bool]:
        """Norm over the whole model, and whether it and every rank's loss are finite. One all-reduce, two float64s."""
        total = torch.zeros(2, dtype=torch.float64, device=self._device)
        if gradients:
            norms = torch.stack(torch._foreach_norm(gradients, dtype=torch.float32)).double()
            total[0] = (norms * norms).sum()
        total[1] = float(not math.isfinite(local_loss))
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        sum_of_squares, num_bad_losses = total.tolist()
        grad_norm = math.sqrt(sum_of_squares) if math.isfinite(sum_of_squares) else sum_of_squares
        return grad_norm, math.isfinite(grad_norm) and num_bad_losses == 0

    def state_tensors(self) -> dict[str, Tensor]:
        """Moments by "<parameter>.exp_avg" and "<parameter>.exp_avg_sq" (8 bits: with ".codes" and ".scale" added)."""
        per_shard = self._rule.tensors() if self._rule is not None else []
        return {
            f"{shard.name}.{key}": tensor
            for shard, moments in zip(self._held, per_shard, strict=True)
            for key, tensor in moments.items()
        }

    def load_state_tensors(self, tensors: dict[str, Tensor], num_updates: int) -> None:
        """Set the moments, and the schedule's place to that many updates; the inverse of `state_tensors`."""
        if self._rule is not None:
            per_shard = [
                {key: tensors[f"{shard.name}.{key}"] for key in moments}
                for shard, moments in zip(self._held, self._rule.tensors(), strict=True)
            ]
            self._rule.load(per_shard, num_updates)
        self.num_updates = self.place = num_updates
