"""What vLLM's own model computes in each operation, recorded by hooks while it prefills.

Owns: which modules are watched, and the names of what they return. Names follow the checkpoint's modules; the trainer's
operations (trainer/model/operations.py) have the same ones. Of layer N, under `layers.N.`:

    stream                                the residual stream that enters the layer
    input_layernorm                       its norm
    self_attn.{q,k,v}_proj                split from vLLM's qkv_proj
    self_attn.{q,k}_norm, {q,k}_rotary    after the norm of heads; after the rotation, as attention takes them
    self_attn.attn, o_proj                heads, and the block's output
    stream_mid, post_attention_layernorm  the stream after attention, and its norm
    mlp.topk_ids, topk_weights, experts   the router's choice, and the routed experts' sum
    mlp.shared_experts, mlp               the shared experts, and the block's output

Gemma's post_attention_layernorm and post_feedforward_layernorm norm o_proj and mlp, and pre_feedforward_layernorm the
stream after attention.
Latent attention has q_a_proj, kv_a_proj_with_mqa, q_a_layernorm, q_b_proj, kv_a_layernorm and kv_b_proj in place of
projections, norms and rotation. After the last layer come its `stream` and `norm`. Every tensor is [tokens, width].

Invariant: a tensor is copied when its module returns, because vLLM's kernels add and rotate in place afterwards. The
model runs eagerly: a compiled or captured model calls no hook.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.conf.architecture.moe_spec import NORMS_BESIDE_DENSE

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)$")
SHARED = ("mlp.shared_experts", "mlp.shared_expert")
LINEARS = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
NORMS = ("q_norm", "k_norm", "q_a_layernorm", "kv_a_layernorm")


class ActivationRecorder:
    """Watches a model from its construction until `finish`."""

    def __init__(self, model: nn.Module) -> None:
        self._recorded: dict[str, list[Tensor]] = {}
        self._undo: list[Callable[[], object]] = []
        layers = {int(found[1]): module for name, module in model.named_modules() if (found := LAYER.search(name))}
        for number, layer in layers.items():
            self._watch_layer(f"layers.{number}.", layer)
        (norm,) = [module for name, module in model.named_modules() if name.endswith("model.norm") or name == "norm"]
        self._watch(norm, lambda args, out: self._norm("norm", f"layers.{len(layers)}.stream", args, out))

    def finish(self) -> dict[str, Tensor]:
        """Stop watching. Returns what was recorded, on the CPU, the rows of all forward passes one after the other."""
        for undo in self._undo:
            undo()
        return {name: torch.cat(parts) for name, parts in self._recorded.items()}

    def _keep(self, name: str, value: Tensor) -> None:
        rows = value.detach().reshape(value.shape[0], -1)
        self._recorded.setdefault(name, []).append(rows.to("cpu", copy=True))

    def _watch(self, module: nn.Module, record: Callable[[tuple[Any, ...], Any], None]) -> None:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            record((*args, *kwargs.values()), out)

        self._undo.append(module.register_forward_hook(hook, with_kwargs=True).remove)

    def _watch_layer(self, prefix: str, layer: nn.Module) -> None:
        modules = dict(layer.named_modules())
        experts = next((path for path, module in modules.items() if hasattr(module, "routed_experts")), "mlp.experts")
        block = experts.removesuffix("experts").removesuffix(".")  # some families have another name for it, or none
        for path, module in modules.items():
            name = f"mlp{path.removeprefix(block)}" if f"{path}.".startswith(f"{block}.") else path
            name = f"mlp.{path}" if not block and path == experts else name
            middle = ("post_attention", "pre_feedforward")["pre_feedforward_layernorm" in modules]
            record = self._recorder_of(prefix, name, module, f"{middle}_layernorm")
            if record is not None:
                self._watch(module, record)
            if name == "mlp.experts" and hasattr(module, "routed_experts"):
                self._watch_experts(f"{prefix}mlp.", module)

    def _recorder_of(
        self, prefix: str, path: str, module: nn.Module, middle: str
    ) -> Callable[[tuple[Any, ...], Any], None] | None:
        """What to do with the arguments and the result of one module of a layer; None where it is not watched.
        `middle` norms the stream after attention."""
        attention, leaf = f"{prefix}self_attn.", path.rpartition(".")[2]
        if path == "input_layernorm":
            return lambda args, out: self._norm(prefix + path, f"{prefix}stream", args, out)
        if path == middle:
            return lambda args, out: self._norm(prefix + path, f"{prefix}stream_mid", args, out)
        if leaf in NORMS:
            return lambda _, out: self._keep(attention + leaf, _first(out))
        if path in ("mlp", "post_attention_layernorm", "post_feedforward_layernorm", *NORMS_BESIDE_DENSE):
            return lambda _, out: self._keep(prefix + path, _first(out))
        if path in SHARED:
            return lambda _, out: self._keep(prefix + SHARED[0], _first(out))
        if path.startswith("mlp"):
            return None
        if leaf in ("qkv_proj", "fused_qkv_a_proj"):
            return lambda _, out: self._split(attention, module, _first(out))
        if leaf in LINEARS:
            return lambda _, out: self._keep(attention + leaf, _first(out))
        if hasattr(module, "impl"):  # vLLM's attention layers, over a backend
            return lambda args, out: self._attention(attention, args, out)
        return None

    def _norm(self, name: str, stream: str, args: tuple[Any, ...], out: Any) -> None:
        """A norm returns its result, and where it added first, the sum too."""
        normed, total = out if isinstance(out, tuple) else (out, args[0])
        self._keep(name, normed)
        self._keep(stream, total)

    def _split(self, prefix: str, module: nn.Module, out: Tensor) -> None:
        projection: Any = module
        names, sizes = ("q_proj", "k_proj", "v_proj"), projection.output_sizes
        if len(sizes) == 2:
            names = ("q_a_proj", "kv_a_proj_with_mqa")
        for name, part in zip(names, out.split(list(sizes), dim=-1), strict=True):
            self._keep(prefix + name, part)

    def _attention(self, prefix: str, args: tuple[Any, ...], out: Any) -> None:
        query, key, third, *_ = args
        if key.shape[0] == third.shape[0] == query.shape[0] and key.numel() == third.numel():  # not a latent
            self._keep(f"{prefix}q_rotary", query)
            self._keep(f"{prefix}k_rotary", key)
        self._keep(f"{prefix}attn", _first(out))

    def _watch_experts(self, prefix: str, runner: Any) -> None:
        """vLLM calls the routed experts by a method, and multiplies their sum by the family's factor afterwards."""
        routed = runner.routed_experts
        call = routed.forward_modular
        factor = runner.routed_scaling_factor

        def recording(*args: Any, **kwargs: Any) -> Any:
            out = call(*args, **kwargs)
            self._keep(f"{prefix}topk_ids", kwargs["topk_ids"].long())
            self._keep(f"{prefix}topk_weights", kwargs["topk_weights"].float())
            self._keep(f"{prefix}experts", _first(out) * factor)
            return out

        routed.forward_modular = recording
        self._undo.append(lambda: delattr(routed, "forward_modular"))


def _first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out
