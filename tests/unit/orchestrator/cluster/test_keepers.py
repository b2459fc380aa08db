"""Locks: on which nodes states of trainer ranks are kept, which is the newest that all have, and what they take."""

from types import SimpleNamespace
from typing import Any

from ray.exceptions import RayError

from slipstream.orchestrator.cluster.rebirth import Keepers, _nodes_of_keepers


def test_a_state_is_kept_on_its_node_and_on_the_next_one() -> None:
    nodes = ["a", "a", "b", "b", "c"]
    assert [_nodes_of_keepers(node, nodes) for node in ("a", "b", "c")] == [["a", "b"], ["b", "c"], ["c", "a"]]
    assert _nodes_of_keepers("a", ["a", "a"]) == ["a"]


class KeeperActors:
    """A cluster of keepers alone."""

    def __init__(self, kept: dict[str, dict[int, list[int]]], free: int = 1000) -> None:
        self._kept, self._free = kept, free
        self.went_back: list[tuple[str, int, int]] = []
        self.loss: Exception | None = None

    async def new_actor_of_node(self, _: type, name: str, node: str) -> Any:
        remote = SimpleNamespace
        return SimpleNamespace(
            begin=remote(remote=lambda *_: ((node, 1), self._free)),
            kept=remote(remote=lambda: self._kept.get(node)),
            go_back=remote(remote=lambda number, life: self.went_back.append((node, number, life)) or "done"),
        )

    async def result_of(self, answer: Any, _: str, error_type: type[Exception]) -> Any:
        if answer is None:
            raise self.loss or error_type("it died with its node")
        return answer


async def test_the_newest_state_that_all_ranks_have_is_found_where_it_is() -> None:
    keepers = Keepers(KeeperActors({"a": {0: [3, 4], 1: [3]}, "b": {1: [3, 4], 0: [3]}}), b"", is_one_node=False)  # type: ignore[arg-type]
    assert await keepers.of(["a", "b"]) == [[("a", 1), ("b", 1)], [("b", 1), ("a", 1)]]
    assert await keepers.newest(2, 9, 1) == (4, [("a", 1), ("b", 1)])
    assert (await keepers.newest(2, 3, 1))[0] == 3
    left = KeeperActors({"a": {0: [3, 4], 1: [3]}})
    halves = Keepers(left, b"", is_one_node=False)  # type: ignore[arg-type]
    await halves.of(["a", "b"])
    assert await halves.newest(2, 9, 1) == (3, [("a", 1), ("a", 1)]), "node b is gone"
    left.loss = RayError("its node does not exist any more")
    assert (await halves.newest(2, 9, 1))[0] == 3
    assert left.went_back == [("a", 3, 1)] * 2, "later states count no more"
    empty = Keepers(KeeperActors({}), b"", is_one_node=True)  # type: ignore[arg-type]
    assert await empty.newest(2, 9, 1) == (0, [])


async def test_room_is_counted_for_three_copies_and_five_with_several_nodes() -> None:
    for nodes, needed in ((["a", "a"], 600), (["a", "b"], 500)):
        for free, is_enough in ((needed, True), (needed - 1, False)):
            keepers = Keepers(KeeperActors({}, free), b"", is_one_node=False)  # type: ignore[arg-type]
            await keepers.of(nodes)
            assert (await keepers.lacks_room(nodes, [100, 100]) == "") == is_enough, (nodes, free)
