"""Promises of trainer/model/context.py that need no second process; test_context_ranks.py has those of real ranks."""

import itertools

import pytest
import torch
from cases.tiny_configs import DEEPSEEK_V32, GPT_OSS, QWEN3_NEXT
from hypothesis import given, strategies as st

from slipstream.conf.architecture.families import read_config
from slipstream.conf.errors import ConfigError
from slipstream.trainer.model.attention.attend import AttentionBackend, attend
from slipstream.trainer.model.attention.flash_attention import AttentionCall
from slipstream.trainer.model.context import Piece, _laid_out, pieces_of_rank
from slipstream.trainer.model.packed_sequences import PackedSequences
from slipstream.trainer.step.microbatches import pack

LENGTHS = st.lists(st.integers(0, 70), min_size=1, max_size=6)


def starts_of(lengths: list[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


@given(lengths=LENGTHS, cp_size=st.integers(1, 5))
def test_every_token_lies_on_one_rank_and_shares_of_the_triangle_are_equal(lengths: list[int], cp_size: int) -> None:
    starts = starts_of(lengths)
    tokens: list[int] = []
    scores = []
    for rank in range(cp_size):
        pieces = [piece for half in pieces_of_rank(starts, cp_size, rank) for piece in half]
        own = [(piece.sequence_start, row) for piece in pieces for row in range(piece.start, piece.stop)]
        tokens += [row for _, row in own]
        scores.append(sum(row - start + 1 for start, row in own))
    assert sorted(tokens) == list(range(starts[-1]))
    # Chunks of one sequence differ by a token at most, and a token has as many scores as its sequence has tokens.
    assert max(scores) - min(scores) <= 2 * sum(lengths)


@given(lengths=LENGTHS, cp_size=st.integers(2, 4), rank=st.integers(0, 3), window=st.sampled_from([None, 1, 5]))
def test_chunks_see_what_whole_sequences_see(lengths: list[int], cp_size: int, rank: int, window: int | None) -> None:
    starts, (q, k, v) = starts_of(lengths), torch.randn(3, sum(lengths), 2, 8).unbind()
    if not sum(lengths):
        return
    whole = PackedSequences.from_cu_seqlens(torch.tensor(starts), sum(lengths), q.device)
    want = attend(q, k, v, AttentionCall(whole, 0.3, window), AttentionBackend.padded)
    pieces = [piece for half in pieces_of_rank(starts, cp_size, rank % cp_size) for piece in half]
    keys = [Piece(piece.sequence_start, piece.sequence_start, piece.stop) for piece in pieces]
    rows, of_keys = (
        torch.tensor([row for piece in some for row in range(piece.start, piece.stop)], dtype=torch.int64)
        for some in (pieces, keys)
    )
    chunks = _laid_out(pieces, keys, q.device)
    got = attend(q[rows], k[of_keys], v[of_keys], AttentionCall(chunks, 0.3, window), AttentionBackend.padded)
    torch.testing.assert_close(got, want[rows])


@given(lengths=st.lists(st.integers(1, 40), max_size=9), cp_size=st.integers(1, 4), groups=st.integers(1, 3))
def test_ranks_of_a_group_get_the_same_microbatches_of_their_tokens_together(
    lengths: list[int], cp_size: int, groups: int
) -> None:
    plan = pack(lengths, groups * cp_size, 10, cp_size=cp_size)
    assert plan[::cp_size] == pack(lengths, groups, 10 * cp_size)
    assert all(plan[rank] == plan[rank - rank % cp_size] for rank in range(groups * cp_size))


@pytest.mark.parametrize(
    ("model", "what"),
    [(GPT_OSS, "attention sinks"), (QWEN3_NEXT, "linear attention"), (DEEPSEEK_V32, "an indexer that chooses keys")],
)
def test_attention_that_cannot_be_shared_is_refused(model: dict[str, object], what: str) -> None:
    spec = read_config(model)
    spec.check_cp_size(1)
    with pytest.raises(ConfigError, match=rf"trainer\.cp_size=2 is not for a model with {what}.*set trainer.cp_size=1"):
        spec.check_cp_size(2)
