"""Promise of rollout/routes.py: a route is beside the position that it was chosen at, or marked as missing."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from slipstream.rollout.errors import EngineError
from slipstream.rollout.routes import continued, read_routes
from slipstream.rollout.types import Rollout, Routes, RoutingShape


def drawn(num_positions: int, num_layers: int, shape: RoutingShape, seed: int) -> np.ndarray:
    """What vLLM returns: every layer of the decoder, zeros where a layer has no experts."""
    rng = np.random.default_rng(seed)
    order = rng.random((num_positions, num_layers, shape.num_experts)).argsort(axis=-1)[..., : shape.top_k]
    order[:, [layer for layer in range(num_layers) if layer not in shape.layers]] = 0
    return order.astype(np.uint8 if shape.num_experts <= 256 else np.uint16)


shapes = st.builds(
    lambda layers, top_k, more: RoutingShape(tuple(sorted(layers)), top_k, top_k + more),
    st.sets(st.integers(0, 5), min_size=1),
    st.integers(1, 4),
    st.sampled_from([0, 3, 260]),
)


@given(shapes, st.integers(1, 9), st.integers(0, 9), st.integers(0, 2**16))
def test_routes_are_what_was_returned_in_layers_with_experts(
    shape: RoutingShape, num_prompt: int, num_response: int, seed: int
) -> None:
    num_tokens = num_prompt + num_response
    returned = drawn(num_tokens - 1, 6, shape, seed)
    routes = read_routes(returned, shape, num_tokens)
    assert routes.is_recorded.shape == (num_tokens - 1,) and routes.is_recorded.all()
    assert routes.experts.dtype == (np.uint8 if shape.num_experts <= 256 else np.int16)
    for position in range(num_tokens - 1):
        for index, layer in enumerate(shape.layers):
            assert routes.experts[position, index].tolist() == returned[position, layer].tolist()


@given(shapes, st.integers(1, 9), st.integers(-3, 3), st.integers(0, 2**16))
def test_another_number_of_positions_makes_all_of_them_doubtful(
    shape: RoutingShape, num_tokens: int, surplus: int, seed: int
) -> None:
    returned = drawn(max(num_tokens - 1 + surplus, 0), 6, shape, seed)
    routes = read_routes(returned, shape, num_tokens)
    assert routes.experts.shape == (num_tokens - 1, len(shape.layers), shape.top_k)
    assert routes.is_recorded.tolist() == [len(returned) == num_tokens - 1] * (num_tokens - 1)
    assert not read_routes(None, shape, num_tokens, was_aborted=True).is_recorded.any()


def test_a_route_that_no_router_chooses_is_missing_at_its_position() -> None:
    shape = RoutingShape((1, 2), 3, 8)
    returned = drawn(6, 3, shape, seed=0)
    returned[1] = 0  # nothing was recorded
    returned[3, 2] = [4, 7, 4]  # an expert twice
    returned[4, 1, 2] = 8  # no such expert
    returned[5, 0] = [9, 9, 9]  # a layer without experts says nothing
    assert read_routes(returned, shape, 7).is_recorded.tolist() == [True, False, True, False, False, True]


@pytest.mark.parametrize("sizes", [(6, 2, 3), (6, 3, 2), (6, 3)])
def test_routes_of_another_model_are_an_error(sizes: tuple[int, ...]) -> None:
    with pytest.raises(EngineError, match=r"routes of shape.*at least 3 layers and 3 experts"):
        read_routes(np.zeros(sizes, np.uint8), RoutingShape((1, 2), 3, 8), 7)


def test_an_engine_whose_kernels_record_nothing_is_an_error() -> None:
    """Else every token of the run would be left out of the loss."""
    for returned in (None, np.zeros((6, 3, 3), np.uint8)):
        with pytest.raises(EngineError, match="kernels of this engine do not record them"):
            read_routes(returned, RoutingShape((1, 2), 3, 8), 7)


def test_a_continued_response_has_the_routes_of_the_requests_that_sampled_it() -> None:
    """Two prompt tokens; two tokens of the first request, three of the second: positions 0 1 2, then 3 4 5."""

    def part(number: int, num_tokens: int, num_positions: int) -> Rollout:
        routes = Routes(np.full((num_positions, 1, 2), number, np.uint8), np.ones(num_positions, dtype=bool))
        return Rollout([9] * num_tokens, [-1.0] * num_tokens, [number] * num_tokens, "", "abort", routes=routes)

    first, second = part(1, 2, 3), part(2, 3, 6)
    joined = continued(first, second)
    assert joined is not None
    assert joined.experts[:, 0, 0].tolist() == [1, 1, 1, 2, 2, 2]
    assert len(joined.is_recorded) == 2 + 5 - 1
    nothing = replace(part(1, 0, 1), routes=Routes(np.zeros((1, 1, 2), np.uint8), np.zeros(1, dtype=bool)))
    assert continued(nothing, second) is second.routes  # ended before its first token: nothing of it counts
    assert continued(replace(first, routes=None), replace(second, routes=None)) is None
