"""A captured pass without a GPU: what a replay does, kernel by kernel, in tensors that stay."""

from types import SimpleNamespace
from typing import Any

import torch

from slipstream.trainer.model.decoder import Decoder
from slipstream.trainer.model.graphs import DecoderGraphs, GraphInputs


class EagerPass:
    peak_bytes = 0

    def __init__(self, decoder: Decoder, inputs: GraphInputs, trainable: list[torch.nn.Parameter]) -> None:
        self.inputs, self._decoder = inputs, decoder
        shape = len(inputs.token_ids_T), decoder.spec.hidden_size
        self.hidden_TH, self.dhidden_TH = torch.zeros(shape), torch.zeros(shape)
        inputs.hidden_states(decoder).backward(self.dhidden_TH)
        found = [one for one in trainable if one.grad is not None]
        self.gradients = [(one, torch.zeros_like(one, requires_grad=False)) for one in found]
        moe = decoder.spec.moe
        num_layers = 0 if inputs.routes is None or moe is None else sum(moe.layers)
        self.flipped = [torch.zeros((), dtype=torch.int64) for _ in range(num_layers)]
        self._out: Any = None
        self.forward, self.backward = SimpleNamespace(replay=self._forward), SimpleNamespace(replay=self._backward)

    def _forward(self) -> None:
        if self.inputs.routes is not None:
            self.inputs.routes.flipped.clear()
        with torch.enable_grad():
            self._out = self.inputs.hidden_states(self._decoder)
        self.hidden_TH.copy_(self._out.detach())
        for mine, found in zip(self.flipped, self.inputs.routes.flipped if self.inputs.routes else (), strict=True):
            mine.copy_(found)

    def _backward(self) -> None:
        kept = [one.grad for one, _ in self.gradients]
        for one, _ in self.gradients:
            one.grad = None
        self._out.backward(self.dhidden_TH)
        for (one, memory), before in zip(self.gradients, kept, strict=True):
            assert one.grad is not None
            memory.copy_(one.grad)
            one.grad = before


class EagerGraphs(DecoderGraphs):
    """Graphs that a CPU replays."""

    fails = False
    """Whether this rank cannot capture."""

    def _capture(self, inputs: GraphInputs) -> Any:
        kept = [parameter.grad for parameter in self._trainable]
        for parameter in self._trainable:
            parameter.grad = None
        captured = EagerPass(self._decoder, inputs, self._trainable)
        for parameter, gradient in zip(self._trainable, kept, strict=True):
            parameter.grad = gradient
        if self.fails:
            raise RuntimeError("no memory")
        return captured
