"""The adapter as an engine reads it: names and shapes of its factors, from a ModelSpec alone. No torch.

Names are those of a PEFT adapter file with one matrix per expert, which is how vLLM packs routed experts:

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight              (R, in)
    base_model.model.model.layers.0.mlp.experts.3.gate_proj.lora_B.weight       (out, R)

Gate and up of an expert share one A here: two names, one factor. R is the rank of the engine's slots: the trainer's
rank, rounded up to one that engines have kernels for. The elements beyond the trainer's rank are zeros. They are sent,
too, so that every byte of a slot is counted and hashed.

Matrices of latent attention are missing: vLLM folds kv_b_proj into other matrices, so no adapter can be applied to it.
So are Mixtral's experts, whose names differ. Invariant: `trainer/delivery/adapter_source.py` writes exactly these.
"""

import re
from collections.abc import Sequence

from slipstream.conf.schema import LoraConfig
from slipstream.weight_sync.layout import TensorMeta

PREFIX = "base_model.model."
_LEAF = r"(?P<leaf>{})_proj\.weight"
_ATTENTION = re.compile(r"\.self_attn\." + _LEAF.format("q|k|v|o") + "$")
_MLP = re.compile(r"\.mlp\.(?:shared_experts?\.)?" + _LEAF.format("gate|up|down") + "$")
_EXPERTS = re.compile(r"\.mlp\.experts\.\d+\." + _LEAF.format("gate|up|down") + "$")


def factor_names(tensor: str) -> tuple[str, str]:
    """Names of A and B beside a checkpoint matrix. Example: "model.x.q_proj.weight" -> "...q_proj.lora_A.weight"."""
    module = PREFIX + tensor.removesuffix(".weight")
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def adapter_tensors(tensors: Sequence[TensorMeta], lora: LoraConfig) -> list[TensorMeta]:
    """Both factors of every adapted matrix of a checkpoint in the engine's dtype, in its order."""
    factors: list[TensorMeta] = []
    slot_rank = lora.slot_rank
    for meta in tensors:
        if not is_adapted(meta.name, lora):
            continue
        a, b = factor_names(meta.name)
        rows, columns = meta.shape
        factors += [TensorMeta(a, (slot_rank, columns), meta.dtype), TensorMeta(b, (rows, slot_rank), meta.dtype)]
    return factors


def is_adapted(tensor: str, lora: LoraConfig) -> bool:
    module = tensor.split(".")[-2]
    kinds = ((lora.adapts_attention(module), _ATTENTION), (lora.adapts_mlp(module), _MLP), (lora.experts, _EXPERTS))
    return any(wanted and pattern.search(tensor) for wanted, pattern in kinds)


def target_modules(tensors: Sequence[TensorMeta], lora: LoraConfig) -> list[str]:
    """Last names of the modules that an engine wraps. Others have no adapter, and wrapping them would cost time."""
    modules: set[str] = set()
    for meta in tensors:
        if is_adapted(meta.name, lora):
            modules.add("experts" if _EXPERTS.search(meta.name) else meta.name.split(".")[-2])
    return sorted(modules)
