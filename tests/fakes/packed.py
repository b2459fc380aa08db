"""A tiny model with INT4 experts, and a judge of programs that compute it in bfloat16.

    the truth   transformers in float32, on experts that compressed_tensors dequantized, adapters added to matrices
    the floor   what bfloat16 costs: KL(transformers in bfloat16 || the truth), on the same tokens
    a program   k3 of what it says against the truth (an estimate of KL(program || truth) from the tokens that the
                program sampled; John Schulman, http://joschu.net/blog/kl-approx.html)

A program that rounds stays within MAX_RATIO floors. One that takes groups, rows, words or matrices for one another, or
leaves an expert's adapter out, is far outside: against a truth that has such a fault (MISREADINGS), a right program is,
and a judgement that does not see that proves nothing. All on the CPU, whatever the program ran on.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fakes.checkpoints import CONFIGS, FOR_GPUS, write_checkpoint

MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**CONFIGS["qwen3_moe"], **FOR_GPUS["qwen3_moe"], "num_experts_per_tok": 8},
    "deepseek_v3": {
        **CONFIGS["deepseek_v3"],
        **FOR_GPUS["deepseek_v3"],
        "num_experts_per_tok": 8,
        "num_hidden_layers": 3,
        "routed_scaling_factor": 8.0,
        "n_group": 1,
        "topk_group": 1,
    },
}
"""Every token sees every expert, so rounding sends none elsewhere. With two of eight, right bfloat16 programs differ by
a k3 of 5e-4 to 3e-1 over 256 tokens: as far as wrong ones do. The second is what Kimi-K2-Thinking is a large one of;
its experts are scaled up, because beside a dense layer and a shared expert they say little.
"""
MAX_RATIO = 5.0
"""On a CPU vLLM's engine is at 0.5 to 0.8 floors and the trainer at 0.6 to 0.9, without an adapter and with one of
normal(0, 0.3). The least misreading before the first adapter is at 220 (qwen3_moe) and 36 (deepseek_v3), one expert's
missing adapter at 90 and 50.
"""
WEIGHTS: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}

Parts = dict[str, Tensor]
"""weight_packed, weight_scale and weight_shape of one matrix."""


def write_packed_checkpoint(model: str, folder: Path, *, seed: int) -> Path:
    """One of MODELS with random weights, its routed experts in INT4 (compressed-tensors, groups of 32)."""
    write_checkpoint(MODELS[model], folder, seed=seed)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if ".mlp.experts." not in name:
            tensors[name] = tensor
            continue
        groups = tensor.float().unflatten(1, (-1, 32))
        scales = (groups.abs().amax(-1) / 7.5).to(torch.bfloat16)
        values = (groups / scales.float()[..., None]).round().clamp(-8, 7).flatten(1).to(torch.int64) + 8
        words = (values.unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)).sum(-1)  # eight a word, the first one lowest
        module = name.removesuffix(".weight")
        tensors[f"{module}.weight_packed"] = words.to(torch.int32)  # bit 31 becomes the sign
        tensors[f"{module}.weight_scale"] = scales
        tensors[f"{module}.weight_shape"] = torch.tensor(tensor.shape, dtype=torch.int64)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": None, "weights": WEIGHTS}},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
                   "re:.*mlp\\.gate$"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def of_scales(change: Callable[[Tensor], Tensor]) -> Callable[[Parts], Parts]:
    return lambda parts: {**parts, "weight_scale": change(parts["weight_scale"]).contiguous()}


def of_values(change: Callable[[Tensor], Tensor]) -> Callable[[Parts], Parts]:
    """`change` takes and gives four-bit numbers, [..., 8] of a word."""
    places = torch.arange(0, 32, 4)
    return lambda parts: {
        **parts,
        "weight_packed": (change(parts["weight_packed"].long()[..., None] >> places & 15) << places).sum(-1).int(),
    }


def identity(parts: Parts) -> Parts:
    return parts


def itself(expert: int, matrix: str) -> tuple[int, str]:
    return expert, matrix


MISREADINGS: dict[str, tuple[Callable[[Parts], Parts], Callable[[int, str], tuple[int, str]]]] = {
    "scales of neighbouring groups": (of_scales(lambda s: s.unflatten(1, (-1, 2)).flip(-1).flatten(1)), itself),
    "scales of the first and last group": (
        of_scales(lambda s: s[:, [s.shape[1] - 1, *range(1, s.shape[1] - 1), 0]]), itself,
    ),
    "scales of the next row": (of_scales(lambda s: s.roll(1, 0)), itself),
    "zero point 7": (of_values(lambda v: (v + 1).clamp(max=15)), itself),
    "highest bits first": (of_values(lambda v: v.flip(-1)), itself),
    "gate for up": (identity, lambda e, m: (e, {"gate": "up", "up": "gate"}.get(m, m))),
    "the next expert": (identity, lambda e, m: ((e + 1) % 8, m)),
}  # fmt: skip
"""What happens to a matrix, and which one is read in place of matrix m of expert e."""


def dequantize(base: Path, folder: Path, *, adapter: Mapping[str, Tensor], misreading: str | None = None) -> Path:
    """A float32 checkpoint of what the packed one says, with an adapter in its matrices.

    Args:
        adapter: lora_A and scaled lora_B of every adapted matrix, by the names of a PEFT file; taken in bfloat16.
    """
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**WEIGHTS))
    change, source = MISREADINGS.get(misreading or "", (identity, itself))
    stored, tensors = load_file(base / "model.safetensors"), {}
    for name, tensor in stored.items():
        if ".experts." not in name:
            tensors[name] = tensor.float()
        elif name.endswith("_packed"):
            prefix, tail = name.split(".experts.")
            expert, matrix = source(int(tail.split(".")[0]), tail.split(".")[1].removesuffix("_proj"))
            read = f"{prefix}.experts.{expert}.{matrix}_proj"
            parts = {leaf: stored[f"{read}.{leaf}"] for leaf in ("weight_packed", "weight_scale", "weight_shape")}
            whole = PackedQuantizationCompressor.decompress(change(parts), scheme)["weight"]
            tensors[name.removesuffix("_packed")] = whole.float()
    for name, factor in adapter.items():
        if ".lora_A." in name:
            matrix = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
            b = adapter[name.replace(".lora_A.", ".lora_B.")]
            tensors[matrix] += b.bfloat16().float() @ factor.bfloat16().float()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((base / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@torch.no_grad()
def said_by_transformers(folder: Path, token_ids_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """Log-probabilities [B, T, V], float32."""
    from transformers import AutoModelForCausalLM

    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **eager)
    return model(token_ids_BT).logits.float().log_softmax(-1)


def expected_k3(program_BTV: Tensor, truth_BTV: Tensor) -> float:
    """KL(program || truth): k3's expectation over the tokens that the program may sample."""
    return (program_BTV.exp() * (program_BTV - truth_BTV)).sum(-1).mean().item()


def k3(program_BT: Tensor, truth_BT: Tensor) -> float:
    """k3 over the tokens that the program sampled."""
    log_ratio_BT = truth_BT.double() - program_BT.double()
    return (log_ratio_BT.exp() - 1 - log_ratio_BT).mean().item()
