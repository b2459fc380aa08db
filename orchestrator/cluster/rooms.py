# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Ray has types for a part of what it offers.
"""Where in Ray there is room for rollout workers, and the room of those that are more than a run began with.

Owns: a placement group for each further worker, which is given back with it; a group can neither grow nor shrink. Does
not own: the run's own group, which has the room of the first workers until the run's end, nor when room is made
(fleet/scaling.py).
"""

import contextlib
from collections import Counter
from collections.abc import Mapping

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup

from slipstream.conf.plural import counted
from slipstream.conf.schema import RunConfig
from slipstream.fleet.scaling import Room
from slipstream.orchestrator.cluster.nodes import RAY_NODES, nodes_of
from slipstream.orchestrator.cluster.ray_cluster import CPU_TICKETS, RayCluster

ROOM_TIMEOUT_S = 20.0
"""Longest wait for the room of further workers. A cluster that grows for them takes minutes: one asks again then."""
_NODE_TICKET = 0.001
"""How much of the one resource that Ray has for each node's name: enough to be placed there."""


class Rooms:
    """See the module's docstring.

    Args:
        group: the run's own.
        only_node: where all workers must be; None: anywhere.
    """

    def __init__(self, config: RunConfig, cluster: RayCluster, group: PlacementGroup, only_node: str | None) -> None:
        self._config = config
        self._cluster = cluster
        self._group = group
        self._only_node = only_node
        self._made: dict[str, PlacementGroup] = {}

    def of(self, name: str) -> PlacementGroup | None:
        """The room of a worker that has its own; None: it is in the run's group."""
        return self._made.get(name)

    @property
    def living(self) -> dict[str, str]:
        return {name: self._cluster.name_of(room) for name, room in self._made.items()}

    async def take_over(self, left: Mapping[str, str]) -> None:
        for name, room in left.items():
            self._made[name] = await self._cluster.find_group(room)

    async def make(self, where: Mapping[str, str | None]) -> None:
        """Reserve what workers need, all or none. `where`: worker -> Ray's id of its node. None: where Ray finds room;
        those of the run's group have theirs. Raises PlacementError: there is no room for all of them."""
        wanted = {name: node for name, node in where.items() if name not in self._made or node is not None}
        made: dict[str, PlacementGroup] = {}
        what = counted(len(where), "further rollout worker")
        async with contextlib.AsyncExitStack() as failed:
            for name, node in wanted.items():
                if node is None and place_of(name) < self._config.rollout.least_workers:
                    continue
                gpus, timeout_s = [self._config.gpus_of_worker], ROOM_TIMEOUT_S / len(where)
                on = await self._on(node or self._only_node)
                made[name] = await self._cluster.place(gpus, what, on=on, timeout_s=timeout_s)
                failed.push_async_callback(self._cluster.give_back, made[name])
            failed.pop_all()
        for name in made.keys() & self._made.keys():
            await self.give_back(name)
        self._made |= made

    async def give_back(self, name: str) -> None:
        """Reserve a worker's own room no more, if it has one."""
        if (room := self._made.pop(name, None)) is not None:
            await self._cluster.give_back(room)

    async def look(self) -> Room:
        return await self._cluster.in_thread(self._seen)

    async def _on(self, node: str | None) -> dict[str, float] | None:
        if node is None or self._cluster.is_own:
            return None
        return {f"node:{await self._cluster.in_thread(lambda: RAY_NODES.name(node))}": _NODE_TICKET}

    def _seen(self) -> Room:
        alive = {one["NodeID"] for one in ray.nodes() if one["Alive"]}
        found = available_resources_per_node()
        usable = alive if self._only_node is None else alive & {self._only_node}
        free = {node: self._fits(found.get(node, {})) for node in usable}
        reserved = {name: nodes_of(room)[0] for name, room in self._made.items()}
        num_ranks = self._config.trainer.num_ranks
        for bundle, node in nodes_of(self._group).items():
            if bundle >= num_ranks:
                reserved.setdefault(f"rollout-{bundle - num_ranks}", node)
        workers = Counter(reserved.values())
        emptiest_first = sorted(free, key=workers.__getitem__)
        return Room(
            {node: free[node] for node in emptiest_first},
            {name: node for name, node in reserved.items() if node in alive},
        )

    def _fits(self, free: Mapping[str, float]) -> int:
        """How many workers a node has room for."""
        needs = {"CPU": CPU_TICKETS} | ({"GPU": self._config.gpus_of_worker} if self._cluster.needs_gpus else {})
        return min(int(free.get(what, 0.0) / number + 1e-6) for what, number in needs.items())


def place_of(name: str) -> int:
    """A worker's place in the publisher's lists, from its first name."""
    return int(name.rpartition("-")[2])
