"""One process of `slipstream push`: reads its share of the checkpoint, then writes it into the engines.

Owns: the process and the messages between it and the command. Does not own how they travel (`rollout/channel.py`),
nor reading or sending (`weight_sync.api`). The command starts it with this module's name, two descriptors (the
connection, and a file for what native libraries say) and an environment that says which GPU is its own.

    command  -- rank, options -->      read the share (with a base, the base's); open the link meanwhile
             <-- so far --             bytes read, now and then
             -- plan, layouts -->      plan for what the engines are expected to be (--start)
             <-- read --               bytes, seconds, page-locked bytes
             -- connect, endpoints --> connect to the engines, allocate staging; plan anew if they have other layouts;
                                       may come before "read". With a base: note what it would make of the engines,
                                       then read the share of the checkpoint
             <-- connected --          seconds of these two steps
             -- publish -->            after "read" and "connected", with the engines paused
             <-- done --               the publish's report, link

Instead of any answer: failed, class, text.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.conf.errors import ConfigError, SlipstreamError
from slipstream.conf.schema import TransportKind, WeightSyncConfig
from slipstream.orchestrator.errors import PushError
from slipstream.orchestrator.push.push_options import PushOptions
from slipstream.rollout.channel import BlockingChannel, Disconnected
from slipstream.rollout.crash_reports import how_it_ended
from slipstream.rollout.in_vllm.fork_server import python_calls
from slipstream.weight_sync.errors import WeightSyncError
from slipstream.weight_sync.gc_freeze import freeze_heap
from slipstream.weight_sync.layout import DestLayout
from slipstream.weight_sync.publish.report import PublishReport
from slipstream.weight_sync.record.layout_wire import layouts_from_bytes, layouts_to_bytes
from slipstream.weight_sync.typed_msgpack import pack, unpack

if TYPE_CHECKING:
    from slipstream.weight_sync.api import Sender
    from slipstream.weight_sync.disk.safetensors_source import Checkpoint, ReadReport

logger = logging.getLogger(__name__)

POLL_S = 0.02
JOIN_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class RankOptions:
    """What all ranks share."""

    push: PushOptions
    world_size: int
    device: str
    host: str
    """Where engines reach this machine."""
    delta_bytes: int
    """Size of an engine's landing zone; 0 without a base."""
    key: bytes
    rendezvous: str
    """file:// address of the ranks' process group."""


class RankProcess:
    """The process of one sending rank, as the command sees it."""

    def __init__(self, rank: int, options: RankOptions, gpu: str | None) -> None:
        self.rank = rank
        self.num_bytes_read = 0
        self._said = os.memfd_create("said")
        ours, theirs = socket.socketpair()
        descriptors = theirs.fileno(), self._said
        mine = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        with theirs:
            self._process = subprocess.Popen(
                python_calls(f"{__name__}:main", *descriptors),
                pass_fds=descriptors,
                env={"GLOO_SOCKET_IFNAME": "lo", **os.environ, **mine},
            )
        self._channel = BlockingChannel(ours)
        self._channel.send([rank, pack(options)])

    def result(self, timeout_s: float) -> Any:
        """The next answer, its kind first; None if there is none yet. Example: ["read", 4096, 0.1, 0].

        Raises:
            ConfigError: The rank met a mistake that the user can correct.
            PushError: The rank failed or died.
        """
        while self._channel.hears(timeout_s):
            try:
                answer = self._channel.receive()
            except Disconnected:
                raise self._failed(f"rank {self.rank} {how_it_ended(self._exit_code())}") from None
            match answer:
                case ["so far", int() as num_bytes]:
                    self.num_bytes_read = num_bytes
                case ["failed", str() as error, str() as text]:
                    raise ConfigError(text) if error == "ConfigError" else self._failed(f"{error}: {text}")
                case ["done", report, link]:
                    return ["done", unpack(PublishReport, report), link]
                case _:
                    return answer
        return None

    def _exit_code(self) -> int | None:
        """Once it has ended; None: it goes on."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(JOIN_TIMEOUT_S)
        return self._process.returncode

    def _failed(self, text: str) -> PushError:
        """With what native libraries said meanwhile. Mooncake logs an error at each start, also where all goes well."""
        said = os.pread(self._said, 1 << 16, 0).decode(errors="replace").strip()
        return PushError(f"{text}. Libraries said:\n{said}" if said else text)

    def plan_for(self, layouts: Sequence[DestLayout], num_engines: int) -> None:
        """Plan while engines start, for the layouts of an engine's ranks. Send all orders, this one included, to all
        ranks in the same order."""
        self._channel.send(["plan", layouts_to_bytes(tuple(layouts)), num_engines])

    def connect(self, endpoints: list[str]) -> None:
        """Connect to the engines, also while the share is still read."""
        self._channel.send(["connect", endpoints])

    def publish(self) -> None:
        """Publish. Call it after result() has returned "read" and "connected"; the next result() is the report."""
        self._channel.send(["publish"])

    def stop(self) -> None:
        """End the process. Idempotent."""
        self._channel.close()  # ends a rank that waits for endpoints
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._process.kill()
        self._exit_code()


def main(connection: int, said: int) -> None:
    """Runs in the rank's process."""
    channel = BlockingChannel(socket.socket(fileno=connection))
    os.set_inheritable(connection, False)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    os.dup2(said, 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command handles Ctrl-C
    rank = 0
    try:
        rank, options = channel.receive()
        _read_and_send(rank, unpack(RankOptions, options), channel)
    except Disconnected:  # the command is gone
        return
    except SlipstreamError as e:
        channel.send(["failed", type(e).__name__, str(e)])
    except Exception as e:  # noqa: BLE001 - the boundary of this process
        channel.send(["failed", type(e).__name__, f"rank {rank}: {e}"])


def _read_and_send(rank: int, options: RankOptions, channel: BlockingChannel) -> None:
    import torch.distributed as dist

    from slipstream.weight_sync.api import Sender
    from slipstream.weight_sync.disk.safetensors_source import Checkpoint

    push = options.push
    first = push.base or push.checkpoint  # what engines may hold is read first
    checkpoint = Checkpoint(first, rank=rank, world_size=options.world_size, num_threads=push.num_threads)
    source = checkpoint.source
    reader = ThreadPoolExecutor(1, "push-read")
    reading = reader.submit(checkpoint.read)
    group = None
    if options.world_size > 1:
        dist.init_process_group("gloo", init_method=options.rendezvous, rank=rank, world_size=options.world_size)
        group = dist.group.WORLD
    config = WeightSyncConfig(
        transport=TransportKind(push.transport),
        watermark_bytes=push.watermark_mib << 20,
        delta_bytes=options.delta_bytes,
        timeout_s=push.timeout_s,
    )
    sender = Sender(
        source, None, key=options.key, rank=rank, world_size=options.world_size, group=group,
        device=options.device, host=options.host, config=config,
    )  # fmt: skip
    told = is_planned = False
    seconds: dict[str, float] = {}
    try:
        while True:
            if not told:
                channel.send(["so far", checkpoint.num_bytes_read])
            if not told and (push.base is None or "base" in seconds) and reading.done():
                report, told = reading.result(), True
                channel.send(["read", report.num_bytes, report.seconds, report.pinned_bytes])
            if not channel.hears(POLL_S):
                continue
            match channel.receive():
                case ["plan", layouts, num_engines]:
                    with _timed(seconds, "plan"):
                        is_planned = _plan_for(sender, layouts, num_engines)
                case ["connect", endpoints]:
                    with _timed(seconds, "connect"):
                        sender.connect(endpoints)
                        if not is_planned:
                            freeze_heap()
                    if push.base is not None:
                        with _timed(seconds, "base"):
                            _wait_for(reading, checkpoint, channel)
                            sender.note_base()
                        reading = reader.submit(checkpoint.refresh, push.checkpoint)
                    channel.send(["connected", seconds])
                case _:
                    channel.send(["done", pack(sender.update(0)), sender.link])
                    return
    finally:
        sender.close()
        if group is not None:
            dist.destroy_process_group()


def _wait_for(reading: Future[ReadReport], checkpoint: Checkpoint, channel: BlockingChannel) -> None:
    """Wait for a read, and say how far it is."""
    while not wait([reading], POLL_S).done:
        channel.send(["so far", checkpoint.num_bytes_read])
    reading.result()


def _plan_for(sender: Sender, layouts: bytes, num_engines: int) -> bool:
    """Plan for the engines' expected layouts. If that fails, connect() plans for their real ones."""
    try:
        sender.plan_for([(layout,) for layout in layouts_from_bytes(layouts)] * num_engines)
    except WeightSyncError as e:
        logger.warning("no plan for the expected layouts: %s", e)
        return False
    freeze_heap()
    return True


@contextlib.contextmanager
def _timed(seconds: dict[str, float], name: str) -> Generator[None]:
    began = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - began
