"""Responses that go on where they stood: when the slot of their version is taken, or their worker is told to go.

    a request ends as ABORTED, with the tokens that it has     (Engine.abort_version, Engine.abort_all)
    another one gets prompt and tokens as its prompt, and samples the rest      (`go_on`)

Owns: what the second request asks, and how the two become one response. Does not own who ends the first one
(adapters/adapter_replica.py, worker.py), nor who samples the rest (fleet/router.py).
Invariant: tokens that stay keep the log-probability and the version with which they were sampled.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from slipstream.conf.schema import SamplingConfig
from slipstream.rollout.routes import continued
from slipstream.rollout.types import ABORTED, Rollout

Sample = Callable[[Sequence[int], SamplingConfig, int | None], Awaitable[Rollout]]
"""(prompt, sampling, seed) -> one response."""


async def go_on_together(
    token_ids: Sequence[int],
    so_far: Sequence[Rollout],
    sampling: SamplingConfig,
    seed: int | None,
    generate_group: Callable[..., Awaitable[list[Rollout]]],
) -> list[Rollout]:
    """Sample the rest of a group that another worker began, by an engine's generate_group(). See go_on()."""

    async def sample(prompt: Sequence[int], rest: SamplingConfig, own: int | None) -> Rollout:
        (part,) = await generate_group(prompt, 1, rest, seed=own)
        return part

    seeds = [None if seed is None else seed + index for index in range(len(so_far))]
    calls = [go_on(token_ids, part, sampling, own, sample) for part, own in zip(so_far, seeds, strict=True)]
    return list(await asyncio.gather(*calls))


async def go_on(
    token_ids: Sequence[int], so_far: Rollout, sampling: SamplingConfig, seed: int | None, sample: Sample
) -> Rollout:
    """Sample the rest of a response that was ended, by `sample`; one that has come to its own end is returned as it is.
    `token_ids` is the prompt; `sampling` and `seed` are of the whole response."""
    if so_far.finish_reason != ABORTED:
        return so_far
    so_far = without_half_a_stop(so_far, sampling.stop)
    num_tokens = len(so_far.token_ids)
    if num_tokens == sampling.max_tokens:
        return replace(so_far, finish_reason="length")
    rest = replace(sampling, max_tokens=sampling.max_tokens - num_tokens)
    own = None if seed is None else seed_of_part(seed, num_tokens)
    part = await sample([*token_ids, *so_far.token_ids], rest, own)
    return replace(
        so_far,
        token_ids=so_far.token_ids + part.token_ids,
        logprobs=so_far.logprobs + part.logprobs,
        policy_versions=so_far.policy_versions + part.policy_versions,
        finish_reason=part.finish_reason,
        routes=continued(so_far, part),
    )


def without_half_a_stop(so_far: Rollout, stop: Sequence[str]) -> Rollout:
    """Drop the last tokens, where a stop text may begin: the engine looks for it only in what it samples itself."""
    num_kept = len(so_far.token_ids) - max((len(text.encode()) - 1 for text in stop), default=0)
    if num_kept >= len(so_far.token_ids):
        return so_far
    num_kept = max(num_kept, 0)
    routes = so_far.routes
    if routes is not None:
        num_positions = max(0, len(routes.is_recorded) - (len(so_far.token_ids) - num_kept))
        routes = routes.at(slice(num_positions))
    return replace(
        so_far,
        token_ids=so_far.token_ids[:num_kept],
        logprobs=so_far.logprobs[:num_kept],
        policy_versions=so_far.policy_versions[:num_kept],
        routes=routes,
    )


def seed_of_part(seed: int, num_tokens: int) -> int:
    """Seed with which a response goes on after `num_tokens` tokens. The first seed would repeat the random numbers."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{num_tokens}".encode()).digest()[:4], "little") >> 1
