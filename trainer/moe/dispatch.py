"""The way of a microbatch's tokens to the experts of one layer, and the all-to-all that takes a row there per choice.

    tokens [T] --source--> choices sorted by expert [S = T*K] --all-to-all--> rows of all ranks, by sender [R]
           --by expert, then sender--> rows [R] --experts--> ... and the same way back

Owns the order of rows and the exchange; does not differentiate (trainer.moe.routed does). Row counts are exact: there
is no padding and no capacity limit, and a rank with zero rows still joins every collective. An expert's rows are in the
order of senders, then of tokens, as they would be on one rank. Without an expert-parallel group nothing is sent and the
host does not wait for the device. gathered.py has the way of fewer bytes, in which sums have another order.
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
from slipstream.trainer.kernels.experts.counting_sort import sort_by_expert
from slipstream.trainer.kernels.experts.gather import gather_rows
from slipstream.trainer.kernels.experts.groups import RowGroups


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
    """The way of one microbatch's rows through one layer."""

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
        """Its tensors, and a function that builds it from them again.

        An autograd.Function saves these tensors, so that they are freed when its backward ends. Anything else on its
        ctx lives until the whole graph ends, after the backward of every other layer.
        """
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


def _all_to_all(
    rows: Tensor, send_splits: list[int], receive_splits: list[int], group: dist.ProcessGroup
) -> Callable[[], Tensor]:
    out = rows.new_empty(sum(receive_splits), *rows.shape[1:])
    return received(out, dist.all_to_all_single(out, rows, receive_splits, send_splits, group=group, async_op=True))


def received(out: Tensor, work: dist.Work | None) -> Callable[[], Tensor]:
    """A function that waits for an exchange, and returns what it wrote."""
    assert work is not None

    def wait() -> Tensor:
        work.wait()
        return out

    return wait
