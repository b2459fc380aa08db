"""What the kernels of a vLLM model read."""

from torch import Tensor, nn

from slipstream.rollout.in_vllm.post_load import _MLA_DERIVED, _mla_layers, _named


def readable(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor that kernels read and that depends on the checkpoint, by name: parameters and what MLA derives."""
    tensors: dict[str, Tensor] = dict(_named(model))
    for name, module in _mla_layers(model):
        tensors |= {f"{name}.{leaf}": getattr(module, leaf) for leaf in _MLA_DERIVED}
    return tensors
