"""From a ModelSpec to a decoder on its device: built on meta, marked trainable, sharded, then allocated.

Does not own values: `trainer.weights.loading` fills them; nor which options fit a model (conf/checks/model.py).
"""

from dataclasses import replace

import torch
from torch import nn

from slipstream.conf.architecture.model_spec import ModelSpec
from slipstream.conf.errors import ConfigError
from slipstream.conf.schema import Activations, TrainerConfig, TrainMode
from slipstream.trainer.lora import Adapted
from slipstream.trainer.model.build import Build
from slipstream.trainer.model.decoder import Decoder
from slipstream.trainer.model.forward import Forward
from slipstream.trainer.model.host_activations import HostPool
from slipstream.trainer.model.shard_decoder import (
    dense_trainable,
    expert_trainable,
    fits_whole,
    shard_decoder,
    sharded_dense,
)
from slipstream.trainer.model.whole_weights import WholeWeights
from slipstream.trainer.moe.bank import UnpackBuffers
from slipstream.trainer.moe.experts import Experts
from slipstream.trainer.moe.router import Router
from slipstream.trainer.parallel import ParallelLayout, sharded_rows
from slipstream.weight_sync.merging.rounding import key_of


def build_decoder(
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    trainer: TrainerConfig,
    layout: ParallelLayout | None = None,
    rounding_seed: int | None = None,
    by: Forward | None = None,
    may_be_whole: bool = False,
) -> Decoder:
    """Construct on meta, shard, allocate on `device`. Values are undefined until
    `trainer.weights.loading.load_weights`.

    Trainable weights are float32, adapters in trainer.lora.dtype; frozen weights (LoRA mode) are in `dtype`.

    Args:
        rounding_seed: The run's, for the thresholds by which merged weights are rounded. None: to nearest.
        by: What computes the decoder; None: the trainer's kernels.
        may_be_whole: Whether dense parameters are gathered once a call where they fit. The decoder is then to be called
            inside Decoder.in_use(), and all ranks build it together.

    Raises:
        ConfigError: the embedding table is to be on the host, and it is the head.
    """
    device = torch.device(device)
    layout = layout if layout is not None else ParallelLayout.single(device)
    lora = trainer.lora if trainer.mode is TrainMode.lora else None
    if trainer.embedding_on_host and spec.tie_embeddings:
        raise ConfigError("trainer.embedding_on_host=true needs a head of its own; this model's is the embedding table")
    missing: list[tuple[nn.Parameter, int]] = []
    host = None
    if trainer.activations_on_host:
        host = HostPool(device, lambda: sum(size for parameter, size in missing if parameter.grad is None))
    build = Build(
        spec=spec,
        compute_dtype=dtype,
        weight_dtype=torch.float32 if lora is None else dtype,
        lora=lora,
        checkpointing=trainer.activation_checkpointing,
        gate_up_kept=trainer.gate_up_kept,
        numerics=trainer.numerics.places,
        layout=layout,
        unpacked=UnpackBuffers(dtype),
    )
    with torch.device("meta"):
        decoder = Decoder(build, by or Forward(), host)
    _choose_trainable(decoder, trainer)
    if rounding_seed is not None:
        _name_merged_parameters(decoder, rounding_seed)
    is_whole = may_be_whole and fits_whole(decoder, layout)
    shard_decoder(decoder, layout, is_whole=is_whole)
    decoder.to_empty(device=device)
    if is_whole and layout.dense_mesh is not None:
        decoder.whole = WholeWeights(sharded_dense(decoder), layout.dense_mesh)
        missing += [(parameter, parameter.nbytes) for parameter in decoder.whole.trainable]
    trainable = (*(() if is_whole else dense_trainable(decoder)), *expert_trainable(decoder))
    missing += [(parameter, sharded_rows(name, parameter).nbytes) for name, parameter in trainable]
    if trainer.embedding_on_host:
        table = decoder.model.embed_tokens
        rows = torch.empty_like(table.weight, device="cpu", pin_memory=device.type == "cuda")
        table.weight = nn.Parameter(rows, requires_grad=False)
    return decoder


def build_whole(spec: ModelSpec, dtype: str, trainer: TrainerConfig, rounding_seed: int | None = None) -> Decoder:
    """The decoder of a trainer with one rank, on torch's meta device: what plans are made from. Options that say where
    things lie do not count. `dtype` is model.dtype."""
    whole = replace(
        trainer, num_ranks=1, ep_size=1, cp_size=1, embedding_on_host=False, activations=Activations.recompute
    )
    return build_decoder(spec, dtype=getattr(torch, dtype), device="meta", trainer=whole, rounding_seed=rounding_seed)


def _name_merged_parameters(decoder: Decoder, seed: int) -> None:
    for name, module in decoder.named_modules():
        if isinstance(module, Adapted) and module.lora is not None:
            leaves = ("gate_up_proj", "down_proj") if isinstance(module, Experts) else ("weight",)
            module.rounding_keys = {leaf: key_of(seed, f"{name}.{leaf}") for leaf in leaves}


def _choose_trainable(decoder: Decoder, trainer: TrainerConfig) -> None:
    """Set requires_grad once, before FSDP2 looks at it. What its module has frozen is trained in no mode."""
    routers = {
        id(parameter) for module in decoder.modules() if isinstance(module, Router) for parameter in module.parameters()
    }
    for name, parameter in decoder.named_parameters():
        if trainer.mode is TrainMode.lora:
            is_trained = "lora_" in name.rsplit(".", 1)[-1]
        else:
            is_trained = trainer.train_router or id(parameter) not in routers
        parameter.requires_grad_(parameter.requires_grad and is_trained)
