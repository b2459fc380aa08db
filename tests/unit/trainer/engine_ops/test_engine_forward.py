"""trainer.engine_ops: values from given operations and published weights or adapters, gradients from the trainer's own
kernels.

Here the operations are plain torch; vLLM's own are compared with an engine in tests/gpu/test_engine_ops_gpu.py and
test_adapter_ops_gpu.py.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases.tiny_configs import DEEPSEEK, DENSE, GLM, GPT_OSS, MIXED, MOE
from cases.tiny_models import (
    base_logits_of,
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
from slipstream.conf.schema import AttentionValues, LoraConfig, TrainMode
from slipstream.trainer.delivery.adapter_source import AdapterSource
from slipstream.trainer.delivery.merged_source import TrainerWeightSource
from slipstream.trainer.engine_ops.engine_forward import EngineForward, MergedForward, SlotForward, choose_forward
from slipstream.trainer.engine_ops.published import Factors, PublishedAdapters, published_linears
from slipstream.trainer.engine_ops.vllm_operations import refusal_of_engine_attention
from slipstream.trainer.errors import TrainerError
from slipstream.trainer.lora import Linear
from slipstream.trainer.model.decoder import Decoder
from slipstream.trainer.model.forward import Forward
from slipstream.trainer.model.layer import DecoderLayer
from slipstream.trainer.weights.loading import load_weights
from slipstream.weight_sync.layout import Region

CPU, SPEC = torch.device("cpu"), read_config(DENSE)


def forward_of(operations: TorchOperations, ranks: int = 1) -> EngineForward:
    return EngineForward(operations=operations, engine_ranks=ranks)


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


MODELS = {"dense": DENSE, "moe": MOE, "deepseek": DEEPSEEK, "glm": GLM, "gpt_oss": GPT_OSS}
MORE = {"not normalized": {**MOE, "norm_topk_prob": False}, "mixed": MIXED, "bias": {**DENSE, "attention_bias": True}}
FORWARDS = {
    "engine": lambda: forward_of(TorchOperations()), "slots": lambda: with_slots(TorchAdapters()),
    "merged": MergedForward,
}  # fmt: skip
CASES = [
    *((kind, TrainMode.lora, name) for kind in ("engine", "slots") for name in ("dense", "moe", *MORE)),
    *(("engine", TrainMode.full, name) for name in ("dense", "moe", *MORE)),
    *(("merged", TrainMode.lora, name) for name in MODELS),
]


@pytest.mark.parametrize(("kind", "mode", "name"), CASES)
def test_values_are_the_operations_and_gradients_the_trainers_own(kind: str, mode: TrainMode, name: str) -> None:
    """Also of biases, and of layers without experts. Each linear has its own factors, so a q adapter in the place of
    k's would be seen."""
    config, trainer, batch = (MODELS | MORE)[name], trainer_config(mode), packed()
    own, mine = make_decoder(config, trainer), make_decoder(config, trainer, by=FORWARDS[kind]())
    wanted, wanted_grads = logprob_gradients(own, batch)
    logprobs, grads = logprob_gradients(mine, batch)
    assert relative_error(logprobs, wanted) < 1e-4
    assert not torch.equal(logprobs, wanted)  # by other operations, in another order
    assert grads.keys() == wanted_grads.keys()
    for key, grad in grads.items():
        assert relative_error(grad, wanted_grads[key]) < 1e-3, key
    assert {key for key, _ in mine.named_parameters()} == {key for key, _ in own.named_parameters()}


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


def test_only_adapted_kinds_of_modules_get_adapters():
    lora = LoraConfig(rank=4, alpha=8.0, targets=("mlp", "experts"))
    operations = TorchAdapters()
    decoder = make_decoder(DENSE, replace(trainer_config(TrainMode.lora), lora=lora), by=with_slots(operations))
    with torch.no_grad():
        decoder(*packed())
    assert [len(factors.a) for factors in operations.seen] == [2, 1] * len(decoder.model.layers)


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
    mine = make_decoder(MODELS[name], dtype=torch.bfloat16, by=MergedForward(), rounding_seed=5)
    separate = logits_of(mine, batch, by=Forward())
    engines = make_decoder(MODELS[name], dtype=torch.bfloat16, nonzero_b=False)
    load_weights(engines, Published(mine), seed=3)
    wanted = base_logits_of(engines, batch)
    assert torch.equal(logits_of(mine, batch), wanted)
    assert not torch.equal(separate, wanted)


@pytest.mark.parametrize("kind", FORWARDS)
def test_the_reference_policy_computes_with_the_base(kind: str) -> None:
    batch, by = packed(), FORWARDS[kind]()
    base, mine = make_decoder(MOE, trainer_config(TrainMode.full)), make_decoder(MOE, by=by)
    assert relative_error(base_logits_of(mine, batch), logits_of(base, batch)) < 1e-4
    assert relative_error(logits_of(mine, batch), logits_of(base, batch)) > 1e-2


def test_weights_side_by_side_are_those_of_each_alone_where_some_have_an_adapter() -> None:
    lora = LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "up_proj"))
    modules = dict(make_decoder(DENSE, trainer_config(lora=lora)).named_modules())
    for parent, leaves in (("self_attn", "qkv"), ("mlp", ("gate", "up"))):
        linears = [modules[f"model.layers.0.{parent}.{leaf}_proj"] for leaf in leaves]
        own = [one for one in linears if isinstance(one, Linear)]
        assert len(own) == len(leaves)
        weight, _ = published_linears(own, torch.float32)
        assert torch.equal(weight, torch.cat([published_linears([one], torch.float32)[0] for one in own]))
        assert not torch.equal(weight, published_linears(own, torch.float32, adapted=False)[0])
