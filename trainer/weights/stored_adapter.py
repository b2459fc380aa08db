"""An adapter in PEFT's format, as its two files describe it. Headers alone are read, no weights; no torch.

    adapter_config.json --fields--> refused by name, or neutral, or rank and scale of each module
    adapter_model.safetensors --names, shapes--> which matrices of the model it changes

trainer/adapter_io.py reads the factors, and draws their names. Invariant: an adapter that is let through computes here
what it computes in PEFT. A field that is not known to be neutral is refused unless it is off, so that fields of a later
PEFT are, too.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple

from slipstream.conf.architecture.model_spec import ModelSpec
from slipstream.conf.architecture.moe_spec import BESIDE_DENSE
from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import JsonMapping, JsonObject, is_list, object_or_empty
from slipstream.conf.schema import LoraConfig
from slipstream.trainer.weights.adapter_names import PREFIX
from slipstream.weight_sync.disk.safetensors_files import StoredTensor, read_header

ADAPTER_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"

READ = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"}
"""Fields that are read."""
NEUTRAL = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "runtime_config",
    "task_type",
    "exclude_modules", "layers_pattern", "layers_to_transform", "target_modules", "target_parameters",
    "fan_in_fan_out", "lora_dropout", "qalora_group_size",
    "corda_config", "eva_config", "lora_ga_config", "loftq_config",
    "ensure_weight_tying", "megatron_core", "merge_weights", "unsloth_fixed",
}  # fmt: skip
"""Fields that change nothing for the factors in the file. By line: where it comes from; which modules have factors,
which the file itself says; what PEFT ignores in linear layers, in inference, or without use_qalora; settings of an
initialization (init_lora_weights says whether it counts); tied embeddings, whose factors are refused, the name of a
package, and flags of old versions of PEFT and of Unsloth."""
NEUTRAL_STARTS = ("gaussian", "eva", "orthogonal", "mica")
"""Values of init_lora_weights that leave the base as it is. Others (pissa, olora, corda, loftq, lora_ga) train beside
another base than the one that is named."""
_MERGE = "merge it into its base with PEFT (merge_and_unload, save_pretrained) and give the merged model as model.path"
_CONVERT = (
    "convert it with PEFT (save_pretrained with path_initial_model_for_weight_conversion), or merge it into its base "
    "(merge_and_unload) and give the merged model as model.path"
)
_FLOATS = ("F32", "BF16", "F16")
SAME_SCALE = 1e-6
"""Relative difference below which scales are one: alpha of an rsLoRA adapter is a decimal that somebody typed."""
LARGEST_ALPHA = 1e18
"""No adapter comes near it; JSON has larger numbers, that no float holds."""


class Kind(StrEnum):
    """What a module belongs to; trainer.lora has a switch for each."""

    attention = "attention"
    mlp = "mlp"
    experts = "experts"


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """What the files say."""

    folder: Path
    fields: JsonObject
    """adapter_config.json."""
    factors: dict[str, StoredTensor]

    def kind_of(self, factor: str) -> Kind:
        if re.search(r"\.\w+_attn\.", factor):
            return Kind.attention
        return Kind.experts if ".experts" in factor else Kind.mlp

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """A module's ("model.layers.0.mlp.down_proj"), as PEFT finds them: the first pattern that matches an end of
        the name counts. Experts are matched by the name of their parameter."""
        inner = module.removesuffix(".base_layer")
        if inner.endswith(".experts"):
            module = f"{inner}.{'down_proj' if inner == module else 'gate_up_proj'}"
        elif any(f".{module}.weight".endswith(f".{name}") for name in self._target_parameters):
            module += ".weight"
        rank, alpha = (
            next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)
            for patterns, default in (
                (self.fields.get("rank_pattern") or {}, self.fields["r"]),
                (self.fields.get("alpha_pattern") or {}, self.fields["lora_alpha"]),
            )
        )
        return rank, alpha / (math.sqrt(rank) if self.fields.get("use_rslora") else rank)

    @property
    def _target_parameters(self) -> Sequence[Any]:
        names = self.fields.get("target_parameters")
        return names if is_list(names) else ()


def name_of_bank(name: str) -> str:
    """A layer's experts in an adapter file: transformers' module, where the trainer has one of its own around them."""
    return name.replace(f".{BESIDE_DENSE}.", ".")


def read_stored_adapter(folder: Path, subject: str) -> StoredAdapter:
    """An adapter's files, if they are those of plain LoRA; ConfigError otherwise. `subject` is what the user calls the
    folder: "trainer.lora.init_from", "--adapter"."""
    path = folder / ADAPTER_CONFIG
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        what = f"no {path.name} is there" if isinstance(error, FileNotFoundError) else f"{path.name}: {error}"
        raise ConfigError(
            f"{subject}={folder} holds no adapter in PEFT's format ({what}); give a folder such as runs/NAME/adapter"
        ) from error
    fields = object_or_empty(content)
    _refuse_other_functions(fields, f"{subject}={folder}")
    if not (folder / ADAPTER_FILE).exists() and (folder / "adapter_model.bin").exists():
        raise ConfigError(
            f"{subject}={folder} has its weights in adapter_model.bin, a format that can run code; load it in PEFT and "
            "save it again (save_pretrained writes safetensors)"
        )
    return StoredAdapter(folder, fields, read_header(folder / ADAPTER_FILE))


def _refuse_other_functions(fields: JsonMapping, of: str) -> None:
    """Raise ConfigError for the first field that makes an adapter something else than W + scale * B @ A."""
    for field, kinds in (("r", int), ("lora_alpha", int | float)):
        value = fields.get(field)
        if not _is_above_0(value, kinds):
            raise ConfigError(
                f"{of} has {field}={value!r:.40} in {ADAPTER_CONFIG}, and an adapter needs a number above 0"
            )
    if (kind := fields.get("peft_type")) not in (None, "LORA"):
        raise ConfigError(f"{of} has peft_type={kind!r}, and only LORA is read; {_MERGE}")
    for field, kinds in (("rank_pattern", int), ("alpha_pattern", int | float)):
        patterns = fields.get(field) or {}
        if not isinstance(patterns, dict) or not all(_is_pattern(*one, kinds) for one in patterns.items()):
            raise ConfigError(f"{of} has {field}={patterns!r}, which is no object of patterns and numbers; {_MERGE}")
    start = fields.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower() not in NEUTRAL_STARTS:
        raise ConfigError(
            f"{of} has init_lora_weights={start!r}: it was trained beside a base that this initialization had changed; "
            f"{_CONVERT}"
        )
    for field in sorted(set(fields) - READ - NEUTRAL):
        value = fields[field]
        if value and not (field == "bias" and value == "none"):
            raise ConfigError(
                f"{of} has {field}={_shortened(value)}, with which it computes something else than W + scale * B @ A; "
                f"{_MERGE}"
            )


def _is_pattern(key: str, value: Any, kinds: type[int] | UnionType) -> bool:
    try:
        re.compile(key)
    except re.error:
        return False
    return _is_above_0(value, kinds)


def _is_above_0(value: Any, kinds: Any) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool) and 0 < value < LARGEST_ALPHA


def _shortened(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class LoraOptions(NamedTuple):
    """Options of trainer.lora with which a run computes as an adapter does."""

    rank: int
    attention_rank: int | None
    expert_rank: int | None
    alpha: float


def options_of(stored: StoredAdapter, subject: str) -> LoraOptions:
    """What a run needs to compute as the adapter does. Raises ConfigError where no options say that: modules of a kind
    have different ranks, or modules have different scales."""
    found: dict[Kind, tuple[int, str]] = {}
    scales: dict[float, str] = {}
    of = f"{subject}={stored.folder}"
    for module in dict.fromkeys(factor.removeprefix(PREFIX).rpartition(".lora_")[0] for factor in stored.factors):
        kind, (rank, scale) = stored.kind_of(module), stored.rank_and_scale(module)
        other_rank, other = found.setdefault(kind, (rank, module))
        if other_rank != rank:
            raise ConfigError(
                f"{of} has rank_pattern={_shortened(stored.fields['rank_pattern'])}: rank {other_rank} in {other} and "
                f"{rank} in {module}, and a run has one rank for all of its {kind}; {_MERGE}"
            )
        first = next(iter(scales), scale)
        if not math.isclose(first, scale, rel_tol=SAME_SCALE):
            field = "alpha_pattern" if stored.fields.get("alpha_pattern") else "rank_pattern"
            raise ConfigError(
                f"{of} has {field}={_shortened(stored.fields[field])}: scale {first:g} in {scales[first]} and "
                f"{scale:g} in {module}, and a run has one scale for all; {_MERGE}"
            )
        scales.setdefault(scale, module)
    if not found:
        raise ConfigError(f"{of}: {ADAPTER_FILE} holds no factor; is it the file of an adapter?")
    ranks = {kind: rank for kind, (rank, _) in found.items()}
    rank = ranks.get(Kind.mlp, next(iter(ranks.values())))
    own = {kind: other for kind, other in ranks.items() if other != rank}
    alpha = float(f"{next(iter(scales)) * rank:.15g}")  # 16, not 16.000000000000004 of a quotient multiplied again
    return LoraOptions(rank, own.get(Kind.attention), own.get(Kind.experts), alpha)


def check_adapter_fits(stored: StoredAdapter, spec: ModelSpec, lora: LoraConfig, subject: str) -> int:
    """Check that a run of these options computes what the adapter does.

    Returns the number of matrices that the run adapts and the adapter has no factors for; they start at zero. Raises
    ConfigError if rank or scale differ, naming the options that fit; or naming the first factor without a place, of
    another shape, or without its other half.
    """
    of = f"{subject}={stored.folder}"
    everything = LoraConfig(rank=lora.rank, alpha=lora.alpha)
    trained, possible = factor_shapes(spec, lora), factor_shapes(spec, everything)
    for name in stored.factors:
        if name not in possible:
            raise ConfigError(f"{of}: {name} {_no_place(name)}")
        if name not in trained:
            kind = stored.kind_of(name)
            raise ConfigError(f"{of}: {name} has no place in a run without {kind} in trainer.lora.targets; add it")
    _check_options(options_of(stored, subject), lora, stored, of)
    for name, factor in stored.factors.items():
        if factor.shape != trained[name]:
            raise ConfigError(
                f"{of}: {name} has shape {factor.shape}, and this model and rank make it {trained[name]}; is the "
                "adapter of another model?"
            )
        if factor.dtype not in _FLOATS:
            raise ConfigError(f"{of}: {name} has format {factor.dtype}; formats that are read: {', '.join(_FLOATS)}")
        if (other := _other_half(name)) not in stored.factors:
            raise ConfigError(f"{of}: {name} is there and {other} is not; is the file whole?")
    return (len(trained) - len(stored.factors)) // 2


def _check_options(needed: LoraOptions, lora: LoraConfig, stored: StoredAdapter, of: str) -> None:
    """Raise ConfigError with the words to copy, where the run's ranks or scale are not the adapter's."""
    kinds = {stored.kind_of(factor) for factor in stored.factors}
    adapters = {Kind.attention: lora.for_attention, Kind.mlp: lora.for_mlp, Kind.experts: lora.for_experts}
    fits = all(
        (adapter := adapters[kind]) is not None and adapter.rank == (own or needed.rank)
        for kind, own in ((Kind.attention, needed.attention_rank), (Kind.mlp, None), (Kind.experts, needed.expert_rank))
        if kind in kinds
    )
    if fits and math.isclose(lora.scale, needed.alpha / needed.rank, rel_tol=SAME_SCALE):
        return
    wanted = needed._asdict()
    given = {option: getattr(lora, option) for option in wanted}
    words = [f"trainer.lora.{option}={value:.15g}" for option, value in wanted.items() if value is not None]
    words += [f"trainer.lora.{option}=null" for option, value in wanted.items() if value is None and given[option]]
    said = f"r={stored.fields['r']}, lora_alpha={stored.fields['lora_alpha']}"
    if stored.fields.get("use_rslora"):
        said += ", use_rslora=true (a scale of lora_alpha / sqrt(r), where a run's is alpha / rank)"
    got = " ".join(f"{option}={'null' if value is None else f'{value:.15g}'}" for option, value in given.items())
    raise ConfigError(f"{of} has {said}; set {' '.join(words)}, got {got}")


def factor_shapes(spec: ModelSpec, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Every factor in an adapter's file: its name and its shape, as PEFT's (drawn in `trainer/adapter_io.py`)."""
    shapes: dict[str, tuple[int, ...]] = {}

    def add(module: str, rank: int, out_features: int, in_features: int, copies: int = 1) -> None:
        shapes[f"{PREFIX}{module}.lora_A.weight"] = (copies * rank, in_features)
        shapes[f"{PREFIX}{module}.lora_B.weight"] = (out_features, rank * copies)

    def add_mlp(module: str, rank: int, width: int) -> None:
        for leaf, sides in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
            if lora.adapts_mlp(f"{leaf}_proj"):
                add(f"{module}.{leaf}_proj", rank, *sides)

    hidden, moe = spec.hidden_size, spec.moe
    for layer, attention in enumerate(spec.attentions):
        prefix = f"model.layers.{layer}."
        if lora.for_attention is not None:
            for linear in attention.linears(hidden):
                module = f"{prefix}{attention.name}.{linear.name}"
                if lora.adapts_attention(linear.name):
                    add(module, lora.for_attention.rank, linear.out_features, linear.in_features)
        if lora.for_mlp is not None:
            for module, width in spec.dense_mlps(layer).items():
                add_mlp(prefix + module, lora.for_mlp.rank, width)
        if lora.for_experts is not None and moe is not None and moe.layers[layer]:
            rank, width, bank = lora.for_experts.rank, moe.intermediate_size, prefix + moe.bank
            add(f"{bank}.base_layer", rank, 2 * width, hidden, moe.num_experts)
            add(bank, rank, hidden, width, moe.num_experts)
    return shapes


def num_adapted(spec: ModelSpec, lora: LoraConfig) -> int:
    """Elements of all matrices that adapters are added to: A and B of rank 1 have an entry for each row and column."""
    shapes = list(factor_shapes(spec, replace(lora, rank=1, attention_rank=None, expert_rank=None)).values())
    return sum(math.prod(a) * b[0] for a, b in zip(shapes[::2], shapes[1::2], strict=True))


def _no_place(name: str) -> str:
    """Why a factor belongs nowhere, as far as its name says, and what to do."""
    if re.search(r"\.experts\.\d+\.", name):
        return (
            "is of one expert, and adapters of experts are read as PEFT writes them for transformers 5 "
            f"(mlp.experts.lora_A, all experts of a layer); {_MERGE}"
        )
    if re.search(r"(embed_tokens|lm_head)\.", name):
        return f"is of the embedding or the head, which adapters do not change here; {_MERGE}"
    if re.search(r"\.lora_[AB]\.[^.]+\.weight$", name):
        return "has the adapter's name in it, as in a state_dict; save the adapter with PEFT's save_pretrained"
    if not name.startswith(f"{PREFIX}model.layers."):
        return (
            f"does not begin with {PREFIX}model.layers., as PEFT names the weights of this model; was it trained in "
            "another class or library? Load it there beside this model and save it with PEFT"
        )
    return "belongs to no weight of the model that adapters change; is the adapter of another model?"


def _other_half(factor: str) -> str:
    module, _, which = factor.rpartition(".lora_")
    return f"{module}.lora_{'B' if which.startswith('A') else 'A'}.weight"
