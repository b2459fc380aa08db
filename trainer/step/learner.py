"""Learner: what a rank trains, the gradients that add up, and the updates made of them.

Owns the order of parameters and of their shards on this rank, the decision whether an update happens and how large it
is, and the policy version, which rises by one with every step that changed the policy. Does not own forward passes
(policy_forward.py), the moments (adamw.py), or files (trainer/checkpoint).

    gradients (summed over ranks) -> sum of squares -> ONE all-reduce -> norm -> clip -> AdamW on local shards

Invariants: all ranks take the same decision, because it depends only on one all-reduced pair of numbers. The norm
counts each element of the model once, in any layout of dense parameters and experts: no two ranks hold the same part.
If the norm or a loss is not finite, nothing changes: not the parameters, the moments or the schedule.
"""

import logging
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.conf.schema import OptimConfig
from slipstream.trainer.errors import TrainerError
from slipstream.trainer.parallel import ParallelLayout, sharded_rows
from slipstream.trainer.step.adamw import make_update_rule
from slipstream.trainer.types import OptimStats

logger = logging.getLogger(__name__)


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


class Learner:
    def __init__(
        self, trainable: Sequence[tuple[str, Tensor]], config: OptimConfig, num_steps: int, updates_per_step: int,
        layout: ParallelLayout,
    ) -> None:  # fmt: skip
        """Args: `trainable` are this rank's parameters by name, of which each may be sharded. The schedule is of
        num_steps * updates_per_step updates."""
        self._trainable, self._config = list(trainable), config
        self._rank, self._device = layout.rank, layout.device
        self._group = dist.group.WORLD if layout.world_size > 1 else None
        self._updates_per_step, self._num_scheduled = updates_per_step, num_steps * updates_per_step
        self._local_loss = 0.0
        self.policy_version = self.num_updates = self._place = 0
        """`_place`: of the next update in the schedule."""
        self.is_in_a_step = False
        """Whether an update was applied that no version counts yet."""
        self.shards = {name: sharded_rows(name, parameter).detach() for name, parameter in self._trainable}
        """This rank's parts, which alias the parameters' storage: plain float32 or bfloat16, perhaps empty."""
        self._held = {name: values for name, values in self.shards.items() if values.numel()}
        self._rule = make_update_rule(list(self._held.values()), config) if self._held else None

    @property
    def progress(self) -> dict[str, int]:
        return {"policy_version": self.policy_version, "num_updates": self.num_updates}

    @property
    def num_bytes(self) -> int:
        return sum(values.nbytes for values in self.shards.values())

    def check_version(self, version: int) -> None:
        if version != self.policy_version:
            raise TrainerError(
                f"rank {self._rank}: a batch for policy version {version} came to version {self.policy_version}"
            )

    def add_loss(self, loss: float) -> None:
        """The loss whose gradients were added; only its finiteness is used."""
        self._local_loss += loss

    @torch.no_grad()
    def update(self, *, ends_version: bool) -> OptimStats:
        """Apply the gradients and drop them, on all ranks or on none; see TrainerRank.optimizer_step. Collective. A
        parameter without a gradient (no token reached it) counts as one with zeros, so that moments decay in the same
        way in any layout of experts."""
        gradients = [self._gradient(name, parameter) for name, parameter in self._trainable]
        own = [gradient for gradient in gradients if gradient.numel()]
        grad_norm, is_finite = self._global_norm(own)
        lr = learning_rate(self._config, self._place, self._num_scheduled)
        if is_finite:
            if 0 < self._config.max_grad_norm < grad_norm:
                torch._foreach_mul_(gradients, self._config.max_grad_norm / grad_norm)
            if self._rule is not None:
                self._rule.step(own, lr)
            self.num_updates, self._place = self.num_updates + 1, self._place + 1
        else:
            logger.warning(
                "rank %d refused an update of the step after version %d: gradient norm %s, or a loss, is not finite",
                self._rank, self.policy_version, grad_norm,
            )  # fmt: skip
        self.drop_gradients()
        self.is_in_a_step = self.is_in_a_step or is_finite
        if ends_version and self.is_in_a_step:
            self._begin_version(self.policy_version + 1)
        return OptimStats(self.policy_version, grad_norm, lr, is_finite)

    def _gradient(self, name: str, parameter: Tensor) -> Tensor:
        values = self.shards[name]
        if sharded_rows(name, parameter).data_ptr() != values.data_ptr():
            raise TrainerError(
                f"rank {self._rank}: the storage of {name} was replaced; the optimizer would update the old one"
            )
        if parameter.grad is None:
            return torch.zeros_like(values)
        return sharded_rows(name, parameter.grad)

    def _global_norm(self, gradients: list[Tensor]) -> tuple[float, bool]:
        """Norm over the whole model, and whether it and every rank's loss are finite. One all-reduce, two float64s."""
        total = torch.zeros(2, dtype=torch.float64, device=self._device)
        if gradients:
            norms = torch.stack(torch._foreach_norm(gradients, dtype=torch.float32)).double()
            total[0] = (norms * norms).sum()
        total[1] = float(not math.isfinite(self._local_loss))
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        sum_of_squares, num_bad_losses = total.tolist()
        grad_norm = math.sqrt(sum_of_squares) if math.isfinite(sum_of_squares) else sum_of_squares
        return grad_norm, math.isfinite(grad_norm) and num_bad_losses == 0

    def drop_gradients(self) -> None:
        """Forget gradients and loss: the next update begins at zero."""
        for _, parameter in self._trainable:
            parameter.grad = None
        self._local_loss = 0.0

    def state_tensors(self) -> dict[str, Tensor]:
        """Parameters ("<name>.value"), moments ("<name>.exp_avg" and "<name>.exp_avg_sq", in 8 bits with ".codes" and
        ".scale" added) and random state of this rank."""
        tensors = {f"{name}.value": values for name, values in self.shards.items()} | self._moments()
        tensors["rng.cpu"] = torch.get_rng_state()
        if self._device.type == "cuda":
            tensors["rng.device"] = torch.cuda.get_rng_state(self._device)
        return tensors

    def _moments(self) -> dict[str, Tensor]:
        of_shards = [] if self._rule is None else self._rule.tensors()
        return {
            f"{name}.{key}": moment
            for name, moments in zip(self._held, of_shards, strict=True)
            for key, moment in moments.items()
        }

    def restore(self, tensors: dict[str, Tensor], progress: dict[str, int]) -> None:
        """Set what state_tensors() and `progress` gave."""
        for name, values in self.shards.items():
            values.copy_(tensors[f"{name}.value"])
        for name, moment in self._moments().items():
            moment.copy_(tensors[name])
        self.num_updates = progress["num_updates"]
        if self._rule is not None:
            self._rule.restarts_at(self.num_updates)
        torch.set_rng_state(tensors["rng.cpu"])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(tensors["rng.device"], self._device)
        self.drop_gradients()
        self._begin_version(progress["policy_version"])

    def _begin_version(self, version: int) -> None:
        """The schedule's place follows from the version: the run may have been resumed with other updates a step."""
        self.policy_version, self.is_in_a_step = version, False
        self._place = version * self._updates_per_step
