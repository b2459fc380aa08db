"""Forward passes of the policy and its reference over one microbatch: log-probabilities, and the loss made of them.

Owns the order of the two passes, which arrays of a microbatch reach the loss, and how the initial weights replace the
trained ones for a pass of the reference (the policy before training, of the KL penalty and DPO), without a second copy
of the model. Does not own gradients, the optimizer or what ranks agree on (trainer/rank.py), or the loss (loss.py).
Invariant: every call runs the decoder equally often on all ranks, also for a microbatch without samples, because every
layer is a collective. Shapes: N counted tokens, H hidden, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from slipstream.trainer.model.context import ContextCut
from slipstream.trainer.model.decoder import Decoder
from slipstream.trainer.model.forward import Forward
from slipstream.trainer.model.graphs import DecoderGraphs
from slipstream.trainer.moe.replay import RecordedRoutes
from slipstream.trainer.parallel import on_device
from slipstream.trainer.step.loss import Loss, PolicyLoss
from slipstream.trainer.step.microbatches import Microbatch, collate
from slipstream.trainer.step.mismatch import kl_estimates
from slipstream.trainer.step.surrogates import LossTokens
from slipstream.trainer.types import Denominators, Extent, Sample, Scores, TrainerOptions


class ReferencePolicy:
    """Switches a decoder to the policy before training and back, after which trained shards hold the same bits. LoRA:
    adapters are switched off. Full training, and adapters that started from other adapters: each rank keeps its initial
    shards and swaps them with the trained ones."""

    def __init__(self, decoder: Decoder, trained_shards: Sequence[Tensor] | None) -> None:
        """Args: `trained_shards`, local tensors that alias the trained parameters, which are copied; None if the policy
        before training is the one without adapters."""
        self._decoder = decoder
        self._swapped = None if trained_shards is None else [(one, one.detach().clone()) for one in trained_shards]

    @contextmanager
    def active(self) -> Iterator[Forward]:
        """What computes the reference inside, without gradients. All ranks enter and leave together."""
        with torch.no_grad():
            if self._swapped is None:
                yield self._decoder.by.without_adapters()
                return
            self._exchange(self._swapped)
            try:
                yield self._decoder.by
            finally:
                self._exchange(self._swapped)

    def _exchange(self, swapped: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Swap trained and initial values in place, and drop gathered copies of the old ones."""
        for trained, initial in swapped:
            kept = trained.clone()
            trained.copy_(initial)
            initial.copy_(kept)
        # What stayed gathered would go on computing with the values that were just swapped out.
        if self._decoder.whole is not None:
            self._decoder.whole.renew()
        for module in self._decoder.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


@dataclass(frozen=True, slots=True)
class PolicyForward:
    decoder: Decoder
    reference: ReferencePolicy | None
    loss_of: Loss
    options: TrainerOptions
    graphs: DecoderGraphs | None = None
    """Runs the decoder where gradients are wanted; None: it runs itself."""

    def loss(self, micro: Microbatch, denominators: Denominators) -> tuple[PolicyLoss, Tensor]:
        """The loss, and the log-probabilities of the policy before the step's first update. The reference runs first,
        while no activations are held."""
        ref_logprobs_N = None if micro.ref_logprobs is None else self._to_device(micro.ref_logprobs)
        if ref_logprobs_N is None and self.reference is not None:
            ref_logprobs_N = self._reference_logprobs(micro, self.reference)
        cut = self._cut(micro)
        routes = self._routes(micro, cut)
        logprobs_N, entropy_N = self._logprobs(micro, cut, routes)
        old_N = logprobs_N.detach() if micro.old_logprobs is None else self._to_device(micro.old_logprobs)
        tokens = LossTokens(
            logprobs_N=logprobs_N,
            old_logprobs_N=old_N,
            rollout_logprobs_N=self._to_device(micro.rollout_logprobs),
            advantages_N=self._to_device(micro.advantages),
            weights_N=torch.ones_like(old_N),
            entropy_N=entropy_N,
            ref_logprobs_N=ref_logprobs_N,
            sequence_index_N=self._to_device(micro.sequence_index),
            sequence_lengths_N=self._to_device(micro.sequence_lengths),
            positions_N=self._to_device(micro.response_positions),
            staleness_N=self._to_device(micro.staleness),
        )
        part = self.loss_of(tokens, self.options.algorithm, denominators, self.options.parity.mask_log_ratio)
        if cut is not None and cut.cp_rank:
            part = part.uncounted()
        if routes is not None:
            part.sums["parity/num_flipped"] = torch.stack(routes.flipped).sum().double()
            part.sums["parity/num_routings"] = routes.num_routings.double()
        return part, old_N

    @torch.no_grad()
    def scores(self, samples: Sequence[Sample], policy_version: int, extents: tuple[Extent, ...] = ()) -> list[Scores]:
        """What updates of these samples need to know of the policy before the first one. Arguments as of `collate`."""
        micro = collate(samples, policy_version, extents)
        ref_logprobs_N = None if self.reference is None else self._reference_logprobs(micro, self.reference)
        cut = self._cut(micro)
        logprobs_N, _ = self._logprobs(micro, cut, self._routes(micro, cut))
        kl_N, algorithm = None, self.options.algorithm
        if ref_logprobs_N is not None and algorithm.penalizes_rewards:
            kl_N = kl_estimates(logprobs_N, ref_logprobs_N, algorithm.kl_estimator)
        counts = [sample.num_valid_tokens for sample in samples]

        def split(values_N: Tensor | None) -> list[Any]:
            if values_N is None:
                return [None] * len(counts)
            return [one.numpy() for one in values_N.cpu().split(counts)] if counts else []

        parts = zip(split(logprobs_N), split(ref_logprobs_N), split(kl_N), strict=True)
        return [Scores(logprobs, ref_logprobs, kl) for logprobs, ref_logprobs, kl in parts]

    def _reference_logprobs(self, micro: Microbatch, reference: ReferencePolicy) -> Tensor:
        cut = self._cut(micro)
        with reference.active() as by:
            return self._logprobs(micro, cut, self._routes(micro, cut), by)[0]

    def _cut(self, micro: Microbatch) -> ContextCut | None:
        """Which tokens of the microbatch this rank has; None: all."""
        layout = self.decoder.layout
        return None if layout.cp_group is None else ContextCut.of(micro.cu_seqlens.tolist(), layout)

    def _routes(self, micro: Microbatch, cut: ContextCut | None) -> RecordedRoutes | None:
        """What the engine recorded for one forward pass. The reference replays it too: its distance from the policy is
        one of weights, not of choices at near-ties."""
        if micro.routed_experts is None or micro.has_route is None:
            return None
        return RecordedRoutes(self._own(micro.routed_experts, cut), self._own(micro.has_route, cut))

    def _logprobs(
        self, micro: Microbatch, cut: ContextCut | None, routes: RecordedRoutes | None, by: Forward | None = None
    ) -> tuple[Tensor, Tensor]:
        """(log-probability, entropy) of every counted token. The head runs only on the rows that predict one."""
        run = partial(self.decoder, by=by, most_tokens=micro.most_tokens)
        if self.graphs is not None and torch.is_grad_enabled():
            run = partial(self.graphs, extents=micro.extents)
        tokens = self._own(micro.token_ids, cut), self._own(micro.positions, cut)
        rows_N, targets_N, predictions = self._to_device(micro.predictor_rows), self._to_device(micro.targets), None
        if cut is None:  # the lengths stay on the host: they decide shapes
            hidden_TH = run(*tokens, torch.from_numpy(micro.cu_seqlens), routes)
        else:
            hidden_TH = self.decoder(*tokens, cut.sequences, routes, by=by)
            predictions = cut.predictions(micro.predictor_rows)
            rows_N, targets_N = predictions.hidden_rows_n, targets_N[predictions.own_n]
        found = self.decoder.logprobs(
            hidden_TH.index_select(0, rows_N),
            targets_N,
            self.options.trainer,
            temperature=self.options.temperature,
            differentiate_entropy=self.options.algorithm.entropy_coef != 0,
        )
        return found if predictions is None else predictions.whole(*found)

    def _own(self, array: np.ndarray, cut: ContextCut | None) -> Tensor:
        """Entries of this rank's tokens, of an array that has one per token."""
        whole = self._to_device(array)
        return whole if cut is None else whole.index_select(0, cut.rows_R)

    def _to_device(self, array: np.ndarray) -> Tensor:
        return on_device(torch.from_numpy(array), self.decoder.layout.device)
