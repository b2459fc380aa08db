"""Log-probabilities that leave an engine together: by vLLM's own classes and encoding, each request gets what vLLM
would have sent it.
"""

from typing import Any
from unittest import mock

import numpy as np
import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from slipstream.rollout.in_vllm.vllm_patches import send_logprobs_together, spread

REQUESTS = 100


class Sampled:
    """A step of some requests; the second of three asks for no log-probabilities."""

    def __init__(self, width: int) -> None:
        rng = np.random.default_rng(width)
        self.lists = LogprobsLists(
            rng.integers(0, 1000, (REQUESTS, width), dtype=np.int32),
            rng.standard_normal((REQUESTS, width), dtype=np.float32),
            rng.integers(0, 1000, REQUESTS, dtype=np.int32),
        )

    def update_from_output(self, *_: Any) -> dict[int, EngineCoreOutputs]:
        """What the scheduler returns, by its own calls of slice_request."""
        made = [
            EngineCoreOutput(
                request_id=f"r{i}",
                new_token_ids=[i],
                new_logprobs=None if i % 3 == 1 else self.lists.slice_request(i, 1),
            )
            for i in range(REQUESTS)
        ]
        return {0: EngineCoreOutputs(outputs=made, timestamp=1.0)}


def sent(step: Sampled) -> tuple[list[EngineCoreOutput], int, int]:
    """What arrives at the client, how many arrays were encoded, and bytes of the message."""
    encoder = MsgpackEncoder()
    with mock.patch.object(encoder, "_encode_ndarray", wraps=encoder._encode_ndarray) as encode:
        frames = encoder.encode(Scheduler.update_from_output(step, None, None)[0])  # type: ignore[arg-type]
    arrived = MsgpackDecoder(EngineCoreOutputs).decode(frames)
    return arrived.outputs, encode.call_count, sum(len(memoryview(frame).cast("B")) for frame in frames)


@pytest.mark.parametrize("width", [1, 17])
def test_requests_get_what_vllm_would_have_sent_them(width: int) -> None:
    step = Sampled(width)
    with mock.patch.object(Scheduler, "update_from_output", Sampled.update_from_output):
        expected, one_by_one, bytes_before = sent(step)
        with send_logprobs_together():
            got, together, num_bytes = sent(step)
        again, _, _ = sent(step)
    assert again[0].new_logprobs is not None, "vLLM's own way is back"
    assert len(again[0].new_logprobs[0]) == 1
    spread(got)
    assert together == 3 < one_by_one and num_bytes < bytes_before
    assert len(got) == len(expected) == REQUESTS
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine.new_logprobs is None) == (theirs.new_logprobs is None)
        if mine.new_logprobs is not None and theirs.new_logprobs is not None:
            assert mine.new_logprobs[3] is theirs.new_logprobs[3] is None
            for own, other in zip(mine.new_logprobs[:3], theirs.new_logprobs[:3], strict=True):
                assert own.dtype == other.dtype and np.array_equal(own, other)
        mine.new_logprobs = theirs.new_logprobs = None
        assert mine == theirs
