"""Trainer ranks that are started again after one of them has died, with the state of the last finished step.

    a call fails, and a rank is dead --> the others are ended --> all start again in their places --> the newest state
    that all have, from keepers' memory --> living engines are met again --> the calls after that state, once more -->
    the call that failed, once more

A trainer rank is a function of the calls that change it. They are noted here from one kept state to the next: what is
computed again is computed from the same batches, so the loop knows nothing of it but that a call took longer.

Owns: the noted calls, how often ranks were started again, what is said of it; which keeper is where, and who sends to
whom. Does not own: how one call goes to all ranks, nor which calls change a rank (ray_handles.py); how ranks start
(trainer_ranks.py); what a keeper does (trainer/checkpoint/keeper.py).
Invariant: ranks are used again only when every noted call was made again on all of them.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ray.exceptions import RayError

from slipstream.conf.json_files import JsonObject
from slipstream.conf.plural import counted
from slipstream.fleet.errors import FleetError
from slipstream.fleet.waiting import together, wait_for
from slipstream.orchestrator.cluster.actors import KeeperActor, TrainerActor
from slipstream.orchestrator.cluster.ray_cluster import RayCluster, kill_actor
from slipstream.orchestrator.errors import CheckpointLost, OrchestratorError, TrainingStopped
from slipstream.trainer.checkpoint.keeper import COPIES_HERE, COPIES_THERE, Address, Readiness

logger = logging.getLogger(__name__)

Arguments = Callable[[int], tuple[object, ...]]
"""Those of one rank's call, given its number."""
_CHECKPOINT, _STEP, KEEP = "begin_checkpoint", "optimizer_step", "keep"
_KEEPER_IS_GONE = "a process that kept states is gone"
_AGAIN_S = 60.0
"""How long Ray may take to start such a process again."""
_READ_S = 600.0
"""Longest that reading a state, or meeting the engines, may take."""
_Started = tuple[type[KeeperActor], Address, int]


@dataclass(frozen=True, slots=True)
class Ranks:
    """All trainer ranks of one life, in order."""

    actors: Sequence[type[TrainerActor]]
    names: Sequence[str]
    """In Ray and in the log."""
    facts: Sequence[JsonObject]
    """What load() returned."""


@dataclass(frozen=True, slots=True)
class _Noted:
    after: int
    """Steps finished before it."""
    what: str
    arguments: Arguments
    timeout_s: float
    returned: Any


@dataclass(slots=True)
class Engines:
    """The rollout workers that ranks are connected to, by their places."""

    endpoints: list[str] = field(default_factory=list[str])
    slots: list[str] = field(default_factory=list[str])
    """Addresses of adapter slots; empty without them."""
    absent: set[int] = field(default_factory=set[int])
    """Out of service."""

    def came(self, place: int, endpoint: str) -> None:
        """A worker was met that was started again, or a further one."""
        for listed in (self.endpoints, self.slots) if self.slots else (self.endpoints,):
            listed += [""] * (place + 1 - len(listed))
        (self.slots or self.endpoints)[place] = endpoint
        self.absent.discard(place)


@dataclass(frozen=True, slots=True)
class LivingRanks:
    """What another controller has to know of the ranks to go on with them."""

    names: Sequence[str]
    facts: Sequence[JsonObject]
    engines: Engines
    num_begun: int
    number: int
    """The kept state that they have now; 0: what they have is not kept."""
    why_not: str


class Keepers:
    """The run's keepers: on each node with trainer ranks an actor that holds states of finished steps.

        node A: ranks 0, 1, keeper A       every rank sends to the keeper of its node and to that of the next node, so
        node B: ranks 2, 3, keeper B       that one of them outlives the rank, and one outlives the node

    Args:
        key: the run's; whoever sends or reads a state knows it.
        is_one_node: whether all processes of the run share one machine, hence loopback.
    """

    def __init__(self, cluster: RayCluster, key: bytes, *, is_one_node: bool) -> None:
        self._cluster, self._key, self._is_one_node = cluster, key, is_one_node
        self._by_node: dict[str, asyncio.Future[_Started]] = {}

    async def of(self, nodes: Sequence[str]) -> list[list[Address]]:
        started = await together(*(self._on(node) for node in dict.fromkeys(nodes)))
        addresses = {node: address for node, (_, address, _) in zip(dict.fromkeys(nodes), started, strict=True)}
        return [[addresses[one] for one in _nodes_of_keepers(node, nodes)] for node in nodes]

    async def again(self) -> None:
        """Look for all of them anew: one that died is started again by Ray, at another address and empty."""
        nodes, self._by_node = list(self._by_node), {}
        await together(*(self._on(node) for node in nodes))

    async def lacks_room(self, nodes: Sequence[str], state_bytes: Sequence[int]) -> str:
        """What there is too little of on a node, for people; "" if there is enough."""
        needed: Counter[str] = Counter()
        for node, num_bytes in zip(nodes, state_bytes, strict=True):
            needed[node] += COPIES_HERE * num_bytes
            needed.update(dict.fromkeys(_nodes_of_keepers(node, nodes), COPIES_THERE * num_bytes))
        for node, num_bytes in needed.items():
            _, (host, _), free = await self._on(node)
            if num_bytes > free:
                return f"{num_bytes / 1e9:.1f} GB of {host}'s memory, which has {free / 1e9:.1f} GB left"
        return ""

    async def newest(self, num_ranks: int, most: int, life: int) -> tuple[int, list[Address]]:
        """The newest number, at most this one, that every rank has a state of, and where each finds it; (0, []) without
        one. Later ones are forgotten, and none is taken of ranks of an earlier life."""
        where: dict[int, dict[int, Address]] = {}
        left: list[tuple[str, type[KeeperActor]]] = []
        for node, started in self._by_node.items():
            try:
                actor, address, _ = await started
                kept = await self._cluster.result_of(actor.kept.remote(), _name(node), OrchestratorError)
            except (OrchestratorError, RayError):  # it died with its node, on which Ray would start it again
                continue
            left.append((node, actor))
            for rank, numbers in kept.items():
                for number in numbers:
                    where.setdefault(number, {})[rank] = address
        number = max((one for one, ranks in where.items() if one <= most and len(ranks) == num_ranks), default=0)
        for node, actor in left:
            await self._cluster.result_of(actor.go_back.remote(number, life), _name(node), OrchestratorError)
        return number, [where[number][rank] for rank in range(num_ranks)] if number else []

    def _on(self, node: str) -> asyncio.Future[_Started]:
        if node not in self._by_node:
            self._by_node[node] = asyncio.ensure_future(self._start(node))
        return self._by_node[node]

    async def _start(self, node: str) -> _Started:
        actor = await self._cluster.new_actor_of_node(KeeperActor, _name(node), node)
        begun = actor.begin.remote(self._is_one_node, self._key)
        return actor, *await self._cluster.result_of(begun, _name(node), OrchestratorError)


def _name(node: str) -> str:
    return f"keeper of {node[:8]}"


def _nodes_of_keepers(node: str, nodes: Sequence[str]) -> list[str]:
    """This node, and the next one with trainer ranks."""
    ring = list(dict.fromkeys(nodes))
    return list(dict.fromkeys([node, ring[(ring.index(node) + 1) % len(ring)]]))


class Rebirth:
    """See the module's docstring.

    Args:
        start: starts all ranks for the n-th time (0: the first) and loads the model on them. Each is told where its
            state is, and its number: it comes meanwhile.
        max_restarts: of all ranks together, in this run.
        backoff_s: pause after a start that failed; doubles with every further one. The first start comes at once.
    """

    def __init__(
        self,
        cluster: RayCluster,
        start: Callable[[int, Sequence[tuple[Address, int]]], Awaitable[Ranks]],
        keepers: Keepers,
        on_all: Callable[[Ranks, str, Arguments, float], Awaitable[list[Any]]],
        *,
        max_restarts: int,
        start_timeout_s: float,
        backoff_s: float = 1.0,
    ) -> None:
        self.engines = Engines()
        self.down_s: list[float] = []
        """Per restart: the seconds from the failed call to ranks that could be called again."""
        self._cluster, self._start, self._keepers, self._on_all = cluster, start, keepers, on_all
        self._max_restarts, self._start_timeout_s, self._backoff_s = max_restarts, start_timeout_s, backoff_s
        self._num_begun = 0
        """Restarts that were begun."""
        self._noted: list[_Noted] = []
        self._num_kept = 0
        """States that ranks began to send."""
        self._first = 0
        """The oldest state after which all calls are noted."""
        self._why_not = "the run had not begun"
        """Why a death ends the run; "" if it does not."""
        self._is_checkpoint_lost = False

    async def begin(self, ranks: Ranks) -> None:
        """From now on ranks keep the states of their steps, if there is room for them, and may be started again."""
        num_bytes = [int(facts["state_bytes"]) for facts in ranks.facts]
        nodes = [str(facts["node"]) for facts in ranks.facts]
        lack = await self._keepers.lacks_room(nodes, num_bytes) if self._max_restarts else ""
        if lack:
            self._why_not = f"keeping the state of each step takes {lack}"
            logger.warning(
                "a trainer rank that dies will end this run, to be resumed from its newest checkpoint: %s",
                self._why_not,
            )
        elif not self._max_restarts:
            self._why_not = "trainer.max_restarts=0"
        else:
            await self.let_keep(ranks)
            self._why_not = ""
            logger.info(
                "trainer ranks are started again up to %d times if one dies: the state of each step, %.2f GB, is kept "
                "in host memory", self._max_restarts, sum(num_bytes) / 1e9,
            )  # fmt: skip

    @property
    def next_number(self) -> int | None:
        """The number of the state after the step under way; None: none is kept."""
        return None if self._why_not else self._num_kept + 1

    @property
    def unkept_steps(self) -> int | None:
        """Finished steps that would at most be made again if a rank died now; None: its death ends the run. The newest
        state may still be on its way."""
        if self._why_not or self._num_kept < self._first:
            return None
        noted = [one for one in self._noted if one.what == _STEP and one.after >= self._num_kept - 1]
        return len({one.returned[0].policy_version for one in noted})

    def note(self, what: str, arguments: Arguments, timeout_s: float, returned: Any = None) -> None:
        """Remember a call that all ranks have made and that changed them: it is made again after a rebirth. If they
        began to send a state, earlier ones are whole, and calls before those are forgotten."""
        if self._why_not:
            return
        if what != KEEP:
            self._noted.append(_Noted(self._num_kept, what, arguments, timeout_s, returned))
        readiness = returned if what == KEEP else returned[1] if what == _STEP else Readiness.later
        if readiness is Readiness.now:
            self._num_kept += 1
            self._noted = [one for one in self._noted if one.after >= self._num_kept - 1 or one.what == _CHECKPOINT]
        elif readiness is Readiness.never:
            self._why_not, self._noted = _KEEPER_IS_GONE, [one for one in self._noted if one.what == _CHECKPOINT]

    async def keep_again(self, ranks: Ranks) -> None:
        """If a keeper has died: use the one that Ray starts in its place. It has nothing: until the state of the next
        step is whole there, the death of a rank ends the run."""
        if self._why_not != _KEEPER_IS_GONE:
            return
        try:
            await wait_for(self._keepers.again(), "a process that keeps states to start again", timeout_s=_AGAIN_S)
            await self.let_keep(ranks)
        except (OrchestratorError, FleetError, RayError) as error:
            self._why_not = f"no process keeps states: {error}"
            logger.warning(
                "a process that kept states is gone, and another one cannot be had: %s; a trainer rank that dies will "
                "end this run", error,
            )  # fmt: skip
            return
        self._why_not, self._first = "", self._num_kept + 1
        logger.warning("a process that kept states is gone; another one keeps them from the next step on")

    def checkpoint_is_written(self) -> None:
        """Note that all ranks' files of the newest checkpoint are there."""
        self._noted = [one for one in self._noted if one.what != _CHECKPOINT]

    def raise_if_checkpoint_lost(self) -> None:
        """Raise CheckpointLost if a checkpoint was lost, once."""
        if self._is_checkpoint_lost:
            self._is_checkpoint_lost = False
            raise CheckpointLost("a trainer rank died before its files were there")

    def living(self, ranks: Ranks) -> LivingRanks:
        is_kept = not any(one.after == self._num_kept for one in self._noted if one.what != _CHECKPOINT)
        facts = [{name: fact[name] for name in ("state_bytes", "node")} for fact in ranks.facts]
        number = self._num_kept if is_kept and not self._why_not else 0
        return LivingRanks(ranks.names, facts, self.engines, self._num_begun, number, self._why_not)

    async def take_over(self, living: LivingRanks) -> None:
        """Go on with ranks that a controller started that is gone. return_to() comes next."""
        self.engines, self._num_begun, self._why_not = living.engines, living.num_begun, living.why_not
        self._num_kept, self._first = living.number, max(1, living.number)
        if not self._why_not:
            await self._keepers.of([str(facts["node"]) for facts in living.facts])

    async def return_to(self, ranks: Ranks, *, has_it: bool) -> bool:
        """Take ranks back to the state of take_over(), if keepers have it; they are not started anew for that.
        `has_it`: nothing has changed in them since. Returns whether they have it now."""
        number, keepers = await self._keepers.newest(len(ranks.actors), self._num_kept, self._num_begun)
        if not self._why_not:
            await self.let_keep(ranks)
        if has_it or not number or number != self._num_kept:
            return has_it
        await self._on_all(ranks, "load_kept", lambda rank: (keepers[rank], number), _READ_S)
        return True

    async def after(self, ranks: Ranks, error: Exception) -> Ranks:
        """Start all ranks again after a call of these failed with `error`, and return the new ones. Raises `error` if
        no rank is dead or ranks may not be started again, TrainingStopped if they cannot be."""
        if self._why_not or not any(who in self._cluster.dead for who in ranks.names):
            raise error
        began, pause_s = time.monotonic(), 0.0
        while True:
            if self._num_begun >= self._max_restarts:
                raise TrainingStopped(
                    f"{error}. Trainer ranks are not started again: trainer.max_restarts={self._max_restarts} are used "
                    "up. Find out why they die, and go on with slipstream resume"
                ) from error
            await asyncio.sleep(pause_s)
            self._num_begun += 1
            logger.warning(
                "%s; all of %s are started again (%d of trainer.max_restarts=%d)",
                error, counted(len(ranks.names), "trainer rank"), self._num_begun, self._max_restarts,
            )  # fmt: skip
            for actor in ranks.actors:
                with contextlib.suppress(RayError):
                    await self._cluster.in_thread(partial(kill_actor, actor))
            # A step whose end was not told counts as unfinished: the call that failed is made again.
            number, keepers = await self._keepers.newest(len(ranks.names), self._num_kept, self._num_begun)
            if number < max(self._num_kept - 1, self._first):
                raise TrainingStopped(f"{error}. No state of its last steps is left: go on with slipstream resume")
            try:
                starting = self._start(self._num_begun, [(keeper, number) for keeper in keepers])
                ranks = await wait_for(starting, "trainer ranks to start again", timeout_s=self._start_timeout_s)
                started_s = time.monotonic() - began
                again = await self._bring_up_to_date(ranks, number, keepers)
            except (OrchestratorError, FleetError) as another:
                error = another
                pause_s = max(self._backoff_s, 2 * pause_s)
                continue
            self.down_s.append(time.monotonic() - began)
            logger.info(
                "trainer ranks are up again after %.1f s (their start took %.1f s), with state %d; %s",
                self.down_s[-1], started_s, number,
                f"made again: {', '.join(again)}" if again else "no finished step was computed again",
            )  # fmt: skip
            return ranks

    async def _bring_up_to_date(self, ranks: Ranks, number: int, keepers: Sequence[Address]) -> list[str]:
        """Returns the names of the calls that were made again."""
        if number:
            began = time.monotonic()
            await self._on_all(ranks, "load_kept", lambda rank: (keepers[rank], number), _READ_S)
            logger.info("trainer ranks read state %d in %.1f s", number, time.monotonic() - began)
        if (engines := self.engines).endpoints:
            facts = engines.endpoints, engines.slots, sorted(engines.absent)
            await self._on_all(ranks, "connect", lambda _: facts, _READ_S)
        await self.let_keep(ranks)
        self._is_checkpoint_lost |= any(one.after < number and one.what == _CHECKPOINT for one in self._noted)
        again, self._noted, self._num_kept = [one for one in self._noted if one.after >= number], [], number
        for one in again:
            (now, *_) = await self._on_all(ranks, one.what, one.arguments, one.timeout_s)
            self.note(one.what, one.arguments, one.timeout_s, now)
            if one.what == _STEP and now[0].policy_version != one.returned[0].policy_version:
                raise TrainingStopped(
                    f"a step that had made version {one.returned[0].policy_version} made "
                    f"{now[0].policy_version} when it was computed again"
                )
        return [one.what for one in again]

    async def let_keep(self, ranks: Ranks) -> None:
        keepers = await self._keepers.of([str(facts["node"]) for facts in ranks.facts])
        await self._on_all(ranks, "keep_states", lambda rank: (keepers[rank], self._num_begun), _READ_S)
