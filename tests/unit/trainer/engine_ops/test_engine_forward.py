"""trainer.engine_ops: values from given operations and published weights, gradients from the trainer's own kernels.

Here the operations are plain torch; vLLM's own are compared with an engine in tests/gpu/test_engine_ops_gpu.py.
"""

import pytest
import torch
from cases.tiny_configs import DEEPSEEK, DENSE, MIXED, MOE
from cases.tiny_models import (
    by_place,
    logits_of,
    logprob_gradients,
    make_decoder,
    packed,
    relative_error,
    trainer_config,
)
from fakes.torch_operations import TorchOperations
from torch import Tensor

from slipstream.conf.architecture.families import read_config
from slipstream.conf.schema import AttentionValues, TrainMode
from slipstream.trainer.delivery.merged_source import TrainerWeightSource
from slipstream.trainer.engine_ops.engine_forward import EngineForward, choose_forward
from slipstream.trainer.engine_ops.vllm_operations import refusal_of_engine_attention
from slipstream.trainer.errors import TrainerError
from slipstream.trainer.lora import Linear
from slipstream.weight_sync.layout import Region

CPU, SPEC = torch.device("cpu"), read_config(DENSE)


def forward_of(operations: TorchOperations, ranks: int = 1) -> EngineForward:
    return EngineForward(operations=operations, engine_ranks=ranks)


@pytest.mark.parametrize("mode", list(TrainMode), ids=str)
@pytest.mark.parametrize(
    "config", [DENSE, MOE, MIXED, {**MOE, "norm_topk_prob": False}, {**DENSE, "attention_bias": True}]
)
def test_values_are_the_operations_and_gradients_the_trainers_own(config, mode):
    """Also of biases, of layers without experts, and of both modes' trainable parameters."""
    batch = packed()
    own, mine = (make_decoder(config, trainer_config(mode), by=by) for by in (None, forward_of(TorchOperations())))
    wanted, wanted_grads = logprob_gradients(own, batch)
    logprobs, grads = logprob_gradients(mine, batch)
    assert relative_error(logprobs, wanted) < 1e-4
    assert not torch.equal(logprobs, wanted)  # by other operations, in another order
    assert grads.keys() == wanted_grads.keys()
    for name, grad in grads.items():
        assert relative_error(grad, wanted_grads[name]) < 1e-3, name
    assert {name for name, _ in mine.named_parameters()} == {name for name, _ in own.named_parameters()}


def test_gradients_use_the_experts_that_the_operations_chose():
    """Operations that choose other experts than the trainer's router would: gradients reach those, and no others."""
    operations = TorchOperations(shift=3)
    decoder = make_decoder({**MOE, "num_hidden_layers": 1}, by=forward_of(operations))
    _, grads = logprob_gradients(decoder, packed((2,)))
    (experts,) = operations.chosen
    touched = grads["model.layers.0.mlp.experts.down_lora_B"].flatten(1).abs().sum(1) > 0
    assert set(touched.nonzero()[:, 0].tolist()) == set(experts.flatten().tolist())


def test_two_engine_ranks_round_their_products_before_they_are_added():
    """As vLLM's row-parallel linears and an all-reduce of two: the bias is the first rank's, the sum is rounded.
    Sums of whole numbers are exact in any order."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randint(-30, 30, shape, generator=generator) for shape in ((7, 32), (16, 32), (16,)))
    linear = Linear(32, 16, bias=True, weight_dtype=torch.bfloat16, lora=None)
    assert linear.bias is not None
    linear.weight.data.copy_(weight)
    linear.bias.data.copy_(bias)
    left, right = ((x[:, half] @ weight[:, half].t()).bfloat16() for half in (slice(None, 16), slice(16, None)))
    wanted = (left + bias.bfloat16()) + right
    with torch.no_grad():
        mine, other = (forward_of(TorchOperations(), ranks).output(linear, x.bfloat16()) for ranks in (2, 1))
        assert torch.equal(mine, wanted)
        assert not torch.equal(mine, other)


@pytest.mark.parametrize("config", [DENSE, {**DENSE, "attention_bias": True}], ids=["plain", "bias"])
def test_a_forward_of_two_engine_ranks_is_the_model(config):
    """In float32, up to the order of sums; both projections that an engine spreads over ranks are."""
    batch, operations = packed(), TorchOperations()
    one, two = (make_decoder(config, by=forward_of(operations, ranks)) for ranks in (1, 2))
    with torch.no_grad():
        wanted, mine = logits_of(one, batch), logits_of(two, batch)
    assert relative_error(mine, wanted) < 1e-5
    assert not torch.equal(mine, wanted)


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
    operations = RecordingOperations()
    decoder = make_decoder({**config, "num_hidden_layers": 1}, dtype=torch.bfloat16, by=forward_of(operations))
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


def test_a_node_that_cannot_run_it_says_so_once_or_takes_its_own() -> None:
    """Asked for, it is refused with one message; by default the trainer's own is taken, and the log says why."""
    own = "the trainer's own"
    for values, told in ((AttentionValues.own, own), (AttentionValues.auto, f"{own} (the trainer has no GPU)")):
        by = choose_forward(SPEC, torch.bfloat16, trainer_config(numerics=by_place(attention=values)), CPU)
        decoder = make_decoder(DENSE, dtype=torch.bfloat16, by=by)
        assert decoder.backends == {"attention": "padded", "attention values": told}
    asked = trainer_config(numerics=by_place(attention=AttentionValues.engine))
    with pytest.raises(TrainerError, match="engine's kernel cannot be had: the trainer has no GPU"):
        choose_forward(SPEC, torch.bfloat16, asked, CPU)


@pytest.mark.parametrize(
    ("change", "dtype", "major", "reason"),
    [
        ({}, torch.float32, 9, "model.dtype=float32 is not one of bfloat16, float16"),
        ({}, torch.bfloat16, 8, "is for Hopper GPUs, this one has compute capability 8.0"),
        ({"head_dim": 20}, torch.bfloat16, 9, "heads of width 20"),
        ({"head_dim": 512}, torch.bfloat16, 9, "heads of width 512"),
        (DEEPSEEK, torch.bfloat16, 9, "heads of width 20"),
        ({"head_dim": 128}, torch.bfloat16, 9, "vLLM's attention cannot be imported where the trainer runs"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_each_reason_is_told(change: dict[str, object], dtype: torch.dtype, major: int, reason: str) -> None:
    """The last one is of a machine whose vLLM has no kernels for GPUs."""
    if torch.cuda.is_available() and reason.startswith("vLLM"):
        pytest.skip("this machine's vLLM has kernels for GPUs")
    told = refusal_of_engine_attention((major, 0), dtype, read_config({**DENSE, **change}).attentions[0])
    assert told is not None and reason in told
