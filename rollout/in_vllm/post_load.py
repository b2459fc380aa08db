"""What vLLM did to each weight after its loader had written it, and how a commit does the same again.

    linear, embedding, norm, router       identity. On CPUs vLLM would copy linear weights into private packed buffers
                                          and empty the parameter; vllm_patches.py switches that off
    block-FP8 linear: weight and scales   identity with the Triton and Cutlass kernels. DeepGEMM requantizes to powers
                                          of two and moves the scales: refused
    experts, Triton kernels               identity: (E, 2I, H) with gate rows first, and (E, H, I); block-FP8 alike
    experts, CPU kernels ("vec", "amx")   repack: cpu_prepack_moe_weight permutes each parameter in place
    experts, other kernels                refused, with the reason
    MLA's W_UK_T and W_UV                 if kv_b_proj.weight is not quantized, views of it: nothing to do. Otherwise
                                          derived: vLLM's own process_weights_after_loading computes them again, and
                                          the result is copied to where CUDA graphs read it
    any other quantization (INT4, ...)    refused: these engines accept adapters only
    empty parameters                      refused: the bytes are somewhere else

Owns: that table, for a live model (`Forms.of`) and for one on meta, for which no kernels were chosen (`Forms.on_meta`);
which engine options rule out writing in place; and a live model's parameters as they were at load time, while its
layout is recorded. Does not own recording (weight_sync/record/recorder.py) nor the commit
(weight_sync/replica/receiver.py). Uses what vLLM 0.25.1 and 0.32 have in common.

Invariant: after a commit that followed these forms, a parameter holds the same bytes as if vLLM had loaded the same
checkpoint, at an unchanged address.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm._custom_ops
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

from slipstream.conf.schema import Device
from slipstream.rollout.errors import UnsupportedWeights
from slipstream.weight_sync.layout import PostLoad

IDENTITY_EXPERTS = ("TRITON", "BATCHED_TRITON")
"""Kernels that read expert weights, and their block scales, as the loader leaves them."""
IDENTITY_FP8_LINEAR = ("TritonFp8BlockScaledMMKernel", "CutlassFp8BlockScaledMMKernel")
"""Kernels that read block-FP8 linear weights, and their scales, as the loader leaves them."""
FILLED_BUFFERS = ("layer_scalar",)
"""Buffers that a checkpoint fills (Gemma 4)."""
ADAPTERS_ONLY = "engines with such weights accept adapter mode only (weight_sync.mode=adapter)"

_MLA_DERIVED = ("W_UV", "W_UK_T")
_MLA_UNKNOWN = ("W_K", "W_V", "W_UK_T_dcp_qrep")
"""Forms that vLLM derives on AMD GPUs and for decode context parallelism."""


@dataclass(slots=True)
class Forms:
    """Every weight of one engine rank that a publish fills or a commit derives, and what a commit does to it."""

    params: dict[str, Tensor]
    """By vLLM's name. Of weights that share memory (tied, or views of another), only the first is here."""
    post_load: dict[str, PostLoad] = field(default_factory=dict)
    """What a commit does, by name. A parameter that is missing here is left as it was written."""
    _repacks: dict[str, Callable[[Tensor], object]] = field(default_factory=dict)
    _recomputes: list[Callable[[], None]] = field(default_factory=list)

    @staticmethod
    def of(model: nn.Module, act_dtype: torch.dtype) -> Forms:
        """The forms of a live model's weights. vLLM derives MLA's matrices in `act_dtype`, model_config.dtype. Raises
        UnsupportedWeights, which names a weight in a form that a one-sided write cannot fill, and the reason."""
        forms = Forms(_fillable(model))
        for name, module in model.named_modules():
            _check_linear(name, module)
            if hasattr(module, "w13_weight"):
                repack = _expert_repack(name, module)
                if repack is not None:
                    forms._repacks |= {f"{name}.{suffix}": repack for suffix in ("w13_weight", "w2_weight")}
        forms.post_load |= dict.fromkeys(forms._repacks, PostLoad.repack)
        for name, module in _mla_layers(model):
            own = {f"{name}.{leaf}": getattr(module, leaf) for leaf in _MLA_DERIVED}
            if _are_views(own.values(), forms.params.values()):
                continue
            forms.params |= {key: tensor.detach() for key, tensor in own.items()}
            forms.post_load |= dict.fromkeys(own, PostLoad.derived)
            forms._recomputes.append(functools.partial(_derive_again, module, act_dtype))
        return forms

    @staticmethod
    def on_meta(model: nn.Module, act_dtype: torch.dtype, device: Device) -> Forms:
        """The forms that `of` would find in a live engine on this kind of device, started by engine_options.py.

        vLLM chose no kernels and derived no weights for a model on meta, so the kind of device decides: experts are
        repacked on CPUs, and left as written on GPUs, where engine_arguments asks for Triton's kernels. (`of` refuses a
        live engine with others.) Raises as `of`.
        """
        cache_scales = {
            f"{name}.{leaf}"  # vLLM drops these parameters after loading
            for name, module in model.named_modules()
            if isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod)
            for leaf, _ in module.named_parameters(recurse=False)
        }
        forms = Forms({name: param for name, param in _fillable(model).items() if name not in cache_scales})
        for name, module in model.named_modules():
            _check_linear(name, module)
            if hasattr(module, "w13_weight"):
                method, backend = _expert_method(name, module)
                if backend not in (*IDENTITY_EXPERTS, "CPU"):
                    raise _reordered(name, method, backend)
                if device is Device.cpu:
                    forms.post_load |= {f"{name}.{leaf}": PostLoad.repack for leaf in ("w13_weight", "w2_weight")}
        for name, module in _mla_layers(model, is_loaded=False):
            projection = getattr(module.kv_b_proj, "base_layer", module.kv_b_proj)  # without its LoRA wrapper
            if projection.weight.dtype == act_dtype:
                continue
            heads, latent = module.num_heads, module.kv_lora_rank
            shapes = {"W_UV": (heads, latent, module.v_head_dim), "W_UK_T": (heads, module.qk_nope_head_dim, latent)}
            made = {
                f"{name}.{leaf}": torch.empty(shapes[leaf], dtype=act_dtype, device="meta") for leaf in _MLA_DERIVED
            }
            forms.params |= made
            forms.post_load |= dict.fromkeys(made, PostLoad.derived)
        return forms

    def repack(self, name: str, tensor: Tensor) -> None:
        """Permute the bytes of a PostLoad.repack parameter in place. The receiver's hook."""
        self._repacks[name](tensor)

    @torch.no_grad()
    def recompute(self) -> None:
        """Compute every PostLoad.derived tensor again, in place, from the loaded weights. The receiver's hook."""
        for one in self._recomputes:
            one()


def refuse_unwritable(vllm_config: Any) -> None:
    """Raise UnsupportedWeights if an engine option moves weights after they were written, or keeps them elsewhere."""
    parallel, offload = vllm_config.parallel_config, vllm_config.offload_config
    offloads = offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0
    sleeps, drafts = vllm_config.model_config.enable_sleep_mode, vllm_config.speculative_config is not None
    copied = "weights are in host memory, and what the GPU reads is a copy"
    for is_on, option, why in (
        (parallel.enable_eplb, "enable_eplb", "experts move between ranks while the engine serves"),
        (parallel.pipeline_parallel_size > 1, "pipeline_parallel_size > 1", "no layout of a pipeline is planned yet"),
        (offloads, "cpu_offload_gb (or offload_group_size)", copied),
        (sleeps, "enable_sleep_mode", "a sleeping engine releases the memory that is written"),
        (drafts, "speculative_config", "a draft model's weights are no part of the checkpoint that is published"),
    ):
        if is_on:
            raise UnsupportedWeights(
                f"the engine runs with {option}: {why}; its weights cannot be written in place, start it without"
            )


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and buffers that are like them."""
    yield from model.named_parameters()
    yield from ((name, one) for name, one in model.named_buffers() if name.endswith(FILLED_BUFFERS))


def _fillable(model: nn.Module) -> dict[str, Tensor]:
    """Parameters that a loader fills. A tied embedding and head are one, under the first name."""
    derived = {f"{name}.{leaf}" for name, _ in _mla_layers(model) for leaf in _MLA_DERIVED}
    params = {name: param.detach() for name, param in _named(model) if name not in derived}
    empty = [name for name, param in params.items() if param.numel() == 0]
    if empty:
        raise UnsupportedWeights(
            f"{', '.join(empty[:3])} and {len(empty)} parameters in all are empty: this engine keeps their bytes in "
            "private packed copies that cannot be written"
        )
    return params


# -- linear ------------------------------------------------------------------------------------------------------------


def _check_linear(name: str, module: nn.Module) -> None:
    """Refuse a quantized layer unless its kernels read weights as they were loaded. Experts have their own check."""
    method = getattr(module, "quant_method", None)
    if method is None or hasattr(module, "w13_weight"):
        return
    if isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod | BaseKVCacheMethod):
        return
    if not isinstance(method, Fp8LinearMethod):
        if not any(True for _ in module.parameters(recurse=False)):
            return
        raise UnsupportedWeights(
            f"{name} is quantized by {type(method).__name__}: nothing can be merged into packed weights; "
            f"{ADAPTERS_ONLY}"
        )
    if not method.block_quant:
        raise UnsupportedWeights(
            f"{name} is FP8 with one scale per tensor or channel, which vLLM transposes after loading; only block-FP8 "
            "(quantization_config.weight_block_size) can be published"
        )
    kernel = type(method.fp8_linear).__name__
    if kernel not in IDENTITY_FP8_LINEAR:
        raise UnsupportedWeights(
            f"{name} runs on {kernel}, which rewrites weights or scales after loading; only "
            f"{', '.join(IDENTITY_FP8_LINEAR)} can be published: start the engine with linear_backend=triton and "
            "VLLM_USE_DEEP_GEMM=0"
        )


# -- experts -----------------------------------------------------------------------------------------------------------


def _expert_method(name: str, module: nn.Module) -> tuple[Any, str]:
    """The quantization method of a layer's experts, and the name of their kernels."""
    method: Any = getattr(module, "quant_method", None)
    method = getattr(method, "old_quant_method", method)  # LoRA wraps it in a method of its own
    if isinstance(method, Fp8MoEMethod):
        if not method.block_quant:
            raise UnsupportedWeights(
                f"{name}: experts are FP8 with one scale per tensor, which vLLM requantizes after loading; only "
                "block-FP8 (quantization_config.weight_block_size) can be published"
            )
        return method, str(method.fp8_backend.name)
    if isinstance(method, UnquantizedFusedMoEMethod):
        return method, str(method.unquantized_backend.name)
    raise UnsupportedWeights(
        f"{name}: experts are quantized by {type(method).__name__}: nothing can be merged into packed weights; "
        f"{ADAPTERS_ONLY}"
    )


def _expert_repack(name: str, module: nn.Module) -> Callable[[Tensor], object] | None:
    """What a commit must do in place to both expert parameters of a layer; None: nothing."""
    method, backend = _expert_method(name, module)
    if backend in IDENTITY_EXPERTS:
        return None
    experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    isa = getattr(experts, "isa", None)
    if (
        not isinstance(method, UnquantizedFusedMoEMethod)
        or backend != "CPU"
        or isa is None
        or getattr(experts, "_use_zentorch", False)
    ):
        raise _reordered(name, method, f"{backend} ({type(experts).__name__})")
    return lambda weight: weight.copy_(vllm._custom_ops.cpu_prepack_moe_weight(weight, isa))


def _reordered(name: str, method: object, kernels: str) -> UnsupportedWeights:
    return UnsupportedWeights(
        f"{name}: under {type(method).__name__} the {kernels} kernels reorder expert weights after loading; only "
        f"{', '.join(IDENTITY_EXPERTS)} (moe_backend=triton) and the CPU kernels for 16-bit and 32-bit weights can be "
        "published"
    )


# -- MLA ---------------------------------------------------------------------------------------------------------------


def _mla_layers(model: nn.Module, *, is_loaded: bool = True) -> Iterator[tuple[str, Any]]:
    """Multi-head latent attention layers: those with derived matrices or, if not `is_loaded`, all of them."""
    for name, module in model.named_modules():
        for leaf in _MLA_UNKNOWN:
            if getattr(module, leaf, None) is not None:
                raise UnsupportedWeights(
                    f"{name} keeps {leaf}, which is computed from kv_b_proj in a way that a commit does not repeat yet"
                )
        if all(isinstance(getattr(module, leaf, None), Tensor) for leaf in _MLA_DERIVED) or (
            not is_loaded and hasattr(module, "kv_b_proj") and hasattr(module, "process_weights_after_loading")
        ):
            yield name, module


def _derive_again(module: Any, act_dtype: torch.dtype) -> None:
    """Let vLLM derive the matrices again, and copy them over the old ones, because CUDA graphs read them there."""
    places = {leaf: getattr(module, leaf) for leaf in _MLA_DERIVED}
    module.process_weights_after_loading(act_dtype)
    for leaf, place in places.items():
        made = getattr(module, leaf)
        if made.data_ptr() != place.data_ptr():
            place.copy_(made)
            setattr(module, leaf, place)


def _are_views(tensors: Iterable[Tensor], params: Iterable[Tensor]) -> bool:
    """Whether all `tensors` lie in the memory of parameters."""
    storages = {param.untyped_storage().data_ptr() for param in params}
    return all(tensor.untyped_storage().data_ptr() in storages for tensor in tensors)


# -- load time ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def load_time_parameters(model: nn.Module) -> Iterator[None]:
    """While the block runs, `model.load_weights` finds the parameters that it found at start: the live ones' memory,
    with the classes and loader methods that they had.

    vLLM replaces parameters after loading (process_weights_after_loading), and block-FP8 layers lose their loader
    methods by that. When it reloads weights, it restores them from a record that every model's constructor leaves
    (`model_loader.reload`), which is read here.

    Args:
        model: Live, without LoRA's wrappers.

    Raises:
        UnsupportedWeights: A parameter was loaded with another dtype, shape or strides than it has now.
    """
    live: list[tuple[nn.Module, str, nn.Parameter]] = []
    made: dict[int, Tensor] = {}  # keyed by the live parameter, so that tied ones stay one
    for name, module in model.named_modules():
        loaded, _ = get_layerwise_info(module).restore_metadata
        for leaf, param in module._parameters.items():
            if param is not None and leaf in loaded:  # vLLM records only parameters that lose something
                live.append((module, leaf, param))
                if id(param) not in made:
                    made[id(param)] = _as_loaded(f"{name}.{leaf}", param, loaded[leaf], module)
    try:
        for module, leaf, param in live:
            module._parameters[leaf] = made[id(param)]  # type: ignore[assignment]
        yield
    finally:
        for module, leaf, param in live:
            module._parameters[leaf] = param


def _as_loaded(name: str, param: nn.Parameter, loaded: Tensor, module: nn.Module) -> Tensor:
    """A parameter with the memory of `param` and the class and attributes of `loaded`, which is on meta."""
    for what, was, now in (
        ("dtype", loaded.dtype, param.dtype),
        ("shape", list(loaded.shape), list(param.shape)),
        ("strides", loaded.stride(), param.stride()),
    ):
        if was != now:
            raise UnsupportedWeights(
                f"{name} was loaded with {what} {was}, and this engine reads it with {now}: what a checkpoint fills is "
                "not what its kernels read"
            )
    made = param.detach()
    made.__class__ = loaded.__class__
    made.__dict__ = loaded.__dict__.copy()  # pyright: ignore[reportAttributeAccessIssue]
    return restore_layer_refs(made, module)
