"""What an engine computes with an adapter, in each way in which it may get it; used by bench/rounding.py.

An engine's forward is transformers' model in bfloat16, whose adapted projections round where an engine's do: in slots
x W^T, x A^T and its product with B; with block-FP8 weights the inputs, too, to FP8 with a scale for 128 of them.

Shapes: T tokens of answers, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from slipstream.trainer.delivery.merged_source import TrainerWeightSource
from slipstream.trainer.lora import Adapted
from slipstream.trainer.model.decoder import Decoder
from slipstream.trainer.weights.block_scales import dequantized
from slipstream.trainer.weights.quantization import BLOCK, SCALE_SUFFIX, BlockFp8, scale_shape
from slipstream.trainer.weights.shards import local_shards
from slipstream.weight_sync.layout import Region
from slipstream.weight_sync.merging.rounding import FP8_MAX

Pairs = Sequence[tuple[list[int], list[int]]]
SCORED_TOGETHER = 16


@dataclass(frozen=True, slots=True)
class Published:
    """An adapted matrix as an engine has it."""

    stored: Tensor
    """What is sent: bfloat16, or codes of float8_e4m3fn."""
    values: Tensor
    """What it stands for, bfloat16 or float32."""
    factors: tuple[Tensor, Tensor] | None = None
    """A and B * alpha / rank, in bfloat16, beside the base."""

    def update_over(self, base: Tensor) -> Tensor:
        """What the engine has beyond the base, in float32."""
        update = self.values.float() - base.float()
        return update if self.factors is None else update + self.factors[1].float() @ self.factors[0].float()

    def whole(self) -> Tensor:
        """One matrix that computes the same, in float32."""
        return self.values.float() if self.factors is None else self.update_over(torch.zeros_like(self.values))


@dataclass(slots=True)
class Policy:
    """By adapted matrix: the frozen base, W + s B A in float32, and what engines get in each way."""

    base: dict[str, Tensor]
    exact: dict[str, Tensor]
    ways: dict[str, dict[str, Published]]


@torch.no_grad()
def published(decoder: Decoder, *, is_fp8: bool, is_merged: bool = True) -> dict[str, Published]:
    """Merged weights, or those of the base, as the product's weight source writes them."""
    quantization = BlockFp8() if is_fp8 else None
    source = TrainerWeightSource(decoder, 0, quantization, is_merged=is_merged)
    found: dict[str, Published] = {}
    source.begin(0)
    for held in local_shards(decoder):
        if held.delta is None:
            continue
        device = held.base.device
        if not is_fp8:
            stored = torch.empty(held.region.shape, dtype=torch.bfloat16, device=device)
            source.read(held.tensor, held.region, stored)
            found[held.tensor] = Published(stored, stored)
            continue
        stored = torch.empty(held.region.shape, dtype=torch.float8_e4m3fn, device=device)
        source.read(held.tensor, held.region, stored)
        scales = torch.empty(scale_shape(held.region.shape), device=device)
        source.read(held.tensor + SCALE_SUFFIX, Region((0, 0), tuple(scales.shape)), scales)
        found[held.tensor] = Published(stored, dequantized(stored, scales, held.region))
    source.end()
    return found


@contextmanager
def to_nearest(decoder: Decoder) -> Iterator[None]:
    """Weight sources that are made inside round merged weights to nearest."""
    keys = {module: module.rounding_keys for module in decoder.modules() if isinstance(module, Adapted)}
    for module in keys:
        module.rounding_keys = {}
    yield
    for module, of_module in keys.items():
        module.rounding_keys = of_module


@torch.no_grad()
def policy_of(decoder: Decoder, *, is_fp8: bool) -> Policy:
    """All ways of the present adapter."""
    base: dict[str, Tensor] = {}
    exact: dict[str, Tensor] = {}
    slots: dict[str, Published] = {}
    own = published(decoder, is_fp8=is_fp8, is_merged=False)
    for held in local_shards(decoder):
        if held.delta is None:
            continue
        name = held.tensor
        base[name] = held.base.detach().clone()
        exact[name] = torch.empty(held.region.shape, device=held.base.device)
        held.read(held.region, exact[name], {})  # float32 is not rounded
        factors = (held.delta.a_parameter.bfloat16(), held.delta.b_parameter.bfloat16() * held.delta.scale)
        slots[name] = Published(own[name].stored, own[name].values, factors)
    with to_nearest(decoder):
        nearest = published(decoder, is_fp8=is_fp8)
    return Policy(base, exact, {"nearest": nearest, "dithered": published(decoder, is_fp8=is_fp8), "slots": slots})


def to_fp8_and_back(values: Tensor) -> Tensor:
    """Each 128 values along the last dim with a scale of their own, in float32."""
    size = values.shape[-1]
    blocks = F.pad(values.float(), (0, -size % BLOCK)).unflatten(-1, (-1, BLOCK))
    scales = (blocks.abs().amax(-1, keepdim=True) / FP8_MAX).clamp_min_(1e-12)
    return ((blocks / scales).to(torch.float8_e4m3fn).float() * scales).flatten(-2)[..., :size]


class EngineLinear(nn.Module):
    """A projection as an engine computes it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.matrix: Published | None = None
        self.rounds_inputs = False
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """x W^T, and the adapter's product in a slot, each rounded to the format of x."""
        assert self.matrix is not None
        weight, bias = self.matrix.values, None if self.bias is None else self.bias.to(self.matrix.values.dtype)
        inputs = to_fp8_and_back(x) if self.rounds_inputs else x
        out = F.linear(inputs.to(weight.dtype), weight, bias).to(x.dtype)
        if self.matrix.factors is None:
            return out
        a, b = self.matrix.factors
        return out + F.linear(F.linear(x, a), b)


class Forwards:
    """Two forwards of one chat model: in float32, and as an engine's."""

    def __init__(self, folder: str, device: str) -> None:
        auto: Any = AutoModelForCausalLM  # which is typed for one model
        self.device = device
        self.float32 = auto.from_pretrained(folder, dtype=torch.float32).to(device).eval()
        self.engine = auto.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
        self.parameters = dict(self.float32.named_parameters())
        self.linears: dict[str, EngineLinear] = {}

    @torch.no_grad()
    def in_float32(self, weights: dict[str, Tensor], pairs: Pairs) -> tuple[Tensor, float]:
        """Score answers: (log-probabilities of the whole vocabulary, TV; nats per token of the answers)."""
        self.take(weights)
        return self._scored(self.float32, pairs)

    @torch.no_grad()
    def as_engine(self, weights: dict[str, Published], pairs: Pairs, *, is_fp8: bool) -> Tensor:
        """The same by an engine's arithmetic."""
        for name, matrix in weights.items():
            if name not in self.linears:
                path = name.removesuffix(".weight")
                self.linears[name] = EngineLinear(self.engine.get_submodule(path))
                self.engine.set_submodule(path, self.linears[name])
            self.linears[name].matrix, self.linears[name].rounds_inputs = matrix, is_fp8
        return self._scored(self.engine, pairs)[0]

    @torch.no_grad()
    def take(self, weights: dict[str, Tensor]) -> None:
        """Set matrices of the float32 model."""
        for name, values in weights.items():
            self.parameters[name].copy_(values)

    @torch.no_grad()
    def sampled(self, prompts: Sequence[list[int]], num_tokens: int, seed: int) -> Pairs:
        """Answers that the float32 model draws with its present weights; what follows an end is dropped."""
        torch.manual_seed(seed)
        end = self.float32.generation_config.eos_token_id
        ends = set(end if isinstance(end, list) else [end])
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(one)) + one for one in prompts], device=self.device)
        mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts], device=self.device)
        drawn = self.float32.generate(
            ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=num_tokens,
            pad_token_id=0,
        )  # fmt: skip
        pairs = []
        for prompt, answer in zip(prompts, drawn[:, longest:].tolist(), strict=True):
            stop = next((place + 1 for place, token in enumerate(answer) if token in ends), len(answer))
            pairs.append((prompt, answer[:stop]))
        return pairs

    def _scored(self, model: Any, pairs: Pairs) -> tuple[Tensor, float]:
        rows, nll = [], 0.0
        for first in range(0, len(pairs), SCORED_TOGETHER):
            part = pairs[first : first + SCORED_TOGETHER]
            longest = max(len(prompt) + len(answer) for prompt, answer in part)
            ids = torch.zeros(len(part), longest, dtype=torch.int64)
            at = torch.zeros(len(part), longest, dtype=torch.bool)
            for row, (prompt, answer) in enumerate(part):
                ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
                at[row, len(prompt) - 1 : len(prompt) + len(answer) - 1] = True
            ids, at = ids.to(self.device), at.to(self.device)
            hidden = model.model(ids).last_hidden_state[at]  # causal: what is on the right does not matter
            rows.append(model.lm_head(hidden).float().log_softmax(-1))
            targets = ids.roll(-1, 1)[at]
            nll -= float(rows[-1].gather(1, targets[:, None]).sum())
        return torch.cat(rows), nll / sum(len(answer) for _, answer in pairs)


def divergence(engine_TV: Tensor, trained_TV: Tensor) -> float:
    """Mean over tokens of KL(engine || trained), which parity/k3 estimates: tokens are sampled by the engine."""
    total = 0.0
    for one, other in zip(engine_TV.split(256), trained_TV.split(256), strict=True):
        total += float((one.double().exp() * (one.double() - other.double())).sum())
    return total / len(engine_TV)
