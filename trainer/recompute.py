"""Parts of a layer that keep only their inputs and are computed again in the backward pass.

torch.utils.checkpoint does the same with hooks around every tensor saved inside. Those hooks take a quarter of the
host's time per layer, and a short step waits for the host. Here a part is one node of the graph, and its backward runs
the part's own graph.

Invariant: the second call sees the same inputs and the same parameter values as the first. There is no dropout, so
there is no random state to restore.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

First = Callable[[], tuple[Any, tuple[Any, ...]]]

NUM_FIXED = 3
"""Arguments of _Recompute.forward before inputs and parameters."""


class Recomputed:
    """Calls a part whose activations are not kept: Recomputed([owner])(part, x, y) is part(x, y).

    Gradients reach inputs that are tensors and the trainable parameters of `owners`, but not tensors inside other
    inputs. The output is a tensor, or a tuple of tensors and other values; none of them is an input. The part is not
    kept, which usually holds this object: a decoder that is forgotten is freed at once, and not by the next collection.
    """

    def __init__(self, owners: Sequence[nn.Module]) -> None:
        self._owners = owners
        self._places: list[tuple[nn.Module, str]] | None = None

    def __call__(self, part: Callable[..., Any], *inputs: Any, first: First | None = None) -> Any:
        """Call the part on `inputs`. `first`: computes the values, instead of the part, which then computes the
        gradients alone. Returns what the part returns, up to rounding, and what the part is given after its inputs when
        it is called for them."""
        if self._places is None:
            modules = (module for owner in self._owners for module in owner.modules())
            named = ((module, *named) for module in modules for named in module.named_parameters(recurse=False))
            self._places = [(module, name) for module, name, parameter in named if parameter.requires_grad]
        parameters = (getattr(module, name) for module, name in self._places)  # FSDP2 exchanges them
        return _Recompute.apply(part, first, len(inputs), *inputs, *parameters)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Callable[..., Any], first: First | None, num_inputs: int, *given: Any) -> Any:
        inputs = given[:num_inputs]
        ctx.part, ctx.parameters = part, given[num_inputs:]
        ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.at = [index for index, x in enumerate(inputs) if isinstance(x, Tensor)]
        ctx.save_for_backward(*(inputs[index] for index in ctx.at))
        ctx.ahead = None
        ctx.set_materialize_grads(False)
        outs, ctx.more = (part(*inputs), ()) if first is None else first()
        indices = (x for x in _tuple(outs) if isinstance(x, Tensor) and not x.is_floating_point())
        ctx.mark_non_differentiable(*indices)
        return outs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: Tensor | None) -> tuple[Tensor | None, ...]:
        (inputs, outs), ctx.ahead = _again(ctx), None
        ctx.maybe_clear_saved_tensors()  # frees an input without a gradient, unless the part keeps it
        wanted, places = [], []
        for index in ctx.at:
            if ctx.needs_input_grad[NUM_FIXED + index]:
                wanted.append(inputs[index])
                places.append(NUM_FIXED + index)
        wanted += ctx.parameters
        places += range(NUM_FIXED + len(inputs), NUM_FIXED + len(inputs) + len(ctx.parameters))
        del inputs
        used = [(out, dout) for out, dout in zip(outs, douts, strict=True) if dout is not None and out.requires_grad]
        grads: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if used and wanted:
            outs, given = zip(*used, strict=True)
            found = torch.autograd.grad(outs, wanted, given, allow_unused=True)
            for place, grad in zip(places, found, strict=True):
                grads[place] = grad
        return tuple(grads)


def recomputation(out: Tensor) -> Callable[[], Tensor] | None:
    """A function that computes `out` again, if a recomputed part returned it; None for any other tensor. An autograd
    function that reads `out` in its backward can call this instead of saving `out`. Its backward runs before the
    part's, and the part's then uses what was computed here."""
    node, index = out.grad_fn, out.output_nr
    if not isinstance(node, _Recompute._backward_cls):
        return None
    return lambda: _again(node)[1][index].detach()


def _again(ctx: Any) -> tuple[list[Any], tuple[Any, ...]]:
    """A part's inputs, detached, and its results with a graph. Both are held until the part's backward."""
    if ctx.ahead is None:
        inputs = list(ctx.others)
        for index, x in zip(ctx.at, ctx.saved_tensors, strict=True):
            inputs[index] = x.detach().requires_grad_(ctx.needs_input_grad[NUM_FIXED + index])
        with torch.enable_grad():
            ctx.ahead = inputs, _tuple(ctx.part(*inputs, *ctx.more))
    return ctx.ahead


def _tuple(outs: Any) -> tuple[Any, ...]:
    return outs if isinstance(outs, tuple) else (outs,)
