"""Promises of trainer/optim.py: AdamW's numbers, the schedule, one norm for all ranks, and no update from a
non-finite step.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from conf.schema import OptimConfig
from trainer.optim import ShardedAdamW, TrainableShard, learning_rate

CPU = torch.device("cpu")


def make(config: OptimConfig, *values: torch.Tensor, copies: int = 1) -> ShardedAdamW:
    shards = [TrainableShard(f"p{index}", value, copies) for index, value in enumerate(values)]
    return ShardedAdamW(shards, config, num_steps=10, group=None, device=CPU)


def test_schedule_warms_up_then_follows_the_cosine_to_its_end():
    """warm-up 3: lr * 1/4, 2/4, 3/4, then the peak at step 3; half-way between the ends at step (3 + 9) / 2;
    the end at step 9.
    """
    config = OptimConfig(lr=4.0, warmup_steps=3, final_lr_fraction=0.5)
    rates = [learning_rate(config, step, num_steps=10) for step in range(12)]
    assert rates[:4] == pytest.approx([1.0, 2.0, 3.0, 4.0])
    assert rates[6] == pytest.approx(3.0)
    assert rates[9:] == pytest.approx([2.0, 2.0, 2.0])
    assert all(a >= b for a, b in pairwise(rates[3:]))


def test_default_rate_is_constant():
    assert {learning_rate(OptimConfig(lr=3e-4), step, 10) for step in range(15)} == {3e-4}


def test_first_update_is_the_hand_computed_one():
    """Adam's first step moves by lr * g / (|g| + eps) = lr * sign(g), after decoupled decay by lr *
    weight_decay * p.
    """
    values = torch.tensor([1.0, -2.0])
    result = make(OptimConfig(lr=0.1, weight_decay=0.5, max_grad_norm=0.0), values).step(
        [torch.tensor([3.0, -4.0])], 0.0
    )
    assert result.grad_norm == pytest.approx(5.0) and result.is_finite and result.lr == 0.1
    assert values.tolist() == pytest.approx([1.0 - 0.05 - 0.1, -2.0 + 0.1 + 0.1])


def test_clipping_scales_to_the_bound_and_only_above_it():
    for bound, scale in ((1.0, 1 / 5), (5.0, 1.0), (0.0, 1.0)):
        values = torch.zeros(2)
        optimizer = make(OptimConfig(lr=0.1, max_grad_norm=bound), values)
        optimizer.step([torch.tensor([3.0, 4.0])], 0.0)
        assert optimizer.state_tensors()["p0.exp_avg"].tolist() == pytest.approx([0.3 * scale, 0.4 * scale])


def test_copies_count_once_in_the_norm():
    """Two parameters with norm 3 and 4; a second copy of the same values elsewhere halves this rank's share:
    sqrt(25 / 2).
    """
    optimizer = make(OptimConfig(), torch.zeros(1), torch.zeros(1), copies=2)
    assert optimizer.step([torch.tensor([3.0]), torch.tensor([4.0])], 0.0).grad_norm == pytest.approx(math.sqrt(12.5))


@pytest.mark.parametrize("bad", ["gradient_nan", "gradient_inf", "loss_nan", "loss_inf"])
def test_a_non_finite_step_changes_nothing(bad):
    values = torch.tensor([1.0, 2.0])
    optimizer = make(OptimConfig(lr=0.1, warmup_steps=2), values)
    optimizer.step([torch.tensor([1.0, 1.0])], 0.0)
    before, moments = values.clone(), {name: t.clone() for name, t in optimizer.state_tensors().items()}
    poison = float("nan") if bad.endswith("nan") else float("inf")
    grad = torch.tensor([1.0, poison if bad.startswith("gradient") else 1.0])
    result = optimizer.step([grad], poison if bad.startswith("loss") else 0.0)
    assert not result.is_finite
    assert torch.equal(values, before) and optimizer.num_updates == 1
    assert all(torch.equal(tensor, moments[name]) for name, tensor in optimizer.state_tensors().items())
    assert optimizer.step([torch.tensor([1.0, 1.0])], 0.0).is_finite


def test_missing_gradients_count_as_zeros_so_that_layouts_agree():
    given_zero, given_none = torch.ones(2), torch.ones(2)
    one, other = make(OptimConfig(lr=0.1), given_zero), make(OptimConfig(lr=0.1), given_none)
    for optimizer in (one, other):
        optimizer.step([torch.tensor([1.0, -1.0])], 0.0)
    one.step([torch.zeros(2)], 0.0)
    other.step([None], 0.0)
    assert torch.equal(given_zero, given_none)


def test_loaded_state_continues_bitwise():
    config = OptimConfig(lr=0.1, warmup_steps=2, final_lr_fraction=0.1)
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(5, generator=generator) for _ in range(4)]
    straight, resumed = torch.ones(5), torch.ones(5)
    optimizer = make(config, straight)
    for grad in grads:
        optimizer.step([grad.clone()], 0.0)
    first = make(config, resumed)
    for grad in grads[:2]:
        first.step([grad.clone()], 0.0)
    state = {name: tensor.clone() for name, tensor in first.state_tensors().items()}
    second = make(config, resumed)
    second.load_state_tensors(state, num_updates=2)
    for grad in grads[2:]:
        second.step([grad.clone()], 0.0)
    assert torch.equal(straight, resumed)


def test_empty_shards_and_state_before_the_first_update():
    optimizer = make(OptimConfig(), torch.zeros(0, 4))
    assert optimizer.step([torch.zeros(0, 4)], 0.0).is_finite
    assert optimizer.state_tensors()["p0.exp_avg"].shape == (0, 4)


def test_parameters_in_low_precision_are_refused():
    with pytest.raises(ValueError, match="bfloat16"):
        make(OptimConfig(), torch.zeros(2, dtype=torch.bfloat16))
