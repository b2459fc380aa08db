"""Tiny models for the trainer's tests: our decoder and the transformers model with the same weights."""

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.conf.architecture.families import read_config
from slipstream.conf.architecture.model_spec import ModelSpec
from slipstream.conf.schema import (
    LoraConfig,
    Match,
    MlaNormEps,
    NumericsByPlace,
    NumericsConfig,
    Roundings,
    TrainerConfig,
    TrainMode,
)
from slipstream.trainer.model.build_decoder import build_decoder
from slipstream.trainer.model.decoder import Decoder
from slipstream.trainer.model.forward import Forward
from slipstream.trainer.model.logprobs import soft_capped
from slipstream.trainer.moe.replay import RecordedRoutes
from slipstream.trainer.parallel import ParallelLayout, local_part
from slipstream.trainer.weights.fused_experts import interleave
from slipstream.trainer.weights.loading import RandomReader, TensorReader, load_weights, named_generator
from slipstream.weight_sync.layout import Region

LENGTHS = (7, 1, 12, 4)
"""Sequences of one packed microbatch."""


def by_place(**places: Any) -> NumericsConfig:
    """Roundings as an engine's, but for these."""
    return NumericsByPlace(own=Roundings(**places))


AS_TRANSFORMERS = NumericsConfig(match=Match.transformers)
"""Rounds where transformers does, for comparisons in bfloat16."""


def trainer_config(mode: TrainMode = TrainMode.lora, **changes: Any) -> TrainerConfig:
    """Rank-4 adapters everywhere, checkpointing on."""
    return TrainerConfig(mode=mode, lora=changes.pop("lora", LoraConfig(rank=4, alpha=8.0)), **changes)


PACKED_LEAVES = ("weight_packed", "weight_scale", "weight_shape", "_blocks", "_scales")


class SpreadReader:
    """Seeded values with enough spread to route unevenly and to show every norm weight.

    Seeded by name, so layouts agree.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._shapes = {meta.name: meta.shape for meta in spec.checkpoint_tensors("float32")}
        self._adds_one = spec.norms_add_one
        self._bits = RandomReader(spec, seed=7, std=0.15, device="cpu")

    def names(self) -> set[str]:
        """All of the model's tensors."""
        return set(self._shapes)

    def read(self, tensor: str, region: Region) -> Tensor:
        """A slice of the whole; packed experts bit by bit."""
        if tensor.endswith(PACKED_LEAVES):
            return self._bits.read(tensor, region)
        whole = torch.randn(self._shapes[tensor], generator=named_generator(7, tensor, torch.device("cpu"))) * 0.15
        ones = ("norm.weight", "norm_1.weight", "norm_2.weight", "layer_scalar", "router.scale", "per_expert_scale")
        if tensor.endswith(ones) and not (self._adds_one and ".linear_attn." not in tensor):
            whole += 1.0
        return whole[tuple(slice(a, b) for a, b in zip(region.start, region.stop, strict=True))]


def make_decoder(
    hf_config: dict[str, Any],
    trainer: TrainerConfig | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    layout: ParallelLayout | None = None,
    device: torch.device | str = "cpu",
    nonzero_b: bool = True,
    mla_norm_eps: MlaNormEps = MlaNormEps.rollout,
    reader: TensorReader | None = None,
    by: Forward | None = None,
    may_be_whole: bool = False,
    rounding_seed: int | None = None,
) -> Decoder:
    """A decoder with a reader's weights, by default SpreadReader's; B is drawn from (name, expert) alone."""
    spec = read_config(hf_config, mla_norm_eps)
    trainer = trainer or trainer_config()
    decoder = build_decoder(
        spec, dtype=dtype, device=device, trainer=trainer, layout=layout, by=by, may_be_whole=may_be_whole,
        rounding_seed=rounding_seed,
    )  # fmt: skip
    load_weights(decoder, reader or SpreadReader(spec), seed=3)
    if nonzero_b:
        draw_b(decoder)
    return decoder


@torch.no_grad()
def draw_b(decoder: Decoder) -> None:
    """Adapters that do something."""
    for name, module in decoder.named_modules():
        first = getattr(module, "first_expert", None)
        for leaf, parameter in module.named_parameters(recurse=False):
            if not leaf.endswith("lora_B"):
                continue
            rows, start = local_part(parameter)
            if first is None:
                whole = torch.randn(parameter.shape, generator=named_generator(5, name + leaf, torch.device("cpu")))
                rows.copy_(whole[start : start + rows.shape[0]] * 0.2)
                continue
            for index, b in enumerate(rows):
                key = f"{name}.{first + start + index}.{leaf}"
                b.copy_(torch.randn(b.shape, generator=named_generator(5, key, torch.device("cpu"))) * 0.2)


def packed(lengths: tuple[int, ...] = LENGTHS, *, seed: int = 0, vocab_size: int = 96) -> tuple[Tensor, Tensor, Tensor]:
    """token_ids_T, positions_T, cu_seqlens."""
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(0, vocab_size, (sum(lengths),), generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths] or [torch.arange(0)])
    return token_ids, positions, torch.tensor([0, *lengths]).cumsum(0)


def logits_of(
    decoder: Decoder,
    batch: tuple[Tensor, Tensor, Tensor],
    routes: RecordedRoutes | None = None,
    by: Forward | None = None,
) -> Tensor:
    """[T, V]."""
    softcap = decoder.spec.logit_softcap
    return decoder.apply_head(
        lambda hidden, weight: soft_capped(F.linear(hidden, weight), softcap), decoder(*batch, routes, by=by)
    )


def base_logits_of(decoder: Decoder, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """[T, V] without adapters."""
    with torch.no_grad():
        return logits_of(decoder, batch, by=decoder.by.without_adapters())


def logprob_gradients(
    decoder: Decoder, batch: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Log-probabilities of the batch's own tokens by the decoder's head, and gradients of a weighted sum of them."""
    decoder.zero_grad()
    logprobs, _ = decoder.logprobs(decoder(*batch), batch[0], TrainerConfig())
    (logprobs * (1 + batch[0] % 5)).sum().backward()
    return logprobs.detach(), {name: p.grad for name, p in decoder.named_parameters() if p.requires_grad}


def probe_loss(logits_TV: Tensor, token_ids_T: Tensor) -> Tensor:
    """A scalar whose gradient touches every logit, unevenly."""
    logprobs_TV = logits_TV.float().log_softmax(-1)
    weights_T = 1.0 + 0.1 * (token_ids_T % 7)
    return -(logprobs_TV.gather(1, token_ids_T[:, None])[:, 0] * weights_T).sum()


def hf_model(hf_config: dict[str, Any], *, attention: str = "eager", reader: TensorReader | None = None) -> nn.Module:
    """The transformers model with a reader's weights, by default SpreadReader's, float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {key: value for key, value in hf_config.items() if key != "model_type"}
    config = AutoConfig.for_model(hf_config["model_type"], **fields)
    config._attn_implementation = attention
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    spec = read_config(hf_config)
    reader = reader or SpreadReader(spec)
    whole = {
        m.name: reader.read(m.name, Region((0,) * len(m.shape), m.shape)) for m in spec.checkpoint_tensors("float32")
    }
    missing = model.load_state_dict(stack_experts(whole), strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()


MIXTRAL_NAMES = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def stack_experts(whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """Per-expert checkpoint tensors -> the stacked names that transformers 5 and our decoder use."""
    stacked: dict[str, Any] = {}
    for checkpoint_name, tensor in whole.items():
        name = ".".join(MIXTRAL_NAMES.get(part, part) for part in checkpoint_name.split("."))
        head, found, tail = name.partition(".mlp.experts.")
        if not found or "." not in tail:
            stacked[name] = tensor
            continue
        expert, leaf, _ = tail.split(".")
        kind = "down_proj" if leaf == "down_proj" else "gate_up_proj"
        slots = stacked.setdefault(f"{head}.mlp.experts.{kind}", {})
        slots.setdefault(int(expert), []).append(tensor)
    return {
        name: value if isinstance(value, Tensor) else torch.stack([torch.cat(value[e]) for e in sorted(value)])
        for name, value in stacked.items()
    }


def hf_logits(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """One sequence at a time, without padding: [T, V]."""
    token_ids, _, cu_seqlens = batch
    parts = [model(token_ids[None, a:b]).logits[0] for a, b in itertools.pairwise(cu_seqlens)]
    return torch.cat(parts)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected|, Frobenius."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))


def gradients_under_checkpoint_names(decoder: Decoder) -> dict[str, Any]:
    """As transformers names them: Gemma 4's and gpt-oss's routers; and gpt-oss's experts lie as there."""
    grads = {name: p.grad for name, p in decoder.named_parameters() if p.requires_grad}
    if decoder.spec.moe is not None and decoder.spec.moe.is_beside_dense:
        renamed = {".moe.gate.weight": ".router.proj.weight", ".moe.gate.": ".router.", ".moe.": "."}
        for ours, theirs in renamed.items():
            grads = {name.replace(ours, theirs): grad for name, grad in grads.items()}
        return grads
    if decoder.spec.moe is None or not decoder.spec.moe.is_fused:
        return grads
    fused = {}
    for name, grad in grads.items():
        if ".mlp.experts." in name:
            grad = interleave(grad) if "gate_up" in name else grad
            grad = grad.transpose(1, 2) if grad.dim() == 3 else grad
        name = name.replace(".mlp.gate.", ".mlp.router.")
        fused[name.replace("up_bias", "up_proj_bias").replace("down_bias", "down_proj_bias")] = grad
    return fused
