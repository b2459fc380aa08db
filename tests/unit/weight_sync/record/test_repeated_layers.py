"""Two layers of each kind recorded and repeated, against recording every layer."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from slipstream.weight_sync.layout import DestLayout, PostLoad, TensorMeta
from slipstream.weight_sync.record.recorder import record_layout
from slipstream.weight_sync.record.repeated_layers import record_repeating

NUM_LAYERS = 7


class Engine:
    """A dense first layer, then layers of two experts each; gate and up fused, rows padded. Counts what it loads. A
    layer may have gate and up the other way round, or another constant."""

    def __init__(self, odd_layer: int | None = None, odd_fill: int | None = None) -> None:
        self.odd_layer, self.odd_fill = odd_layer, odd_fill
        self.num_loaded = 0
        self.params: dict[str, Tensor] = {"embed": torch.empty(10, 4, device="meta")}
        self.tensors = [TensorMeta("embed.weight", (9, 4), "float32")]
        for layer in range(NUM_LAYERS):
            prefix, experts = f"model.layers.{layer}", 2 if layer else 1
            self.params[f"{prefix}.w13"] = torch.empty(experts, 8, 4, device="meta")
            self.params[f"{prefix}.pad"] = torch.empty(3, device="meta")
            self.params[f"{prefix}.extra"] = torch.empty(3, device="meta")
            for expert in range(experts):
                for leaf in ("gate", "up"):
                    self.tensors.append(TensorMeta(f"{prefix}.mlp.experts.{expert}.{leaf}", (4, 4), "float32"))

    def load_weights(self, stream: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in stream:
            self.num_loaded += 1
            if name == "embed.weight":
                self.params["embed"][:9].copy_(tensor)
                self.params["embed"][9:].fill_(0)
                continue
            layer, expert, is_up = int(name.split(".")[2]), int(name.split(".")[5]), name.endswith("up")
            rows = slice(4, 8) if is_up != (layer == self.odd_layer) else slice(0, 4)
            self.params[f"model.layers.{layer}.w13"][expert, rows].copy_(tensor)
            self.params[f"model.layers.{layer}.pad"].fill_(layer == self.odd_fill)

    def record(self, record) -> DestLayout:
        post_load = {name: PostLoad.derived for name in self.params if name.endswith("extra")}
        return record(self.load_weights, self.params, self.tensors, 0, post_load=post_load)


def test_repeated_layers_are_the_recorded_ones() -> None:
    whole, quick = Engine(), Engine()
    assert quick.record(record_repeating) == whole.record(record_layout)
    # The embedding, the dense layer, and two of the six others with four tensors each.
    assert (whole.num_loaded, quick.num_loaded) == (1 + 2 + 6 * 4, 1 + 2 + 2 * 4)


@pytest.mark.parametrize("odd", [{"odd_layer": 2}, {"odd_fill": 2}])
def test_layers_that_differ_are_all_recorded(odd: dict[str, int]) -> None:
    engine = Engine(**odd)
    assert engine.record(record_repeating) == Engine(**odd).record(record_layout)
    assert engine.num_loaded > 1 + 2 + 6 * 4


@pytest.mark.parametrize("change", ["shape", "tie"])
def test_a_layer_with_other_parameters_is_of_its_own_kind(change: str) -> None:
    engine = Engine()
    if change == "shape":
        engine.params["model.layers.5.extra"] = torch.empty(4, device="meta")
    else:
        engine.params["model.layers.5.extra"] = engine.params["model.layers.1.extra"]
    layout = engine.record(record_repeating)
    assert {param.name for param in layout.params} == set(engine.params)
    assert engine.num_loaded == 1 + 2 + 3 * 4
