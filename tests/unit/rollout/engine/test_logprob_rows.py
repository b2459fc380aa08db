"""A step's log-probabilities, gathered and spread again, are what vLLM's own cut gives each request."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from hypothesis import given, strategies as st

from slipstream.rollout.in_vllm.vllm_patches import gather, row_of_request, spread


class Lists(NamedTuple):
    """vLLM's LogprobsLists (tests/contract/test_logprobs_together.py has the real one)."""

    logprob_token_ids: np.ndarray
    logprobs: np.ndarray
    sampled_token_ranks: np.ndarray
    cu_num_generated_tokens: list[int] | None = None


@st.composite
def steps(draw: st.DrawFn) -> tuple[Lists, list[tuple[int, int] | None]]:
    """A step, and of each output that it makes, in any order: its request and number of tokens; None: no
    log-probabilities.
    """
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=8))
    ends = np.cumsum([0, *sizes]).tolist()
    rows, width = ends[-1], draw(st.integers(1, 4))
    numbers = np.arange(rows * width).reshape(rows, width)
    is_even = all(size == 1 for size in sizes)
    step = Lists(numbers, numbers / 7, np.arange(rows) + 100, None if is_even and draw(st.booleans()) else ends)
    order = draw(st.permutations(range(len(sizes))))
    outputs = [(i, draw(st.integers(0, sizes[i]))) if draw(st.integers(0, 3)) else None for i in order]
    return step, outputs


@given(steps())
def test_each_output_gets_its_own_rows(case: tuple[Lists, list[tuple[int, int] | None]]) -> None:
    step, asked = case
    outputs = [SimpleNamespace(new_logprobs=None if one is None else row_of_request(step, *one)) for one in asked]
    gather(outputs)
    assert sum(output.new_logprobs is not None for output in outputs) == any(one is not None for one in asked)
    spread(outputs)
    for output, one in zip(outputs, asked, strict=True):
        if one is None or one[1] == 0:
            assert output.new_logprobs is None
            continue
        start = one[0] if step.cu_num_generated_tokens is None else step.cu_num_generated_tokens[one[0]]
        mine = slice(start, start + one[1])
        expected = Lists(step.logprob_token_ids[mine], step.logprobs[mine], step.sampled_token_ranks[mine])
        assert equal(output.new_logprobs, expected)


def test_outputs_as_vllm_sends_them_stay_as_they_are() -> None:
    own = Lists(np.ones((1, 1)), np.ones((1, 1)), np.ones(1))
    outputs = [SimpleNamespace(new_logprobs=None), SimpleNamespace(new_logprobs=own)]
    spread(outputs)
    assert outputs[0].new_logprobs is None and outputs[1].new_logprobs is own


def equal(one: Any, other: Any) -> bool:
    assert one.cu_num_generated_tokens is other.cu_num_generated_tokens is None
    return all(np.array_equal(a, b) for a, b in zip(one[:3], other[:3], strict=True))
