"""Promises of trainer/moe/dispatch.py and block.py: ranks divide the choices of all tokens among them, and experts that
are cut over ranks give the bits of one rank, whether rows travel or tokens are gathered.
"""

from math import gcd
from typing import Any

import pytest
import torch
from cases.moe_cases import NUM_TOKENS, rows_of, run_expert_parallel
from cases.tiny_models import relative_error
from hypothesis import given, strategies as st
from torch import Tensor

from slipstream.conf.schema import CombineMode
from slipstream.trainer.kernels.experts.combine import weighted_sum
from slipstream.trainer.moe.block import expert_shares
from slipstream.trainer.moe.dispatch import _padded, gathers, own_rows, plan_gathered
from slipstream.trainer.moe.replay import RecordedRoutes


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


DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return {n: run_expert_parallel(n, tmp_path_factory.mktemp(f"ep{n}"), DTYPES) for n in (1, 2, 4)}


def together(ranks, world_size: int, dtype: torch.dtype, is_full: bool, way: str) -> dict[str, Tensor]:
    """Results of all ranks: tokens' by token, experts' by expert, both of which are cut along dim 0."""
    parts = [results[dtype, is_full, way] for results in ranks[world_size]]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("is_full", [False, True], ids=["adapters", "full"])
def test_gathered_tokens_give_one_ranks_sums_in_another_order(ranks, world_size, is_full):
    """Experts see the same rows in the same order: their gradients have the same bits, except that of dx, of which a
    rank's part is rounded before it travels."""
    for dtype in DTYPES:
        one = together(ranks, 1, dtype, is_full, "rows")
        for way in ("tokens", "tokens, counted"):
            many = together(ranks, world_size, dtype, is_full, way)
            for name, wanted in one.items():
                if name not in ("out", "x"):
                    assert torch.equal(many[name], wanted), (dtype, way, name)
            allowed = {"out": 2e-7, "x": 2e-7} if dtype is torch.float32 else {"out": 1e-4, "x": 2**-8}
            found = {name: relative_error(many[name].float(), one[name].float()) for name in allowed}
            assert all(found[name] <= allowed[name] for name in allowed), (dtype, way, found)
            assert world_size == 1 or not torch.equal(many["x"], one["x"]), "one rank's order of sums"


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_expert_parallel_ranks_give_the_bits_of_one(ranks, world_size, dtype):
    """Unequal shares of tokens, of four ranks of experts too, and one without tokens. Experts see the same rows in the
    same order."""
    for is_full in (False, True):
        for way in ("rows", *CombineMode):
            one, many = together(ranks, 1, dtype, is_full, way), together(ranks, world_size, dtype, is_full, way)
            for name, wanted in one.items():
                assert torch.equal(many[name], wanted), (way, name)
    assert any(rows_of(rank, 4) == slice(NUM_TOKENS, NUM_TOKENS) for rank in range(4))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_mode_of_combining_rounds_in_its_own_way_on_any_number_of_ranks(ranks, world_size):
    once, *others = (together(ranks, world_size, torch.bfloat16, False, mode)["out"] for mode in CombineMode)
    assert not any(torch.equal(once, other) for other in others) and not torch.equal(*others)


@pytest.mark.parametrize(("num_experts", "ep_size"), [(3, 2), (6, 4), (10, 4), (12, 8), (384, 256)])
def test_every_ep_rank_holds_the_same_number_over_the_layers_of_a_turn(num_experts: int, ep_size: int) -> None:
    num_layers = ep_size // gcd(num_experts, ep_size)
    layers = [expert_shares(num_experts, ep_size, layer) for layer in range(num_layers)]
    for shares in layers:
        assert [expert for share in shares for expert in share] == list(range(num_experts))
    held = {sum(len(shares[rank]) for shares in layers) for rank in range(ep_size)}
    assert held == {num_experts * num_layers // ep_size}


@pytest.mark.parametrize("recorded", [[True, False, True], [True] * 3, [False] * 3])
def test_routings_are_counted_of_recorded_tokens_alone(recorded: list[bool]) -> None:
    routes = RecordedRoutes(torch.zeros(3, 2, 4, dtype=torch.uint8), torch.tensor(recorded))
    assert int(routes.num_routings) == sum(recorded) * 2 * 4
