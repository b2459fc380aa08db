"""What a difference of trainer and engine is made of; used by bench/parity.py --learned.

Two programs that compute the same weights in bfloat16 differ as far as they round differently. So the k3 of a trainer
is put beside forwards of which only one thing differs:

    same weights                 the trainer on the merged weights that the engine holds (numerics.match=merged)
    same weights, norm=each      the same with norms that round elsewhere: another program, and no weight differs
    engine, float32              the engine beside a float32 forward of the weights that it holds: its arithmetic
    weights, float32             W + s B A beside what the engine holds, both in float32: the rounding of weights
    trainer, float32             the trainer beside W + s B A in float32: its arithmetic

Float32 is transformers' model, with one layer in memory at a time, so that it fits beside both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from bench.rounding_ways import to_nearest
from slipstream.conf.schema import Match, NumericsByPlace, Rounding, Roundings, TrainerConfig
from slipstream.trainer.delivery.merged_source import TrainerWeightSource
from slipstream.trainer.engine_ops.choose_forward import choose_forward
from slipstream.trainer.model.build_decoder import build_decoder
from slipstream.trainer.model.decoder import Decoder
from slipstream.weight_sync.layout import Region

HEAD_ROWS = 1024
SAME_WEIGHTS = {
    "same weights": NumericsByPlace(match=Match.merged),
    "same weights, norm=each": NumericsByPlace(match=Match.merged, own=Roundings(norm=Rounding.each)),
}
"""Numerics of trainers on the engine's weights."""


def rounded(decoder: Decoder, rounding: str) -> AbstractContextManager[None]:
    """Inside, the decoder's merged weights are rounded so."""
    return to_nearest(decoder) if rounding == "nearest" else nullcontext()


def with_numerics(decoder: Decoder, trainer: TrainerConfig, numerics: NumericsByPlace, seed: int) -> Decoder:
    """A decoder over the same parameters that rounds otherwise."""
    trainer = replace(trainer, numerics=numerics)
    device = next(decoder.parameters()).device
    by = choose_forward(decoder.spec, decoder.dtype, trainer, device)
    other = build_decoder(decoder.spec, dtype=decoder.dtype, device=device, trainer=trainer, rounding_seed=seed, by=by)
    other.load_state_dict(decoder.state_dict(keep_vars=True), assign=True)
    return other


class Weights:
    """The decoder's checkpoint tensors with adapters merged into them, one at a time."""

    def __init__(self, decoder: Decoder, rounding: str) -> None:
        with rounded(decoder, rounding):
            self.source = TrainerWeightSource(decoder, 0)
        self.device = next(decoder.parameters()).device
        self.metas = {meta.name: meta for meta in self.source.layout().tensors}

    def __enter__(self) -> Weights:
        self.source.begin(0)
        return self

    def __exit__(self, *_: object) -> None:
        self.source.end()

    def stored(self, name: str) -> Tensor:
        """As an engine gets it."""
        return self._read(name, getattr(torch, self.metas[name].dtype))

    def exact(self, name: str) -> Tensor:
        """In float32, which no sum is rounded to."""
        return self._read(name, torch.float32)

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        shape = self.metas[name].shape
        out = torch.empty(shape, dtype=dtype, device=self.device)
        self.source.read(name, Region((0,) * len(shape), shape), out)
        return out


class Float32Forward:
    """See the module's docstring.

    Args:
        hf_config: Of a dense model or a mixture whose experts transformers stacks, gate above up.
    """

    def __init__(self, hf_config: dict[str, Any], device: torch.device | str) -> None:
        fields = {key: value for key, value in hf_config.items() if key not in ("model_type", "torch_dtype", "dtype")}
        config = AutoConfig.for_model(hf_config["model_type"], **fields)
        auto: Any = AutoModelForCausalLM  # which is typed for one model
        with torch.device("meta"):
            self.model: Any = auto.from_config(config, dtype=torch.float32)
        inner = self.model.model
        self.layer = inner.layers[0]
        inner.layers = nn.ModuleList([self.layer] * len(inner.layers))
        self.model.to_empty(device=device).eval()
        inner.rotary_emb = type(inner.rotary_emb)(config).to(device)
        self.layer.register_forward_pre_hook(lambda *_: self._fill_next())
        self.device = device
        self.read: Callable[[str], Tensor] = lambda name: torch.empty(0)
        self.names: list[list[str]] = []
        self.done = 0

    @torch.no_grad()
    def logprobs(self, names: Sequence[str], read: Callable[[str], Tensor], responses: Sequence[Any]) -> list[float]:
        """Log-probabilities of the sampled tokens of all responses (tokens, num_prompt_tokens), with those weights."""
        self.read, self.done = read, 0
        self.names = [[] for _ in self.model.model.layers]
        rest = dict(self.model.named_parameters())
        for name in names:
            found = re.match(r"model\.layers\.(\d+)\.", name)
            if found:
                self.names[int(found[1])].append(name)
            else:
                rest[name].copy_(read(name))
        if "lm_head.weight" not in names:
            self.model.lm_head.weight.copy_(self.model.model.embed_tokens.weight)
        ids = torch.zeros(len(responses), max(len(one.tokens) for one in responses), dtype=torch.int64)
        at = torch.zeros_like(ids, dtype=torch.bool)
        for row, one in enumerate(responses):
            ids[row, : len(one.tokens)] = torch.tensor(one.tokens)
            at[row, one.num_prompt_tokens - 1 : len(one.tokens) - 1] = True
        ids, at = ids.to(self.device), at.to(self.device)
        hidden = self.model.model(ids, use_cache=False).last_hidden_state[at]  # causal: padding on the right
        targets = ids.roll(-1, 1)[at]
        found = []
        for rows, wanted in zip(hidden.split(HEAD_ROWS), targets.split(HEAD_ROWS), strict=True):
            found += self.model.lm_head(rows).log_softmax(-1).gather(1, wanted[:, None])[:, 0].tolist()
        return found

    def _fill_next(self) -> None:
        """The one layer becomes the next of the model."""
        own = dict(self.layer.named_parameters())
        for name in self.names[self.done]:
            leaf, values = name.removeprefix(f"model.layers.{self.done}."), self.read(name)
            prefix, is_expert, rest = leaf.partition(".experts.")
            if not is_expert:
                own[leaf].copy_(values)
                continue
            expert, kind, _ = rest.split(".")
            if kind == "down_proj":
                own[f"{prefix}.experts.down_proj"][int(expert)].copy_(values)
                continue
            first = 0 if kind == "gate_proj" else len(values)
            own[f"{prefix}.experts.gate_up_proj"][int(expert), first : first + len(values)].copy_(values)
        self.done += 1
