"""The run's keepers: on each node with trainer ranks an actor that holds states of finished steps.

    node A: ranks 0, 1, keeper A       every rank sends to the keeper of its node and to that of the next node, so that
    node B: ranks 2, 3, keeper B       one of them outlives the rank, and one outlives the node

Owns: which keeper is where, and who sends to whom. Does not own: what a keeper does (trainer/checkpoint/keeper.py), or
when states are sent (trainer/rank.py) and read (rebirth.py).
"""

import asyncio
from collections import Counter
from collections.abc import Sequence

from ray.exceptions import RayError

from slipstream.fleet.waiting import together
from slipstream.orchestrator.cluster.actors import KeeperActor
from slipstream.orchestrator.cluster.ray_cluster import RayCluster
from slipstream.orchestrator.errors import OrchestratorError
from slipstream.trainer.checkpoint.keeper import COPIES_HERE, COPIES_THERE, Address

_Started = tuple[type[KeeperActor], Address, int]


class Keepers:
    """See the module's docstring.

    Args:
        key: the run's; whoever sends or reads a state knows it.
        is_one_node: whether all processes of the run share one machine, hence loopback.
    """

    def __init__(self, cluster: RayCluster, key: bytes, *, is_one_node: bool) -> None:
        self._cluster, self._key, self._is_one_node = cluster, key, is_one_node
        self._by_node: dict[str, asyncio.Future[_Started]] = {}

    async def of(self, nodes: Sequence[str]) -> list[list[Address]]:
        """The keepers of each rank."""
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
