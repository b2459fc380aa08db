"""Which tensor-parallel sizes an engine can have: what vLLM divides over an engine's ranks, and when that must be even.

    heads            tp divides num_attention_heads
    key/value heads  tp divides num_key_value_heads, or is a multiple of them: ranks then hold copies. gpt-oss: divides.
                     Latent attention has none.
    linear attention tp divides its key heads and its value heads
    feed-forwards    tp divides their width: dense layers, shared experts, and routed experts unless ranks hold whole
                     ones (expert parallel; gpt-oss: all the same)
    vocabulary       tp divides vocab_size, padded to multiples of 64
    block-FP8        one rank's part of each of these is whole blocks of 128, except of the vocabulary and of modules
                     that the conversion left out

Owns these rules, as vLLM 0.32 asserts them when it builds a model (`QKVParallelLinear`, `FusedMoEConfig`,
`VocabParallelEmbedding`, `validate_fp8_block_shape`). vLLM checks late, and sometimes without a message. Does not own
what an architecture is: fields of the wrong type are ignored here, and conf/architecture/families.py refuses them.
Pure.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from slipstream.conf.architecture.families import family_of
from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import HfConfig, JsonMapping
from slipstream.conf.schema.rules import divisors

VOCABULARY_PADDING = 64
"""Rows of vLLM's vocabulary come in multiples of this (`DEFAULT_VOCAB_PADDING_SIZE`)."""
FP8_BLOCK = 128


class Width(NamedTuple):
    """Columns divided over ranks. Example: Width("intermediate_size=18432", 18432, 16, ("gate_proj", "up_proj"))."""

    what: str
    """Name and value, as the user reads them."""
    size: int
    num_parts: int
    modules: tuple[str, ...]
    """Parts of the names of the layers that have it."""


def check_tp_size_fits_model(
    option: str, tp_size: int, hf_config: HfConfig, *, is_expert_parallel: bool = False, can_split_experts: bool = True
) -> None:
    """Refuse a size with which the engine cannot build its ranks of this model, and say which sizes work.

    Args:
        option: How the size was given: "rollout.tp_size", "--tp".
        hf_config: config.json of the model, with the engine's quantization_config.
        is_expert_parallel: Whether ranks hold whole experts.
        can_split_experts: Whether that may be proposed; a CPU's engines cannot.
    """
    problem = tp_problem(tp_size, hf_config, is_expert_parallel=is_expert_parallel)
    if problem is None:
        return
    sizes = divisors(_size(hf_config, "num_attention_heads") or 1)
    allowed = [size for size in sizes if tp_problem(size, hf_config, is_expert_parallel=is_expert_parallel) is None]
    whole_experts = [size for size in sizes if tp_problem(size, hf_config, is_expert_parallel=True) is None]
    cures = [f"it can be {one_of(allowed)}"] if allowed else []
    if can_split_experts and len(whole_experts) > len(allowed):
        cures.append(f"with expert parallelism it can be {one_of(whole_experts)}")
    if not cures:
        is_fp8 = fp8_skipped(hf_config) is not None
        cures.append(f"no size fits; {'give a model in another format' if is_fp8 else 'choose another model'}")
    raise ConfigError(f"{option}={tp_size} {problem}; {'; '.join(cures)}")


def tp_problem(tp_size: int, hf_config: HfConfig, *, is_expert_parallel: bool) -> str | None:
    """The first rule that this size breaks, as the rest of a sentence; None if it breaks none."""
    heads, kv_heads = _size(hf_config, "num_attention_heads"), num_kv_heads_of(hf_config)
    if heads is not None and heads % tp_size:
        return f"does not divide the model's {heads} attention heads"
    if kv_heads is not None and kv_heads % tp_size:
        if family_of(hf_config).cuts_all:
            return f"does not divide the model's {kv_heads} key/value heads"
        if tp_size % kv_heads:
            return f"neither divides the model's {kv_heads} key/value heads nor is a multiple of them"
    widths = [*_other_heads(hf_config, tp_size)]
    widths += _feed_forwards(hf_config, tp_size, is_expert_parallel=is_expert_parallel)
    for width in widths:
        if width.size % width.num_parts:
            return f"does not divide {width.what}"
    vocab_size = _size(hf_config, "vocab_size")
    if vocab_size is not None:
        num_rows = -(-vocab_size // VOCABULARY_PADDING) * VOCABULARY_PADDING
        if num_rows % tp_size:
            return f"does not divide the vocabulary's {num_rows} rows (vocab_size={vocab_size}, padded)"
    skipped = fp8_skipped(hf_config)
    if skipped is None:
        return None
    for width in [*widths, *_projections(hf_config, tp_size)]:
        part = width.size // width.num_parts
        if part % FP8_BLOCK and not any(name in module for module in skipped for name in width.modules):
            return f"leaves a rank {part} of {width.what}, and block-FP8 comes in blocks of {FP8_BLOCK}"
    return None


def num_experts_of(hf_config: HfConfig) -> int:
    """Routed experts of a layer, by the name the architecture uses for them; 0 for a dense model."""
    for key in ("num_experts", "n_routed_experts", "num_local_experts"):
        if isinstance(value := hf_config.get(key), int):
            return value
    return 0


def num_kv_heads_of(hf_config: HfConfig) -> int | None:
    """Key/value heads of grouped-query attention; None for latent attention, and if they are unknown."""
    if hf_config.get("kv_lora_rank") is not None:
        return None
    return _size(hf_config, "num_key_value_heads") or _size(hf_config, "num_attention_heads")


def fp8_skipped(hf_config: HfConfig) -> Sequence[str] | None:
    """Modules that block-FP8 leaves out; None if engines have another format."""
    quantization: JsonMapping = hf_config.get("quantization_config") or {}
    if quantization.get("quant_method") != "fp8" or not quantization.get("weight_block_size"):
        return None
    return quantization.get("modules_to_not_convert") or ()


def one_of(values: Sequence[int]) -> str:
    return ", ".join(str(value) for value in values)


def has_dense_layers(hf_config: HfConfig) -> bool:
    """Whether some layer has one feed-forward for all tokens instead of routed experts."""
    if not num_experts_of(hf_config):
        return True
    return any(
        (
            hf_config.get("mlp_only_layers"),
            hf_config.get("decoder_sparse_step", 1) != 1,
            hf_config.get("first_k_dense_replace"),
            hf_config.get("enable_moe_block"),  # beside the experts
        )
    )


def has_shared_experts(hf_config: HfConfig) -> bool:
    """Whether tokens pass a feed-forward in addition to their routed experts."""
    return bool(hf_config.get("n_shared_experts") or hf_config.get("shared_expert_intermediate_size"))


def _other_heads(hf_config: HfConfig, tp_size: int) -> Iterator[Width]:
    if (attention := family_of(hf_config).other_attention) is not None:
        for key in attention.divided:
            if (count := _size(hf_config, key)) is not None:
                yield Width(f"the {attention.kind} attention's {key}={count}", count, tp_size, ())


def _feed_forwards(hf_config: HfConfig, tp_size: int, *, is_expert_parallel: bool) -> Iterator[Width]:
    family, dense = family_of(hf_config), _size(hf_config, "intermediate_size")
    name, width = family.expert_width, _size(hf_config, family.expert_width)
    if family.cuts_all:
        if width is not None:
            yield Width(f"the experts' {name}={width}", width, tp_size, (".experts",))
        return
    if dense is not None and has_dense_layers(hf_config):
        names = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
        yield Width(f"the dense feed-forward's intermediate_size={dense}", dense, tp_size, names)
    if not num_experts_of(hf_config):
        return
    if (shared := _size(hf_config, "shared_expert_intermediate_size")) is not None:
        names = ("shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj")
        yield Width(f"the shared expert's shared_expert_intermediate_size={shared}", shared, tp_size, names)
    if width is None:
        return
    if num_shared := _size(hf_config, "n_shared_experts"):
        names = ("shared_experts.gate_proj", "shared_experts.up_proj", "shared_experts.down_proj")
        what = f"the shared experts' {num_shared} * moe_intermediate_size={width}"
        yield Width(what, num_shared * width, tp_size, names)
    parts = 1 if is_expert_parallel else tp_size
    yield Width(f"the routed experts' {name}={width}", width, parts, (".experts",))


def _projections(hf_config: HfConfig, tp_size: int) -> Iterator[Width]:
    """Widths of attention projections. tp_size divides them, but a rank's part may not be whole blocks of FP8."""
    heads, kv_heads = _size(hf_config, "num_attention_heads"), num_kv_heads_of(hf_config)
    if heads is None:
        return
    if kv_heads is not None:
        head_dim = head_dim_of(hf_config)
        if head_dim is not None:
            yield Width(f"the queries' {heads} heads of {head_dim}", heads * head_dim, tp_size, ("q_proj", "o_proj"))
            what = f"the keys' {kv_heads} heads of {head_dim}"
            yield Width(what, kv_heads * head_dim, min(tp_size, kv_heads), ("k_proj", "v_proj"))
        return
    sizes = [_size(hf_config, key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    if (rank := _size(hf_config, "q_lora_rank")) is not None:
        yield Width(f"q_lora_rank={rank}", rank, 1, ("q_a_proj", "kv_a_proj_with_mqa"))
    if tp_size > 1 and all(sizes):
        nope, turning, value = (size or 0 for size in sizes)
        for name, size in (("q_b_proj", nope + turning), ("kv_b_proj", nope + value), ("o_proj", value)):
            yield Width(f"{name}'s {heads} heads of {size}", heads * size, tp_size, (name,))


def head_dim_of(hf_config: HfConfig) -> int | None:
    """Elements of a head of grouped-query attention; None if the config does not say."""
    if (given := _size(hf_config, "head_dim")) is not None:
        return given
    if (usual := family_of(hf_config).head_dim) is not None:
        return usual
    heads, hidden = _size(hf_config, "num_attention_heads"), _size(hf_config, "hidden_size")
    return hidden // heads if heads is not None and hidden is not None else None


def _size(hf_config: HfConfig, key: str) -> int | None:
    value = hf_config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
