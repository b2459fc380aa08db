"""What a rollout worker asks of an engine: thirteen verbs, and two more for adapter slots.

`vllm_engine.py` is the engine that there is. docs/engines.md says what another one would have to give.

    prepare, start, warm_up, check, shutdown           its life
    generate_group, score, abort_all                   requests, between start() and shutdown()
    pause, clear_cache, set_version, resume            a publish, in this order, around
    call_ranks                                         what its ranks do with their weights
    next_logprobs, abort_version                       adapter slots

Owns: this protocol. Imports no engine.
Invariants that a worker relies on: a token's stamp is the version whose weights sampled it. No step runs, and no weight
is read, between the return of pause() and resume(). Requests that pause() froze go on at resume().
"""

from collections.abc import Sequence
from typing import Any, Protocol

from slipstream.conf.schema import PauseMode, SamplingConfig
from slipstream.rollout.errors import EngineDied
from slipstream.rollout.types import Adapter, Rollout

CALL_TIMEOUT_S = 1800.0
"""Longest that a call to the engine may take if the caller sets no deadline; recording a large model takes minutes."""


class Engine(Protocol):
    """See the module's docstring. All methods belong to one event loop."""

    version: int
    """Policy version that stamps new tokens; -1 while the weights are dummies."""
    num_generated_tokens: int
    """Tokens since the start, including those of unfinished responses."""
    num_finished_responses: int
    """Responses that have ended since the start."""
    first_token_at: float | None
    """When the first token came, in seconds since 1970."""

    @property
    def num_kv_blocks(self) -> int:
        """Blocks of the KV cache; 0 while the engine is down."""
        ...

    @property
    def start_phase(self) -> str:
        """What start() is doing, for people."""
        ...

    async def prepare(self) -> None:
        """Do the part of start() that needs no device, which may still be another engine's."""
        ...

    async def start(self) -> None:
        """Start the engine's processes and wait until it could serve. Raises EngineError if it failed to come up."""
        ...

    async def warm_up(self, adapter: Adapter | None = None) -> None:
        """Have everything compiled that a request would wait for; with an adapter, if given. Tokens do not count."""
        ...

    def check(self) -> None:
        """Raise EngineDied if one of the engine's processes has ended, or a call was left unanswered."""
        ...

    async def generate_group(
        self,
        prompt_token_ids: Sequence[int],
        n: int,
        sampling: SamplingConfig,
        *,
        seed: int | None = None,
        adapter: Adapter | None = None,
    ) -> list[Rollout]:
        """Sample `n` responses to one prompt, with the log-probability and the version of each token. Their `text` is
        empty. One that a pause, abort_version() or the end of the engine's process ended is ABORTED.

        Args:
            seed: The first response's; the others' follow it. None: the engine's own stream (much faster on GPUs).
            adapter: Applied to all of them, from first token to last. The caller holds a lease on its slot.

        Raises EngineError if it refused the request or answered inconsistently, EngineDied if it was gone before.
        """
        ...

    async def score(self, token_ids: Sequence[int], adapter: Adapter | None = None) -> list[float]:
        """Log-probability of every token but the first, at temperature 1, from one prefill of the whole sequence: at
        least two tokens, and fewer than rollout.max_model_len. Raises: as generate_group()."""
        ...

    async def abort_all(self) -> None:
        """End all responses in flight. Each returns what it has so far, as ABORTED."""
        ...

    async def pause(self, mode: PauseMode, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Stop stepping. When this returns the device is idle and new requests queue up until resume(). Those in flight
        are frozen (keep, keep_kv), have ended by themselves (wait), or are ended (abort). Raises EngineDied if the step
        took longer, and EngineError if requests did, with `wait`. They go on, and a later pause() waits for the rest of
        them."""
        ...

    async def clear_cache(self, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Drop all KV blocks. Requests that pause() froze are prefilled again, with the weights that resume() finds."""
        ...

    async def set_version(self, version: int) -> None:
        """Stamp tokens with `version` from now on, none that was sampled before. Only between pause() and resume()."""
        ...

    async def resume(self, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Go on with requests in flight and queued ones."""
        ...

    async def call_ranks(self, method: str, *args: Any, timeout_s: float = CALL_TIMEOUT_S) -> list[Any]:
        """Call a method of WeightReceiver (in_vllm/worker_extension.py) in the process of every rank; results by rank.
        Raises the first rank's error, as its own class, and EngineDied if a rank did not answer in time; the engine
        takes no further calls then."""
        ...

    def shutdown(self) -> None:
        """End the engine's processes. Idempotent."""
        ...

    async def next_logprobs(self, prompt_token_ids: Sequence[int], adapter: Adapter | None) -> dict[int, float]:
        """Log-probabilities of the likeliest next tokens, and of the one that was sampled."""
        ...

    async def abort_version(self, version: int) -> None:
        """End the requests in flight that use this version's adapter. Each returns what it has so far, as ABORTED."""
        ...


def is_gone(engine: Engine) -> bool:
    """Whether it can sample no more."""
    try:
        engine.check()
    except EngineDied:
        return True
    return False
