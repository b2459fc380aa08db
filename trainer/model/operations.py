"""A layer as a list of named operations, and how it is walked.

    stream, sum -> [ operation -> operation -> ... ] -> next_stream, next_sum      each takes and returns values by name

    parts of the list    recomputed in backward, or not (Part); between parts a value may wait in host memory
    who computes         Forward: the trainer's kernels, merged weights, or the engine's kernels
    compared             comparison.py: one operation at a time, beside what an engine computed

Owns the walk. Does not own which operations a layer has (layer.py, attention/), nor any arithmetic (forward.py).
Names are those of `rollout/in_vllm/activations.py`, without the number of the layer. Values are tensors of T packed
tokens; of the other three below, an operation takes None where there is none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from slipstream.trainer.recompute import Recomputed

SUM = "sum"
"""The stream before it was rounded (Roundings.norm=once). A recomputation norms the rounded one, as backward does."""
ROUTES = "mlp.routes"
"""Recorded experts (trainer.moe.replay.LayerRoutes) to use instead of the router's choice."""
KEEP_GATE_UP = "mlp.keep_gate_up"
"""Is called with the product of gate and up, if that is kept for backward."""


@dataclass(frozen=True, slots=True)
class Operation:
    """Example: Operation("input_layernorm", ("stream", "sum"), ("input_layernorm",), run)."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    run: Callable[..., Sequence[Any]]
    """Takes a forward.Place and the inputs in order, returns the outputs in order."""
    is_view: bool = False
    """Its outputs are parts of its input: no engine returns them."""


def norm_of(name: str, norm: nn.Module, *addends: str) -> Operation:
    """The norm of this name, of one value or of the sum of two."""
    return Operation(name, addends, (name,), lambda at, x, *more: (at.by.norm(norm, x + more[0] if more else x),))


class Part:
    """Neighbouring operations of a layer, which are recomputed together if at all.

    Args:
        gives: What operations after the part take, or the layer's result.
        owners: Modules whose parameters a recomputation reads; none: the part is not recomputed.
        waits: Whether what it gives may wait in host memory.
    """

    def __init__(
        self, operations: Sequence[Operation], gives: Sequence[str], owners: Sequence[nn.Module] = (), *, waits: bool
    ) -> None:
        self.operations, self.gives, self.waits = tuple(operations), tuple(gives), waits
        made = {name for operation in operations for name in operation.outputs}
        taken = [name for operation in operations for name in operation.inputs]
        self.takes = tuple(name for name in dict.fromkeys(taken) if name not in made)
        self._again = Recomputed(owners) if owners else None
        later, self._steps = set(gives), []
        for operation in reversed(operations):
            ended = tuple({*operation.inputs, *operation.outputs} - later)
            later.update(operation.inputs)
            self._steps.insert(0, (operation, ended))

    def __call__(self, at: Any, *given: Any) -> tuple[Any, ...]:
        """What the part gives, of what it takes. A value ends with its last use."""
        known = dict(zip(self.takes, given, strict=True))
        for operation, ended in self._steps:
            outs = operation.run(at, *[known[name] for name in operation.inputs])
            known.update(zip(operation.outputs, outs, strict=True))
            for name in ended:
                del known[name]
        return tuple([known[name] for name in self.gives])

    def recomputed(self, at: Any, *given: Any) -> tuple[Any, ...]:
        """What the part gives, of what it takes. If the part has owners, backward computes it again."""
        if self._again is None:
            return self(at, *given)
        later = [None if name == SUM else one for name, one in zip(self.takes, given, strict=True)]
        return self._again(self, at, *later, first=lambda: (self(at, *given), ()))
