"""Promise of attention/indexer.py: attention to the chosen keys alone, in blocks of which little is kept."""

import pytest
import torch
from cases.tiny_models import relative_error

from slipstream.trainer.model.attention import indexer
from slipstream.trainer.model.attention.attend import AttentionBackend
from slipstream.trainer.model.attention.flash_attention import AttentionCall
from slipstream.trainer.model.attention.indexer import Indexed, attend_chosen, chosen_keys, sparse_attention
from slipstream.trainer.model.packed_sequences import PackedSequences

LENGTHS = (3, 17, 1, 9)
TOP_K = 4
SCALE = 0.3


def inputs() -> tuple[list[torch.Tensor], Indexed]:
    generator = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)
    shapes = ((tokens, 2, 6), (tokens, 2, 6), (tokens, 2, 5), (tokens, 12, 7), (tokens, 7), (tokens, 12))
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    return [x.requires_grad_() for x in drawn[:3]], Indexed(*drawn[3:])


def by_a_square(qkv: list[torch.Tensor], indexed: Indexed, lengths: tuple[int, ...] = LENGTHS) -> torch.Tensor:
    """The definition: one softmax over each query's chosen keys, a sequence at a time."""
    outs = []
    for part in torch.arange(sum(lengths)).split(lengths):
        q, k, v = (x[part].transpose(0, 1) for x in qkv)
        products = torch.einsum("snd,kd->snk", indexed.q_TIE[part], indexed.k_TE[part]).relu()
        scores = torch.einsum("sn,snk->sk", indexed.weights_TI[part], products)
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        least = scores.topk(min(TOP_K, len(part)), dim=1).values[:, -1:]
        logits = (q @ k.transpose(1, 2) * SCALE).masked_fill((scores < least) | scores.isinf(), -torch.inf)
        outs.append((logits.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize("block", [2, 256])
def test_blocks_are_a_softmax_over_the_chosen_keys_with_its_gradients(block, monkeypatch):
    monkeypatch.setattr(indexer, "BLOCK", block)
    qkv, indexed = inputs()
    sequences = PackedSequences.from_cu_seqlens(torch.tensor([0, 3, 20, 21, 30]), 30, torch.device("cpu"))
    q, k, v = qkv
    mine = sparse_attention(q, k, v, indexed, AttentionCall(sequences, SCALE), TOP_K, AttentionBackend.padded)
    wanted = by_a_square(qkv, indexed)
    assert relative_error(mine, wanted) < 1e-6
    probe = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    grads, expected = (torch.autograd.grad((out * probe).sum(), qkv) for out in (mine, wanted))
    assert all(relative_error(*pair) < 1e-5 for pair in zip(grads, expected, strict=True))
    leaking = by_a_square(qkv, indexed, (20, 10))
    assert relative_error(mine, leaking) > 0.1, "a sequence that sees the one before it would be seen"


def test_no_block_holds_scores_of_more_queries_than_its_own(monkeypatch):
    """Nothing of a block waits for backward but what it was given."""
    monkeypatch.setattr(indexer, "BLOCK", 2)
    seen = []

    def noting(*given, **options):
        seen.append((len(given[0]), len(given[1])))
        return attend_chosen(*given, **options)

    monkeypatch.setattr(indexer, "attend_chosen", noting)
    (q, k, v), indexed = inputs()
    sequences = PackedSequences.from_cu_seqlens(torch.tensor([0, 3, 20, 21, 30]), 30, torch.device("cpu"))
    out = sparse_attention(q, k, v, indexed, AttentionCall(sequences, SCALE), TOP_K, AttentionBackend.padded)
    # queries 4 .. 16 of the second sequence, 4 .. 8 of the last, each up to its last query's key
    blocks = [(2, last) for last in range(6, 17, 2)] + [(1, 17), (2, 6), (2, 8), (1, 9)]
    assert seen == blocks
    out.sum().backward()
    assert sorted(seen) == sorted(blocks * 2), "computed again, instead of kept"


def test_a_query_chooses_no_key_behind_it_and_as_many_as_it_may():
    _, indexed = inputs()
    sees = chosen_keys(indexed.q_TIE[8:12], indexed.k_TE[:12], indexed.weights_TI[8:12], TOP_K)
    assert sees.sum(1).tolist() == [TOP_K] * 4
    assert not sees[torch.arange(12) > torch.arange(8, 12)[:, None]].any()
