"""The start of a run with staleness: batches begin one after the other, as they do later, and not all at once.

With a staleness of S, S + 1 batches may be in flight. If all began together, engines would decode all of them to nearly
the same end: the trainer would wait for as long as S + 1 batches take, and then have S in store, while no ticket is
left and engines idle. Where responses are of similar length this repeats. Begun at even distances, a batch ends
whenever one has been trained:

    batch 0  |----------------|                    batch k begins when batch 0 has done the share k / (S + 1), that is,
    batch 1      |----------------|                when k (k + 1) / 2 / (S + 1) batches have been sampled in all
    batch 2          |----------------|

Owns when the first S batches ahead are opened. Does not own the bound, which is the buffer's, or anything after the
first batch is taken. A worker that does not answer is left out: batches then begin later, at the latest when the first
one is taken.
"""

import asyncio

from slipstream.conf.schema import RunConfig
from slipstream.fleet.replicas import ReplicaState
from slipstream.fleet.roster import Roster
from slipstream.orchestrator.loop.buffer import GroupBuffer

ASK_EVERY_S = 0.25
ANSWER_WITHIN_S = 2.0


def num_ahead(sampled_batches: float, max_staleness_steps: int) -> int:
    """How many batches may be sampled ahead, once so many have been sampled in all.

    Example: with a staleness of 3, batch 1 is opened after a quarter of a batch, batch 2 after three quarters, batch 3
    after one and a half.
    """
    shares = sampled_batches * (max_staleness_steps + 1)
    return max(k for k in range(max_staleness_steps + 1) if k * (k + 1) / 2 <= shares)


class Ramp:
    """See the module's docstring. `begin`, and then `run` beside the sampler."""

    def __init__(self, config: RunConfig, roster: Roster, buffer: GroupBuffer) -> None:
        algorithm = config.algorithm
        self._max_staleness_steps = algorithm.max_staleness_steps
        self._num_responses = algorithm.groups_per_step * algorithm.group_size
        self._max_tokens = config.max_response_tokens
        self._roster, self._buffer = roster, buffer
        self._before = (0, 0)

    async def begin(self) -> None:
        if self._max_staleness_steps:
            self._before = await self._sampled()
            await self._buffer.open_ahead(0)

    async def run(self) -> None:
        """Open one batch after the other, until all are open or the first one is taken."""
        while not self._buffer.is_wide_open:
            await asyncio.sleep(ASK_EVERY_S)
            tokens, finished = (now - then for now, then in zip(await self._sampled(), self._before, strict=True))
            # How long responses get is not known: at most max_tokens, and those that have ended are done.
            done = max(tokens / (self._num_responses * self._max_tokens), finished / self._num_responses, 0.0)
            await self._buffer.open_ahead(num_ahead(done, self._max_staleness_steps))

    async def _sampled(self) -> tuple[int, int]:
        """Tokens and finished responses of all workers that serve and answer."""
        serving = [one for one in self._roster.replicas.values() if one.state is ReplicaState.serving]
        answers = await asyncio.gather(
            *(asyncio.wait_for(one.worker.progress(), ANSWER_WITHIN_S) for one in serving), return_exceptions=True
        )
        found = [answer for answer in answers if not isinstance(answer, BaseException)]
        return sum(one.num_tokens for one in found), sum(one.num_finished for one in found)
