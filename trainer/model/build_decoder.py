"""From a ModelSpec to a decoder on its device: built on meta, marked trainable, sharded, then allocated.

Owns the checks of model and options together. Does not own values: `trainer.weights.loading` fills them.
"""

import torch
from torch import nn

from slipstream.conf.architecture.model_spec import ExpertFormat, ModelSpec, stays_frozen
from slipstream.conf.errors import ConfigError
from slipstream.conf.schema import LoraConfig, TrainerConfig, TrainMode
from slipstream.trainer.lora import Adapted
from slipstream.trainer.model.attend import choose_attention_backend
from slipstream.trainer.model.decoder import Decoder
from slipstream.trainer.model.forward import Forward
from slipstream.trainer.model.host_activations import HostPool
from slipstream.trainer.model.layer import Build
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
        ConfigError: there are more ep_ranks than experts, cp_size does not fit the attention, or LoRA finds nothing to
            adapt.
    """
    device = torch.device(device)
    layout = layout if layout is not None else ParallelLayout.single(device)
    lora = trainer.lora if trainer.mode is TrainMode.lora else None
    _refuse_misfits(spec, lora, layout)
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
        attention_backends=[
            choose_attention_backend(device, dtype, spec.attention_of(layer)) for layer in range(spec.num_layers)
        ],
        checkpointing=trainer.activation_checkpointing,
        gate_up_kept=trainer.gate_up_kept,
        numerics=trainer.numerics.places,
        layout=layout,
        unpacked=UnpackBuffers(dtype),
        by=by or Forward(),
        host=host,
    )
    with torch.device("meta"):
        decoder = Decoder(build)
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
        host = torch.empty_like(table.weight, device="cpu", pin_memory=device.type == "cuda")
        table.weight = nn.Parameter(host, requires_grad=False)
    return decoder


def _refuse_misfits(spec: ModelSpec, lora: LoraConfig | None, layout: ParallelLayout) -> None:
    spec.check_cp_size(layout.cp_size)
    num_moe_layers = sum(spec.is_moe_layer(layer) for layer in range(spec.num_layers))
    if num_moe_layers == 0 and layout.ep_size > 1:
        raise ConfigError(f"trainer.ep_size must be 1 for a model without experts, got {layout.ep_size}")
    if spec.moe is not None and spec.moe.expert_format is not ExpertFormat.plain and lora is None:
        raise ConfigError(f"trainer.mode=full cannot train {spec.moe.expert_format} experts; set trainer.mode=lora")
    if num_moe_layers and spec.moe is not None and spec.moe.num_experts < layout.ep_size:
        raise ConfigError(
            f"trainer.ep_size must be <= the number of experts {spec.moe.num_experts}, got {layout.ep_size}"
        )
    if lora is not None:
        moe = spec.moe
        has_dense = moe is None or moe.is_beside_dense or moe.shared_intermediate_size > 0 or not all(moe.layers)
        has_target = lora.attention or (lora.experts and num_moe_layers) or (lora.mlp and has_dense)
        if not has_target:
            raise ConfigError(
                f"trainer.lora adapts nothing in this {spec.family} model, where {num_moe_layers} of {spec.num_layers} "
                f"layers have experts: got targets={list(lora.targets)}; name what the model has"
            )


def _name_merged_parameters(decoder: Decoder, seed: int) -> None:
    for name, module in decoder.named_modules():
        if isinstance(module, Adapted) and module.lora is not None:
            leaves = ("gate_up_proj", "down_proj") if isinstance(module, Experts) else ("weight",)
            module.rounding_keys = {leaf: key_of(seed, f"{name}.{leaf}") for leaf in leaves}


def _choose_trainable(decoder: Decoder, trainer: TrainerConfig) -> None:
    """Set requires_grad once, before FSDP2 looks at it."""
    routers = {
        id(parameter) for module in decoder.modules() if isinstance(module, Router) for parameter in module.parameters()
    }
    for name, parameter in decoder.named_parameters():
        if trainer.mode is TrainMode.lora:
            parameter.requires_grad_("lora_" in name.rsplit(".", 1)[-1])
        else:
            parameter.requires_grad_(trainer.train_router or id(parameter) not in routers)
        if stays_frozen(name):
            parameter.requires_grad_(False)
