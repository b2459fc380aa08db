"""The log-probabilities of an engine's step leave its process as three arrays, and not as three per request.

    EngineCore   row_of_request   a request's output names its rows among those of the step
                 gather           the first of these outputs gets the rows of all, and where each output's rows end
    client       spread           each output gets its own rows, as if vLLM had sent them so

vLLM sends the id, the log-probability and the rank of each request's token as numpy arrays of one number, and encodes
and decodes each of them by itself. With a thousand requests that is most of what a step costs the two processes beside
scheduling, and an EngineCore with so many requests waits for Python, not for its GPU (docs/measurements.md).

Owns: how the rows lie in the message. Does not own: where vLLM calls these functions (vllm_patches.py).
Invariant: after `spread`, outputs are equal to those that vLLM itself would have delivered.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple


class Rows(NamedTuple):
    """Some rows of a step's log-probabilities."""

    step: Any
    """vLLM's LogprobsLists."""
    start: int
    end: int


def row_of_request(step: Any, request: int, num_tokens: int) -> Rows:
    """Instead of LogprobsLists.slice_request: which rows are the request's, without cutting arrays.

    Args:
        step: vLLM's LogprobsLists: what the step sampled for all its requests.
        request: The request's place in the step.
        num_tokens: How many tokens it got.
    """
    starts = step.cu_num_generated_tokens
    start = request if starts is None else starts[request]
    return Rows(step, start, start + num_tokens)


def gather(outputs: Sequence[Any]) -> None:
    """Move the rows of all outputs into the first that has any, whose cu_num_generated_tokens says where the rows of
    each output end, from 0 on. (vLLM itself never sends that field.)

    Args:
        outputs: vLLM's EngineCoreOutput of one step, in the order in which they are sent; their rows are Rows.
    """
    first, indices, ends = None, [], [0]
    for output in outputs:
        rows = output.new_logprobs
        if rows is not None:
            first = output if first is None else first
            indices += range(rows.start, rows.end)
        ends.append(len(indices))
    if first is None:
        return
    ids, logprobs, ranks, _ = step = first.new_logprobs.step
    for output in outputs:
        output.new_logprobs = None
    first.new_logprobs = type(step)(ids[indices], logprobs[indices], ranks[indices], ends)


def spread(outputs: Sequence[Any]) -> None:
    """Give each output its own rows; nothing changes where `gather` did not run."""
    sent = next((output.new_logprobs for output in outputs if output.new_logprobs is not None), None)
    if sent is None or sent.cu_num_generated_tokens is None:
        return
    ids, logprobs, ranks, ends = sent
    for output, (start, end) in zip(outputs, itertools.pairwise(ends), strict=True):
        mine = slice(start, end)
        output.new_logprobs = None if start == end else type(sent)(ids[mine], logprobs[mine], ranks[mine], None)
