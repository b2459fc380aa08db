"""Checkpoints whose weights are quantized: which ones the trainer reads, and what it refuses by name. No torch."""

import re
from collections.abc import Iterator
from dataclasses import replace

from slipstream.conf.architecture.model_spec import ModelSpec
from slipstream.conf.architecture.moe_spec import INT4_GROUP, CheckpointNames, ExpertFormat
from slipstream.conf.errors import ConfigError
from slipstream.conf.failures import raised_as
from slipstream.conf.json_files import JsonObject, is_list, object_or_empty

FP8_BLOCK = [128, 128]
"""Rows and columns under one scale, as DeepSeek-V3 is published."""


def with_quantization(spec: ModelSpec, quantization: JsonObject) -> ModelSpec:
    """The spec of a checkpoint with packed experts, or with blocks of FP8. Loading turns FP8 into the model's own
    format, and publishing turns it back. Every other quantization is refused by name."""
    parts = (*spec.kinds_of_attention, *(() if spec.moe is None else (spec.moe,)))
    reason = next((part.unquantized for part in parts if part.unquantized is not None), None)
    if reason is not None:
        raise ConfigError(
            f"model.hf_config.quantization_config: quantized checkpoints and engines of {spec.family} are not "
            f"supported, because {reason}; give a float checkpoint, and model.engine_format=checkpoint"
        )
    method, layout = quantization.get("quant_method"), quantization.get("format")
    if method == "fp8" and quantization.get("weight_block_size") == FP8_BLOCK:
        return spec
    if method == "mxfp4" and spec.moe is not None and spec.moe.is_fused:
        return _packed(spec, ExpertFormat.mxfp4)
    groups = [object_or_empty(group) for group in object_or_empty(quantization.get("config_groups")).values()]
    weights = object_or_empty(groups[0].get("weights")) if len(groups) == 1 else {}
    wanted = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": INT4_GROUP}
    got = {key: weights.get(key) for key in wanted}
    is_int4 = method == "compressed-tensors" and layout == "pack-quantized" and got == wanted
    if not is_int4 or groups[0].get("input_activations") is not None or spec.moe is None:
        raise ConfigError(
            f"model.hf_config.quantization_config is not supported: quant_method={method!r}, format={layout!r}, "
            f"weights={got}; the trainer reads float weights, and routed experts as compressed-tensors "
            f"pack-quantized {wanted} or gpt-oss's mxfp4, or fp8 with weight_block_size={FP8_BLOCK}: give one of "
            "these (GPTQ, AWQ and bitsandbytes are not among them)"
        )
    ignored = quantization.get("ignore")
    patterns = [one for one in ignored if isinstance(one, str)] if is_list(ignored) else []
    for linear in _other_linears(spec):
        if not any(_matches(pattern, linear) for pattern in patterns):
            raise ConfigError(
                f"model.hf_config.quantization_config.ignore does not name {linear}: only routed experts may be packed"
            )
    return _packed(spec, ExpertFormat.int4)


def _packed(spec: ModelSpec, expert_format: ExpertFormat) -> ModelSpec:
    assert spec.moe is not None
    if spec.moe.names != CheckpointNames():
        raise ConfigError(
            f"model.hf_config.quantization_config: packed experts of {spec.family} are not supported, because its "
            "checkpoints have names of their own; give a float checkpoint"
        )
    if spec.hidden_size % INT4_GROUP or spec.moe.intermediate_size % INT4_GROUP:
        raise ConfigError(
            f"model.hf_config: hidden_size and moe_intermediate_size must be multiples of {INT4_GROUP} for packed "
            f"experts, got {spec.hidden_size} and {spec.moe.intermediate_size}"
        )
    return replace(spec, moe=replace(spec.moe, expert_format=expert_format))


def _other_linears(spec: ModelSpec) -> Iterator[str]:
    """Module names of every linear layer that is not a routed expert. Routers are left out: compressed-tensors does not
    count them as linear layers."""
    for meta in spec.checkpoint_tensors("bfloat16"):
        module, _, leaf = meta.name.rpartition(".")
        is_other = ".experts." in module or module.endswith((".gate", "embed_tokens"))
        if leaf == "weight" and len(meta.shape) == 2 and not is_other:
            yield module


def _matches(pattern: str, module: str) -> bool:
    """Match as compressed-tensors does: a whole name, or a regular expression from the name's start after "re:"."""
    with raised_as(ConfigError, f"model.hf_config.quantization_config.ignore has {pattern!r}: "):
        return re.match(pattern[3:], module) is not None if pattern.startswith("re:") else pattern == module
