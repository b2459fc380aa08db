"""Locks: experts that are cut over ranks give the bits of one rank, whether rows travel or tokens are gathered."""

import pytest
import torch
from cases.moe_cases import NUM_TOKENS, rows_of, run_expert_parallel
from cases.tiny_models import relative_error
from torch import Tensor

from slipstream.conf.schema import CombineMode

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
