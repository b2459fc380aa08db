# pyright: reportUnknownMemberType=false
# Ray has types for a part of what it offers.
"""What Ray runs: an actor around one trainer rank, one that starts and watches the process of one rollout worker, one
around a node's fork server, and one around the keeper of trainer ranks' states.

Owns: nothing but the wrapping; what is wrapped knows nothing of Ray. Invariant: torch is imported here only when a
trainer's actor starts, and vLLM never: rollout workers are processes of their own (rollout/worker_process.py).
`ray.method` tells type checkers what a call takes and returns.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from slipstream.conf.json_files import JsonObject
from slipstream.orchestrator.cluster import nodes
from slipstream.orchestrator.machine import memory_bytes
from slipstream.rollout import worker_process
from slipstream.rollout.crash_reports import report_crashes
from slipstream.rollout.engine.engine_options import set_engine_environment
from slipstream.rollout.in_vllm import fork_server
from slipstream.rollout.types import WorkerOptions
from slipstream.rollout.worker_process import WorkerProcess, log_to_stderr
from slipstream.trainer.checkpoint.keeper import Address, Keeper, Readiness, Taking
from slipstream.weight_sync.gc_freeze import frozen_imports

logger = logging.getLogger(__name__)

TELL_S = 1.0
"""How long the actor of a worker whose process has ended goes on answering."""
PAGE_LOCKS = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
"""How torch takes page-locked memory in a trainer rank: threads touch its pages before the driver locks them. By
default the driver does both, 2.3 GB a second, and a GPU computes nothing meanwhile; a rank's states take dozens of GB.
"""

if TYPE_CHECKING:
    from slipstream.trainer.rank import TrainerRank
    from slipstream.trainer.types import OptimStats, TrainerOptions
    from slipstream.weight_sync.publish.report import PublishReport


class TrainerActor:
    """Runs inside the actor's process: holds one TrainerRank, which imports torch only there."""

    def __init__(self, name: str, crashes: Path) -> None:
        log_to_stderr(name)
        self._report = crashes / name
        report_crashes(self._report)
        self._started: TrainerRank | None = None
        self._reserved: socket.socket | None = None
        self._taking: Taking | None = None

    @property
    def _rank(self) -> TrainerRank:
        assert self._started is not None, "start() comes first"
        return self._started

    @ray.method
    def pick_rendezvous(self, is_only_node: bool) -> str:
        """A free port of this node, where rank 0 will listen and all ranks meet.

        It stays bound until this rank has joined: importing torch takes seconds, in which the engines take dozens of
        ports. Rank 0 can listen on it all the same, because both sockets set SO_REUSEADDR and this one never listens.
        """
        host = nodes.address_of_this_node(is_only=is_only_node)
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind((host, 0))
        return f"tcp://{host}:{self._reserved.getsockname()[1]}"

    @ray.method
    def prepare(self, kept: tuple[Address, bytes, int, int] | None) -> None:
        """Import what a rank needs, PyTorch above all. The state that load_kept() will ask for comes meanwhile. `kept`:
        Taking's arguments."""
        self._taking = None if kept is None else Taking(*kept)
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", PAGE_LOCKS)
        with frozen_imports():
            import_module("slipstream.trainer.rank")

    @ray.method
    def join(self, rank: int, options: TrainerOptions, is_only_node: bool) -> None:
        from slipstream.trainer.rank import TrainerRank

        host = nodes.address_of_this_node(is_only=is_only_node)
        nodes.meet_over(host)
        self._started = TrainerRank(options, rank=rank, host=host)
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None

    @ray.method
    def load(self) -> JsonObject:
        facts = self._rank.load()
        report_crashes(self._report)  # it may have imported vLLM
        return facts | {"node": ray.get_runtime_context().get_node_id(), "pid": os.getpid()}

    @ray.method
    def call(self, what: str, *arguments: object) -> Any:
        """A method of this class, of the rank, its states or its delivery; RayTrainerGroup has their types."""
        holder = next(one for one in (self, self._rank, self._rank.states, self._rank.delivery) if hasattr(one, what))
        return getattr(holder, what)(*arguments)

    def load_kept(self, keeper: Address, number: int) -> None:
        """RankStates.load_kept, once with what prepare() began to take."""
        taking, self._taking = self._taking, None
        self._rank.states.load_kept(keeper, number, None if taking is None else taking.of(keeper, number))

    def optimizer_step(self, ends_version: bool, keep_as: int | None) -> tuple[OptimStats, Readiness]:
        """TrainerRank.optimizer_step; then RankStates.keep, if the state has a number."""
        stats = self._rank.optimizer_step(ends_version=ends_version)
        return stats, Readiness.later if keep_as is None else self._rank.states.keep(keep_as)

    def connect(self, endpoints: list[str], adapter_endpoints: list[str], absent: list[int] | None) -> JsonObject:
        return self._rank.delivery.connect(endpoints, None, adapter_endpoints, absent)

    def publish(self, exclude: Sequence[int], trace: Path | None) -> PublishReport:
        return self._rank.delivery.publish(self._rank.policy_version, exclude=exclude, trace=trace)


class KeeperActor:
    """Runs inside one actor's process on each node with trainer ranks: holds their states of finished steps."""

    def __init__(self, name: str, crashes: Path) -> None:
        log_to_stderr(name)
        report_crashes(crashes / name.replace(" ", "-"))
        self._keeper: Keeper | None = None

    @ray.method
    def begin(self, is_only_node: bool, key: bytes) -> tuple[Address, int]:
        """Keep states from now on. Returns where they are sent to, and how much memory the node has left."""
        if self._keeper is None:
            self._keeper = Keeper(nodes.address_of_this_node(is_only=is_only_node), key)
        return self._keeper.address, memory_bytes()[1]

    @ray.method
    def kept(self) -> dict[int, list[int]]:
        """Keeper.kept; nothing, if this process was started again."""
        return {} if self._keeper is None else self._keeper.kept()

    @ray.method
    def go_back(self, number: int, life: int) -> None:
        if self._keeper is not None:
            self._keeper.go_back(number, life)


class ForkServerActor:
    """Runs inside one actor's process on each node with engines: holds the server that forks the rollout workers."""

    def __init__(self, name: str, crashes: Path) -> None:
        log_to_stderr(name)
        report_crashes(crashes / name.replace(" ", "-"))

    @ray.method
    def address(self, environment: Mapping[str, str]) -> str:
        """Where the server listens. The first call starts it: vLLM is imported under these variables."""
        return fork_server.begin(environment, also=[worker_process.PRELOAD])


class RolloutActor:
    """Runs inside the actor's process: starts the process of a RolloutWorker, watches it, and ends with it. Calls to
    the worker do not come here (rollout/worker_verbs.py). Asynchronous, so that ended() may wait beside others."""

    def __init__(self, name: str, crashes: Path) -> None:
        log_to_stderr(name)
        report_crashes(crashes / f"{name}-actor")
        self._report = crashes / name
        self._name = name
        self._started: WorkerProcess | None = None

    @ray.method
    async def launch(self, options: WorkerOptions, seed: int, is_only_node: bool, forks: type[ForkServerActor]) -> str:
        """Start the worker's process, from this node's fork server. Returns where it answers calls."""
        set_engine_environment(options.device, batch_invariant=options.batch_invariant)
        try:
            fork_server.join(await forks.address.remote(fork_server.imports_read(os.environ)))
        except RayError as error:
            logger.warning("this node's fork server cannot be started: %s", error)
        self._started = await WorkerProcess.start(
            options,
            seed=seed,
            host=nodes.address_of_this_node(is_only=is_only_node),
            name=self._name,
            report=self._report,
        )
        return self._started.address

    @ray.method
    async def ended(self) -> None:
        """Wait for the end of the worker's process, and raise an error that says how it ended. This process ends a
        second later, because Ray only guesses why an actor has ended."""
        assert self._started is not None, "launch() comes first"
        death = await self._started.ended()
        asyncio.get_running_loop().call_later(TELL_S, os._exit, 1)
        raise death

    @ray.method
    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()

    @ray.method
    async def processes(self, pids: Sequence[int]) -> list[nodes.ProcessId]:
        """The worker's processes, this one, and what they started, to be ended when they answer no more."""
        return nodes.trees_of([*pids, os.getpid()])
