"""What vLLM is asked for one request, and what its last output says, in Slipstream's words.

Owns: the SamplingParams of the three kinds of requests, and reading their outputs. Does not own: sending them, nor the
version stamps (vllm_engine.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slipstream.conf.schema import EvalSampling, EvalSamplingConfig, SamplingConfig
from slipstream.rollout.errors import EngineError
from slipstream.rollout.routes import read_routes
from slipstream.rollout.types import ABORTED, Rollout, RoutingShape

if TYPE_CHECKING:
    from vllm import SamplingParams
NUM_PROBE_LOGPROBS = 16


def sampling_params(sampling: SamplingConfig, stop_token_ids: Sequence[int], seed: int | None) -> SamplingParams:
    """Ask for a response, which the model's end-of-sequence tokens (`stop_token_ids`) end if `stop_at_eos` says so. No
    seed: the engine's own stream."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    drawing = sampling.drawing if isinstance(sampling, EvalSampling) else EvalSamplingConfig()
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=drawing.top_p,
        top_k=drawing.top_k,
        max_tokens=sampling.max_tokens,
        stop=list(sampling.stop),
        stop_token_ids=[*(stop_token_ids if sampling.stop_at_eos else []), *sampling.stop_token_ids],
        ignore_eos=not sampling.stop_at_eos,
        seed=seed,
        logprobs=0,  # only the sampled token's
        flat_logprobs=True,  # lists of numbers; a dict and an object per token make full garbage collections long
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,  # a stop text may be, or contain, a special token's
        include_stop_str_in_output=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def rollout_of(
    request_id: str, final: Any, stamps: list[int], num_prompt_tokens: int, routing: RoutingShape | None
) -> Rollout:
    """A response, without text.

    Args:
        final: vLLM's last output of the request.
        stamps: The policy version of each token that the engine sampled for it.
        routing: Shape of the routes that came with it; None: none did.

    Raises EngineError if tokens, log-probabilities and stamps do not belong together, or are not finite.
    """
    if final is None or not final.outputs:
        raise EngineError(f"{request_id} ended without an output")
    (completion,) = final.outputs
    token_ids = list(completion.token_ids)
    flat = completion.logprobs
    if (flat.token_ids if flat else []) != token_ids:
        raise EngineError(f"{request_id} has log-probabilities of other tokens than it returned")
    logprobs = list(flat.logprobs) if flat else []
    was_aborted = completion.finish_reason == ABORTED
    if was_aborted or isinstance(completion.stop_reason, str):
        stamps = stamps[: len(token_ids)]  # tokens that arrived after the request was ended, here by a stop text
    if len(stamps) != len(token_ids):
        raise EngineError(f"{request_id} has {len(token_ids)} tokens and {len(stamps)} version stamps")
    if not all(map(math.isfinite, logprobs)):
        raise EngineError(f"{request_id} has a log-probability that is not finite; are the weights finite?")
    routes = None
    if routing is not None:
        num_tokens = num_prompt_tokens + len(token_ids)
        routes = read_routes(completion.routed_experts, routing, num_tokens, was_aborted=was_aborted)
    return Rollout(token_ids, logprobs, list(stamps), "", str(completion.finish_reason), routes=routes)


def probe_params() -> SamplingParams:
    """Ask for the likeliest next tokens."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=1, temperature=1.0, seed=1, logprobs=NUM_PROBE_LOGPROBS, detokenize=False)


def next_logprobs_of(final: Any) -> dict[int, float]:
    """Log-probabilities of the likeliest next tokens, and of the one that was sampled. Raises EngineError if the probe
    was ended before."""
    if final is None or not final.outputs[0].logprobs:
        raise EngineError("a probe of the engine ended without an output")
    return {token: entry.logprob for token, entry in final.outputs[0].logprobs[0].items()}


def prefill_params() -> SamplingParams:
    """Ask for the log-probabilities of given tokens."""
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=1,
        prompt_logprobs=0,  # of the given token alone
        flat_logprobs=True,
        skip_reading_prefix_cache=True,  # blocks that decoding filled would be returned as they are
        detokenize=False,
    )


def prompt_logprobs_of(final: Any, token_ids: Sequence[int]) -> list[float]:
    """Log-probability of every token but the first, at temperature 1. Raises EngineError if the request was ended
    before its prefill was complete."""
    flat = None if final is None else final.prompt_logprobs
    if flat is None or list(flat.token_ids) != list(token_ids[1:]):
        raise EngineError(f"the engine ended a prefill of {len(token_ids)} tokens without their log-probabilities")
    return list(flat.logprobs)
