"""CUDA graphs of the decoder's forward and backward, for microbatches whose kernels the host cannot launch as fast as
the GPU runs them.

    3,700 tokens of 21 sequences --padded--> 3,840 tokens, 32 sequences: one more of 140 tokens, and 10 empty ones
        the first microbatch of that size    kernel by kernel, unpadded
        the second                           forward and backward are captured, then replayed
        all later ones                       copy the tokens, replay the forward; head and loss kernel by kernel;
                                             copy the gradient of the hidden states, replay the backward

A captured kernel reads and writes the same addresses on every replay. So inputs are copied to tensors of the graph, and
gradients lie where activations lay before: they are a parameter's own until the next replay, before which they are
copied, and added to if the parameter has some already. Attention by cuDNN needs lengths on the host; such microbatches
are not padded, and one graph serves only those of the same lengths.

Owns the captured graphs and their memory: one pool for all, because at most one microbatch is between its forward and
its backward. Does not own sizes (graph_sizes.py), what is captured (decoder.py), the head or the loss.
Invariant: hidden states and gradients are those of the decoder, up to kernels that grouped products choose by row
count. Padding adds zeros to gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from slipstream.trainer.model.attention.attend import AttentionBackend
from slipstream.trainer.model.decoder import Decoder
from slipstream.trainer.model.graph_sizes import GraphSize, graph_size, padded_starts
from slipstream.trainer.model.packed_sequences import PackedSequences
from slipstream.trainer.moe.dispatch import BOUND_BYTES, gathers
from slipstream.trainer.moe.experts import Experts
from slipstream.trainer.moe.replay import RecordedRoutes
from slipstream.trainer.types import Extent

logger = logging.getLogger(__name__)

MOST_GRAPHS = 32
"""Sizes that are captured: the first ones that come twice. A graph takes some ten MB, its capture about a second."""
MOST_SEEN = 1024
"""Sizes that are remembered. Those of long sequences hardly ever come again."""
MARGIN = 1.05
"""The least memory to leave beside the pool, as a multiple of what the fullest microbatch took."""


def refusal_of_graphs(decoder: Decoder, device: torch.device) -> str | None:
    """Why this decoder's microbatches cannot be replayed; None if they can."""
    if device.type != "cuda":
        return "the trainer has no GPU"
    if (reason := _refusal_of_ranks(decoder)) is not None:
        return reason
    if not decoder.attention_backends <= {AttentionBackend.cudnn, AttentionBackend.varlen}:
        return f"attention is {decoder.backends['attention']}"
    if decoder.by.gradients_by is not None:
        return "values come from merged weights or from the engine's kernels"
    for attention in decoder.spec.kinds_of_attention:
        if attention.uncaptured is not None:
            return attention.uncaptured
    if decoder.spec.norms_halves:
        return "layers norm what they add, which was not captured yet"
    for module in decoder.modules():
        if isinstance(module, Experts) and module.packed is not None:
            return "experts are packed"
        if isinstance(module, Experts) and module.reads_counts:
            return "the host reads how many tokens each expert gets"
    return None


def _refusal_of_ranks(decoder: Decoder) -> str | None:
    layout, moe = decoder.layout, decoder.spec.moe
    if layout.world_size == 1:
        return None
    if layout.cp_group is not None:
        return "ranks share sequences"
    if decoder.whole is None or any(isinstance(module, FSDPModule) for module in decoder.modules()):
        return "weights are gathered layer by layer"
    modes = {module.combine_mode for module in decoder.modules() if isinstance(module, Experts)}
    if moe is not None and not all(gathers(layout.ep_size, moe.top_k, mode) for mode in modes):
        return "the host reads how many rows travel"
    return None


class DecoderGraphs:
    """Stands for a decoder where gradients are wanted: a size that comes again is captured, and replayed from then on.
    Make one only where `refusal_of_graphs` is None."""

    def __init__(self, decoder: Decoder, max_tokens: int, any_of_ranks: Callable[[bool], bool] = bool) -> None:
        """
        Args:
            max_tokens: Larger microbatches are not captured (trainer.cuda_graph_tokens).
            any_of_ranks: Collective: whether its argument is true on any rank."""
        self._decoder, self._max_tokens, self._any_of_ranks = decoder, max_tokens, any_of_ranks
        whole = [] if decoder.whole is None else decoder.whole.trainable
        own = [one for one in decoder.parameters() if one.requires_grad and not isinstance(one, DTensor)]
        self._trainable = [*whole, *own]
        self._lent: list[tuple[nn.Parameter, Tensor]] = []
        """Gradients in the pool, and the parameters that may have them."""
        self._seen: dict[GraphSize, None] = {}
        """Sizes that came, the oldest first."""
        self._captured: dict[GraphSize, CapturedPass] = {}
        self._pool: Any = None
        self._fullest_bytes = 0
        """The most memory that was allocated so far, the pool's not counted."""
        self.num_replays = 0

    def __call__(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        cu_seqlens: Tensor,
        routes: RecordedRoutes | None = None,
        *,
        extents: Sequence[Extent] = (),
    ) -> Tensor:
        """As Decoder.forward. The result is overwritten by the next call; its backward must come before that.
        `extents`: of every rank's microbatch. Ranks take one size and capture together, so that exchanges match."""
        starts = tuple(cu_seqlens.tolist())
        has_cudnn = AttentionBackend.cudnn in self._decoder.attention_backends
        size = graph_size(starts, has_routes=routes is not None, has_cudnn=has_cudnn, extents=extents)
        captured = None
        if size is not None and self._may_capture(size) and self._comes_again(size):
            self.take_back()
            captured = self._filled(size, GraphInputs(size, token_ids_T, positions_T, starts, routes, self._decoder))
        if captured is None:
            most_tokens = max((one.num_tokens for one in extents), default=None)
            return self._decoder(token_ids_T, positions_T, cu_seqlens, routes, most_tokens=most_tokens)
        self.num_replays += 1
        if routes is not None:
            routes.flipped.extend(captured.flipped)
        anchor = torch.zeros((), requires_grad=True)
        return _Replay.apply(anchor, captured, self, len(token_ids_T))

    @property
    def peak_bytes(self) -> int:
        """The most memory that a replay uses and that torch does not count as allocated."""
        return max((captured.peak_bytes for captured in self._captured.values()), default=0)

    def with_replays(self, peak_bytes: int) -> int:
        """The most memory in use, of the most that torch counts as allocated, which must stay free beside the pool."""
        self._fullest_bytes = max(self._fullest_bytes, peak_bytes)
        return peak_bytes + self.peak_bytes

    def forget(self) -> None:
        """Give the memory back. Sizes are captured anew when they come again."""
        self.take_back()
        self._captured.clear()
        self._seen.clear()
        self._pool = None

    def add_gradients(self, gradients: list[tuple[nn.Parameter, Tensor]]) -> None:
        """Give parameters these gradients of a replay, or add to those that they have."""
        self._lent = gradients
        sums, addends = [], []
        for parameter, gradient in gradients:
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                sums.append(parameter.grad)
                addends.append(gradient)
        if sums:
            torch._foreach_add_(sums, addends)

    def take_back(self) -> None:
        """Copy the gradients that parameters have in the pool: the next replay writes there."""
        for parameter, lent in self._lent:
            if parameter.grad is lent:
                parameter.grad = lent.clone()
        self._lent = []

    def _may_capture(self, size: GraphSize) -> bool:
        layout, spec = self._decoder.layout, self._decoder.spec
        if not 0 < size.num_tokens <= self._max_tokens:
            return False
        longest = (attention.longest_captured for attention in spec.kinds_of_attention)
        if any(most is not None and size.longest > most for most in longest):
            return False
        if layout.ep_group is None or spec.moe is None:
            return True
        num_rows = layout.ep_size * size.num_tokens * spec.moe.top_k
        return num_rows * spec.hidden_size * self._decoder.dtype.itemsize <= BOUND_BYTES  # else the host counts them

    def _comes_again(self, size: GraphSize) -> bool:
        """Whether this size is captured, or can be because it came before. Remembers it."""
        if size in self._captured:
            return True
        if len(self._captured) == MOST_GRAPHS:
            return False
        came_before = size in self._seen
        self._seen[size] = None
        if len(self._seen) > MOST_SEEN:
            del self._seen[next(iter(self._seen))]
        return came_before

    def _filled(self, size: GraphSize, inputs: GraphInputs) -> CapturedPass | None:
        """The captured pass of this size, with these inputs. None if it cannot be captured; nothing is from then on."""
        captured = self._captured.get(size)
        if captured is not None:
            captured.inputs.fill(inputs)
            return captured
        reason = "another rank failed"
        try:
            captured = self._capture(inputs)
        except RuntimeError as error:  # an OutOfMemoryError is one
            reason = str(error).partition("\n")[0]
        if self._any_of_ranks(captured is None) or captured is None:
            logger.warning(
                "microbatches run without CUDA graphs from now on, because one of %d tokens could not be captured: %s",
                size.num_tokens, reason,
            )  # fmt: skip
            self._max_tokens = 0
            self.forget()
            return None
        self._captured[size] = captured
        return captured

    def _capture(self, inputs: GraphInputs) -> CapturedPass:
        """Raises RuntimeError if there is too little memory for it, or for the fullest microbatch beside it."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        kept = [parameter.grad for parameter in self._trainable]
        try:
            captured = CapturedPass(self._decoder, inputs, self._trainable, self._pool)
        finally:
            for parameter, gradient in zip(self._trainable, kept, strict=True):
                parameter.grad = gradient
        segments = torch.cuda.memory_snapshot()
        pool_bytes = sum(one["total_size"] for one in segments if tuple(one["segment_pool_id"]) == self._pool)
        left = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - pool_bytes
        if left < MARGIN * self._fullest_bytes:
            raise RuntimeError(
                f"its {pool_bytes / 1e9:.1f} GB would leave {left / 1e9:.1f} GB for the fullest microbatch, which "
                f"takes {self._fullest_bytes / 1e9:.1f} GB"
            )
        return captured


class GraphInputs:
    """A microbatch, padded to a graph's size, in tensors of its own."""

    def __init__(
        self,
        size: GraphSize,
        token_ids_T: Tensor,
        positions_T: Tensor,
        starts: tuple[int, ...],
        routes: RecordedRoutes | None,
        decoder: Decoder,
    ) -> None:
        num_missing = size.num_tokens - len(token_ids_T)
        starts = starts if size.starts is not None else padded_starts(starts, size)
        laid_out = PackedSequences.from_cu_seqlens(
            torch.tensor(starts), size.num_tokens, token_ids_T.device, row_length=size.longest
        )
        most_tokens = None if decoder.layout.ep_group is None else size.num_tokens
        self.sequences = replace(laid_out, starts=starts if size.starts is not None else (), most_tokens=most_tokens)
        self.token_ids_T = F.pad(token_ids_T, (0, num_missing))
        self.positions_T = F.pad(positions_T, (0, num_missing))
        self.routes = None
        if size.has_routes:
            routes = routes or _no_routes(decoder, token_ids_T)
            experts_TLK = F.pad(routes.experts_TLK, (0, 0, 0, 0, 0, num_missing))
            self.routes = RecordedRoutes(experts_TLK, F.pad(routes.is_recorded_T, (0, num_missing)))

    def fill(self, other: GraphInputs) -> None:
        for own, others in zip(self._tensors(), other._tensors(), strict=True):
            own.copy_(others)

    def hidden_states(self, decoder: Decoder) -> Tensor:
        """The decoder's hidden states of these inputs, padding included."""
        return decoder(self.token_ids_T, self.positions_T, self.sequences, self.routes, may_move=False)

    def _tensors(self) -> list[Tensor]:
        of_routes = [] if self.routes is None else [self.routes.experts_TLK, self.routes.is_recorded_T]
        where = [self.sequences.cu_seqlens, self.sequences.padded_row_T]
        return [self.token_ids_T, self.positions_T, *where, *of_routes]


class CapturedPass:
    """The graphs of one size: forward from `inputs` to `hidden_TH`, backward from `dhidden_TH` to `gradients`."""

    def __init__(self, decoder: Decoder, inputs: GraphInputs, trainable: list[nn.Parameter], pool: Any) -> None:
        """Capture both. Leaves gradients behind that are none."""
        self.inputs = inputs
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles what is new at this size
            hidden_TH = inputs.hidden_states(decoder)
            self.dhidden_TH = torch.zeros_like(hidden_TH)
            _drop_gradients(trainable)
            hidden_TH.backward(self.dhidden_TH)
            del hidden_TH
        torch.cuda.current_stream().wait_stream(stream)
        _drop_gradients(trainable)
        if inputs.routes is not None:
            inputs.routes.flipped.clear()
        torch.cuda.reset_peak_memory_stats()
        # Other threads may call CUDA meanwhile: a publish, or copies for a checkpoint.
        options: dict[str, Any] = {"pool": pool, "stream": stream, "capture_error_mode": "thread_local"}
        with torch.cuda.graph(self.forward, **options):
            hidden_TH = inputs.hidden_states(decoder)
        with torch.cuda.graph(self.backward, **options):
            hidden_TH.backward(self.dhidden_TH)
        self.hidden_TH = hidden_TH.detach()
        del hidden_TH
        self.flipped = [] if inputs.routes is None else list(inputs.routes.flipped)
        self.gradients = [(one, alias(one.grad)) for one in trainable if one.grad is not None]
        _drop_gradients(trainable)
        self.peak_bytes = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        """Device memory that a replay uses, at most."""
        torch.cuda.reset_peak_memory_stats()


def alias(tensor: Tensor) -> Tensor:
    """The same elements in the same memory, which the result does not keep: what is captured next may use it, too."""
    same_size = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]

    class Memory:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.element_size() for stride in tensor.stride()),
            "typestr": f"<i{tensor.element_size()}",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }

    return torch.as_tensor(Memory(), dtype=same_size, device=tensor.device).view(tensor.dtype)


def _no_routes(decoder: Decoder, token_ids_T: Tensor) -> RecordedRoutes:
    """Empty ones, for a rank whose microbatch has no routes while another rank's has some."""
    moe = decoder.spec.moe
    assert moe is not None
    experts_TLK = token_ids_T.new_zeros(len(token_ids_T), sum(moe.layers), moe.top_k, dtype=torch.int16)
    return RecordedRoutes(experts_TLK, torch.zeros_like(token_ids_T, dtype=torch.bool))


def _drop_gradients(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


class _Replay(torch.autograd.Function):
    """Replays a captured forward, and in the backward its backward, which gives parameters their gradients itself."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, captured: CapturedPass, graphs: DecoderGraphs, num_tokens: int) -> Tensor:
        captured.forward.replay()
        ctx.captured, ctx.graphs, ctx.num_tokens, ctx.replay = captured, graphs, num_tokens, graphs.num_replays
        return captured.hidden_TH[:num_tokens].detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dhidden_TH: Tensor) -> tuple[None, None, None, None]:
        if ctx.replay != ctx.graphs.num_replays:
            raise RuntimeError("a captured forward was replayed again before this backward")
        given_TH = ctx.captured.dhidden_TH
        given_TH[: ctx.num_tokens].copy_(dhidden_TH)
        given_TH[ctx.num_tokens :].zero_()
        ctx.captured.backward.replay()
        ctx.graphs.add_gradients(ctx.captured.gradients)
        return None, None, None, None
