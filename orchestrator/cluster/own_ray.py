"""The servers of the run's own Ray cluster, in a process beside the controller.

    async with starting_ray(config, folder) as own:    the process starts; meanwhile this one may import Ray (1 s)
        address = await own.address()                  its servers are up
        ...
        why = await own.lost()                         never, unless a server ends by itself
                                                       on leaving: all that the process started has ended

Owns: that process (ray_host.py), its environment, the token, and the private folder. Does not own: what is done in the
cluster (ray_cluster.py). Imports no Ray.
Invariant: after `end`, every process of the cluster has ended, also after an error or an interrupt. When the controller
is killed, ray_host.py sees to that, unless another one takes its place in time (`hold`, `take_over`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import psutil

from slipstream.conf.schema import Device, Objective, RunConfig
from slipstream.orchestrator.checkpoints.journal import Whereabouts
from slipstream.orchestrator.cluster.private_folder import (
    PrivateFolder,
    end_processes,
    make_private_folder,
    remove_folders_of_dead_runs,
)
from slipstream.orchestrator.cluster.ray_host import HOST, HostOptions, loss
from slipstream.orchestrator.environment import resolve_device
from slipstream.orchestrator.errors import PlacementError
from slipstream.orchestrator.files.run_folder import RunFolder
from slipstream.orchestrator.inputs.object_store import object_store_bytes
from slipstream.orchestrator.machine import Machine
from slipstream.orchestrator.socket_folder import HOLD, LET_GO
from slipstream.rollout.crash_reports import death_in, how_it_ended
from slipstream.rollout.engine.engine_options import compile_cache, set_engine_environment
from slipstream.rollout.in_vllm.fork_server import imports_read

logger = logging.getLogger(__name__)

NUM_TRIES = 5
"""How often Ray is started. At a load of 25 on two cores three starts in a row failed, after some 50 s each: the
raylet's 15 s cannot be changed, and its agent's imports take as long there.
"""
_END_TIMEOUT_S = 20.0


class ServerEnded(PlacementError):
    """One of Ray's servers ended while it started."""


@contextlib.asynccontextmanager
async def starting_ray(
    config: RunConfig, folder: RunFolder, left_by: Whereabouts | None = None
) -> AsyncGenerator[OwnRay | None]:
    """The run's own cluster, which has begun to start, and ends with the block; None if cluster.ray_address names
    another one. `left_by`: a controller that was killed left its cluster here, to be taken over if it is there
    still."""
    if config.cluster.ray_address is not None:
        yield None
        return
    own = OwnRay(config, folder)
    try:
        if left_by is None or not await own.take_over(left_by):
            await own.begin()
        yield own
    finally:
        await own.end()


class OwnRay:
    """See the module's docstring. `folder`: the run folder: Ray's logs end up there."""

    def __init__(self, config: RunConfig, folder: RunFolder) -> None:
        self._config = config
        self._folder = folder
        self._host: _Host | None = None
        self._private: PrivateFolder | None = None
        self._lock: int | None = None
        self.dashboard: str | None = None
        """Host and port of Ray's page, once `address` has answered; None where the run has none."""
        self.is_taken_over = False
        """Whether a controller that was killed had started it."""

    @property
    def token(self) -> Path:
        """The file with what Ray's servers ask for; after begin()."""
        assert self._private is not None
        return self._private.token

    async def begin(self) -> None:
        """Start the process that starts Ray's servers, and do not wait for them."""
        for root in remove_folders_of_dead_runs():
            logger.info("%s is removed: the run that made it was killed", root)
        self._private, self._lock = make_private_folder()
        os.environ.pop("RAY_AUTH_TOKEN", None)  # the user's, for other clusters: it would win
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(self._private.token)
        root = str(Path(__file__).parents[3])
        environment = {
            **compile_cache(),
            **os.environ,
            "TMPDIR": str(self._private.temporary),
            "PYTHONPATH": os.pathsep.join(
                dict.fromkeys([root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
            ),
        }
        # No library's bytecode is kept for it, and agents that compile all that they import miss the raylet's 15 s.
        environment.pop("PYTHONOPTIMIZE", None)
        cluster = self._config.cluster
        has_workers = self._config.algorithm.objective is Objective.policy
        options = HostOptions(
            folder=str(self._private.root),
            logs=str(self._folder.ray_logs),
            crashes=str(self._folder.crashes),
            has_dashboard=cluster.dashboard,
            object_store_bytes=object_store_bytes(self._config, Machine()),
            workers_import_under=self._workers_import_under(environment) if has_workers else None,
        )
        self.is_taken_over = False
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "slipstream.orchestrator.cluster.ray_host", json.dumps(asdict(options))),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # what is sent to our process group is not for Ray's servers
            pass_fds=(self._lock,),  # held until both processes are gone
            env=environment,
        )
        assert process.stdin is not None and process.stdout is not None
        pipe = process.stdin.get_extra_info("pipe")
        self._host = _Host(process.pid, process.stdout, process.stdin, pipe.fileno(), process.wait)

    async def take_over(self, left: Whereabouts) -> bool:
        """Take the place of a controller that is gone. Returns whether its cluster is there still."""
        private = PrivateFolder(Path(left.folder))
        try:
            reader, writer = await asyncio.open_unix_connection(str(private.door))
        except OSError:
            return False
        sock = writer.get_extra_info("socket")
        self._host = _Host(left.pid, reader, writer, sock.fileno(), partial(_end_of, left.pid))
        self._private = private
        os.environ.pop("RAY_AUTH_TOKEN", None)
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(private.token)
        self.is_taken_over = True
        return True

    @property
    def whereabouts(self) -> Whereabouts:
        assert self._host is not None and self._private is not None
        return Whereabouts(str(self._private.root), self._host.pid)

    def hold(self, is_held: bool) -> None:
        """From now on the cluster outlives this controller for a while (ray_host.LEASE_S), or does so no longer. May be
        called by a handler of a signal."""
        if self._host is not None:
            with contextlib.suppress(OSError):  # it has ended
                os.write(self._host.descriptor, HOLD if is_held else LET_GO)

    async def address(self) -> str:
        """Ray's address, once its servers are up. They are started again if one of them ends meanwhile: on a busy
        machine they give each other too little time (the raylet 15 s to its agent). Raises PlacementError: Ray did not
        start."""
        for _ in range(NUM_TRIES - 1):
            try:
                return await self._said_address()
            except ServerEnded as error:
                logger.warning("%s; once more: servers of a busy machine give each other too little time", error)
            await self.end()
            await self.begin()
        return await self._said_address()

    async def lost(self) -> str:
        """Wait until a server ends by itself. Returns which one and how."""
        said = await self._next_word()
        return loss(said["lost"], said["how"])

    async def end(self) -> None:
        """Let the process end all that it holds, and remove the private folder. Harmless where there is none."""
        if self._host is not None:
            self.hold(False)
            self._host.writer.close()
            try:
                await asyncio.wait_for(self._host.end(), _END_TIMEOUT_S)
            except TimeoutError:
                logger.warning("process %d, which holds Ray, does not end and is killed", self._host.pid)
                await asyncio.to_thread(end_processes, _tree(self._host.pid), timeout_s=_END_TIMEOUT_S)
            self._host = None
        if self._private is not None and self._private.root.exists():  # the host was killed before it could
            self._private.keep_logs(self._folder.ray_logs)
            self._private.remove()
        if self._lock is not None:
            os.close(self._lock)
        self._private = self._lock = None

    async def _said_address(self) -> str:
        said = await self._next_word()
        if "lost" in said:
            raise ServerEnded(f"Ray did not start: {said['lost']}: {said['how']} (its logs: {self._folder.ray_logs})")
        if "failed" in said:
            raise PlacementError(f"Ray did not start: {said['failed']}")
        self.dashboard = said.get("dashboard") if self._config.cluster.dashboard else None
        return said["address"]

    async def _next_word(self) -> dict[str, str]:
        """What the process says next; that it has ended, where it says no more."""
        assert self._host is not None
        line = await self._host.reader.readline()
        if line:
            return json.loads(line)
        exit_code = await self._host.end()
        return {"lost": "ray_host", "how": f"it {death_in(self._folder.crashes / HOST) or how_it_ended(exit_code)}"}

    def _workers_import_under(self, environment: dict[str, str]) -> dict[str, str]:
        """Variables that imports read, in a rollout worker's actor of a Ray with this environment."""
        there = dict(environment)
        there.setdefault("OMP_NUM_THREADS", "1")  # by Ray, which counts the actor's cores
        device = Device.cuda if resolve_device(self._config.cluster.device) == "cuda" else Device.cpu
        set_engine_environment(device, batch_invariant=self._config.is_bitwise, environment=there)
        return imports_read(there)


@dataclass(frozen=True, slots=True)
class _Host:
    """The process that holds the servers: a child of this one, or of a controller that is gone."""

    pid: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    descriptor: int
    """The writer's."""
    end: Callable[[], Awaitable[int | None]]
    """Waits for its end. Returns the exit code, where that is known."""


async def _end_of(pid: int) -> None:
    """Wait for the end of a process that may be nobody's child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop, has_ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, has_ended.set)
    try:
        await has_ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _tree(pid: int) -> Callable[[], Iterable[psutil.Process]]:
    """Finds a process and all that descends from it, for `end_processes`."""

    def find() -> list[psutil.Process]:
        try:
            top = psutil.Process(pid)
            return [*top.children(recursive=True), top]
        except psutil.NoSuchProcess:
            return []

    return find
