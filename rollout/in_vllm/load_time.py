"""Gives a live model, for a time, the parameters with which vLLM loaded it: same memory, with their loader methods.

    constructor    ModelWeightParameter(load_row_parallel_weight, weight_loader, ...)   vLLM records class, attributes
    loading        process_weights_after_loading: replace_parameter(layer, "weight", ...)
    live           plain Parameter, without what load_weights calls

Block-FP8 layers lose their loader methods in this way, bf16 layers do not. When vLLM reloads weights, it restores them
from a record that every model's constructor leaves (`model_loader.reload`); this module reads the same record.

Owns: putting such parameters into a model while its layout is recorded. Does not own: the recording
(weight_sync/record/recorder.py), nor whether kernels read the bytes as loaded (post_load.py).

Invariant: inside this context a parameter has the live one's memory, dtype, shape and strides; the live one is never
changed.
"""

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

from slipstream.rollout.errors import UnsupportedWeights


@contextlib.contextmanager
def load_time_parameters(model: nn.Module) -> Iterator[None]:
    """While the block runs, `model.load_weights` finds the parameters that it found at start.

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
