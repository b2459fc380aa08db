"""ModelSpec: what the decoder is built from, read from a Hugging Face config. Pure data, no torch.

A new architecture is one entry of `_FAMILIES`: a function from the config's dict to a ModelSpec. What a config asks
for and the decoder cannot do (sliding windows, scaled RoPE, other activations) is refused here, by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from conf.errors import ConfigError
from weight_sync.layout import TensorMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """The mixture-of-experts layers."""

    num_experts: int
    top_k: int
    intermediate_size: int
    """Width of one expert."""
    norm_topk_prob: bool
    """Divide the top-k probabilities by their sum."""
    layers: tuple[bool, ...]
    """One entry per decoder layer: True where the feed-forward is a mixture of experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One decoder-only architecture. Sizes are element counts."""

    family: str
    """model_type of the Hugging Face config."""
    hf_architecture: str
    """Class that transformers and vLLM build from an exported checkpoint."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """Width of a dense feed-forward."""
    rms_norm_eps: float
    rope_theta: float
    tie_embeddings: bool
    qk_norm: bool
    """RMSNorm over head_dim on queries and keys, before RoPE."""
    attention_bias: bool
    """q, k, v and o projections have a bias."""
    moe: MoeSpec | None = None

    @staticmethod
    def from_hf_config(config: dict[str, Any]) -> ModelSpec:
        """Read a config.json's dict. Missing optional fields take transformers' defaults.

        Raises:
            ConfigError: unknown model_type, a missing size, or a feature that the decoder lacks.
        """
        model_type = config.get("model_type")
        if model_type not in _FAMILIES:
            raise ConfigError(
                f"model.hf_config.model_type must be one of {', '.join(sorted(_FAMILIES))}, got {model_type!r}; "
                "a new architecture is one entry of trainer/model/spec.py"
            )
        return _FAMILIES[model_type](config)

    def is_moe_layer(self, layer: int) -> bool:
        """Whether the feed-forward of this layer is a mixture of experts."""
        return self.moe is not None and self.moe.layers[layer]

    def checkpoint_tensors(self, dtype: str) -> list[TensorMeta]:
        """Every tensor of the Hugging Face checkpoint, in a fixed order; tied embeddings have no lm_head.weight.

        Args:
            dtype: name as in weight_sync.layout.DTYPE_BYTES, e.g. "bfloat16".
        """
        hidden, vocab = self.hidden_size, self.vocab_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            shapes[prefix + "input_layernorm.weight"] = (hidden,)
            shapes |= {prefix + "self_attn." + name: shape for name, shape in self._attention_shapes().items()}
            shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
            shapes |= {prefix + "mlp." + name: shape for name, shape in self._mlp_shapes(layer).items()}
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_embeddings:
            shapes["lm_head.weight"] = (vocab, hidden)
        return [TensorMeta(name, shape, dtype) for name, shape in shapes.items()]

    def _attention_shapes(self) -> dict[str, tuple[int, ...]]:
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {}
        for name, out_size, in_size in (
            ("q_proj", q_size, self.hidden_size),
            ("k_proj", kv_size, self.hidden_size),
            ("v_proj", kv_size, self.hidden_size),
            ("o_proj", self.hidden_size, q_size),
        ):
            shapes[f"{name}.weight"] = (out_size, in_size)
            if self.attention_bias:
                shapes[f"{name}.bias"] = (out_size,)
        if self.qk_norm:
            shapes["q_norm.weight"] = (self.head_dim,)
            shapes["k_norm.weight"] = (self.head_dim,)
        return shapes

    def _mlp_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        if self.moe is None or not self.moe.layers[layer]:
            return _swiglu_shapes("", self.hidden_size, self.intermediate_size)
        shapes: dict[str, tuple[int, ...]] = {"gate.weight": (self.moe.num_experts, self.hidden_size)}
        for expert in range(self.moe.num_experts):
            shapes |= _swiglu_shapes(f"experts.{expert}.", self.hidden_size, self.moe.intermediate_size)
        return shapes


def _swiglu_shapes(prefix: str, hidden: int, intermediate: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (intermediate, hidden),
        f"{prefix}up_proj.weight": (intermediate, hidden),
        f"{prefix}down_proj.weight": (hidden, intermediate),
    }


def _require(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"model.hf_config.{key} must be a positive whole number, got {value!r}")
    return value


def _refuse(config: dict[str, Any], key: str, allowed: tuple[Any, ...]) -> None:
    value = config.get(key, allowed[0])
    if value not in allowed:
        raise ConfigError(
            f"model.hf_config.{key}={value!r} is not supported for {config['model_type']}; "
            f"supported: {', '.join(repr(one) for one in allowed)}"
        )


def _rope_theta(config: dict[str, Any]) -> float:
    """Base of the rotary frequencies, from `rope_parameters` (transformers 5) or `rope_theta` (before).

    Scaled variants are refused.
    """
    rope = dict(config.get("rope_parameters") or {})
    scaling = config.get("rope_scaling") or {}
    kind = rope.get("rope_type", scaling.get("rope_type", scaling.get("type", "default")))
    if kind != "default":
        raise ConfigError(f"model.hf_config: RoPE type {kind!r} is not supported; supported: 'default'")
    return float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))


def _qwen3(config: dict[str, Any], *, moe: MoeSpec | None = None, head_dim: int = 128) -> ModelSpec:
    """Qwen3 (transformers models/qwen3): GQA with q/k norms, SwiGLU, RMSNorm."""
    _refuse(config, "hidden_act", ("silu",))
    _refuse(config, "use_sliding_window", (False, None))
    _refuse(config, "attention_dropout", (0.0, None))
    heads = _require(config, "num_attention_heads")
    kv_heads = _require(config, "num_key_value_heads")
    if heads % kv_heads:
        raise ConfigError(
            f"model.hf_config.num_key_value_heads must divide num_attention_heads, got {kv_heads} and {heads}"
        )
    return ModelSpec(
        family=config["model_type"],
        hf_architecture="Qwen3ForCausalLM" if moe is None else "Qwen3MoeForCausalLM",
        vocab_size=_require(config, "vocab_size"),
        hidden_size=_require(config, "hidden_size"),
        num_layers=_require(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_require(config, "head_dim") if config.get("head_dim") is not None else head_dim,
        intermediate_size=_require(config, "intermediate_size"),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=_rope_theta(config),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qk_norm=True,
        attention_bias=bool(config.get("attention_bias", False)),
        moe=moe,
    )


def _qwen3_moe(config: dict[str, Any]) -> ModelSpec:
    """Qwen3-MoE (transformers models/qwen3_moe): Qwen3 whose feed-forwards are experts without a shared one."""
    # transformers writes num_experts, or num_local_experts (its attribute map), into config.json
    num_experts = _require(config, "num_experts" if "num_experts" in config else "num_local_experts")
    top_k = _require(config, "num_experts_per_tok")
    if top_k > num_experts:
        raise ConfigError(f"model.hf_config.num_experts_per_tok must be <= num_experts, got {top_k} and {num_experts}")
    num_layers = _require(config, "num_hidden_layers")
    sparse_step, dense_layers = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    moe = MoeSpec(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=_require(config, "moe_intermediate_size"),
        norm_topk_prob=bool(config.get("norm_topk_prob", False)),
        layers=tuple(i not in dense_layers and (i + 1) % sparse_step == 0 for i in range(num_layers)),
    )
    return _qwen3(config, moe=moe, head_dim=_require(config, "hidden_size") // _require(config, "num_attention_heads"))


_FAMILIES: dict[str, Callable[[dict[str, Any]], ModelSpec]] = {"qwen3": _qwen3, "qwen3_moe": _qwen3_moe}
"""model_type -> how to read its config."""
