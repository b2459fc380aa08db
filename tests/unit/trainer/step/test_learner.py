"""Promises of trainer/step/learner.py: AdamW's numbers, the schedule, one norm for all ranks, and no update from a
non-finite step. Those of versions are in test_rank.py."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from slipstream.conf.errors import ConfigError
from slipstream.conf.schema import OptimConfig, OptimState
from slipstream.trainer.errors import TrainerError
from slipstream.trainer.parallel import ParallelLayout
from slipstream.trainer.step.learner import Learner, learning_rate
from slipstream.trainer.types import OptimStats


def make(config: OptimConfig, *values: Tensor) -> Learner:
    """It trains these tensors in place, as p0, p1, ..."""
    trainable = [(f"p{index}", torch.nn.Parameter(value)) for index, value in enumerate(values)]
    return Learner(trainable, config, num_steps=10, updates_per_step=1, layout=ParallelLayout.single("cpu"))


def step(learner: Learner, *gradients: Tensor | None, loss: float = 0.0, ends_version: bool = True) -> OptimStats:
    for (_, parameter), gradient in zip(learner._trainable, gradients, strict=True):
        parameter.grad = gradient
    learner.add_loss(loss)
    return learner.update(ends_version=ends_version)


def moment(learner: Learner, name: str = "p0.exp_avg") -> Tensor:
    return learner.state_tensors()[name]


def resumed(config: OptimConfig, state: dict[str, Tensor], num_updates: int, *values: Tensor) -> Learner:
    learner = make(config, *values)
    learner.restore(state, {"num_updates": num_updates, "policy_version": num_updates})
    return learner


def test_schedule_warms_up_then_follows_the_cosine_to_its_end():
    """warm-up 3: lr * 1/4, 2/4, 3/4, then the peak at step 3; half-way between the ends at step (3 + 9) / 2;
    the end at step 9."""
    config = OptimConfig(lr=4.0, warmup_steps=3, final_lr_fraction=0.5)
    rates = [learning_rate(config, place, num_steps=10) for place in range(12)]
    assert rates[:4] == pytest.approx([1.0, 2.0, 3.0, 4.0])
    assert rates[6] == pytest.approx(3.0)
    assert rates[9:] == pytest.approx([2.0, 2.0, 2.0])
    assert all(a >= b for a, b in pairwise(rates[3:]))
    assert {learning_rate(OptimConfig(lr=3e-4), place, 10) for place in range(15)} == {3e-4}, "constant by default"


def test_a_warm_up_below_1_is_a_share_of_all_updates():
    for share, updates, num_steps in ((0.3, 3, 10), (0.07, 7, 100), (0.01, 1, 10), (0.25, 2, 10)):
        own, same = (OptimConfig(lr=4.0, warmup_steps=one, final_lr_fraction=0.5) for one in (share, updates))
        rates = [[learning_rate(one, place, num_steps) for place in range(num_steps)] for one in (own, same)]
        assert rates[0] == rates[1] and rates[0][0] == 4.0 / (updates + 1)
    for refused in (1.5, math.inf, math.nan, -0.1):
        with pytest.raises(ConfigError, match=r"trainer\.optim\.warmup_steps must be"):
            OptimConfig(warmup_steps=refused)


@pytest.mark.parametrize(("num_steps", "warmup"), [(1, 0), (3, 3), (3, 2), (2, 9), (3, 1)])
def test_a_schedule_with_room_for_one_step_of_decay_or_for_none_ends_at_once(num_steps, warmup):
    config = OptimConfig(lr=1.0, warmup_steps=warmup, final_lr_fraction=0.25)
    rates = [learning_rate(config, place, num_steps) for place in range(warmup, warmup + 4)]
    assert rates == pytest.approx([1.0, 0.25, 0.25, 0.25])


def test_first_update_is_the_hand_computed_one():
    """Adam's first step moves by lr * g / (|g| + eps) = lr * sign(g), after decoupled decay by lr * decay * p."""
    values = torch.tensor([1.0, -2.0])
    learner = make(OptimConfig(lr=0.1, weight_decay=0.5, max_grad_norm=0.0), values)
    result = step(learner, torch.tensor([3.0, -4.0]))
    assert result.grad_norm == pytest.approx(5.0) and result.is_finite and result.lr == 0.1
    assert values.tolist() == pytest.approx([1.0 - 0.05 - 0.1, -2.0 + 0.1 + 0.1])


def test_clipping_scales_to_the_bound_and_only_above_it():
    for bound, scale in ((1.0, 1 / 5), (4.999, 0.9998), (5.0, 1.0), (0.0, 1.0)):
        learner = make(OptimConfig(lr=0.1, max_grad_norm=bound), torch.zeros(2))
        assert step(learner, torch.tensor([3.0, 4.0])).grad_norm == pytest.approx(5.0), "the norm before"
        assert moment(learner).tolist() == pytest.approx([0.3 * scale, 0.4 * scale])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("what", ["gradient", "loss"])
def test_a_non_finite_step_changes_nothing(what, bad, caplog):
    learner = make(OptimConfig(lr=0.1, warmup_steps=2), torch.tensor([1.0, 2.0]))
    step(learner, torch.ones(2))
    before = {name: tensor.clone() for name, tensor in learner.state_tensors().items()}
    gradient = torch.tensor([1.0, bad if what == "gradient" else 1.0])
    result = step(learner, gradient, loss=bad if what == "loss" else 0.0)
    assert not result.is_finite and math.isfinite(result.grad_norm) == (what == "loss")
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.state_tensors().items())
    assert learner.num_updates == 1 and step(learner, torch.ones(2)).is_finite
    assert "an update of the step after version 1:" in caplog.text, "whose row may have 1, or 2 for others applied"


def test_missing_gradients_count_as_zeros_so_that_layouts_agree():
    given_zero, given_none = torch.ones(2), torch.ones(2)
    for values, second in ((given_zero, torch.zeros(2)), (given_none, None)):
        learner = make(OptimConfig(lr=0.1), values)
        step(learner, torch.tensor([1.0, -1.0]))
        step(learner, second)
    assert torch.equal(given_zero, given_none)


BFLOAT16_STATES = [state for state in OptimState if state is not OptimState.host]


@pytest.mark.parametrize(
    ("state", "dtype"),
    [*((one, torch.float32) for one in OptimState), *((one, torch.bfloat16) for one in BFLOAT16_STATES)],
    ids=str,
)
def test_loaded_state_continues_bitwise(state, dtype):
    """Also the random numbers of stochastic rounding."""
    config = OptimConfig(lr=0.1, warmup_steps=2, final_lr_fraction=0.1, state=state)
    generator = torch.Generator().manual_seed(0)
    shapes = [(16, 512), (5,)]  # large enough for 8 bits, and not
    grads = [[torch.randn(shape, generator=generator).to(dtype) for shape in shapes] for _ in range(4)]
    straight, other = ([torch.ones(shape, dtype=dtype) for shape in shapes] for _ in range(2))
    learner, saved = make(config, *straight), {}
    for number in range(4):
        if number == 2:
            saved = {name: tensor.clone() for name, tensor in learner.state_tensors().items()}
        step(learner, *(grad.clone() for grad in grads[number]))
    second = resumed(config, saved, 2, *other)
    for number in (2, 3):
        step(second, *(grad.clone() for grad in grads[number]))
    assert all(torch.equal(a, b) for a, b in zip(straight, other, strict=True))
    assert not torch.equal(straight[0], torch.ones(shapes[0], dtype=dtype))


@pytest.mark.parametrize(
    ("state", "allowed"), [(OptimState.bfloat16, 0.02), (OptimState.int8, 0.06), (OptimState.host, 0.0)]
)
def test_reduced_moments_take_nearly_the_float32_steps(state, allowed):
    """Adam moves every element by about lr a step: after 8 steps of 0.01 the two may differ by a few percent of that.
    8-bit moments of blocks of 256 have a relative error of about 1 %; host moments have none."""
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(16, 512, generator=generator) for _ in range(8)]
    exact, reduced = torch.zeros(16, 512), torch.zeros(16, 512)
    for values, kind in ((exact, OptimState.float32), (reduced, state)):
        learner = make(OptimConfig(lr=0.01, weight_decay=0.1, state=kind), values)
        for grad in grads:
            step(learner, grad.clone())
    error = ((reduced - exact).norm() / exact.norm()).item()
    assert error <= allowed and (error > 0) == (allowed > 0), "or the moments are not reduced at all"


def test_squares_in_bfloat16_fall_after_gradients_did():
    """580 steps leave 0.999^580 = 56 % of it. Rounded to nearest it stays: 0.1 % is less than half of the 2^-8 that a
    bfloat16 resolves."""
    kept = {}
    for state in (OptimState.float32, OptimState.bfloat16):
        torch.manual_seed(7)
        learner = make(OptimConfig(betas=(0.9, 0.999), state=state, max_grad_norm=0.0), torch.zeros(8, 256))
        for number in range(600):
            step(learner, torch.full((8, 256), 1.0 if number < 20 else 0.01))
        kept[state] = moment(learner, "p0.exp_avg_sq").float().mean().item()
    assert kept[OptimState.bfloat16] == pytest.approx(kept[OptimState.float32], rel=0.02)


def test_an_element_whose_gradients_are_tiny_beside_its_blocks_makes_no_leap():
    """Its square is 1e-8 of the block's largest, below the 3.25e-7 that 8 bits resolve. Forgotten at every step, it
    would be (1 - 0.999) of one square, and the update sqrt(1 / 0.001) = 30 times too large."""
    torch.manual_seed(7)
    values, sizes = torch.zeros(1, 4096), torch.ones(1, 4096)
    learner = make(OptimConfig(lr=1e-3, state=OptimState.int8, max_grad_norm=0.0), values)
    sizes[0, 5::256] = 1e-4
    for _ in range(100):
        before = values.clone()
        step(learner, sizes * torch.randn(1, 4096))
        assert ((values - before).abs() < 5e-3).all()


def test_8_bit_moments_take_two_bytes_a_parameter():
    state = make(OptimConfig(state=OptimState.int8), torch.zeros(64, 1024)).state_tensors()
    assert sum(tensor.nbytes for name, tensor in state.items() if "exp_avg" in name) == 64 * 1024 * (2 + 2 * 4 / 256)


def test_bfloat16_parameters_move_by_less_than_their_last_bit_on_average():
    """At 1.0 a bfloat16 can only move by 2^-8 downwards; a step of 1e-4 is lost every time when rounded to nearest."""
    torch.manual_seed(0)
    values = torch.ones(64, 512, dtype=torch.bfloat16)
    learner = make(OptimConfig(lr=1e-4, state=OptimState.int8), values)
    for _ in range(10):
        step(learner, torch.ones(64, 512, dtype=torch.bfloat16))
    assert (1 - values.float()).mean().item() == pytest.approx(1e-3, rel=0.1)


def test_the_norm_of_bfloat16_gradients_is_a_float32_number():
    """257 ones: sqrt(257) = 16.03; in bfloat16, whose neighbour of 16 is 16.125, it would be 16, and the sum of squares
    would end at 256."""
    learner = make(OptimConfig(max_grad_norm=0.0), torch.zeros(257, dtype=torch.bfloat16))
    assert step(learner, torch.ones(257, dtype=torch.bfloat16)).grad_norm == pytest.approx(math.sqrt(257), rel=1e-6)


def test_empty_shards_between_others_count_in_their_own_place():
    """Norm sqrt(9 + 16)."""
    values = [torch.zeros(1), torch.zeros(0), torch.zeros(1)]
    learner = make(OptimConfig(lr=0.1, max_grad_norm=0.0), *values)
    result = step(learner, torch.tensor([3.0]), torch.zeros(0), torch.tensor([-4.0]))
    assert result.grad_norm == pytest.approx(5.0)
    assert [value.tolist() for value in values] == [[pytest.approx(-0.1)], [], [pytest.approx(0.1)]]
    moments = {f"{name}.{key}" for name in ("p0", "p2") for key in ("exp_avg", "exp_avg_sq")}
    assert learner.state_tensors().keys() == moments | {"p0.value", "p1.value", "p2.value", "rng.cpu"}


def test_squares_of_norms_are_added_up_in_float64():
    """4097^2 is no number of float32."""
    learner = make(OptimConfig(max_grad_norm=0.0), torch.zeros(1), torch.zeros(1))
    assert step(learner, torch.tensor([4097.0]), torch.ones(1)).grad_norm == math.sqrt(4097**2 + 1)


@pytest.mark.parametrize("values", [torch.zeros(1), torch.zeros(0)], ids=["a shard", "none"])
def test_the_rate_of_an_update_is_that_of_its_number_also_after_a_resume_and_a_refusal(values):
    """Warm-up 3: 1/4, 2/4, 3/4 of 4; a refused step has the rate of the update that it would have been. Ranks without
    a shard keep the same schedule."""
    config, grad = OptimConfig(lr=4.0, warmup_steps=3), torch.ones_like(values)
    learner = make(config, values.clone())
    rates = [step(learner, grad.clone(), loss=loss).lr for loss in (0.0, 0.0, math.nan, 0.0)]
    assert (rates, learner.num_updates) == ([1.0, 2.0, 3.0, 3.0], 3)
    again = resumed(config, learner.state_tensors(), 2, values.clone())
    assert step(again, grad.clone()).lr == 3.0
    assert again.progress == {"policy_version": 3, "num_updates": 3}, "those before the resume count, too"
    again.restore(learner.state_tensors(), {"num_updates": 1, "policy_version": 1})
    assert step(again, grad.clone()).lr == 2.0, "all ranks go back where one has died"
    rates = [step(again, grad.clone(), ends_version=False).lr for _ in range(2)]
    assert rates == [3.0, 4.0], "also where a step has several"


@pytest.mark.parametrize("values", [torch.zeros(1), torch.zeros(0)], ids=["a shard", "none"])
@pytest.mark.parametrize(
    ("loss", "others", "norm", "is_finite"),
    [
        (0.5, (16.0, 0.0), 5.0, True),
        (0.5, (16.0, 1.0), 5.0, False),  # a loss elsewhere
        (-math.inf, (16.0, 0.0), 5.0, False),
        (0.5, (math.nan, 0.0), math.nan, False),
    ],
)
def test_a_rank_decides_by_the_sums_of_all_ranks(monkeypatch, values, loss, others, norm, is_finite):
    """Its own gradient is 3, if it has one. Of the other ranks come a sum of squares, and how many losses are bad."""
    learner, told = make(OptimConfig(max_grad_norm=1.0, warmup_steps=1), values.clone()), []
    learner._group = group = object()  # type: ignore[assignment]

    def all_reduce(total, *, group):
        told.append((total.tolist(), group))
        total += torch.tensor(others, dtype=torch.float64)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    result = step(learner, torch.full_like(values, 3.0), loss=loss)
    if not values.numel():
        norm = 4.0 if norm == 5.0 else norm
    assert told == [([9.0 * values.numel(), float(not math.isfinite(loss))], group)]
    assert (result.grad_norm, result.is_finite) == (pytest.approx(norm, nan_ok=True), is_finite)
    assert learner.num_updates == learner.policy_version == int(is_finite)
    if is_finite and values.numel():
        assert moment(learner).item() == pytest.approx(0.1 * 3 / 5), "clipped by all ranks' norm"


def test_storage_that_was_replaced_is_refused():
    learner = make(OptimConfig(), torch.zeros(2))
    learner._trainable[0][1].data = torch.ones(2)
    with pytest.raises(TrainerError, match="the storage of p0 was replaced"):
        step(learner, torch.ones(2))
