"""Context parallelism: one microbatch's tokens over the ranks of a cp group.

    cp_size 2, a sequence of 8    chunks   [0 1] [2 3] [4 5] [6 7]
    cp_rank 0  chunks 0 and 3     queries   0 1             6 7      against keys 0-1 and 0-7
    cp_rank 1  chunks 1 and 2     queries       2 3   4 5            against keys 0-3 and 0-5

Each sequence is cut into 2 x cp_size chunks, and cp_rank c holds chunks c and 2 x cp_size - 1 - c, so that all ranks
have equal shares of the causal triangle. Everything but attention works on one token at a time and needs no other rank.
Attention gathers keys and values; their gradients go back to the ranks that hold the tokens and are added there in the
order of ranks. Log-probabilities are gathered too, so that every rank computes the loss of the whole microbatch, of
which each log-probability's gradient goes on where it was computed.

Owns the cut and both exchanges. Does not own kernels (attend.py) nor the group (parallel.py). Invariants: all ranks of
the group hold the same microbatch, and make the same calls in the same order, also a rank that gets no token. An
exchange on gloo has a name of at most 15 characters (see parallel.gather_wholes).

Shapes: T tokens of the microbatch, R of this rank, K keys of this rank's queries, N predictions, n of this rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from slipstream.trainer.model.packed_sequences import PackedSequences
from slipstream.trainer.parallel import ParallelLayout


class Piece(NamedTuple):
    """A chunk of one sequence, in rows of the microbatch. It sees keys from the sequence's first row to its own."""

    sequence_start: int
    start: int
    stop: int


def pieces_of_rank(starts: Sequence[int], cp_size: int, cp_rank: int) -> tuple[list[Piece], list[Piece]]:
    """The rank's earlier chunk of every sequence, and its later ones; without empty chunks.

    Args:
        starts: first row of each sequence, and the number of rows.
    """
    num_chunks = 2 * cp_size
    halves: list[list[Piece]] = []
    for chunk in (cp_rank, num_chunks - 1 - cp_rank):
        halves.append([])
        for start, stop in itertools.pairwise(starts):
            first, last = (start + (stop - start) * edge // num_chunks for edge in (chunk, chunk + 1))
            if first < last:
                halves[-1].append(Piece(start, first, last))
    return halves[0], halves[1]


@dataclass(frozen=True, slots=True, eq=False)
class ContextCut:
    """Where the tokens of one microbatch lie over the ranks of a cp group."""

    group: dist.ProcessGroup
    cp_rank: int
    rows_R: Tensor
    """int64; this rank's tokens, as rows of the microbatch."""
    chunks: PackedSequences
    """Its chunks, each with where its keys lie."""
    owner_T: np.ndarray
    """int64; the cp_rank of each token."""
    place_T: np.ndarray
    """int64; the token's row there."""
    most_rows: int
    """R of the rank that has most."""
    key_places: tuple[Tensor, Tensor]
    """int64; of the keys of earlier and of later chunks: rows of what all ranks sent. No row twice in one of them."""

    @classmethod
    def of(cls, starts: Sequence[int], layout: ParallelLayout) -> ContextCut:
        """The cut of a microbatch with these starts (pieces_of_rank)."""
        assert layout.cp_group is not None
        num_tokens, own = starts[-1], layout.cp_rank
        owner_T, place_T, most = np.zeros(num_tokens, np.int64), np.zeros(num_tokens, np.int64), 0
        for rank in range(layout.cp_size):
            rows = _rows(*(piece for half in pieces_of_rank(starts, layout.cp_size, rank) for piece in half))
            owner_T[rows], place_T[rows], most = rank, np.arange(len(rows)), max(most, len(rows))
        halves = pieces_of_rank(starts, layout.cp_size, own)
        keys = [[Piece(piece.sequence_start, piece.sequence_start, piece.stop) for piece in half] for half in halves]
        sent_T, pieces = owner_T * most + place_T, [*halves[0], *halves[1]]
        earlier, later = (torch.from_numpy(sent_T[_rows(*half)]).to(layout.device) for half in keys)
        rows_R = torch.from_numpy(_rows(*pieces)).to(layout.device)
        chunks = _laid_out(pieces, [*keys[0], *keys[1]], layout.device)
        return cls(layout.cp_group, own, rows_R, chunks, owner_T, place_T, most, (earlier, later))

    @property
    def sequences(self) -> PackedSequences:
        """This rank's chunks as the decoder takes them."""
        return replace(self.chunks, gather=self.gather_keys)

    def gather_keys(self, k_RGD: Tensor, v_RGV: Tensor) -> tuple[Tensor, Tensor]:
        """[K, G, D] and [K, G, V]: keys and values of each of `chunks`, in order. Collective, as is its backward."""
        flat = [heads.reshape(len(heads), heads.shape[1] * heads.shape[2]) for heads in (k_RGD, v_RGV)]
        both_KF = _GatheredKeys.apply(torch.cat(flat, dim=1), self)
        k_KF, v_KF = both_KF.split([part.shape[1] for part in flat], dim=1)
        return k_KF.unflatten(1, k_RGD.shape[1:]), v_KF.unflatten(1, v_RGV.shape[1:])

    def predictions(self, rows_N: np.ndarray) -> Predictions:
        """The predictions made of the hidden states of these rows of the microbatch."""
        owner_N, device = self.owner_T[rows_N], self.rows_R.device
        places_N, most = np.zeros(len(rows_N), np.int64), 0
        for rank in range(self.group.size()):
            (own,) = np.nonzero(owner_N == rank)
            places_N[own], most = np.arange(len(own)), max(most, len(own))
        (own_n,) = np.nonzero(owner_N == self.cp_rank)
        return Predictions(
            self.group,
            torch.from_numpy(self.place_T[rows_N[own_n]]).to(device),
            torch.from_numpy(own_n).to(device),
            torch.from_numpy(owner_N * most + places_N).to(device),
            most,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """Which of a microbatch's predictions this rank makes, and how all ranks come to know all of them."""

    group: dist.ProcessGroup
    hidden_rows_n: Tensor
    """int64; rows of this rank's hidden states."""
    own_n: Tensor
    """int64; which of the N they predict."""
    sent_N: Tensor
    """int64; rows of what all ranks sent."""
    most: int
    """n of the rank that has most."""

    def whole(self, logprobs_n: Tensor, entropy_n: Tensor) -> tuple[Tensor, Tensor]:
        """[N] each, the same on every rank. Collective; its backward, which is that of this rank's own, is not."""
        sent = torch.stack([logprobs_n, entropy_n], dim=1)
        found_N2 = _gather(sent, self.most, self.group).index_select(0, self.sent_N)
        logprobs_N, entropy_N = (column.clone() for column in found_N2.unbind(1))
        return logprobs_N.index_copy(0, self.own_n, logprobs_n), entropy_N.index_copy(0, self.own_n, entropy_n)


class _GatheredKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_RF: Tensor, cut: ContextCut) -> Tensor:
        ctx.cut, ctx.num_rows = cut, len(own_RF)
        return _gather(own_RF, cut.most_rows, cut.group).index_select(0, torch.cat(cut.key_places))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_KF: Tensor) -> tuple[Tensor, None]:
        cut: ContextCut = ctx.cut
        sent = grad_KF.new_zeros(cut.group.size() * cut.most_rows, grad_KF.shape[1])
        halves = grad_KF.split([len(places) for places in cut.key_places])
        for places, grad in zip(cut.key_places, halves, strict=True):  # one addition per row and half: a fixed order
            sent.index_add_(0, places, grad)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=cut.group)
        return _sum_of_ranks(received, cut.group.size())[: ctx.num_rows].to(grad_KF.dtype), None


def _gather(own: Tensor, most_rows: int, group: dist.ProcessGroup) -> Tensor:
    """Rows of all ranks, most_rows of each."""
    sent = F.pad(own.detach(), (0, 0, 0, most_rows - len(own))).contiguous()
    received = sent.new_empty(group.size() * most_rows, own.shape[1])
    if most_rows:
        dist.all_gather_into_tensor(received, sent, group=group)
    return received


def _sum_of_ranks(received: Tensor, num_ranks: int) -> Tensor:
    """Add up what each rank sent, in float32, in the order of ranks."""
    parts = received.view(num_ranks, -1, received.shape[1]).unbind()
    total = parts[0].float() if received.dtype.itemsize < 4 else parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _rows(*pieces: Piece) -> np.ndarray:
    """int64; the rows of pieces, one after the other."""
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(piece.start, piece.stop) for piece in pieces)])


def _laid_out(queries: Sequence[Piece], keys: Sequence[Piece], device: torch.device) -> PackedSequences:
    """Queries as packed sequences, with their keys'."""
    both: list[PackedSequences] = []
    for pieces in (queries, keys):
        starts = torch.tensor([0, *(piece.stop - piece.start for piece in pieces)]).cumsum(0)
        both.append(PackedSequences.from_cu_seqlens(starts, int(starts[-1]), device))
    return replace(both[0], keys=both[1])
