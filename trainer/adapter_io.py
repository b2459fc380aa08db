"""Adapters and merged models on disk, in the formats of PEFT and transformers.

An adapter, for E experts, rank r (P = base_model.model.<module>):

    P.lora_A.weight                          (r, in)        P.lora_B.weight                          (out, r)
    P of gate_up: ...mlp.experts.base_layer  (E*r, H)                                                (2I, r*E)
    P of down:    ...mlp.experts             (E*r, I)                                                (H, r*E)

In expert A the expert is the slowest index; in expert B it is the *fastest* (column j * E + e belongs to rank row j
of expert e). A reader that takes it for the slowest finds the same shape, raises nothing, and gives every expert
columns of other experts.
"""

import json
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import JsonObject
from slipstream.conf.schema import LoraConfig
from slipstream.trainer.delivery.merged_source import TrainerWeightSource
from slipstream.trainer.errors import CheckpointError
from slipstream.trainer.lora import Linear
from slipstream.trainer.model.decoder import Decoder
from slipstream.trainer.moe.experts import Experts
from slipstream.trainer.parallel import local_part, whole
from slipstream.trainer.weights.adapter_names import PREFIX
from slipstream.trainer.weights.fused_experts import deinterleave, interleave
from slipstream.trainer.weights.packed_experts import is_packed
from slipstream.trainer.weights.quantization import BlockFp8
from slipstream.trainer.weights.stored_adapter import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    check_adapter_fits,
    name_of_bank,
    read_stored_adapter,
)
from slipstream.weight_sync.disk.safetensors_files import INDEX_NAME
from slipstream.weight_sync.layout import DTYPE_BYTES, Region, TensorMeta
from slipstream.weight_sync.publish.collectives import all_gather_bytes
from slipstream.weight_sync.typed_msgpack import pack, unpack

MAX_FILE_BYTES = 4 << 30
"""Largest safetensors file of a merged model."""

# PEFT wraps gate_up_proj first and down_proj around it, so the inner wrapper is the outer one's base_layer.
_EXPERT_MODULES = {"gate_up": ".base_layer", "down": ""}

# PEFT matches the end of a module's name with these.
_ATTENTION, _EXPERTS = r"\w+_attn\.\w+", r"experts(\.\w+)?"

# In a model type that has experts, PEFT reads these target_modules as the experts of transformers 4 and rewrites
# them. So the dense feed-forwards of such a model are listed as parameters, which PEFT leaves alone; the tensors have
# the same names either way.
_NAMES_PEFT_REWRITES = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class GatheredAdapter:
    """What the two files of an adapter hold, on the host: the policy may change meanwhile."""

    tensors: dict[str, Tensor]
    config: JsonObject

    def write(self, folder: Path | str) -> None:
        """Write adapter_model.safetensors (in trainer.lora.dtype) and adapter_config.json into a folder, which is made
        if missing."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        _save(self.tensors, folder / ADAPTER_FILE)
        (folder / ADAPTER_CONFIG).write_text(json.dumps(self.config, indent=2) + "\n")


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    """Write a safetensors file that others may read as the umask lets them; safetensors' own is for its owner alone."""
    partial = file.with_name(f".{file.name}.partial")
    partial.unlink(missing_ok=True)
    partial.touch()
    mode = partial.stat().st_mode
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.chmod(mode)
    partial.replace(file)


def save_adapter(decoder: Decoder, folder: Path | str, base: str | None = None) -> None:
    """Collective: write the adapter into a folder. Rank 0 writes; every rank returns once the files are on disk.
    Arguments and errors are those of `gather_adapter`."""
    gathered = gather_adapter(decoder, base, lambda values: values.to("cpu", copy=True))
    if gathered is not None:
        gathered.write(folder)
    _wait_for_rank_0(decoder)


def gather_adapter(decoder: Decoder, base: str | None, to_host: Callable[[Tensor], Tensor]) -> GatheredAdapter | None:
    """Collective: copy the adapter to rank 0's host memory; None on every other rank. `base` is the base checkpoint's
    path, for whoever loads the adapter. Raises CheckpointError if the decoder has no adapters."""
    layout = decoder.layout
    tensors: dict[str, Tensor] = {}
    modules: set[str] = set()
    parameters: set[str] = set()
    lora = decoder.lora
    if lora is None:
        raise CheckpointError(
            "this policy has no adapters to save: it trains every weight; save the merged model instead"
        )
    for name, module in decoder.named_modules():
        if isinstance(module, Linear) and module.lora is not None:
            leaf = name.rsplit(".", 1)[-1]
            if decoder.spec.moe is not None and leaf in _NAMES_PEFT_REWRITES:
                parameters.add(f"{name[name.index('mlp.') :]}.weight")
            else:
                modules.add(leaf)
            for factor, parameter in (("A", module.lora_A), ("B", module.lora_B)):
                values = whole(parameter)
                if layout.rank == 0:
                    tensors[f"{PREFIX}{name}.lora_{factor}.weight"] = to_host(values)
        elif isinstance(module, Experts) and module.lora is not None:
            name = name_of_bank(name)
            bank = name.split(".", 3)[-1]  # below model.layers.0
            parameters |= {f"{bank}.gate_up_proj", f"{bank}.down_proj"}
            for leaf, suffix in _EXPERT_MODULES.items():
                a_ERK = all_experts(decoder, getattr(module, f"{leaf}_lora_A"))
                b_ENR = all_experts(decoder, getattr(module, f"{leaf}_lora_B"))
                if leaf == "gate_up" and module.gate_up_bias is not None:
                    b_ENR = interleave(b_ENR)
                if layout.rank == 0:
                    tensors[f"{PREFIX}{name}{suffix}.lora_A.weight"] = to_host(pack_expert_a(a_ERK))
                    tensors[f"{PREFIX}{name}{suffix}.lora_B.weight"] = to_host(pack_expert_b(b_ENR))
    if layout.rank != 0:
        return None
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        **_ranks(lora),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(modules),
        "target_parameters": sorted(parameters) or None,
    }
    return GatheredAdapter(tensors, config)


@torch.no_grad()
def load_adapter(decoder: Decoder, folder: Path | str) -> int:
    """Read an adapter in PEFT's format into this rank's shards. No communication. A module without factors in the file
    keeps those that it has: B is zero when a run starts.

    Returns the number of matrices of the whole policy without factors in the file. Raises CheckpointError if it is no
    adapter of this policy (trainer/weights/stored_adapter.py).
    """
    folder = Path(folder)
    assert decoder.lora is not None, "a policy without adapters starts from none"
    try:
        stored = read_stored_adapter(folder, "adapter")
        num_missing = check_adapter_fits(stored, decoder.spec, decoder.lora, "adapter")
        file = safe_open(folder / ADAPTER_FILE, framework="pt", device="cpu")
    except (ConfigError, OSError) as error:  # this machine's files are bad; the controller checked its own before
        raise CheckpointError(str(error)) from error
    for name, module in decoder.named_modules():
        if not isinstance(module, Linear | Experts) or module.lora is None:
            continue
        if isinstance(module, Experts):
            _load_experts(decoder, module, f"{PREFIX}{name_of_bank(name)}", stored.factors, file.get_tensor)
        elif f"{PREFIX}{name}.lora_A.weight" in stored.factors:
            for factor, parameter in (("A", module.lora_A), ("B", module.lora_B)):
                values = file.get_tensor(f"{PREFIX}{name}.lora_{factor}.weight")
                rows, start = local_part(parameter)
                rows.copy_(values[start : start + rows.shape[0]])
    return num_missing


def _ranks(lora: LoraConfig) -> JsonObject:
    """The fields of adapter_config.json that say rank and scale; the scale is the same for all."""
    ranks = {_ATTENTION: lora.attention_rank, _EXPERTS: lora.expert_rank}
    others = {pattern: rank for pattern, rank in ranks.items() if rank not in (None, lora.rank)}
    return {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "rank_pattern": others,
        "alpha_pattern": {pattern: lora.scale * rank for pattern, rank in others.items() if rank is not None},
    }


def _load_experts(
    decoder: Decoder, bank: Experts, prefix: str, stored: Container[str], read: Callable[[str], Tensor]
) -> None:
    assert decoder.spec.moe is not None
    num_experts = decoder.spec.moe.num_experts
    for leaf, suffix in _EXPERT_MODULES.items():
        if f"{prefix}{suffix}.lora_A.weight" not in stored:
            continue
        a, start = local_part(getattr(bank, f"{leaf}_lora_A"))
        b, _ = local_part(getattr(bank, f"{leaf}_lora_B"))
        rank, in_features = getattr(bank, f"{leaf}_lora_A").shape[1:]
        out_features = getattr(bank, f"{leaf}_lora_B").shape[1]
        stored_a, stored_b = (read(f"{prefix}{suffix}.lora_{factor}.weight") for factor in "AB")
        experts = slice(bank.first_expert + start, bank.first_expert + start + a.shape[0])
        a.copy_(stored_a.view(num_experts, rank, in_features)[experts])
        b_ENR = stored_b.view(out_features, rank, num_experts).permute(2, 0, 1)
        b.copy_((deinterleave(b_ENR) if leaf == "gate_up" and bank.gate_up_bias is not None else b_ENR)[experts])


def pack_expert_a(a_ERK: Tensor) -> Tensor:
    """(E, r, in) -> (E * r, in): the expert is the slowest index."""
    return a_ERK.flatten(0, 1).contiguous()


def pack_expert_b(b_ENR: Tensor) -> Tensor:
    """(E, out, r) -> (out, r * E): the expert is the fastest index."""
    return b_ENR.permute(1, 2, 0).flatten(1).contiguous()


@torch.no_grad()
def save_merged(decoder: Decoder, folder: Path | str, hf_config: JsonObject) -> None:
    """Collective: write a Hugging Face checkpoint of W + scale * B @ A, in the formats that engines load.

    Rank 0 writes, and keeps at most one file of MAX_FILE_BYTES in host memory.

    Args:
        decoder: in LoRA mode the adapters are merged (float32, rounded once); in full training weights are cast.
        hf_config: the config.json to write; dtype and architectures are filled in. Its quantization_config decides
            which tensors are written in block-FP8; the others have the compute dtype.

    Raises CheckpointError if experts are packed.
    """
    if is_packed(decoder):
        raise CheckpointError(
            "a model of packed experts is not written merged: W + B @ A does not fit the packed format; save the "
            "adapter, and serve it beside the packed base or merge it into a float copy of the model with PEFT"
        )
    folder = Path(folder)
    dtype = str(decoder.dtype).removeprefix("torch.")
    source = TrainerWeightSource(decoder, decoder.layout.rank, BlockFp8.from_hf_config(hf_config))
    tensors = {meta.name: meta for meta in source.layout().tensors}
    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda meta: prod(meta.shape) * DTYPE_BYTES[meta.dtype],
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=MAX_FILE_BYTES,
    )
    regions: list[dict[str, Region]] = [{shard.tensor: shard.region for shard in source.layout().shards}]
    if decoder.layout.world_size > 1:
        regions = [unpack(dict[str, Region], data) for data in all_gather_bytes(pack(regions[0]), None)]
    is_writer = decoder.layout.rank == 0
    if is_writer:
        folder.mkdir(parents=True, exist_ok=True)
    source.begin(version=0)
    try:
        for file, names in split.filename_to_tensors.items():  # all ranks walk the same tensors in the same order
            merged = ((name, _merged(decoder, source, regions, tensors[name])) for name in names)
            content = {name: tensor for name, tensor in merged if tensor is not None}
            if is_writer:
                _save(content, folder / file)
            content.clear()  # before the next file's are merged
    finally:
        source.end()
    if is_writer:
        (folder / INDEX_NAME).unlink(missing_ok=True)  # an earlier model's index here would hide the new file
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
        config = {"architectures": [decoder.spec.hf_architecture], **hf_config, "dtype": dtype, "torch_dtype": dtype}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _wait_for_rank_0(decoder)


def _merged(
    decoder: Decoder, source: TrainerWeightSource, regions: Sequence[Mapping[str, Region]], meta: TensorMeta
) -> Tensor | None:
    """A whole tensor on the CPU of rank 0, to which its holders send it; None elsewhere."""
    layout = decoder.layout
    dtype = getattr(torch, meta.dtype)
    merged = torch.empty(meta.shape, dtype=dtype) if layout.rank == 0 else None
    holders = [(holder, held[meta.name]) for holder, held in enumerate(regions) if meta.name in held]
    if holders and holders[0][1].shape == meta.shape:
        holders = holders[:1]  # other holders have the same values
    for holder, region in holders:
        if layout.rank not in (0, holder):
            continue
        part = torch.empty(region.shape, dtype=dtype, device=layout.device)
        if layout.rank == holder:
            source.read(meta.name, region, part)
        if holder != 0:
            data = part.view(-1).view(torch.uint8)  # process groups do not know every format
            dist.recv(data, holder) if layout.rank == 0 else dist.send(data, 0)
        if merged is not None:
            merged[tuple(slice(a, b) for a, b in zip(region.start, region.stop, strict=True))] = part.cpu()
    return merged


def all_experts(decoder: Decoder, parameter: Tensor) -> Tensor:
    """Collective: (E_local, ...) -> (E, ...), first over the expert mesh, then over the ep group."""
    mine = whole(parameter).contiguous()
    group = decoder.layout.ep_group
    if group is None:
        return mine
    counts = [mine.new_empty(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(counts, mine.new_full((1,), len(mine), dtype=torch.int64), group=group)
    sizes = [int(count) for count in counts]
    padded = mine.new_zeros((max(sizes), *mine.shape[1:]))  # shares may differ by one
    padded[: len(mine)] = mine
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes)])


def _wait_for_rank_0(decoder: Decoder) -> None:
    if decoder.layout.world_size > 1:
        dist.barrier()
