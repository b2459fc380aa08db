"""What counts as rounding, and how a verdict is worded. Tensors are drawn; no model is run."""

import math

import pytest
import torch

from slipstream.orchestrator.parity.compare import against, agreement, difference, partings, routing_difference, verdict

ROWS, WIDTH = 200, 64


def drawn(seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def layers_of(kind: str, faulty: dict[int, torch.Tensor], reference: torch.Tensor, num_layers: int = 4):
    """The same operation in several layers, of which some returned something else."""
    names = [f"layers.{layer}.{kind}" for layer in range(num_layers)]
    return [difference(name, name, reference, faulty.get(layer, reference)) for layer, name in enumerate(names)]


def test_another_rounding_of_the_same_numbers_is_no_finding():
    """bfloat16 keeps 8 bits: what is rounded from numbers that differ in the ninth differs by a unit here and there."""
    exact = drawn()
    first, second = exact.bfloat16(), (exact * (1 + 2.0**-9 * torch.sign(drawn(1)))).bfloat16()
    found = difference("layers.0.mlp.experts", "layers.0.mlp.experts", first, second)
    assert 0.05 < found.differing < 0.6
    assert found.excess < 1
    sentence, agrees = verdict([found])
    assert agrees
    assert "No operation differs by more than rounding" in sentence


def test_a_wrong_eps_in_one_norm_is_found_below_the_format_s_resolution():
    """A common factor of 1 - 4e-4 moves one bfloat16 in ten by a unit; over 200 tokens it cannot be chance."""
    x = drawn() * 0.1
    norm = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    other = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 9e-6)
    found = against(layers_of("input_layernorm", {3: other.bfloat16()}, norm.bfloat16()))
    assert found[3].relative < 2.0**-8
    sentence, agrees = verdict(found)
    assert not agrees
    assert sentence.startswith("They part at layer 3, input_layernorm: its output differs by ")
    assert "where other layers differ by 0.0e+00 (eps, or the norm's weight)" in sentence


def test_one_layer_that_differs_far_more_than_the_others_is_named_although_rounding_could_explain_it():
    reference, noise = drawn(), drawn(1)
    faulty = {layer: reference + noise * (1e-3 if layer == 2 else 1e-6) for layer in range(4)}
    found = layers_of("self_attn.o_proj", {layer: x.bfloat16() for layer, x in faulty.items()}, reference.bfloat16())
    assert max(one.excess for one in found) < 1
    (parted,) = partings(against(found))
    assert parted.place == "layer 2, self_attn.o_proj"


def test_an_earlier_comparison_shows_what_is_new():
    reference = drawn()
    found = layers_of("mlp.experts", {layer: reference + 1e-5 * drawn(2) for layer in range(4)}, reference)
    usual = {one.tensor: one.relative for one in found}
    assert partings(against(found, usual)) == []
    (parted,) = partings(against(found, {name: value / 1.2 for name, value in usual.items()}))
    assert parted.place == "every layer, mlp.experts"


def test_flipped_routings_are_counted_whatever_the_order_of_a_token_s_experts():
    ids = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]])
    weights = torch.tensor([[0.6, 0.4]]).expand(4, 2)
    same = routing_difference("layers.0.mlp.gate", (weights, ids), (weights.flip(1), ids.flip(1)))
    assert (same.flipped, same.relative, same.excess) == (0.0, 0.0, 0.0)
    moved = ids.clone()
    moved[0, 1] = 7
    found = routing_difference("layers.0.mlp.gate", (weights, ids), (weights, moved))
    assert found.flipped == 1 / 8
    assert found.excess > 1
    assert found.relative == 0.0, "weights are compared where the choice is the same"


def test_differences_that_vanish_without_adapters_name_the_adapter():
    reference = drawn()
    without = layers_of("self_attn.qkv_proj", {}, reference)
    found = layers_of("self_attn.qkv_proj", {layer: reference + 0.1 * drawn(1) for layer in range(4)}, reference)
    assert verdict(found, without)[0].startswith("The engine computes without the adapter: self_attn.qkv_proj differ")
    assert verdict(found, found)[0].startswith("They part at every layer, self_attn.qkv_proj")


def test_what_is_not_finite_is_a_finding():
    reference = drawn()
    broken = reference.clone()
    broken[0, 0] = math.nan
    assert partings([difference("norm", "norm", reference, broken)])[0].place == "norm"


def test_figures_of_a_pair_by_hand():
    """d = (0, ln 2): exp(d) - d - 1 is 0 and 1 - ln 2."""
    figures = agreement(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.0 + math.log(2)]))
    assert figures["k3_mean"] == pytest.approx((1 - math.log(2)) / 2, rel=1e-6)
    assert figures["k3_max"] == figures["k3_p99"] == pytest.approx(1 - math.log(2), rel=1e-6)
    assert figures["max_abs_log_ratio"] == pytest.approx(math.log(2), rel=1e-6)
    assert figures["probability_difference"] == pytest.approx(math.exp(-2) / 2, rel=1e-5)
