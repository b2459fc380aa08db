"""Promises of trainer/moe/dispatch.py without a group: ranks divide the choices of all tokens among them."""

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from slipstream.conf.schema import CombineMode
from slipstream.trainer.kernels.experts.combine import weighted_sum
from slipstream.trainer.moe.dispatch import _padded, gathers, own_rows, plan_gathered


@st.composite
def choices(draw: Any) -> tuple[list[int], torch.Tensor]:
    """Experts of each rank, and [N, K] different experts of each token; -1 where a rank's tokens are padded."""
    shares = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(sum))
    top_k = draw(st.integers(1, min(sum(shares), 4)))
    token = st.one_of(st.permutations(range(sum(shares))).map(lambda ids: ids[:top_k]), st.just([-1] * top_k))
    return shares, torch.tensor(draw(st.lists(token, max_size=9)), dtype=torch.int64).view(-1, top_k)


@given(choices())
def test_every_choice_is_one_ranks_and_their_sums_add_up(drawn: tuple[list[int], torch.Tensor]) -> None:
    shares, experts_NK = drawn
    is_real_NK = experts_NK >= 0
    values_EH = torch.arange(1.0, sum(shares) + 1)[:, None] * torch.tensor([1.0, -100.0])
    served_NK, total = torch.zeros_like(experts_NK), torch.zeros(len(experts_NK), 2)
    for rank, num_local in enumerate(shares):
        first = sum(shares[:rank])
        order, rows_NK = own_rows(experts_NK, first, num_local)
        served_NK += rows_NK >= 0
        num_rows = int(order.counts_E[:num_local].sum())
        assert int((rows_NK >= 0).sum()) == num_rows
        of_rows = experts_NK.flatten()[order.choice_of_row_S[:num_rows]]
        assert (
            of_rows.tolist() == (torch.arange(num_local).repeat_interleave(order.counts_E[:num_local]) + first).tolist()
        )
        assert torch.equal(order.token_of_row_S, order.choice_of_row_S // experts_NK.shape[1])
        for expert in range(num_local):  # in the order of tokens
            tokens = order.token_of_row_S[:num_rows][of_rows == first + expert]
            assert torch.equal(tokens, tokens.sort().values)
        total += weighted_sum(values_EH[of_rows], None, rows_NK)
    assert torch.equal(served_NK, is_real_NK.long())
    wanted = (values_EH[experts_NK.clamp(min=0)] * is_real_NK[:, :, None]).sum(1)
    assert torch.equal(total, wanted)  # of small whole numbers


@pytest.mark.parametrize("num_rows", [3, 5])
def test_rows_are_sent_in_one_piece(num_rows: int) -> None:
    """NCCL refuses a strided tensor."""
    rows = torch.arange(6.0).view(2, 3).t()
    sent = _padded(rows, num_rows)
    assert sent.is_contiguous() and torch.equal(sent[:3], rows)
    assert not sent[3:].any() and len(sent) == num_rows


def test_more_tokens_than_the_ranks_agreed_on_are_refused() -> None:
    group: Any = None
    with pytest.raises(AssertionError, match="5 tokens, of at most 4"):
        plan_gathered(torch.zeros(5, 8), torch.zeros(5, 2, dtype=torch.int64), torch.zeros(5, 2), group, [1, 1], 4)


@pytest.mark.parametrize(
    ("num_ranks", "top_k", "mode", "expected"),
    [
        (2, 2, CombineMode.vllm_like, True),
        (4, 8, CombineMode.fp32_once, True),
        (8, 8, CombineMode.vllm_like, True),
        (16, 8, CombineMode.vllm_like, False),
        (2, 8, CombineMode.hf_eager, False),
    ],
)
def test_tokens_are_gathered_by_few_ranks_where_sums_have_no_promised_order(
    num_ranks: int, top_k: int, mode: CombineMode, expected: bool
) -> None:
    assert gathers(num_ranks, top_k, mode) is expected
