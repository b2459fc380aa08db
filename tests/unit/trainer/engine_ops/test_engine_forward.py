"""trainer.engine_ops: values from given operations and published weights, gradients from the trainer's own kernels.

Here the operations are plain torch; vLLM's own are compared with an engine in tests/gpu/test_engine_ops_gpu.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases.tiny_models import (
    DENSE,
    MIXED,
    MOE,
    logits_of,
    make_decoder,
    packed,
    probe_loss,
    relative_error,
    trainer_config,
)
from torch import Tensor

from conf.schema import TrainMode
from trainer.delivery.merged_source import TrainerWeightSource
from trainer.engine_ops.engine_forward import compute_in_engine_operations
from trainer.lora import disabled_adapters
from trainer.model.logprobs import token_logprobs
from weight_sync.layout import Region


class TorchOperations:
    """What trainer.engine_ops.vllm_operations promises, in float32 formulas; `shift` picks other experts on purpose."""

    def __init__(self, theta: float = 10000.0, head_dim: int = 16, shift: int = 0) -> None:
        self.theta, self.head_dim, self.shift = theta, head_dim, shift
        self.chosen: list[Tensor] = []

    def norm(self, x, weight, eps):
        return (x.float() * (x.float().pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight.float()).to(x.dtype)

    def linear(self, x, weight, bias=None):
        return x @ weight.t() if bias is None else x @ weight.t() + bias

    def rotate(self, q, k, sequences):
        frequencies = self.theta ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = (sequences.positions_T[:, None] * frequencies)[:, None]

        def turned(x):
            first, second = x.chunk(2, -1)
            parts = (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
            return torch.cat(parts, -1).to(x.dtype)

        return turned(q), turned(k)

    def attend(self, q, k, v, sequences, scale):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        outs = []
        for start, stop in zip(sequences.starts, sequences.starts[1:], strict=False):
            logits = torch.einsum("qnd,knd->nqk", q[start:stop], k[start:stop]) * scale
            hidden = torch.ones(logits.shape[1:], dtype=torch.bool).triu(1)
            outs.append(torch.einsum("nqk,knd->qnd", logits.masked_fill(hidden, -torch.inf).softmax(-1), v[start:stop]))
        return torch.cat(outs)

    def silu_and_mul(self, gate_up):
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def route(self, x, logits, top_k, does_normalize):
        probabilities = logits.softmax(-1)
        experts = (probabilities.topk(top_k).indices + self.shift) % logits.shape[1]
        weights = probabilities.gather(1, experts)
        self.chosen.append(experts)
        return (weights / weights.sum(-1, keepdim=True) if does_normalize else weights), experts.to(torch.int32)

    def experts(self, x, gate_up, down, weights, experts):
        out = torch.zeros_like(x)
        for choice in range(experts.shape[1]):
            h = self.silu_and_mul(torch.einsum("th,tih->ti", x, gate_up[experts[:, choice].long()]))
            out += weights[:, choice, None] * torch.einsum("ti,thi->th", h, down[experts[:, choice].long()])
        return out

    def token_logprobs(self, logits, targets):
        return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def loss_and_gradients(decoder, batch):
    decoder.zero_grad()
    hidden = decoder(*batch)
    logprobs, _ = decoder.apply_head(
        lambda rows, weight: token_logprobs(rows, weight, batch[0], temperature=1.0, chunk_tokens=5, head=decoder.head),
        hidden,
    )
    (logprobs * (1 + batch[0] % 5)).sum().backward()
    return logprobs.detach(), {name: p.grad for name, p in decoder.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("mode", list(TrainMode), ids=str)
@pytest.mark.parametrize(
    "config", [DENSE, MOE, MIXED, {**MOE, "norm_topk_prob": False}, {**DENSE, "attention_bias": True}]
)
def test_values_are_the_operations_and_gradients_the_trainers_own(config, mode):
    """Also of biases, of layers without experts, and of both modes' trainable parameters."""
    batch = packed()
    own, mine = (make_decoder(config, trainer_config(mode)) for _ in range(2))
    compute_in_engine_operations(mine, TorchOperations())
    wanted, wanted_grads = loss_and_gradients(own, batch)
    logprobs, grads = loss_and_gradients(mine, batch)
    assert relative_error(logprobs, wanted) < 1e-4
    assert not torch.equal(logprobs, wanted)  # by other operations, in another order
    assert grads.keys() == wanted_grads.keys()
    for name, grad in grads.items():
        assert relative_error(grad, wanted_grads[name]) < 1e-3, name
    assert {name for name, _ in mine.named_parameters()} == {name for name, _ in own.named_parameters()}


def test_gradients_use_the_experts_that_the_operations_chose():
    """Operations that choose other experts than the trainer's router would: gradients reach those, and no others."""
    decoder = make_decoder({**MOE, "num_hidden_layers": 1})
    operations = TorchOperations(shift=3)
    compute_in_engine_operations(decoder, operations)
    _, grads = loss_and_gradients(decoder, packed((2,)))
    (experts,) = operations.chosen
    touched = grads["model.layers.0.mlp.experts.down_lora_B"].flatten(1).abs().sum(1) > 0
    assert set(touched.nonzero()[:, 0].tolist()) == set(experts.flatten().tolist())


def test_a_switched_off_adapter_adds_nothing():
    batch = packed()
    bare, mine = make_decoder(MOE, trainer_config(TrainMode.full)), make_decoder(MOE)
    compute_in_engine_operations(mine, TorchOperations())
    with torch.no_grad(), disabled_adapters(mine):
        assert relative_error(logits_of(mine, batch), logits_of(bare, batch)) < 1e-4
    assert probe_loss(logits_of(mine, batch), batch[0]) != probe_loss(logits_of(bare, batch), batch[0])


class RecordingOperations(TorchOperations):
    """Keeps every weight that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []

    def linear(self, x, weight, bias=None):
        self.weights.append(weight)
        return super().linear(x, weight, bias)

    def experts(self, x, gate_up, down, weights, experts):
        self.weights += [gate_up, down]
        return super().experts(x.float(), gate_up.float(), down.float(), weights, experts).to(x.dtype)


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_weights_have_the_bits_that_a_publish_writes(config):
    decoder = make_decoder({**config, "num_hidden_layers": 1}, dtype=torch.bfloat16)
    operations = RecordingOperations()
    compute_in_engine_operations(decoder, operations)
    with torch.no_grad():
        decoder(*packed())
    source = TrainerWeightSource(decoder, rank=0)
    source.begin(1)

    def published(name: str) -> Tensor:
        meta = next(tensor for tensor in source.layout().tensors if tensor.name == name)
        out = torch.empty(meta.shape, dtype=torch.bfloat16)
        source.read(name, Region((0,) * len(meta.shape), meta.shape), out)
        return out

    layer, attention = "model.layers.0.mlp.", "model.layers.0.self_attn."
    wanted = [
        torch.cat([published(f"{attention}{x}_proj.weight") for x in "qkv"]),
        published(attention + "o_proj.weight"),
    ]
    if config is DENSE:
        wanted += [torch.cat([published(f"{layer}{x}_proj.weight") for x in ("gate", "up")])]
        wanted += [published(layer + "down_proj.weight")]
    else:
        experts = [
            [published(f"{layer}experts.{e}.{x}_proj.weight") for x in ("gate", "up", "down")]
            for e in range(MOE["num_experts"])
        ]
        wanted += [published(layer + "gate.weight"), torch.stack([torch.cat(e[:2]) for e in experts])]
        wanted += [torch.stack([e[2] for e in experts])]
    assert len(operations.weights) == len(wanted)
    for mine, other in zip(operations.weights, wanted, strict=True):
        assert torch.equal(mine, other)
