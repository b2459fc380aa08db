"""ModelSpec: what the decoder is built from. Pure data, no torch.

Owns the names and shapes of a checkpoint's tensors: those of attentions (attention_spec.py) and experts (moe_spec.py),
and of what is around them. Does not own how a Hugging Face config is read and what is refused (families.py). Invariant:
the decoder, the loader, the publisher and the planner read the same lists, so a projection is named in one place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from slipstream.conf.architecture.attention_spec import AttentionSpec
from slipstream.conf.architecture.moe_spec import ExpertFormat, MoeSpec, swiglu
from slipstream.conf.architecture.rope_spec import RopeSpec
from slipstream.conf.architecture.tensors import Parameter, Parameters, Start, TensorMeta, below, norm_weight
from slipstream.conf.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One decoder-only architecture. Sizes are element counts."""

    family: str
    hf_architecture: str
    """Class that transformers and vLLM build from an exported checkpoint."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    rms_norm_eps: float
    tie_embeddings: bool
    attentions: tuple[AttentionSpec, ...]
    """One per layer."""
    moe: MoeSpec | None = None
    norms_add_one: bool = False
    """Norms of the residual stream multiply by 1 + weight, and round once."""
    norms_halves: bool = False
    """What attention gives, and the feed-forward, is normed before the stream adds it (Gemma)."""
    embedding_scale: float = 1.0
    """Multiplies embeddings, rounded to the compute dtype."""
    scales_layers: bool = False
    """What a layer gives is multiplied by one number of the checkpoint, `layer_scalar`; and norms read sums after they
    were rounded, which vLLM adds in operations of their own (Gemma 4)."""
    logit_softcap: float | None = None
    """Logits x become softcap * tanh(x / softcap)."""
    has_gelu: bool = False
    """Gates of dense feed-forwards pass GELU's approximation by tanh instead of SiLU."""
    num_mtp_layers: int = 0
    """Multi-token prediction layers that a checkpoint holds behind the decoder's own; never loaded."""

    def is_moe_layer(self, layer: int) -> bool:
        return self.moe is not None and self.moe.layers[layer]

    @property
    def num_layers(self) -> int:
        return len(self.attentions)

    def dense_mlps(self, layer: int) -> dict[str, int]:
        """Feed-forwards that every token of this layer passes: module -> width."""
        width = self.intermediate_size
        return self.moe.dense_mlps(width) if self.moe is not None and self.moe.layers[layer] else {"mlp": width}

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        return tuple(dict.fromkeys(attention.rope for attention in self.attentions))

    @property
    def kinds_of_attention(self) -> tuple[AttentionSpec, ...]:
        """Each attention once."""
        return tuple(dict.fromkeys(self.attentions))

    def check_cp_size(self, cp_size: int) -> None:
        """Ranks can share the tokens of a sequence only if they can compute its attention apart."""
        what = next((one.unshared for one in self.kinds_of_attention if one.unshared is not None), None)
        if cp_size > 1 and what is not None:
            raise ConfigError(
                f"trainer.cp_size={cp_size} is not for a model with {what}, and {self.family} has it; set "
                "trainer.cp_size=1"
            )

    def sequence_cache_bytes(self, num_tokens: int, dtype: str, tp_size: int) -> int:
        """What one rank of an engine keeps of one sequence, before it is rounded up to blocks; arguments as those of
        AttentionSpec.cached_bytes."""
        return sum(attention.cached_bytes(num_tokens, dtype, tp_size) for attention in self.attentions)

    def checkpoint_tensors(self, dtype: str) -> tuple[TensorMeta, ...]:
        """Every tensor of the Hugging Face checkpoint, in a fixed order; tied embeddings have no lm_head.weight.
        `dtype` is a name as in DTYPE_BYTES. A router's correction bias is always float32, for bfloat16 would move
        tokens to other experts, and so are the decays of linear attention."""
        return _checkpoint_tensors(self, dtype)

    def parameters(self) -> Parameters:
        hidden, table = self.hidden_size, Parameter((self.vocab_size, self.hidden_size))
        parameters = {"model.embed_tokens.weight": table}
        for layer, attention in enumerate(self.attentions):
            prefix = f"model.layers.{layer}"
            own = {"input_layernorm.weight": self._norm}
            own |= below(attention.name, attention.parameters(hidden))
            outer = ("pre_feedforward", "post_feedforward") if self.norms_halves else ()
            own |= {f"{name}_layernorm.weight": self._norm for name in ("post_attention", *outer)}
            dense = swiglu("mlp", hidden, self.intermediate_size)
            own |= self.moe.of_layer(hidden, dense, self._norm) if self.moe and self.moe.layers[layer] else dense
            if self.scales_layers:
                own["layer_scalar"] = Parameter((1,), start=Start.ones)
            parameters |= below(prefix, own)
        parameters["model.norm.weight"] = self._norm
        return parameters if self.tie_embeddings else {**parameters, "lm_head.weight": table}

    def unpacked(self) -> ModelSpec:
        """The same model with experts in the model's dtype: the matrices that adapters are added to."""
        if self.moe is None:
            return self
        return replace(self, moe=replace(self.moe, expert_format=ExpertFormat.plain))

    @property
    def _norm(self) -> Parameter:
        return norm_weight(self.hidden_size, adds_one=self.norms_add_one)


@lru_cache(maxsize=4)
def _checkpoint_tensors(spec: ModelSpec, dtype: str) -> tuple[TensorMeta, ...]:
    """Kept, because a plan asks several times for a list that takes 0.1 s for the largest models."""
    return tuple(TensorMeta(name, one.shape, one.dtype or dtype) for name, one in spec.parameters().items())
