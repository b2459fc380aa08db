"""The floor of the mismatch: how far an engine is from itself, when it scores its own responses again by prefill.

Owns: which responses are scored, and the figures. Does not own: when (controller), the scoring (rollout/worker.py).
Invariant: scored are tokens whose every stamp is the version that the engines hold, so decoding and prefill differ in
their kernels and batches alone. A floor that cannot be measured is a null and a warning; it never ends a run.

    decoding   log mu of each token, as it was sampled      d = prefill - decoding
    prefill    log mu' of the same tokens at once           floor k3 = mean of exp(d) - d - 1
"""

import asyncio
import logging
import math
from collections.abc import Sequence

from slipstream.fleet.router import Router
from slipstream.orchestrator.metrics.catalogue import Value
from slipstream.rollout.branches import branches_of
from slipstream.rollout.types import Group

logger = logging.getLogger(__name__)

FLOOR_EVERY_STEPS = 10
"""The floor is measured at the first step and then this often: it costs a prefill of few sequences."""
NUM_SEQUENCES = 4
"""Responses that are scored, of different prompts."""
MAX_SCORED_TOKENS = 1024
"""Per sequence, prompt included. vLLM has float32 logits of all at once: 1024 times 150 000 entries take 0.6 GB."""
FLOOR_TIMEOUT_S = 60.0
"""Longest that the scoring may take; it overlaps with the trainer's forward and backward."""


async def measure_floor(
    router: Router, groups: Sequence[Group], version: int, *, max_model_len: int, num_sequences: int = NUM_SEQUENCES
) -> dict[str, Value]:
    """Score the first response of each of the first groups that `version` sampled alone. Returns metrics by name; empty
    when no group is of that version, or the engines moved on or failed."""
    longest = min(MAX_SCORED_TOKENS, max_model_len - 1)  # vLLM insists on one more token
    responses = [
        branch.first_response
        for group in groups
        for rollout in group.rollouts[:1]
        for branch in branches_of(group.prompt, rollout)[:1]
        if set(branch.policy_versions) == {version}
    ]
    chosen = [response for response in responses if len(response[0]) < longest][:num_sequences]
    differences: list[float] = []
    try:
        async with asyncio.timeout(FLOOR_TIMEOUT_S):
            for prompt, response, decoded in chosen:  # one after the other: see MAX_SCORED_TOKENS
                scored = await router.score([*prompt, *response][:longest], version)
                prefilled = [] if scored is None else scored[len(prompt) - 1 :]
                differences += [one - other for one, other in zip(prefilled, decoded, strict=False)]
    except Exception as error:  # noqa: BLE001 - it crosses Ray, and a figure is not worth a run
        logger.warning("the floor of the mismatch was not measured: %s: %s", type(error).__name__, error)
        return {}
    if not differences:
        return {}
    return {
        "parity/floor_k3": math.fsum(math.expm1(d) - d for d in differences) / len(differences),
        "parity/floor_log_ratio_max": max(map(abs, differences)),
    }
