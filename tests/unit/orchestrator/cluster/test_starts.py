"""What trainer ranks try before a run; the room of rollout workers that are asked for while a run goes on, all of it or
none, and given back with them; what workers are built from.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from cases.tiny_configs import DEEPSEEK, DENSE, GPT_OSS, MIXED

from slipstream.conf.load import load_run_config
from slipstream.conf.schema import ParityConfig, RunConfig
from slipstream.orchestrator.cluster.nodes import RAY_NODES
from slipstream.orchestrator.cluster.ray_cluster import RayCluster, RunContext
from slipstream.orchestrator.cluster.rollout_workers import RolloutWorkers, Rooms, routing_shape
from slipstream.orchestrator.cluster.trainer_ranks import start_trainer_ranks
from slipstream.orchestrator.errors import PlacementError
from slipstream.orchestrator.files.run_folder import RunFolder
from slipstream.orchestrator.inputs.model_folder import resolve_hf_config
from slipstream.rollout.types import RoutingShape

FACTS = {
    "pid": 1, "load_parts_s": {}, "backends": {}, "device": "cpu", "num_parameters": 0, "num_trainable_parameters": 0,
    "dense_weights": "", "whole_bytes": 0, "mtp_tensors": [], "unadapted_matrices": 0, "ignored_tensors": [],
}  # fmt: skip


async def test_a_microbatch_is_tried_that_fills_all_ranks_which_share_its_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def result_of(_: RayCluster, answer: object, *__: object) -> object:
        return answer

    actor = Mock()
    actor.load.remote.return_value = FACTS
    actor.call.remote.return_value = {"seconds": 1.0, "peak_device_bytes": 0}
    monkeypatch.setattr(RayCluster, "new_actor", AsyncMock(return_value=actor))
    monkeypatch.setattr(RayCluster, "result_of", result_of)
    config = RunConfig()
    tokens = 2 * config.rollout.max_model_len
    config = replace(config, trainer=replace(config.trainer, max_microbatch_tokens=tokens, num_ranks=2, cp_size=2))
    cluster = RayCluster(config, RunFolder(tmp_path), None, needs_gpus=False, on_lost=list)
    run = RunContext(config, cluster, "cuda", {}, b"", is_one_node=True, startup=Mock())
    await start_trainer_ranks(run, [0, 1])
    what, lengths = actor.call.remote.call_args.args
    assert (what, len(lengths)) == ("warm_up", 4)


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


REPLAYED = replace(RunConfig(), parity=ParityConfig(replay_routing=True))


@pytest.mark.parametrize(
    ("hf_config", "shape"),
    [
        (DEEPSEEK, RoutingShape((1, 2), 3, 8)),  # its first layer is dense
        (MIXED, RoutingShape((0, 2), 2, 8)),
        (GPT_OSS, RoutingShape((0, 1), 3, 8)),
        (DENSE, None),
    ],
)
def test_engines_record_layers_with_experts_when_routing_is_replayed(hf_config, shape) -> None:
    assert routing_shape(REPLAYED, hf_config) == shape
    assert routing_shape(RunConfig(), hf_config) is None
