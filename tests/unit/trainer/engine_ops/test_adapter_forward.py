"""trainer.engine_ops beside engines that add adapters to a base: which factors reach which operation, in which format.

Here the operations are plain torch; vLLM's own are compared in tests/gpu/test_adapter_ops_gpu.py.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases.tiny_configs import DENSE, MIXED, MOE
from cases.tiny_models import (
    base_logits_of,
    logits_of,
    logprob_gradients,
    make_decoder,
    packed,
    relative_error,
    trainer_config,
)
from fakes.torch_operations import TorchOperations

from slipstream.conf.schema import LoraConfig, TrainMode
from slipstream.trainer.delivery.adapter_source import AdapterSource
from slipstream.trainer.engine_ops.engine_forward import SlotForward
from slipstream.trainer.engine_ops.published import Factors, PublishedAdapters
from slipstream.trainer.model.layer import DecoderLayer
from slipstream.weight_sync.layout import Region

RANK_OF_SLOTS = 8


class TorchAdapters(TorchOperations):
    """What trainer.engine_ops.vllm_adapters promises, in float32 formulas; `seen` has every factor that came."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Factors] = []

    def add(self, out, x, factors):
        self.seen.append(Factors(*(tuple(one.clone() for one in side) for side in factors)))
        added = [(x @ a[0].t()) @ b[0].t() for a, b in zip(*factors, strict=True)]
        return out + torch.cat(added, -1)

    def experts(self, x, *given):
        if len(given) == 4 and isinstance(given[1], tuple):
            (gate_up, down), adapters, weights, experts = given
            self.seen += [Factors(*(tuple(one.clone() for one in side) for side in group)) for group in adapters]
            of_gate_up, of_down = adapters
            deltas = [b[0] @ a[0] for a, b in zip(*of_gate_up, strict=True)]
            gate_up = gate_up + torch.cat(deltas, 1)
            down = down + of_down.b[0][0] @ of_down.a[0][0]
            given = (gate_up, down, weights, experts)
        gate_up, down, weights, experts = given
        return super().experts(x.float(), gate_up.float(), down.float(), weights, experts).to(x.dtype)


def with_slots(operations: TorchAdapters) -> SlotForward:
    return SlotForward(operations=operations, adapters=operations, slots=PublishedAdapters(RANK_OF_SLOTS))


@pytest.mark.parametrize("config", [DENSE, MOE, MIXED, {**DENSE, "attention_bias": True}])
def test_values_are_base_plus_adapter_and_gradients_the_trainers_own(config):
    """Each linear has its own factors, so a q adapter in the place of k's would be seen."""
    batch = packed()
    own, mine = make_decoder(config), make_decoder(config, by=with_slots(TorchAdapters()))
    wanted, wanted_grads = logprob_gradients(own, batch)
    logprobs, grads = logprob_gradients(mine, batch)
    assert relative_error(logprobs, wanted) < 1e-4
    assert not torch.equal(logprobs, wanted)  # by other operations, in another order
    for name, grad in grads.items():
        assert relative_error(grad, wanted_grads[name]) < 1e-3, name


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_factors_have_the_bits_that_a_publish_writes_into_a_slot(config):
    """A rank below the slots', and a scale whose product with B rounds."""
    lora = LoraConfig(rank=6, alpha=18.0, attention_rank=4)
    trainer = replace(trainer_config(TrainMode.lora), lora=lora)
    operations, is_moe = TorchAdapters(), config is MOE
    config = {**config, "num_hidden_layers": 2}
    decoder = make_decoder(config, trainer, dtype=torch.bfloat16, by=with_slots(operations))
    with torch.no_grad():
        decoder(*packed())
    source = AdapterSource(decoder, 0, lora)
    shapes = {meta.name: meta.shape for meta in source.layout().tensors}

    def published(module: str, factor: str) -> torch.Tensor:
        name = f"base_model.model.{module}_proj.lora_{factor}.weight"
        out = torch.empty(shapes[name], dtype=torch.bfloat16)
        source.read(name, Region((0, 0), shapes[name]), out)
        return out

    seen = iter(operations.seen)
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        groups = [[f"self_attn.{leaf}" for leaf in "qkv"], ["self_attn.o"]]
        if not is_moe:
            groups += [["mlp.gate", "mlp.up"], ["mlp.down"]]
        for group in groups:
            given = next(seen)
            for index, module in enumerate(group):
                assert torch.equal(given.a[index][0], published(prefix + module, "A")), module
                assert torch.equal(given.b[index][0], published(prefix + module, "B")), module
        if is_moe:
            for given, leaves in ((next(seen), ("gate", "up")), (next(seen), ("down",))):
                for index, leaf in enumerate(leaves):
                    for expert in range(MOE["num_experts"]):
                        module = f"{prefix}mlp.experts.{expert}.{leaf}"
                        assert torch.equal(given.a[index][0, expert], published(module, "A")), module
                        assert torch.equal(given.b[index][0, expert], published(module, "B")), module
    assert next(seen, None) is None


def test_modules_of_equal_shapes_share_memory_and_others_never_do():
    """vLLM's kernels know a factor's strides by its address."""
    decoder = make_decoder({**DENSE, "num_hidden_layers": 2})
    published = PublishedAdapters(RANK_OF_SLOTS)
    addresses: dict[int, torch.Size] = {}
    for layer in decoder.model.layers:
        assert isinstance(layer, DecoderLayer)
        attention: Any = layer.self_attn
        mlp: Any = layer.mlp
        for linears in ([attention.q_proj], [attention.o_proj], [mlp.gate_proj, mlp.up_proj], [mlp.down_proj]):
            slot = published.linears(linears, torch.float32)
            assert len({one.data_ptr() for one in (*slot.a, *slot.b)}) == 2 * len(linears)
            for one in (*slot.a, *slot.b):
                assert addresses.setdefault(one.data_ptr(), one.shape) == one.shape
    assert len(addresses) == 8  # of one layer, in which q and o have equal shapes


def test_a_switched_off_adapter_adds_nothing():
    batch = packed()
    operations = TorchAdapters()
    bare, mine = make_decoder(MOE, trainer_config(TrainMode.full)), make_decoder(MOE, by=with_slots(operations))
    assert relative_error(base_logits_of(mine, batch), logits_of(bare, batch)) < 1e-4
    assert not operations.seen


def test_only_adapted_kinds_of_modules_get_adapters():
    lora = LoraConfig(rank=4, alpha=8.0, targets=("mlp", "experts"))
    operations = TorchAdapters()
    decoder = make_decoder(DENSE, replace(trainer_config(TrainMode.lora), lora=lora), by=with_slots(operations))
    with torch.no_grad():
        decoder(*packed())
    assert [len(factors.a) for factors in operations.seen] == [2, 1] * len(decoder.model.layers)
