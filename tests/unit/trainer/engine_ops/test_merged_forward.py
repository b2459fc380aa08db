"""trainer.numerics.match=merged: values of merged weights, gradients of base and adapters."""

import pytest
import torch
from cases.tiny_configs import DEEPSEEK, DENSE, GLM, GPT_OSS, MOE
from cases.tiny_models import (
    base_logits_of,
    logits_of,
    make_decoder,
    packed,
    probe_loss,
    relative_error,
    trainer_config,
)
from torch import Tensor

from slipstream.conf.schema import LoraConfig
from slipstream.trainer.delivery.merged_source import TrainerWeightSource
from slipstream.trainer.engine_ops.engine_forward import MergedForward
from slipstream.trainer.engine_ops.published import base_linears, published_linears
from slipstream.trainer.lora import Linear
from slipstream.trainer.model.decoder import Decoder
from slipstream.trainer.model.forward import Forward
from slipstream.trainer.weights.loading import load_weights
from slipstream.weight_sync.layout import Region

MODELS = {"dense": DENSE, "moe": MOE, "deepseek": DEEPSEEK, "glm": GLM, "gpt_oss": GPT_OSS}


class Published:
    """What a publish of a decoder writes, as a checkpoint to load."""

    def __init__(self, decoder: Decoder) -> None:
        self._source = TrainerWeightSource(decoder, rank=0)
        self._source.begin(1)

    def names(self) -> set[str]:
        return {meta.name for meta in self._source.layout().tensors}

    def read(self, tensor: str, region: Region) -> Tensor:
        (meta,) = (one for one in self._source.layout().tensors if one.name == tensor)
        out = torch.empty(region.shape, dtype=getattr(torch, meta.dtype))
        self._source.read(tensor, region, out)
        return out


@pytest.mark.parametrize("name", MODELS)
def test_values_are_those_of_the_published_checkpoint(name: str) -> None:
    """Bit by bit, in bfloat16, where they differ from those of the adapters beside their base."""
    batch = packed()
    mine = make_decoder(MODELS[name], dtype=torch.bfloat16, by=MergedForward())
    separate = logits_of(mine, batch, by=Forward())
    engines = make_decoder(MODELS[name], dtype=torch.bfloat16, nonzero_b=False)
    load_weights(engines, Published(mine), seed=3)
    wanted = base_logits_of(engines, batch)
    assert torch.equal(logits_of(mine, batch), wanted)
    assert not torch.equal(separate, wanted)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_base_and_adapters(name: str) -> None:
    batch = packed()
    both = [make_decoder(MODELS[name], by=by) for by in (Forward(), MergedForward())]
    grads = []
    for decoder in both:
        probe_loss(logits_of(decoder, batch), batch[0]).backward()
        grads.append({name: p.grad for name, p in decoder.named_parameters() if p.requires_grad})
    assert grads[0].keys() == grads[1].keys()
    for key, grad in grads[1].items():
        assert relative_error(grad, grads[0][key]) < 1e-3, key


def test_the_reference_policy_computes_with_the_base() -> None:
    batch = packed()
    own, merged = (make_decoder(MOE, by=by) for by in (Forward(), MergedForward()))
    assert torch.equal(base_logits_of(merged, batch), base_logits_of(own, batch))


def test_weights_side_by_side_are_those_of_each_alone_where_some_have_an_adapter() -> None:
    lora = LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "up_proj"))
    modules = dict(make_decoder(DENSE, trainer_config(lora=lora)).named_modules())
    for parent, leaves in (("self_attn", "qkv"), ("mlp", ("gate", "up"))):
        linears = [modules[f"model.layers.0.{parent}.{leaf}_proj"] for leaf in leaves]
        own = [one for one in linears if isinstance(one, Linear)]
        assert len(own) == len(leaves)
        weight, _ = published_linears(own, torch.float32)
        assert torch.equal(weight, torch.cat([published_linears([one], torch.float32)[0] for one in own]))
        assert not torch.equal(weight, base_linears(own, torch.float32)[0])
