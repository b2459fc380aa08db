"""The way of a microbatch's tokens to the experts of one layer.

Dispatch: an all-to-all takes a row there per choice.

    tokens [T] --source--> choices sorted by expert [S = T*K] --all-to-all--> rows of all ranks, by sender [R]
           --by expert, then sender--> rows [R] --experts--> ... and the same way back

Row counts are exact: there is no padding and no capacity limit, and a rank with zero rows still joins every collective.
Without an expert-parallel group nothing is sent and the host does not wait for the device.

Gathered: every ep_rank gets every token once, which takes fewer bytes, and sums have another order.

    tokens [T] --all-gather--> tokens of all ranks [N] --choices of own experts, sorted--> rows [S] --experts--> rows
    rows --sum of each token's--> partial sums [N] --all-to-all--> partial sums by rank [R, T] --sum--> tokens [T]

No exchange is waited for at once: choices are sorted while tokens travel, own tokens summed while others' sums do. A
token that each of R ranks has an expert for travels R - 1 times, and not once per choice; its partial sums come back,
and not its rows. Every rank gets also the tokens that it has no expert for, so this is for groups of no more ranks than
a token has experts (`gathers`), where few are. All sizes are known to the host: R ranks have R x M rows, of which each
rank's own come first and the rest is padding. How many rows own experts get stays on the device where memory for all
choices of all tokens is small (BOUND_BYTES), and the host does not wait; else it reads that one number. Choices of a
rank are summed in float32, in the order of the router, then other ranks in their order, then this one. So a sum may
differ in its last bit from that of one rank, whose choices are all summed in the order of the router.

Owns the order of rows and the exchange; does not differentiate (experts.py does). An expert's rows are in the order of
senders, then of tokens, as they would be on one rank.

Shapes: T tokens of this rank, M of the rank that has most, N = R M, K choices of a token, S rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.conf.schema import CombineMode
from slipstream.trainer.kernels.experts.combine import weighted_sum
from slipstream.trainer.kernels.experts.counting_sort import ExpertOrder, sort_by_expert
from slipstream.trainer.kernels.experts.gather import gather_rows
from slipstream.trainer.kernels.experts.groups import RowGroups

BOUND_BYTES = 512 << 20
"""Bytes of rows, one for each choice of each token: with more, rows have memory for as many as there are."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """The rows that ranks of the expert-parallel group send each other for one layer."""

    group: dist.ProcessGroup
    send_splits: list[int]
    """Rows of this rank's tokens that each ep_rank's experts get."""
    receive_splits: list[int]
    """Rows that this rank's experts get from each ep_rank."""
    by_expert_R: Tensor
    """int64; row i in expert order is row by_expert[i] in sender order."""
    by_sender_R: Tensor
    """The inverse."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    choice_of_row_S: Tensor
    """int64; row i, sorted by expert, is choice choice_of_row[i] = t * K + k."""
    token_of_row_S: Tensor
    """int64; row i is a copy of token token_of_row[i]."""
    row_of_choice_TK: Tensor
    """The inverse, one entry per choice."""
    groups: RowGroups
    """Rows of each local expert, after the exchange."""
    exchange: Exchange | None
    """None: this rank holds every expert."""

    def taken_apart(self) -> tuple[list[Tensor], Callable[..., Dispatch]]:
        """Its tensors, and a function that builds it from them again. An autograd.Function saves these tensors, so that
        they are freed when its backward ends. Anything else on its ctx lives until the whole graph ends, after the
        backward of every other layer."""
        (of_groups, groups_of), exchange = self.groups.taken_apart(), self.exchange
        of_exchange = [] if exchange is None else [exchange.by_expert_R, exchange.by_sender_R]
        splits = None if exchange is None else (exchange.group, exchange.send_splits, exchange.receive_splits)
        num_of_groups = len(of_groups)  # `again` holds no tensor

        def again(choices: Tensor, tokens: Tensor, rows: Tensor, *rest: Tensor) -> Dispatch:
            sent = None if splits is None else Exchange(*splits, rest[-2], rest[-1])
            return Dispatch(choices, tokens, rows, groups_of(*rest[:num_of_groups]), sent)

        return [self.choice_of_row_S, self.token_of_row_S, self.row_of_choice_TK, *of_groups, *of_exchange], again

    def sending(self, values_TH: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        """Start to bring tokens to the experts of their choices.

        Returns:
            A function that waits for it, before which other work may be queued. It returns a tensor, and for each row
            in expert order the index of its row in that tensor. The kernel that reads the rows does this last gather.
        """
        exchange = self.exchange
        if exchange is None:
            return lambda: (values_TH, self.token_of_row_S)
        rows = gather_rows(values_TH, self.token_of_row_S)
        wait = _all_to_all(rows, exchange.send_splits, exchange.receive_splits, exchange.group)
        return lambda: (wait(), exchange.by_expert_R)

    def weights_of_rows(self, weights_TK: Tensor) -> Tensor:
        """The routing weight of each row in expert order."""
        weights_S, exchange = weights_TK.flatten()[self.choice_of_row_S], self.exchange
        if exchange is None:
            return weights_S
        received = _all_to_all(weights_S, exchange.send_splits, exchange.receive_splits, exchange.group)()
        return received[exchange.by_expert_R]

    def combining(
        self,
        rows_SH: Tensor,
        weights_TK: Tensor | None,
        mode: CombineMode = CombineMode.fp32_once,
        sum_dtype: torch.dtype | None = None,
    ) -> Callable[[], Tensor]:
        """Start to bring rows in expert order back to their tokens' rank.

        Args:
            rows_SH: Not held by the caller, they end as soon as they are sorted for sending.
            weights_TK, mode: As in weighted_sum.
            sum_dtype: Of partial sums; here there are none.

        Returns:
            A function that waits for it and sums the rows of each token: [T, H] in their dtype. Call it once.
        """
        exchange = self.exchange
        if exchange is None:
            out_TH = weighted_sum(rows_SH, weights_TK, self.row_of_choice_TK, mode)
            return lambda: out_TH
        rows_SH = gather_rows(rows_SH, exchange.by_sender_R)
        wait = _all_to_all(rows_SH, exchange.receive_splits, exchange.send_splits, exchange.group)
        return lambda: weighted_sum(wait(), weights_TK, self.row_of_choice_TK, mode)

    def weights_gradient(self, dw_S: Tensor) -> Callable[[], Tensor]:
        """Start to bring values in expert order back. Returns a function that waits for them: [T, K]."""
        exchange = self.exchange
        if exchange is None:
            return lambda: dw_S[self.row_of_choice_TK]
        wait = _all_to_all(dw_S[exchange.by_sender_R], exchange.receive_splits, exchange.send_splits, exchange.group)
        return lambda: wait()[self.row_of_choice_TK]


@torch.no_grad()
def plan_dispatch(
    experts_TK: Tensor, num_experts: int, group: dist.ProcessGroup | None, shares: Sequence[int] = ()
) -> Dispatch:
    """Sort choices by expert and, with a group, exchange row counts (a small all-to-all, one wait for the device).

    Args:
        group: The ep_ranks; None: this rank holds every expert.
        shares: Experts of each ep_rank, in order.
    """
    order = sort_by_expert(experts_TK.flatten(), num_experts, experts_TK.shape[1])
    choices = (order.choice_of_row_S, order.token_of_row_S, order.row_of_choice_S.view_as(experts_TK))
    counts_E = order.counts_E
    if group is None:
        return Dispatch(*choices, RowGroups(counts_E, experts_TK.numel(), order.ends_E), None)

    num_ranks = group.size()
    num_local = shares[group.rank()]
    received_re = counts_E.new_empty(num_ranks * num_local)
    dist.all_to_all_single(received_re, counts_E, [num_local] * num_ranks, list(shares), group=group)
    counts = torch.cat((counts_E, received_re)).tolist()
    send_splits = _sums(counts[:num_experts], shares)
    receive_splits = _sums(counts[num_experts:], [num_local] * num_ranks)

    num_rows = sum(receive_splits)
    expert_of_row = torch.arange(num_local, device=counts_E.device).repeat(num_ranks)
    expert_of_row = expert_of_row.repeat_interleave(received_re, output_size=num_rows)
    local = sort_by_expert(expert_of_row, num_local)
    exchange = Exchange(group, send_splits, receive_splits, local.choice_of_row_S, local.row_of_choice_S)
    return Dispatch(*choices, RowGroups(local.counts_E, num_rows, local.ends_E), exchange)


def _sums(counts: Sequence[int], shares: Sequence[int]) -> list[int]:
    """Sum neighbouring counts. Example: _sums([1, 2, 3], [1, 2]) == [1, 5]."""
    return [sum(counts[stop - size : stop]) for stop, size in zip(accumulate(shares), shares)]


@dataclass(frozen=True, slots=True)
class Gathered:
    """The way of one microbatch's tokens through one layer, with the verbs of Dispatch."""

    group: dist.ProcessGroup
    num_tokens: int
    """T."""
    most_tokens: int
    """M."""
    choice_of_row_S: Tensor
    """int64; row i, sorted by expert, is choice choice_of_row[i] = n * K + k. Beyond own experts' rows, of others."""
    token_of_row_S: Tensor
    """int64; row i is a copy of token token_of_row[i] of all ranks' tokens."""
    row_of_choice_NK: Tensor
    """The inverse; -1: an expert of another rank."""
    weights_NK: Tensor
    """Routing weights, float32."""
    groups: RowGroups

    def taken_apart(self) -> tuple[list[Tensor], Callable[..., Gathered]]:
        of_groups, groups_of = self.groups.taken_apart()
        fixed = (self.group, self.num_tokens, self.most_tokens)

        def again(choices: Tensor, tokens: Tensor, rows: Tensor, weights: Tensor, *rest: Tensor) -> Gathered:
            return Gathered(*fixed, choices, tokens, rows, weights, groups_of(*rest))

        return [self.choice_of_row_S, self.token_of_row_S, self.row_of_choice_NK, self.weights_NK, *of_groups], again

    def sending(self, values_TH: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        wait = _all_gather(_padded(values_TH, self.most_tokens), self.group)
        return lambda: (wait(), self.token_of_row_S)

    def weights_of_rows(self, weights_TK: Tensor) -> Tensor:
        """As `Dispatch.weights_of_rows`; they came with the plan."""
        return self.weights_NK.flatten()[self.choice_of_row_S]

    def combining(
        self,
        rows_SH: Tensor,
        weights_TK: Tensor | None,
        mode: CombineMode = CombineMode.fp32_once,
        sum_dtype: torch.dtype | None = None,
    ) -> Callable[[], Tensor]:
        """As `Dispatch.combining`; partial sums travel in sum_dtype, while those of own tokens are made."""
        dtype, num_ranks, num_others = rows_SH.dtype, self.group.size(), len(self.weights_NK) - self.most_tokens
        (own_TK, others), (own_weights_TK, weights) = self._split(self.row_of_choice_NK), self._split(self.weights_NK)
        if weights_TK is None:
            own_weights_TK = weights = None
        sent = weighted_sum(rows_SH, weights, others, mode, sum_dtype)
        parts_NH = sent.new_empty(num_ranks * self.most_tokens, sent.shape[1])
        splits = [self.most_tokens] * num_ranks
        splits[self.group.rank()] = 0
        wait = _all_to_all(sent, splits, splits, self.group, parts_NH[:num_others])
        out_TH = parts_NH[num_others : num_others + self.num_tokens]
        weighted_sum(rows_SH, own_weights_TK, own_TK, mode, out_TH=out_TH)

        def summed() -> Tensor:
            wait()
            tokens_T = torch.arange(self.num_tokens, device=parts_NH.device)
            starts_R = torch.arange(num_ranks, device=parts_NH.device) * self.most_tokens
            return weighted_sum(parts_NH, None, tokens_T[:, None] + starts_R, out_dtype=dtype)

        return summed

    def _split(self, of_choices_NK: Tensor) -> tuple[Tensor, Tensor]:
        """What is of this rank's tokens, and what of other ranks', in their order."""
        first = self.group.rank() * self.most_tokens
        after = of_choices_NK[first + self.most_tokens :]
        others = torch.cat([of_choices_NK[:first], after]) if first and len(after) else of_choices_NK[:first]
        return of_choices_NK[first : first + self.num_tokens], others if first else after

    def weights_gradient(self, dw_S: Tensor) -> Callable[[], Tensor]:
        dw_NK = torch.cat([dw_S, dw_S.new_zeros(1)])[self.row_of_choice_NK]  # -1: the last
        wait = _all_to_all(dw_NK, None, None, self.group)
        return lambda: wait().unflatten(0, (self.group.size(), -1))[:, : self.num_tokens].sum(0)


def gathers(num_ranks: int, top_k: int, mode: CombineMode) -> bool:
    """Whether tokens are gathered: where it saves bytes, or costs few for no waits, and the order of sums is free. A
    token travels R - 1 times, and to K (R - 1) / R of other ranks' experts."""
    return num_ranks <= top_k and mode is not CombineMode.hf_eager


@torch.no_grad()
def plan_gathered(
    x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor, group: dist.ProcessGroup, shares: list[int], most_tokens: int
) -> tuple[Gathered, Callable[[], tuple[Tensor, Tensor]]]:
    """Gather choices and weights, and sort those of own experts while tokens travel.

    Args:
        shares: Experts of each ep_rank, in order.
        most_tokens: The largest T of the group.

    Returns:
        The plan, and what its `sending` of x_TH would return.
    """
    num_tokens, top_k = experts_TK.shape
    assert num_tokens <= most_tokens, f"{num_tokens} tokens, of at most {most_tokens}"
    num_local = shares[group.rank()]
    numbers_TK = experts_TK.to(torch.int32) + 1  # 0: padding
    sent = torch.cat([numbers_TK, weights_TK.to(torch.float32).view(torch.int32)], 1)
    receive_choices = _all_gather(_padded(sent, most_tokens), group)
    receive_x = _all_gather(_padded(x_TH, most_tokens), group)
    choices_N2K = receive_choices()
    weights_NK = choices_N2K[:, top_k:].view(torch.float32).contiguous()
    order, rows_NK = own_rows(choices_N2K[:, :top_k].long() - 1, sum(shares[: group.rank()]), num_local)
    counts_E, ends_E = order.counts_E[:-1], order.ends_E[:-1]
    choices, tokens, num_rows = order.choice_of_row_S, order.token_of_row_S, rows_NK.numel()
    if num_rows * x_TH.shape[1] * x_TH.element_size() > BOUND_BYTES:
        num_rows = int(ends_E[-1])
        choices, tokens = choices[:num_rows].clone(), tokens[:num_rows].clone()
    groups = RowGroups(counts_E, num_rows, ends_E, expected_rows=rows_NK.numel() * num_local // sum(shares))
    plan = Gathered(group, num_tokens, most_tokens, choices, tokens, rows_NK, weights_NK, groups)
    return plan, lambda: (receive_x(), tokens)


def own_rows(experts_NK: Tensor, first: int, num_local: int) -> tuple[ExpertOrder, Tensor]:
    """Sort choices by expert, those of own experts first..first+num_local-1 before all others, and the row of each own
    choice; -1: it is another rank's, or padding (expert -1)."""
    local_NK = experts_NK - first
    is_own_NK = (local_NK >= 0) & (local_NK < num_local)
    order = sort_by_expert(local_NK.where(is_own_NK, num_local).flatten(), num_local + 1, experts_NK.shape[1])
    return order, order.row_of_choice_S.view_as(experts_NK).where(is_own_NK, -1)


def _padded(rows: Tensor, num_rows: int) -> Tensor:
    if rows.shape[0] == num_rows:
        return rows.contiguous()
    out = rows.new_zeros(num_rows, *rows.shape[1:])
    out[: rows.shape[0]] = rows
    return out


def _all_to_all(
    rows: Tensor, send_splits: list[int] | None, receive_splits: list[int] | None, group: dist.ProcessGroup,
    out: Tensor | None = None,
) -> Callable[[], Tensor]:  # fmt: skip
    """No splits: equal ones. `out` is written; None: new memory."""
    if out is None:
        out = rows.new_empty(len(rows) if receive_splits is None else sum(receive_splits), *rows.shape[1:])
    return _received(out, dist.all_to_all_single(out, rows, receive_splits, send_splits, group=group, async_op=True))


def _all_gather(rows: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    out = rows.new_empty(group.size() * rows.shape[0], *rows.shape[1:])
    return _received(out, dist.all_gather_into_tensor(out, rows, group=group, async_op=True))


def _received(out: Tensor, work: dist.Work | None) -> Callable[[], Tensor]:
    """A function that waits for an exchange, and returns what it wrote."""
    assert work is not None

    def wait() -> Tensor:
        work.wait()
        return out

    return wait
