"""Fields: a Hugging Face config, whose fields are read by name and checked, for the families that share them. No torch.

Every reader names the field in its error, what it got and what it takes.
"""

from collections.abc import Callable, Collection
from typing import Any

from slipstream.conf.architecture.attention_spec import AttentionSpec, GqaSpec
from slipstream.conf.architecture.model_spec import ModelSpec
from slipstream.conf.architecture.moe_spec import MoeSpec
from slipstream.conf.architecture.rope_spec import LinearScaling, Llama3Scaling, RopeScaling, RopeSpec, YarnScaling
from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import JsonMapping, JsonObject, is_object

LARGEST, LARGEST_NUMBER = (1 << 31) - 1, 1e18
MOST_LAYERS, MOST_EXPERTS = 1024, 4096
"""No model comes near these. With more, the list of a model's tensors would not fit into memory."""


class Fields(JsonObject):
    """A config.json, or a part of one, that notes which fields are looked for."""

    def __init__(self, config: JsonMapping) -> None:
        super().__init__(config)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def size(self, key: str, default: int | None = None, most: int = LARGEST) -> int:
        return self._whole(key, default, 1, "a positive whole number", most)

    def count(self, key: str, default: int | None = None) -> int:
        return self._whole(key, default, 0, "a whole number from 0 on")

    def _whole(self, key: str, default: int | None, least: int, what: str, most: int = LARGEST) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"model.hf_config.{key} must be {what}, got {value!r}")
        if value > most:
            raise ConfigError(f"model.hf_config.{key} must be at most {most}, got {value!r:.40}")
        return value

    def number(self, key: str, default: float) -> float:
        return float(_positive(self.get(key, default), f"model.hf_config.{key}"))

    def by_layer(self, key: str) -> list[Any]:
        value: Any = self.get(key)
        if value is not None and not isinstance(value, list | tuple):
            raise ConfigError(f"model.hf_config.{key} must be a list about layers, got {value!r}")
        return [*(value or ())]

    def refuse(self, **allowed: tuple[Any, ...]) -> None:
        """Refuse fields with other values than these. The first one counts where the config does not say."""
        for key, values in allowed.items():
            value = self.get(key, values[0])
            if value not in values:
                raise ConfigError(
                    f"model.hf_config.{key}={value!r} is not supported for {self['model_type']}; "
                    f"supported: {', '.join(repr(one) for one in values)}"
                )

    def require(self, *keys: str) -> None:
        """Refuse a config without one of these: transformers' default is that of one model, or vLLM has another."""
        for key in keys:
            self.asked.add(key)
            if key not in self:
                raise ConfigError(
                    f"model.hf_config.{key} must be given for {self['model_type']}: without it, transformers or vLLM "
                    "computes another model; copy it from the checkpoint's config.json"
                )

    def refuse_windows(self, kind: str = "full_attention") -> None:
        """For families whose layers are all alike, without a window: vLLM gives each a window that the config names."""
        self.refuse(sliding_window=(None,))
        self.refuse_layer_types(kind)

    def refuse_layer_types(self, kind: str = "full_attention") -> None:
        kinds = self.by_layer("layer_types")
        if set(kinds) - {kind}:
            raise ConfigError(
                f"model.hf_config.layer_types={kinds!r} is not supported for {self['model_type']}, where every layer "
                f"has {kind}; remove it"
            )

    @property
    def num_layers(self) -> int:
        return self.size("num_hidden_layers", most=MOST_LAYERS)

    @property
    def hidden_per_head(self) -> int:
        return self.size("hidden_size") // self.size("num_attention_heads")

    @property
    def first_dense_layers(self) -> int:
        """Layers before the first one with experts. vLLM asks for the field; transformers' default fits one model."""
        self.require("first_k_dense_replace")
        return self.count("first_k_dense_replace")

    def model(
        self,
        architecture: str,
        attention: AttentionSpec | tuple[AttentionSpec, ...],
        *,
        rms_norm_eps: float = 1e-6,
        width: str = "intermediate_size",
        is_tied: bool = False,
        **own: Any,
    ) -> ModelSpec:
        """The spec, with the fields that every family reads alike.

        Args:
            architecture: Class of transformers and vLLM.
            attention: Of all layers, or one per layer.
            rms_norm_eps, is_tied: What counts where the config does not say.
            width: Field of the width of dense feed-forwards.
            own: What of ModelSpec differs from its defaults.
        """
        self.refuse(hidden_act=("silu",), attention_dropout=(0.0, None))
        # vLLM reads these of any config, and transformers' models have no such parts
        self.refuse(is_causal=(True, None), dual_chunk_attention_config=(None,), llama_4_scaling=(None,))
        return ModelSpec(
            family=self["model_type"],
            hf_architecture=architecture,
            vocab_size=self.size("vocab_size"),
            hidden_size=self.size("hidden_size"),
            intermediate_size=self.size(width),
            rms_norm_eps=self.number("rms_norm_eps", rms_norm_eps),
            tie_embeddings=bool(self.get("tie_word_embeddings", is_tied)),
            attentions=attention if isinstance(attention, tuple) else (attention,) * self.num_layers,
            **own,
        )

    def experts(
        self,
        *,
        norm_topk_prob: bool,
        width: str = "moe_intermediate_size",
        top_k: str = "num_experts_per_tok",
        layers: tuple[bool, ...] | None = None,
        **own: Any,
    ) -> MoeSpec:
        """Experts whose number has any of the names in use; `layers`: None: every layer has them. `own`: what of
        MoeSpec differs from its defaults."""
        # transformers writes a family's own name, or num_local_experts (its attribute map), into config.json
        names = ("num_experts", "n_routed_experts", "num_local_experts")
        given = [name for name in names if self.get(name) is not None]
        if not given:
            raise ConfigError(f"model.hf_config: the number of experts must be given, as one of {', '.join(names)}")
        num_experts = self.size(given[0], most=MOST_EXPERTS)
        if any(self[name] != num_experts for name in given[1:]):
            raise ConfigError(f"model.hf_config: {' and '.join(given)} are one size under two names, and must be equal")
        chosen = self.size(top_k)
        if chosen > num_experts:
            raise ConfigError(f"model.hf_config.{top_k} must be <= num_experts, got {chosen} and {num_experts}")
        return MoeSpec(
            num_experts=num_experts,
            top_k=chosen,
            intermediate_size=self.size(width),
            norm_topk_prob=norm_topk_prob,
            layers=(True,) * self.num_layers if layers is None else layers,
            **own,
        )

    def grouped_queries(
        self,
        head_dim: int,
        rope: RopeSpec | None = None,
        *,
        needs_kv_heads: bool = True,
        **own: Any,
    ) -> GqaSpec:
        """The spec of attention with fewer keys than queries.

        Args:
            rope: None: all of a head turns, as the config says.
            needs_kv_heads: Whether the config has to say num_key_value_heads. False only where transformers' default is
                num_attention_heads; for other families it is a number that fits one model.
            own: Fields of GqaSpec that differ from its defaults.
        """
        heads = self.size("num_attention_heads")
        if needs_kv_heads:
            self.require("num_key_value_heads")
        kv_heads = self.size("num_key_value_heads", heads)
        if heads % kv_heads:
            raise ConfigError(
                f"model.hf_config.num_key_value_heads must divide num_attention_heads, got {kv_heads} and {heads}"
            )
        return GqaSpec(
            rope=rope or self.rope(head_dim),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            **own,
        )

    def rope(
        self,
        head_dim: int,
        *,
        interleaved: bool = False,
        partial: float | None = None,
        theta: float = 10000.0,
        ignored: Collection[str] = (),
    ) -> RopeSpec:
        """Read `rope_parameters` (transformers 5), or `rope_scaling`, `rope_theta` and `partial_rotary_factor` (older).
        Of two, `rope_scaling` counts, as for transformers and vLLM.

        Args:
            interleaved: as RopeSpec.interleaved.
            partial: the part of each head that turns, where the config does not say; None: in this family, all of it.
            theta: RoPE's base, where the config does not say.
            ignored: Fields that say nothing about text.
        """
        newer, older = self.get("rope_parameters"), self.get("rope_scaling")
        given: object = older or newer or {}
        rope = Fields(given if is_object(given) else {repr(given): None})  # which is no field
        self.refuse(original_max_position_embeddings=(None,))  # transformers prefers it to that of YaRN
        if unknown := sorted(set(rope) - _ROPE_FIELDS - {*ignored}):
            raise ConfigError(
                "model.hf_config: rope_scaling and rope_parameters have fields that are not read: "
                f"{', '.join(unknown)}; read are {', '.join(sorted(_ROPE_FIELDS))}"
            )
        kind = str(rope.get("rope_type", rope.get("type", "default")))
        if kind not in _ROPE_SCALINGS:
            raise ConfigError(
                f"model.hf_config: RoPE type {kind!r} is not supported; supported: "
                f"{', '.join(repr(one) for one in _ROPE_SCALINGS)}"
            )
        part = rope.number("partial_rotary_factor", self.number("partial_rotary_factor", partial or 1.0))
        if partial is None and part != 1.0:
            raise ConfigError(
                f"model.hf_config.partial_rotary_factor must be 1 for {self['model_type']}, all of whose head turns in "
                f"transformers, got {part}"
            )
        dim = int(head_dim * part)
        if dim < 2 or dim % 2 or dim > head_dim:
            raise ConfigError(f"model.hf_config: RoPE must turn an even number of at most {head_dim} dims, got {dim}")
        return RopeSpec(
            dim=dim,
            theta=rope.number("rope_theta", self.number("rope_theta", theta)),
            interleaved=interleaved,
            scaling=_ROPE_SCALINGS[kind](self, rope),
        )


def _yarn(config: Fields, rope: Fields) -> YarnScaling:
    def number(key: str) -> float | None:
        """None where it is missing or null. 0 stays: of `mscale`, vLLM takes one that is missing for 1."""
        return _number(rope, key) if rope.get(key) else rope.get(key)

    original = number("original_max_position_embeddings") or config.size("max_position_embeddings")
    return YarnScaling(
        factor=float(number("factor") or config.size("max_position_embeddings") / original),
        original_max_positions=int(original),
        beta_fast=float(number("beta_fast") or 32),
        beta_slow=float(number("beta_slow") or 1),
        mscale=number("mscale"),
        mscale_all_dim=number("mscale_all_dim"),
        attention_factor=None if rope.get("attention_factor") is None else _number(rope, "attention_factor"),
        truncate=bool(rope.get("truncate", True)),
    )


def _llama3(config: Fields, rope: Fields) -> Llama3Scaling:
    return Llama3Scaling(
        factor=float(_number(rope, "factor")),
        low_freq_factor=float(_number(rope, "low_freq_factor")),
        high_freq_factor=float(_number(rope, "high_freq_factor")),
        original_max_positions=int(_number(rope, "original_max_position_embeddings")),
    )


def _linear(config: Fields, rope: Fields) -> LinearScaling:
    factor = _number(rope, "factor")
    if not isinstance(factor, float):
        raise ConfigError(f"model.hf_config: RoPE's factor must be written as {factor}.0: vLLM fails on a whole number")
    return LinearScaling(factor=factor)


def _positive(value: object, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < LARGEST_NUMBER:
        raise ConfigError(f"{name} must be a positive number, got {value!r:.40}")
    return value


def _number(rope: Fields, key: str) -> float:
    return _positive(rope.get(key), f"model.hf_config: RoPE's {key}")


_ROPE_FIELDS = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"),
    *("low_freq_factor", "high_freq_factor"),
}
_ROPE_SCALINGS: dict[str, Callable[[Fields, Fields], RopeScaling | None]] = {
    "default": lambda config, rope: None,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
