"""Sizes of CUDA graphs, and what padding to them does to a microbatch. tests/gpu/test_graphs_gpu.py captures them."""

from itertools import pairwise

import pytest
import torch
from cases.tiny_configs import DEEPSEEK, GPT_OSS, MIXED, MOE
from cases.tiny_models import make_decoder, packed, relative_error
from hypothesis import given, strategies as st

from slipstream.trainer.model import graphs as graphs_module
from slipstream.trainer.model.decoder import Decoder
from slipstream.trainer.model.graph_sizes import GraphSize, graph_size, padded_starts
from slipstream.trainer.model.graphs import DecoderGraphs, GraphInputs, refusal_of_graphs
from slipstream.trainer.moe.replay import RecordedRoutes
from slipstream.trainer.types import Extent

CPU = torch.device("cpu")
SOME_LENGTHS = st.lists(st.integers(1, 3000), min_size=1, max_size=60)


def starts_of(lengths: list[int]) -> tuple[int, ...]:
    return tuple(torch.tensor([0, *lengths]).cumsum(0).tolist())


@given(SOME_LENGTHS, st.booleans(), st.booleans())
def test_a_size_holds_its_microbatch_with_little_padding(lengths: list[int], has_routes: bool, has_cudnn: bool) -> None:
    starts = starts_of(lengths)
    size = graph_size(starts, has_routes=has_routes, has_cudnn=has_cudnn)
    assert size is not None
    assert size.has_routes is has_routes
    if size.starts is not None:
        assert has_cudnn
        assert sum(lengths) >= 1024 * len(lengths)
        assert size == GraphSize(sum(lengths), len(lengths), max(lengths), starts, has_routes)
        return
    assert 0 <= size.num_tokens - sum(lengths) < max(128, sum(lengths) / 8)
    assert size.longest < 2 * max(lengths) or size.longest == 128
    padded = padded_starts(starts, size)
    assert padded[: len(starts)] == starts
    assert padded[-1] == size.num_tokens
    assert len(padded) == size.num_sequences + 1
    assert all(0 <= stop - start <= size.longest for start, stop in pairwise(padded))
    assert size.num_sequences <= max(8, 2 * (len(lengths) + 1 + sum(lengths) // 8 // size.longest))
    assert graph_size(starts_of(lengths[::-1]), has_routes=has_routes, has_cudnn=has_cudnn) == size, "other lengths"


@given(st.lists(SOME_LENGTHS, min_size=2, max_size=4), st.booleans())
def test_ranks_take_one_size_that_holds_every_microbatch(ranks: list[list[int]], has_cudnn: bool) -> None:
    extents = [Extent(sum(one), len(one), max(one), has_routes=number == 1) for number, one in enumerate(ranks)]
    sizes = [
        graph_size(starts_of(one), has_routes=extent.has_routes, has_cudnn=has_cudnn, extents=extents)
        for one, extent in zip(ranks, extents, strict=True)
    ]
    assert len(set(sizes)) == 1
    size = sizes[0]
    if size is None:
        assert has_cudnn and any(sum(one) >= 1024 * len(one) for one in ranks)
        return
    assert size.has_routes and size.starts is None
    for one in ranks:
        padded = padded_starts(starts_of(one), size)
        assert padded[-1] == size.num_tokens and len(padded) == size.num_sequences + 1
        assert all(0 <= stop - start <= size.longest for start, stop in pairwise(padded))


@pytest.mark.parametrize("family", [MOE, MIXED, DEEPSEEK], ids=["moe", "dense_and_moe", "latent_attention"])
@pytest.mark.parametrize("with_routes", [False, True])
def test_padding_changes_neither_hidden_states_nor_gradients(family: dict, with_routes: bool) -> None:
    """The second microbatch takes the tensors of the first, as a replay does."""
    decoder = make_decoder(family)
    first, second = packed((5, 9, 2)), packed((1, 12, 3, 4), seed=1)
    where = {id(batch): tuple(batch[2].tolist()) for batch in (first, second)}
    size = graph_size(where[id(second)], has_routes=with_routes, has_cudnn=False)
    assert size is not None
    assert size == graph_size(where[id(first)], has_routes=with_routes, has_cudnn=False)

    def inputs_of(batch: tuple[torch.Tensor, ...]) -> GraphInputs:
        routes = routes_of(decoder, len(batch[0]), with_routes)
        return GraphInputs(size, batch[0], batch[1], where[id(batch)], routes, decoder)

    inputs = inputs_of(first)
    for batch in (first, second):
        routes = routes_of(decoder, len(batch[0]), with_routes)
        wanted = decoder(*batch, routes)
        weights = 1.0 + torch.arange(wanted.numel()).view_as(wanted) % 5
        (wanted * weights).sum().backward()
        expected = [p.grad for p in decoder.parameters() if p.grad is not None]
        decoder.zero_grad()
        inputs.fill(inputs_of(batch))
        if inputs.routes is not None:
            inputs.routes.flipped.clear()
        hidden = inputs.hidden_states(decoder)
        assert len(hidden) == 128
        hidden = hidden[: len(wanted)]
        torch.testing.assert_close(hidden, wanted)
        (hidden * weights).sum().backward()
        found = [p.grad for p in decoder.parameters() if p.grad is not None]
        decoder.zero_grad()
        assert len(found) > 10
        assert all(relative_error(one, other) < 1e-4 for one, other in zip(found, expected, strict=True))
        if routes is not None and inputs.routes is not None:
            assert [int(n) for n in inputs.routes.flipped] == [int(n) for n in routes.flipped]
            assert sum(routes.flipped) > 0


def routes_of(decoder: Decoder, num_tokens: int, wanted: bool) -> RecordedRoutes | None:
    if not wanted or decoder.spec.moe is None:
        return None
    draw = torch.Generator().manual_seed(num_tokens)
    moe, num_layers = decoder.spec.moe, sum(decoder.spec.moe.layers)
    scores = torch.rand(num_tokens, num_layers, moe.num_experts, generator=draw)
    return RecordedRoutes(scores.topk(moe.top_k).indices.to(torch.int16), torch.arange(num_tokens) % 3 > 0)


def test_refusals_say_why() -> None:
    assert refusal_of_graphs(make_decoder(MOE), CPU) == "the trainer has no GPU"
    cuda = torch.device("cuda")
    assert refusal_of_graphs(make_decoder(GPT_OSS), cuda) == "attention is padded"


def test_gradients_of_a_replay_are_lent_then_copied_and_added_up() -> None:
    """A replay writes to the same memory each time."""
    decoder = make_decoder(MOE)
    graphs = DecoderGraphs(decoder, 0)
    trained = [parameter for parameter in decoder.parameters() if parameter.requires_grad]
    first, *others = trained
    memory = [torch.empty_like(parameter) for parameter in trained]

    def replay(value: float) -> None:
        graphs.take_back()
        for gradient in memory:
            gradient.fill_(value)
        graphs.add_gradients(list(zip(trained, memory, strict=True)))

    replay(1.0)
    assert all(parameter.grad is lent for parameter, lent in zip(trained, memory, strict=True))
    replay(2.0)
    first.grad = None  # as if nothing had reached it
    replay(4.0)
    assert first.grad is memory[0]
    assert all(parameter.grad is not None and (parameter.grad == 7.0).all() for parameter in others)
    graphs.forget()
    memory[0].fill_(9.0)
    assert first.grad is not None
    assert (first.grad == 4.0).all()


def test_a_size_is_captured_when_it_comes_again_and_old_ones_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs_module, "MOST_SEEN", 2)
    graphs = DecoderGraphs(make_decoder(MOE), 0)
    sizes = [GraphSize(128 * place, 8, 128, None, has_routes=False) for place in (1, 2, 3)]
    assert [graphs._comes_again(sizes[place]) for place in (0, 0, 1, 2, 0, 2)] == [
        False,
        True,
        False,
        False,
        False,
        True,
    ]
