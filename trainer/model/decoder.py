"""Decoder: one decoder-only transformer for every supported architecture, over packed variable-length sequences.

    token ids -> embed_tokens -> layers x [ norm, attention, +, norm, feed-forward, + ] -> norm -> hidden
                                                                     dense | experts             |
                                                                               the caller <- apply_head

Owns what is around the layers (layer.py), and the parameter names, which are the checkpoint's (experts are stacked, see
trainer.moe.experts). Does not own the mathematics of log-probabilities (logprobs.py): the head hands its weight to a
function (`apply_head`), so that the logits of a whole microbatch never exist.

Shapes: T packed tokens, H hidden, V vocabulary.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.conf.schema import TrainerConfig
from slipstream.trainer.kernels.experts.gather import gather_rows
from slipstream.trainer.model.attention.part import Attention
from slipstream.trainer.model.build import Build
from slipstream.trainer.model.forward import Forward
from slipstream.trainer.model.host_activations import HostPass, HostPool
from slipstream.trainer.model.layer import DecoderLayer, Pass
from slipstream.trainer.model.logprobs import token_logprobs
from slipstream.trainer.model.packed_sequences import PackedSequences
from slipstream.trainer.model.rope import RotaryEmbedding
from slipstream.trainer.model.whole_weights import WholeWeights
from slipstream.trainer.moe.experts import Experts
from slipstream.trainer.moe.replay import RecordedRoutes

Out = TypeVar("Out")


class VocabTable(nn.Module):
    """A (V, H) weight. Where FSDP2 shards it, it is gathered for forward, and again for the backward of what forward
    returns; it is whole only then. Embedding and head are two uses of this one class, so that tied embeddings are one
    parameter of one FSDP2 unit."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        shape = (build.spec.vocab_size, build.spec.hidden_size)
        self.compute_dtype = build.compute_dtype
        self.weight = nn.Parameter(torch.empty(shape, dtype=build.weight_dtype))

    def forward(self, use: Callable[[Tensor, Tensor], Out], x: Tensor) -> Out:
        """use(x, weight_VH) with the weight in the compute dtype."""
        return use(x, self.weight.to(self.compute_dtype))


class Trunk(nn.Module):
    """Everything but the head. A module of its own, because the checkpoint's names begin with `model.`."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        spec = build.spec
        self.embed_tokens, self._scale = VocabTable(build), spec.embedding_scale
        self.layers = nn.ModuleList(DecoderLayer(build, layer) for layer in range(spec.num_layers))
        self.norm = build.norm()

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """The stream that enters the first layer, [T, H]."""
        is_on_host = self.embed_tokens.weight.device != token_ids_T.device
        x_TH = self.embed_tokens(_rows_of_host if is_on_host else F.embedding, token_ids_T)
        return x_TH if self._scale == 1.0 else x_TH * torch.tensor(self._scale, dtype=x_TH.dtype)


class Decoder(nn.Module):
    """Token ids -> hidden states after the final norm. Built by `build_decoder`."""

    def __init__(self, build: Build, by: Forward, host: HostPool | None) -> None:
        """
        Args:
            by: What computes it, where a call does not say otherwise.
            host: Where layers keep what their backward needs; None: on the device."""
        super().__init__()
        self.spec, self.by, self.host = build.spec, by, host
        self.dtype = build.compute_dtype
        """Compute dtype (model.dtype): the format of activations, frozen weights and exports."""
        self.lora = build.lora
        """None in full training."""
        self.layout = build.layout
        self.model = Trunk(build)
        self.lm_head = None if build.spec.tie_embeddings else VocabTable(build)
        self.rotaries = [RotaryEmbedding(rope, build.numerics.rotation) for rope in build.spec.ropes]
        attentions = (module for module in self.modules() if isinstance(module, Attention))
        self.attention_backends = {one.backend for one in attentions if one.backend is not None}
        self.whole: WholeWeights | None = None
        """Gathers dense parameters for `in_use`; None: there is one rank, or FSDP2 gathers them layer by layer."""

    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        cu_seqlens: Tensor | PackedSequences,
        routes: RecordedRoutes | None = None,
        *,
        by: Forward | None = None,
        most_tokens: int | None = None,
        may_move: bool = True,
    ) -> Tensor:
        """Run the decoder over one microbatch, or over this rank's tokens of it (context.py).

        Args:
            token_ids_T: int64 [T], sequences one after the other. T = 0 is a dummy microbatch: every collective still
                runs, and every trainable parameter gets a gradient of zeros.
            positions_T: int64 [T], position of each token in its own sequence.
            cu_seqlens: int [num_sequences + 1], start of each sequence and T at the end; [0] when T = 0. Pass it on the
                CPU if you can: it decides shapes, and the host waits to read it from a GPU. Or where they lie.
            routes: experts to use instead of the routers' own choice. Each layer appends to its `flipped`.
            by: computes it, instead of the decoder's own.
            most_tokens: T of the rank that has most. None: with experts on several ranks, the host waits for that.
            may_move: whether what backward needs may wait where `host` says.

        Returns:
            hidden_TH in the compute dtype.
        """
        sequences = cu_seqlens
        if not isinstance(sequences, PackedSequences):
            sequences = PackedSequences.from_cu_seqlens(sequences, token_ids_T.shape[0], token_ids_T.device)
            sequences = replace(sequences, most_tokens=most_tokens)
        by, host = by or self.by, self.host if may_move and torch.is_grad_enabled() else None
        if not token_ids_T.shape[0]:
            by = by.gradients_by or by  # kernels of engines take no empty microbatch
        if self.layout.ep_group is not None and sequences.most_tokens is None:
            sequences = replace(sequences, most_tokens=self.layout.most_of_ep_group(token_ids_T.shape[0]))
        x_TH, ropes = self.model.embed(token_ids_T), self.ropes(positions_T)
        run = Pass(by, ropes, sequences, routes, None if host is None else HostPass(host, len(self.model.layers)))
        for layer in self.model.layers:
            x_TH = layer(x_TH, run)
        return by.norm(self.model.norm, x_TH, run.take_sum())

    def in_use(self) -> AbstractContextManager[None]:
        """Microbatches run inside. Where dense parameters are gathered whole, they are so here and nowhere else, and
        parameters that are read or changed are read or changed outside. Collective at either end."""
        return nullcontext() if self.whole is None else self.whole.in_use()

    def ropes(self, positions_T: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Cosines and sines of each rotation that layers have (DecoderLayer.rope)."""
        return [rotary(positions_T, self.dtype) for rotary in self.rotaries]

    def apply_head(self, use: Callable[[Tensor, Tensor], Out], hidden_TH: Tensor) -> Out:
        """Call use(hidden_TH, weight_VH). The whole head weight exists during this call, and again in its backward.

        `use` returns a tensor, or a tuple or dict of tensors, that depend on hidden_TH: FSDP2 attaches its backward
        hooks to them. A custom autograd.Function may save weight_VH with ctx.save_for_backward; nothing else may keep
        it. The weight is in the compute dtype, requires grad in full training, and is the embedding's when tied. Call
        this after `forward`.

        Example:
            logprobs_TV = decoder.apply_head(lambda hidden, weight: F.linear(hidden, weight).log_softmax(-1), hidden_TH)
        """
        table = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return table(use, hidden_TH)

    def logprobs(
        self, hidden_NH: Tensor, targets_N: Tensor, trainer: TrainerConfig, *, temperature: float = 1.0,
        differentiate_entropy: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Log-probabilities and entropies of these targets, as token_logprobs gives them, by this decoder's head."""
        return self.apply_head(
            lambda rows_NH, weight_VH: token_logprobs(
                rows_NH, weight_VH, targets_N, temperature=temperature,
                chunk_tokens=trainer.logprob_chunk_tokens(self.spec.vocab_size), head=self.by.head,
                softcap=self.spec.logit_softcap, differentiate_entropy=differentiate_entropy,
            ),
            hidden_NH,
        )  # fmt: skip

    @property
    def backends(self) -> dict[str, str]:
        """Kernels chosen at construction, for the run's log.

        Example: {"attention": "varlen", "experts": "triton"}
        """
        chosen = {"attention": ", ".join(sorted(self.attention_backends))}
        if self.by.attention_values is not None:
            chosen["attention values"] = self.by.attention_values
        for module in self.modules():
            if isinstance(module, Experts):
                chosen["experts"] = str(module.backend)
        return chosen


def _rows_of_host(token_ids_T: Tensor, table_VH: Tensor) -> Tensor:
    return gather_rows(table_VH, token_ids_T)
