"""From a ModelSpec to a decoder on its device: built on meta, marked trainable, sharded, then allocated.

Owns which parameters are sharded over which ranks, which of them train where, and who gathers them: dense ones are
gathered once a call (whole_weights.py) where that takes little of the device's memory, and else layer by layer by
FSDP2, in forward and again in backward. Sharded experts are always FSDP2's. Does not own values:
`trainer.weights.loading` fills them; nor which options fit a model (conf/checks/model.py).

Invariant: gradients are summed, never averaged. The loss is divided by counts of the whole batch before backward, and
the all-to-all brings every row's gradient to the expert's owner. Hence the ranks' local gradient shards are disjoint
pieces of the true gradient, and its norm is sqrt(all_reduce(sum of local squares)) over all ranks, dense and experts
alike.
"""

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from slipstream.conf.architecture.model_spec import ModelSpec
from slipstream.conf.schema import Activations, TrainerConfig, TrainMode
from slipstream.trainer.lora import Adapted
from slipstream.trainer.model.build import Build
from slipstream.trainer.model.decoder import Decoder
from slipstream.trainer.model.forward import Forward
from slipstream.trainer.model.host_activations import HostPool
from slipstream.trainer.model.whole_weights import WholeWeights, extra_bytes
from slipstream.trainer.moe.bank import UnpackBuffers
from slipstream.trainer.moe.experts import Experts
from slipstream.trainer.moe.router import Router
from slipstream.trainer.parallel import ParallelLayout, device_bytes, sharded_rows
from slipstream.weight_sync.merging.rounding import key_of

WHOLE_SHARE = 1 / 8
"""The part of a device's memory that whole dense parameters may take beside this rank's rows of them."""


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
    """
    device = torch.device(device)
    layout = layout if layout is not None else ParallelLayout.single(device)
    lora = trainer.lora if trainer.mode is TrainMode.lora else None
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


def shard_decoder(decoder: Decoder, layout: ParallelLayout, *, is_whole: bool = False) -> None:
    """Apply FSDP2 in place; nothing on a single rank. Parameters may be on meta.

    Args:
        is_whole: Dense parameters are left to WholeWeights. Banks of experts then still have the decoder as their root,
            under which FSDP2 gathers one while another is in use.

    Units: expert banks (over the expert mesh), layers, embedding, head, and the final norm as the root. Parameters are
    gathered in the compute dtype; gradients are reduced in float32 by a plain sum. Frozen 16-bit weights and float32
    adapters share a unit: FSDP2 asks for one dtype among trainable parameters only.

    Every unit, the root included, frees its whole parameters after forward: one left whole after a forward without a
    backward (the reference policy) would serve stale values after the next optimizer step.
    """
    if layout.dense_mesh is None:
        return
    banks = _expert_banks(decoder)
    policy = MixedPrecisionPolicy(param_dtype=decoder.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)

    def shard(module: nn.Module, mesh: DeviceMesh, ignored: set[nn.Parameter]) -> None:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True, ignored_params=ignored)
        assert isinstance(module, FSDPModule)
        # Both calls are needed: a factor alone asks for a pre-multiplied sum, which gloo does not have.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)

    if layout.expert_mesh is not None:
        for bank in banks:
            shard(bank, layout.expert_mesh, set())
    if is_whole:
        if layout.expert_mesh is not None:
            shard(decoder, layout.dense_mesh, set(decoder.parameters()))
        return
    local = {parameter for bank in banks for parameter in bank.parameters()} | replicated_parameters(decoder)
    tables = [decoder.model.embed_tokens] if decoder.lm_head is None else [decoder.model.embed_tokens, decoder.lm_head]
    for module in (*tables, *decoder.model.layers, decoder):
        shard(module, layout.dense_mesh, local)


def sharded_dense(decoder: Decoder) -> list[tuple[nn.Module, str]]:
    """Where parameters are that are neither experts' nor on every rank whole: each module, and the name there."""
    kept = _expert_parameter_ids(decoder) | set(map(id, replicated_parameters(decoder)))
    return [
        (module, name)
        for module in decoder.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if id(parameter) not in kept
    ]


def fits_whole(decoder: Decoder, layout: ParallelLayout) -> bool:
    """Whether dense parameters are gathered once a call; the smallest device decides for all ranks. Collective."""
    if layout.dense_mesh is None:
        return False
    room = layout.least_of_ranks(device_bytes(layout.device)) * WHOLE_SHARE
    return extra_bytes(sharded_dense(decoder), layout.world_size) <= room


def replicated_parameters(decoder: Decoder) -> set[nn.Parameter]:
    """Parameters that every rank holds whole: frozen vectors (all of the base's in LoRA mode, layers' factors and
    routers' float32 correction biases in any).

    A norm sharded over 256 ranks would be shards of a few bytes, each a separate write to every engine rank. Frozen
    vectors never change, so the ranks' copies stay equal. Correction biases are float32 in any mode: FSDP2 would gather
    them in the compute dtype, and bfloat16 moves tokens to other experts.
    """
    experts = _expert_parameter_ids(decoder)
    return {
        parameter
        for parameter in decoder.parameters()
        if not parameter.requires_grad and id(parameter) not in experts and parameter.dim() == 1
    }


def dense_trainable(decoder: Decoder) -> list[tuple[str, nn.Parameter]]:
    """Trainable parameters outside expert banks: DTensors sharded over all ranks (plain tensors on one rank). Gradients
    are summed over ranks, by WholeWeights or FSDP2."""
    experts = _expert_parameter_ids(decoder)
    return [(n, p) for n, p in decoder.named_parameters() if p.requires_grad and id(p) not in experts]


def expert_trainable(decoder: Decoder) -> list[tuple[str, nn.Parameter]]:
    """Trainable parameters of this rank's experts: plain tensors, or DTensors over the expert mesh. Names repeat over
    ep_ranks: `...experts.down_lora_A` is another set of experts on each. Gradients need no further sum."""
    experts = _expert_parameter_ids(decoder)
    return [(n, p) for n, p in decoder.named_parameters() if p.requires_grad and id(p) in experts]


def _expert_banks(decoder: Decoder) -> list[Experts]:
    return [module for module in decoder.modules() if isinstance(module, Experts)]


def _expert_parameter_ids(decoder: Decoder) -> set[int]:
    return {id(parameter) for bank in _expert_banks(decoder) for parameter in bank.parameters()}
