"""The room of rollout workers that are asked for while a run goes on: all of it or none, and given back with them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.conf.load import load_run_config
from slipstream.orchestrator.cluster.nodes import RAY_NODES
from slipstream.orchestrator.cluster.ray_cluster import RunContext
from slipstream.orchestrator.cluster.rollout_workers import RolloutWorkers
from slipstream.orchestrator.cluster.rooms import Rooms
from slipstream.orchestrator.errors import PlacementError
from slipstream.orchestrator.inputs.model_folder import resolve_hf_config

ON = {"node:127.0.0.1": 0.001}


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RAY_NODES, "name", {"a": "127.0.0.1", "b": "127.0.0.2"}.__getitem__)


class Ray:
    """Has room for so many workers."""

    is_own = False

    def __init__(self, room: int) -> None:
        self.room = room
        self.held: list[str] = []
        self.asked: list[tuple[list[float], str, dict[str, float] | None]] = []

    async def place(self, gpus: list[float], what: str, *, on: dict[str, float] | None, timeout_s: float) -> str:
        assert 0 < timeout_s <= 20
        self.asked.append((gpus, what, on))
        if len(self.held) == self.room:
            raise PlacementError(f"the Ray cluster cannot hold {what}")
        self.held.append(f"room {len(self.asked)}")
        return self.held[-1]

    async def in_thread(self, call: Callable[[], str]) -> str:
        return call()

    async def give_back(self, room: str) -> None:
        self.held.remove(room)


def workers_of(ray: Ray, *words: str) -> RolloutWorkers:
    config = load_run_config(["experiment=quickstart", *words])
    unused: Any = None
    cluster: Any = ray
    run = RunContext(config, cluster, "cpu", resolve_hf_config(config.model), b"k", is_one_node=True, startup=unused)
    return RolloutWorkers(run, Path(), Rooms(config, cluster, unused, "a"), unused)


async def test_each_further_worker_has_a_room_of_its_own_until_it_ends() -> None:
    ray = Ray(room=9)
    workers = workers_of(ray)
    await workers.rooms.make(dict.fromkeys(("rollout-1", "rollout-2", "rollout-3")))
    assert ray.asked == [([workers._config.gpus_of_worker], "3 further rollout workers", ON)] * 2, "1 is the run's own"
    await workers.rooms.make({"rollout-2": None})
    assert len(ray.held) == 2, "it has its room"
    await workers.end("rollout-3")
    await workers.end("rollout-1")
    assert ray.held == ["room 1"]


async def test_without_room_for_all_none_is_kept() -> None:
    ray = Ray(room=1)
    workers = workers_of(ray)
    with pytest.raises(PlacementError, match="cannot hold 2 further rollout workers"):
        await workers.rooms.make({"rollout-2": None, "rollout-3": None})
    assert ray.held == []
    await workers.rooms.make({"rollout-2": None})
    assert ray.held == ["room 3"]


async def test_a_worker_that_starts_elsewhere_gives_its_former_room_back_also_one_of_the_runs_first() -> None:
    ray = Ray(room=2)
    rooms = workers_of(ray).rooms
    await rooms.make({"rollout-0": "b"})
    assert ray.asked[-1][2] == {"node:127.0.0.2": 0.001} and rooms.of("rollout-0") == "room 1"
    await rooms.make({"rollout-0": "a"})
    assert (rooms.of("rollout-0"), ray.held) == ("room 2", ["room 2"])
