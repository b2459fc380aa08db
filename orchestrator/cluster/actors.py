"""What runs inside the processes of a run: a Ray actor around one trainer rank, and one around one rollout worker.

Owns: nothing but the wrapping; the wrapped classes know nothing of Ray. Invariant: torch and vLLM are imported here
only when an actor starts, in its own process.
"""

from __future__ import annotations

import logging
import socket
from typing import Any

import ray

from orchestrator.cluster import nodes


class TrainerActor:
    """Runs inside the actor's process: holds one TrainerRank, which imports torch only there."""

    def __init__(self, name: str) -> None:
        _log_to_stderr(name)
        self._rank: Any = None
        self._reserved: socket.socket | None = None

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

    def start(self, options: dict[str, Any], is_only_node: bool) -> dict[str, Any]:
        """Build the rank and load the model."""
        from trainer.rank import TrainerRank

        host = nodes.address_of_this_node(is_only=is_only_node)
        nodes.meet_over(host)
        self._rank = TrainerRank(**options, host=host)
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None
        return self._rank.load()

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the rank."""
        return getattr(self._rank, method)(*args)


class RolloutActor:
    """Runs inside the actor's process: holds one RolloutWorker. Asynchronous, so that groups overlap."""

    def __init__(self, name: str) -> None:
        _log_to_stderr(name)
        self._worker: Any = None

    async def start(self, options: dict[str, Any], is_only_node: bool) -> str:
        """Start the engine; returns the address where publishers reach this replica."""
        from rollout.worker import RolloutWorker

        self._worker = RolloutWorker(**options, host=nodes.address_of_this_node(is_only=is_only_node))
        return await self._worker.start()

    def node(self) -> str:
        """Ray's id of this node."""
        return ray.get_runtime_context().get_node_id()

    def processes(self) -> list[nodes.ProcessId]:
        """This process and its engine's, to be ended even when they answer no more."""
        return nodes.own_tree()

    async def call(self, method: str, *args: Any) -> Any:
        """Call a coroutine method of the worker."""
        return await getattr(self._worker, method)(*args)


def _log_to_stderr(name: str) -> None:
    """Ray writes the stderr of an actor into a file of its own."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s %(levelname).1s [{name}] %(name)s: %(message)s")
