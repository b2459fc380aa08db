"""A rollout worker's side of adapter mode: a publish fills a free slot of a running engine, and a commit flips to it.

    begin(v)    pick a slot that nobody reads; every rank's receiver of that slot DIRTY -> where to write
                (none is free: wait, or end the requests of the oldest version, as weight_sync.pause_mode says)
    verify      every rank proves the slot's bytes
    commit(v)   requests that start from here on read the slot
    abort       the slot is empty; the earlier version goes on serving

A restarted worker takes the newest version from another worker's slot instead, once it has the base:

    pull(offers) a free slot; every rank reads the peer's newest slot and proves the bytes
    adopt(v)     what commit does
    release      every rank closes its link to the peer (the base came over the same link)

Owns: that order, the policy for busy slots, and the probe: before the first version, noise in the factors of each kind
of module, in the last layer of each slot, must change the engine's log-probabilities. (The most common fault of this
mode is an engine that silently ignores the adapters of experts, which no hash shows.)
Invariants: the engine is never paused. A request reads one slot from its first token to its last, unless its version is
evicted. Every group ends, however often it is evicted. A publish that fails loses only the version that it was writing.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar

from slipstream.conf.schema import PauseMode, SamplingConfig, WeightSyncConfig
from slipstream.rollout.adapters.slot_leases import SlotTable
from slipstream.rollout.continuation import go_on
from slipstream.rollout.crash_reports import death_of_a_child
from slipstream.rollout.engine.engine import Engine, is_gone
from slipstream.rollout.errors import EngineDied, EngineError, ReplicaNotServing, SlotsBusy
from slipstream.rollout.receivers import SlotReceivers
from slipstream.rollout.types import ABORTED, PROBE, Adapter, Rollout
from slipstream.rollout.worker_verbs import EngineConnection
from slipstream.weight_sync.calls.verbs import verb_of
from slipstream.weight_sync.record.repeated_layers import layer_of
from slipstream.weight_sync.replica.endpoint import ReplicaHandler
from slipstream.weight_sync.replica.messages import Bound, EngineRank, Expected
from slipstream.weight_sync.replica.recovery import Offer, Pulled, slowest

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

PROBE_TOKENS = (1, 2, 3, 4, 5, 6, 7, 8)
MAX_RESTARTS = 2
"""How often a group starts anew because its version was evicted; later its responses go on under newer versions."""
EVICT_RETRY_S = 0.02
"""Time between two tries to end a version's requests. Some requests reach the engine only after a try."""


class AdapterReplica(ReplicaHandler):
    """See the module's docstring.

    Args:
        ranks: Every engine rank's slots: their layout, and the addresses of each.
        asked: Those ranks, which answer beside the engine's steps.
        has_base: Whether the engine's own weights have arrived; until then it is paused.
    """

    def __init__(
        self,
        engine: Engine,
        ranks: Sequence[EngineRank],
        asked: Sequence[EngineConnection],
        num_slots: int,
        config: WeightSyncConfig,
        has_base: Callable[[], bool],
    ) -> None:
        self._engine = engine
        self._ranks = list(ranks)
        self._asked = asked
        self.config = config
        self._has_base = has_base
        self._num_slots = num_slots
        self._table = SlotTable(num_slots)
        self._writing: int | None = None
        self._is_probed = False
        self.is_going = False
        self.num_evicted_requests = 0
        """Requests that ended because a publish needed their slot; they started anew or went on under a newer one."""

    @property
    def num_ranks(self) -> int:
        return len(self._ranks)

    @property
    def version(self) -> int:
        """The newest committed one; -1: there is none yet."""
        return -1 if self._table.newest is None else self._table.newest.version

    @property
    def _hands_over(self) -> bool:
        """Whether another worker goes on with requests that are ended, as they are."""
        return self.is_going or is_gone(self._engine)

    # -- sampling ----------------------------------------------------------------------------------------------------

    async def sample(
        self,
        token_ids: Sequence[int],
        n: int,
        sampling: SamplingConfig,
        *,
        seed: int | None,
        version: int | None = None,
        so_far: Sequence[Rollout] = (),
    ) -> list[Rollout]:
        """`n` responses under `version`, if it is kept, or else under the newest committed version, under which those
        that another worker began (`so_far`) go on. Raises ReplicaNotServing if no version was committed yet."""
        if self._table.newest is None:
            raise ReplicaNotServing("this rollout worker has no adapter yet: it samples only from a committed version")
        num_evictions, rollouts = [one.num_evictions for one in so_far] or [0] * n, list(so_far)
        num_tries = 1 if self.config.requests_in_flight is PauseMode.keep else 1 + MAX_RESTARTS
        for _ in range(0 if so_far else num_tries):
            with self._table.lease(version) as adapter:
                rollouts = await self._engine.generate_group(token_ids, n, sampling, seed=seed, adapter=adapter)
            is_evicted = [rollout.finish_reason == ABORTED and not self._hands_over for rollout in rollouts]
            self._count_evicted(sum(is_evicted))
            num_evictions = [before + more for before, more in zip(num_evictions, is_evicted, strict=True)]
            if not any(is_evicted):  # otherwise all start anew, so that siblings have one version
                break
        # A group that is evicted every time would never end, so its responses now go on from where they are.
        parts = [replace(part, num_evictions=count) for part, count in zip(rollouts, num_evictions, strict=True)]
        seeds = [None if seed is None else seed + index for index in range(n)]
        calls = [
            self._continue(token_ids, sampling, own, version, part) for own, part in zip(seeds, parts, strict=True)
        ]
        return list(await asyncio.gather(*calls))

    def keep(self, version: int | None) -> bool:
        return self._table.keep(version)

    async def score(self, token_ids: Sequence[int], version: int) -> list[float] | None:
        """Engine.score under `version`; None when it is not the newest one."""
        if self.version != version:
            return None
        with self._table.lease() as adapter:
            return await self._engine.score(token_ids, adapter)

    async def _continue(
        self, token_ids: Sequence[int], sampling: SamplingConfig, seed: int | None, version: int | None, so_far: Rollout
    ) -> Rollout:
        """Finish one response whose version was evicted: prefill what it has under the newest version, and go on."""

        async def sample(prompt: Sequence[int], rest: SamplingConfig, own: int | None) -> Rollout:
            with self._table.lease(version) as adapter:
                (part,) = await self._engine.generate_group(prompt, 1, rest, seed=own, adapter=adapter)
            return part

        while so_far.finish_reason == ABORTED and not self._hands_over:
            so_far = await go_on(token_ids, so_far, sampling, seed, sample)
            is_evicted = so_far.finish_reason == ABORTED and not self._hands_over
            self._count_evicted(is_evicted)
            so_far = replace(so_far, num_evictions=so_far.num_evictions + is_evicted)
        return so_far

    def _count_evicted(self, num_requests: int) -> None:
        if num_requests and self.config.requests_in_flight is PauseMode.wait:
            raise EngineError("the engine aborted requests although nobody asked it to")
        self.num_evicted_requests += num_requests

    # -- ReplicaHandler

    async def describe(self) -> Sequence[EngineRank]:
        return self._ranks

    async def pause(self, version: int, epoch: int, digest: str) -> None:
        """Do nothing: the engine goes on sampling during a publish."""

    async def begin(self, version: int, epoch: int, digest: str) -> Sequence[Bound]:
        """Choose a slot that no request reads, and let every rank receive into it."""
        slot = await self._take_slot(version)
        return await self._ask(SlotReceivers.begin, slot, version, epoch, digest)

    async def verify(self, version: int, epoch: int, digest: str, expected: Sequence[Expected]) -> None:
        assert self._writing is not None
        await self._ask(SlotReceivers.verify, self._writing, version, epoch, digest, expected)

    async def commit(self, version: int, epoch: int) -> None:
        await self._flip(SlotReceivers.commit, version, epoch)

    async def abort(self, epoch: int, reason: str) -> None:
        """The slot stays empty; the next begin() takes it again, on a fresh connection."""
        slot, self._writing = self._writing, None
        if slot is not None:
            await self._ask(SlotReceivers.abort, slot, epoch, reason)

    # -- recovery of a restarted worker --------------------------------------------------------------------------

    async def offer(self) -> list[Offer]:
        newest = self._table.newest
        if newest is None:
            raise ReplicaNotServing("this rollout worker has no adapter yet that another one could read")
        return await self._ask(SlotReceivers.offer, newest.slot)

    async def pull(self, offers: Sequence[Offer]) -> Pulled:
        """Fill a free slot from a peer's newest one. No request reads it before adopt(). Arguments as Worker.pull."""
        slot = await self._take_slot(offers[0].version)
        limit_s = self.config.timeout_s  # limits the read, which must end before the wait for it
        return slowest(await ask_all(self._asked, 2 * limit_s, SlotReceivers.pull, slot, offers, limit_s))

    async def adopt(self, version: int, epoch: int) -> None:
        await self._flip(SlotReceivers.adopt, version, epoch)

    async def release(self, offers: Sequence[Offer]) -> None:
        """Close the links to a peer. vLLM's own calls would interrupt sampling."""
        await self._ask(SlotReceivers.release, offers)

    # -- both --------------------------------------------------------------------------------------------------------

    async def _ask(
        self, verb: Callable[Concatenate[SlotReceivers, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        return await ask_all(self._asked, self.config.timeout_s, verb, *args, **kwargs)

    async def _take_slot(self, version: int) -> int:
        """Choose a slot for `version` that no request reads. The first time, prove that the engine applies adapters."""
        if not self._has_base():
            raise ReplicaNotServing("the base weights have not arrived: they come once, before any adapter")
        if not self._is_probed:
            await self._probe()
            self._is_probed = True
        slot = await self._free_slot(version)
        self._table.write(slot)
        self._writing = slot
        return slot

    async def _flip(self, verb: Callable[[SlotReceivers, int, int, int], None], version: int, epoch: int) -> None:
        assert self._writing is not None
        await self._ask(verb, self._writing, version, epoch)
        self._table.commit(self._writing, version)
        self._writing = None

    async def _free_slot(self, version: int) -> int:
        """Wait for a slot that no request reads; weight_sync.pause_mode says how."""
        policy, limit_s = self.config.requests_in_flight, self.config.timeout_s / 2
        try:
            async with asyncio.timeout(limit_s):
                while (slot := self._table.free()) is None:
                    if policy is PauseMode.wait:
                        await self._table.wait_changed()
                    elif (oldest := self._table.oldest_read()) is not None:
                        await self._engine.abort_version(oldest.version)
                        await asyncio.sleep(EVICT_RETRY_S)
                return slot
        except TimeoutError as e:
            raise SlotsBusy(
                f"no adapter slot became free for version {version} within {limit_s:g} s: requests in flight by version"
                f" {self._table.num_readers}; raise weight_sync.timeout_s, or set weight_sync.pause_mode=keep"
            ) from e

    async def _probe(self) -> None:
        """In every slot, noise in the factors of each kind of module must change the next token's distribution."""
        kinds = sorted({kind_of(param.name) for param in self._ranks[0].layout.params})
        for slot in range(self._num_slots):
            if ignored := await self._ignored(slot, kinds):
                raise EngineError(
                    f"the engine ignores adapters of {', '.join(ignored)} in slot {slot} of {self._num_slots}: noise in"
                    " them, in the last layer, changes no log-probability; set weight_sync.mode=merged, where the base"
                    " is not INT4"
                )
        logger.info("adapters of %s reach the engine's output, in each of %d slots", ", ".join(kinds), self._num_slots)

    async def _ignored(self, slot: int, kinds: Sequence[str]) -> list[str]:
        """The kinds whose factors in this slot change nothing. Leaves the slot empty."""

        factors = [param.name for param in self._ranks[0].layout.params]

        async def said_with(kind: str) -> dict[int, float]:
            await self._ask(SlotReceivers.fill, slot, last_of_kind(factors, kind), 1)
            what = f"probe of {kind or 'nothing'} in slot {slot}"
            return await self._engine.next_logprobs(PROBE_TOKENS, Adapter(slot, PROBE, what))

        silent = await said_with("")
        # All of these requests run the same kernels on the same slot: an adapter that is ignored changes no bit.
        ignored = [kind for kind in kinds if await said_with(kind) == silent]
        await self._ask(SlotReceivers.fill, slot, [], 1)
        return ignored


async def ask_all(
    ranks: Sequence[EngineConnection],
    limit_s: float,
    verb: Callable[Concatenate[SlotReceivers, P], T],
    *args: P.args,
    **kwargs: P.kwargs,
) -> list[T]:
    """Ask every rank of an engine about its adapter slots. Results by rank.

    vLLM's own collective_rpc runs between two steps of the engine: each call waits for one step and delays the next,
    and a publish into an adapter slot makes three calls. These go to a thread of each rank and need not wait, because
    no request reads the slot that is written.

    Raises the first rank's error, as its own class; and EngineDied if the engine's process is gone, or all of them did
    not answer in time.
    """
    asked = verb_of(verb)
    try:
        async with asyncio.timeout(limit_s):
            calls = (rank.call(asked, *args, **kwargs) for rank in ranks)
            results: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
    except TimeoutError as e:
        raise EngineDied(f"the engine did not answer {asked.name} within {limit_s:g} s") from e
    for result in results:
        if isinstance(result, EngineDied):
            how = death_of_a_child() or "died"
            raise EngineDied(f"the engine's process {how}; this rollout worker must be restarted") from result
        if isinstance(result, BaseException):
            raise result
    return results


def kind_of(factor: str) -> str:
    if ".experts." in factor:
        return "experts"
    return "attention" if ".self_attn." in factor else "feed-forward"


def last_of_kind(factors: Iterable[str], kind: str) -> list[str]:
    """The factors of one kind of module in the last layer that has it: whatever acts there, acts through the fewest
    other layers. (Where the first layer alone acts, noise in all of them shows nothing.)"""
    of_kind = [name for name in factors if kind_of(name) == kind]
    last = max(map(layer_of, of_kind), default=-1)
    return [name for name in of_kind if layer_of(name) == last]
