"""Promises of trainer/step/optim.py: AdamW's numbers, the schedule, one norm for all ranks, and no update from a
non-finite step.
"""

import math
from itertools import pairwise

import pytest
import torch

from slipstream.conf.errors import ConfigError
from slipstream.conf.schema import OptimConfig, OptimState
from slipstream.trainer.step.optim import ShardedAdamW, TrainableShard, learning_rate

CPU = torch.device("cpu")


def make(config: OptimConfig, *values: torch.Tensor) -> ShardedAdamW:
    shards = [TrainableShard(f"p{index}", value) for index, value in enumerate(values)]
    return ShardedAdamW(shards, config, num_updates=10, group=None, device=CPU)


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


def test_a_warm_up_below_1_is_a_share_of_all_updates():
    for share, updates, num_steps in ((0.3, 3, 10), (0.07, 7, 100), (0.01, 1, 10), (0.25, 2, 10)):
        own, same = (OptimConfig(lr=4.0, warmup_steps=one, final_lr_fraction=0.5) for one in (share, updates))
        rates = [[learning_rate(one, step, num_steps) for step in range(num_steps)] for one in (own, same)]
        assert rates[0] == rates[1] and rates[0][0] == 4.0 / (updates + 1)
    for refused in (1.5, math.inf, math.nan, -0.1):
        with pytest.raises(ConfigError, match=r"trainer\.optim\.warmup_steps must be"):
            OptimConfig(warmup_steps=refused)


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
    for bound, scale in ((1.0, 1 / 5), (4.999, 0.9998), (5.0, 1.0), (0.0, 1.0)):
        optimizer = make(OptimConfig(lr=0.1, max_grad_norm=bound), torch.zeros(2))
        assert optimizer.step([torch.tensor([3.0, 4.0])], 0.0).grad_norm == pytest.approx(5.0), "the norm before"
        assert optimizer.state_tensors()["p0.exp_avg"].tolist() == pytest.approx([0.3 * scale, 0.4 * scale])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("what", ["gradient", "loss"])
def test_a_non_finite_step_changes_nothing(what, bad):
    values = torch.tensor([1.0, 2.0])
    optimizer = make(OptimConfig(lr=0.1, warmup_steps=2), values)
    optimizer.step([torch.tensor([1.0, 1.0])], 0.0)
    before, moments = values.clone(), {name: t.clone() for name, t in optimizer.state_tensors().items()}
    grad = torch.tensor([1.0, bad if what == "gradient" else 1.0])
    result = optimizer.step([grad], bad if what == "loss" else 0.0)
    assert not result.is_finite and math.isfinite(result.grad_norm) == (what == "loss")
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


@pytest.mark.parametrize(
    ("state", "dtype"),
    [
        *((state, torch.float32) for state in OptimState),
        *((state, torch.bfloat16) for state in OptimState if state is not OptimState.host),
    ],
    ids=str,
)
def test_loaded_state_continues_bitwise(state, dtype):
    config = OptimConfig(lr=0.1, warmup_steps=2, final_lr_fraction=0.1, state=state)
    generator = torch.Generator().manual_seed(0)
    shapes = [(16, 512), (5,)]  # large enough for 8 bits, and not
    grads = [[torch.randn(shape, generator=generator).to(dtype) for shape in shapes] for _ in range(4)]
    straight = [torch.ones(shape, dtype=dtype) for shape in shapes]
    resumed = [torch.ones(shape, dtype=dtype) for shape in shapes]
    torch.manual_seed(7)  # of stochastic rounding
    optimizer = make(config, *straight)
    for step in range(4):
        if step == 2:
            torch.manual_seed(8)
        optimizer.step([grad.clone() for grad in grads[step]], 0.0)
    torch.manual_seed(7)
    first = make(config, *resumed)
    for step in range(2):
        first.step([grad.clone() for grad in grads[step]], 0.0)
    saved = {name: tensor.clone() for name, tensor in first.state_tensors().items()}
    second = make(config, *resumed)
    second.load_state_tensors(saved, num_updates=2)
    torch.manual_seed(8)
    for step in range(2, 4):
        second.step([grad.clone() for grad in grads[step]], 0.0)
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))
    assert not torch.equal(straight[0], torch.ones(shapes[0], dtype=dtype))


@pytest.mark.parametrize("state", [OptimState.bfloat16, OptimState.int8, OptimState.host])
def test_reduced_moments_take_nearly_the_float32_steps(state):
    """Adam moves every element by about lr a step: after 8 steps of 0.01 the two may differ by a few percent of that.
    8-bit moments of blocks of 256 have a relative error of about 1 %; host moments have none.
    """
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(16, 512, generator=generator) for _ in range(8)]
    exact, reduced = torch.zeros(16, 512), torch.zeros(16, 512)
    one = make(OptimConfig(lr=0.01, weight_decay=0.1), exact)
    other = make(OptimConfig(lr=0.01, weight_decay=0.1, state=state), reduced)
    for grad in grads:
        one.step([grad.clone()], 0.0)
        other.step([grad.clone()], 0.0)
    error = ((reduced - exact).norm() / exact.norm()).item()
    assert error <= {OptimState.bfloat16: 0.02, OptimState.int8: 0.06, OptimState.host: 1e-7}[state]
    if state is not OptimState.host:
        assert error > 0  # or the moments are not reduced at all


def test_squares_in_bfloat16_fall_after_gradients_did():
    """580 steps leave 0.999^580 = 56 % of it. Rounded to nearest it stays: 0.1 % is less than half of the 2^-8 that a
    bfloat16 resolves."""
    kept = {}
    for state in (OptimState.float32, OptimState.bfloat16):
        torch.manual_seed(7)
        optimizer = make(OptimConfig(betas=(0.9, 0.999), state=state, max_grad_norm=0.0), torch.zeros(8, 256))
        for step in range(600):
            optimizer.step([torch.full((8, 256), 1.0 if step < 20 else 0.01)], 0.0)
        kept[state] = optimizer.state_tensors()["p0.exp_avg_sq"].float().mean().item()
    assert kept[OptimState.bfloat16] == pytest.approx(kept[OptimState.float32], rel=0.02)


def test_an_element_whose_gradients_are_tiny_beside_its_blocks_makes_no_leap():
    """Its square is 1e-8 of the block's largest, below the 3.25e-7 that 8 bits resolve. Forgotten at every step, it
    would be (1 - 0.999) of one square, and the update sqrt(1 / 0.001) = 30 times too large."""
    torch.manual_seed(7)
    values = torch.zeros(1, 4096)
    optimizer = make(OptimConfig(lr=1e-3, state=OptimState.int8, max_grad_norm=0.0), values)
    sizes = torch.ones(1, 4096)
    sizes[0, 5::256] = 1e-4
    for _ in range(100):
        before = values.clone()
        optimizer.step([sizes * torch.randn(1, 4096)], 0.0)
        assert ((values - before).abs() < 5e-3).all()


def test_8_bit_moments_take_two_bytes_a_parameter():
    values = torch.zeros(64, 1024)
    tensors = make(OptimConfig(state=OptimState.int8), values).state_tensors()
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert num_bytes == values.numel() * (2 + 2 * 4 / 256)


def test_bfloat16_parameters_move_by_less_than_their_last_bit_on_average():
    """At 1.0 a bfloat16 can only move by 2^-8 downwards; a step of 1e-4 is lost every time when rounded to nearest."""
    torch.manual_seed(0)
    values = torch.ones(64, 512, dtype=torch.bfloat16)
    optimizer = make(OptimConfig(lr=1e-4, state=OptimState.int8), values)
    for _ in range(10):
        optimizer.step([torch.ones(64, 512, dtype=torch.bfloat16)], 0.0)
    assert (1 - values.float()).mean().item() == pytest.approx(1e-3, rel=0.1)


def test_empty_shards_and_state_before_the_first_update():
    optimizer = make(OptimConfig(), torch.zeros(0, 4))
    assert optimizer.step([torch.zeros(0, 4)], 0.0).is_finite
    assert optimizer.state_tensors() == {}


def test_the_norm_of_bfloat16_gradients_is_a_float32_number():
    """257 ones: sqrt(257) = 16.03; in bfloat16, whose neighbour of 16 is 16.125, it would be 16, and the sum of squares
    would end at 256."""
    optimizer = make(OptimConfig(max_grad_norm=0.0), torch.zeros(257, dtype=torch.bfloat16))
    result = optimizer.step([torch.ones(257, dtype=torch.bfloat16)], 0.0)
    assert result.grad_norm == pytest.approx(math.sqrt(257), rel=1e-6)


def test_gradients_of_another_dtype_and_empty_shards_between_others_count_in_their_own_place():
    """Norm sqrt(9 + 16)."""
    values = [torch.zeros(1), torch.zeros(0), torch.zeros(1)]
    shards = [TrainableShard(name, value) for name, value in zip("abc", values, strict=True)]
    optimizer = ShardedAdamW(shards, OptimConfig(lr=0.1, max_grad_norm=0.0), num_updates=10, group=None, device=CPU)
    gradients = [torch.tensor([3.0], dtype=torch.bfloat16), torch.zeros(0), torch.tensor([-4.0])]
    assert optimizer.step(gradients, 0.0).grad_norm == pytest.approx(5.0)
    assert [value.tolist() for value in values] == [[pytest.approx(-0.1)], [], [pytest.approx(0.1)]]
    assert sorted(optimizer.state_tensors()) == ["a.exp_avg", "a.exp_avg_sq", "c.exp_avg", "c.exp_avg_sq"]


def test_squares_of_norms_are_added_up_in_float64():
    """4097^2 is no number of float32."""
    optimizer = make(OptimConfig(max_grad_norm=0.0), torch.zeros(1), torch.zeros(1))
    assert optimizer.step([torch.tensor([4097.0]), torch.ones(1)], 0.0).grad_norm == math.sqrt(4097**2 + 1)


def test_the_rate_of_an_update_is_that_of_its_number_also_after_a_resume_and_a_refusal():
    """Warm-up 3: 1/4, 2/4, 3/4 of 4; a refused step has the rate of the update that it would have been."""
    config = OptimConfig(lr=4.0, warmup_steps=3)
    optimizer = make(config, torch.zeros(1))
    grad = torch.ones(1)
    assert [optimizer.step([grad], loss).lr for loss in (0.0, 0.0, math.nan, 0.0)] == [1.0, 2.0, 3.0, 3.0]
    assert optimizer.num_updates == 3
    resumed = make(config, torch.zeros(1))
    resumed.load_state_tensors(optimizer.state_tensors(), num_updates=2)
    assert resumed.step([grad], 0.0).lr == 3.0
    assert resumed.num_updates == 3, "those before the resume count, too: a second resume starts from here"
    resumed.load_state_tensors(optimizer.state_tensors(), num_updates=1)
    assert resumed.step([grad], 0.0).lr == 2.0, "all ranks go back where one has died"
    empty = make(config, torch.zeros(0))
    empty.load_state_tensors({}, num_updates=2)
    rates = [empty.step([torch.zeros(0)], 0.0).lr for _ in range(2)]
    assert rates == [3.0, 4.0], "ranks without a shard keep the same schedule"


@pytest.mark.parametrize(("num_steps", "warmup"), [(1, 0), (3, 3), (3, 2), (2, 9), (3, 1)])
def test_a_schedule_with_room_for_one_step_of_decay_or_for_none_ends_at_once(num_steps, warmup):
    config = OptimConfig(lr=1.0, warmup_steps=warmup, final_lr_fraction=0.25)
    rates = [learning_rate(config, step, num_steps) for step in range(warmup, warmup + 4)]
    assert rates == pytest.approx([1.0, 0.25, 0.25, 0.25])


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
    values, group, told = values.clone(), object(), []

    def all_reduce(total, *, group):
        told.append((total.tolist(), group))
        total += torch.tensor(others, dtype=torch.float64)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    config = OptimConfig(max_grad_norm=1.0, warmup_steps=1)
    optimizer = ShardedAdamW([TrainableShard("p0", values)], config, 10, group, CPU)
    result = optimizer.step([torch.full_like(values, 3.0)], loss)
    if not values.numel():
        norm = 4.0 if norm == 5.0 else norm
    assert told == [([9.0 * values.numel(), float(not math.isfinite(loss))], group)]
    assert (result.grad_norm, result.is_finite) == (pytest.approx(norm, nan_ok=True), is_finite)
    assert optimizer.num_updates == optimizer.place == int(is_finite)
    if is_finite and values.numel():
        moment = optimizer.state_tensors()["p0.exp_avg"].item()
        assert moment == pytest.approx(0.1 * 3 / 5), "clipped by all ranks' norm"


def test_gradients_must_be_one_per_shard():
    with pytest.raises(ValueError, match="zip"):
        make(OptimConfig(), torch.zeros(1)).step([], 0.0)
