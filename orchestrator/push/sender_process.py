"""One process of `slipstream push`: reads its share of the checkpoint, then writes it into the engines.

Owns: the process and the pipe to the command. Does not own reading or sending (`weight_sync.api`). Imports torch only
after the environment says which GPU is its own.

    command  -- spawn -->              read the share (with a base, the base's); open the link meanwhile
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
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from typing import TYPE_CHECKING, Any

from slipstream.conf.errors import ConfigError, SlipstreamError
from slipstream.conf.schema import TransportKind
from slipstream.orchestrator.errors import PushError
from slipstream.orchestrator.push.push_options import PushOptions
from slipstream.rollout.crash_reports import how_it_ended
from slipstream.weight_sync.errors import WeightSyncError
from slipstream.weight_sync.gc_freeze import freeze_heap
from slipstream.weight_sync.layout import DestLayout

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
    """The command's end of one rank."""

    def __init__(self, rank: int, options: RankOptions, gpu: str | None) -> None:
        context = multiprocessing.get_context("spawn")
        self.rank = rank
        self.num_bytes_read: Any = context.Value("q", 0, lock=False)
        self._pipe, theirs = context.Pipe()
        self._said = os.memfd_create("said")
        said = f"/proc/{os.getpid()}/fd/{self._said}"
        self._process = context.Process(
            target=_run, args=(rank, options, gpu, theirs, self.num_bytes_read, said), daemon=True
        )
        self._process.start()
        theirs.close()

    def result(self, timeout_s: float) -> Any:
        """The next answer, its kind first; None if there is none yet. Example: ("read", 4096, 0.1, 0).

        Raises:
            ConfigError: The rank met a mistake that the user can correct.
            PushError: The rank failed or died.
        """
        if not self._pipe.poll(timeout_s):
            if not self._process.is_alive() and not self._pipe.poll(0):
                raise self._failed(f"rank {self.rank} {how_it_ended(self._process.exitcode)}")
            return None
        try:
            answer = self._pipe.recv()
        except EOFError:
            self._process.join(JOIN_TIMEOUT_S)
            raise self._failed(f"rank {self.rank} {how_it_ended(self._process.exitcode)}") from None
        if answer[0] == "failed":
            _, error, text = answer
            raise ConfigError(text) if error == "ConfigError" else self._failed(f"{error}: {text}")
        return answer

    def _failed(self, text: str) -> PushError:
        """With what native libraries said meanwhile. Mooncake logs an error at each start, also where all goes well."""
        said = os.pread(self._said, 1 << 16, 0).decode(errors="replace").strip()
        return PushError(f"{text}. Libraries said:\n{said}" if said else text)

    def plan_for(self, layouts: Sequence[tuple[DestLayout, ...]]) -> None:
        """Plan while engines start. Send all orders, this one included, to all ranks in the same order."""
        self._tell("plan", list(layouts))

    def connect(self, endpoints: list[str]) -> None:
        """Connect to the engines, also while the share is still read."""
        self._tell("connect", endpoints)

    def publish(self) -> None:
        """Publish. Call it after result() has returned "read" and "connected"; the next result() is the report."""
        self._tell("publish", None)

    def _tell(self, order: str, value: object) -> None:
        with contextlib.suppress(OSError):  # it has ended, and result() says why
            self._pipe.send((order, value))

    def stop(self) -> None:
        """End the process. Idempotent."""
        self._pipe.close()  # ends a rank that waits for endpoints
        self._process.join(1.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(JOIN_TIMEOUT_S)


def _run(
    rank: int, options: RankOptions, gpu: str | None, pipe: Connection, num_read: Synchronized[int], said: str
) -> None:
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    with open(said, "ab") as native:
        os.dup2(native.fileno(), 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command handles Ctrl-C
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        _read_and_send(rank, options, pipe, num_read)
    except EOFError:  # the command is gone
        return
    except SlipstreamError as e:
        pipe.send(("failed", type(e).__name__, str(e)))
    except Exception as e:  # noqa: BLE001 - the boundary of this process
        pipe.send(("failed", type(e).__name__, f"rank {rank}: {e}"))


def _read_and_send(rank: int, options: RankOptions, pipe: Connection, num_read: Synchronized[int]) -> None:
    import torch.distributed as dist

    from slipstream.conf.schema import WeightSyncConfig
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
            num_read.value = checkpoint.num_bytes_read
            if not told and (push.base is None or "base" in seconds) and reading.done():
                report, told = reading.result(), True
                pipe.send(("read", report.num_bytes, report.seconds, report.pinned_bytes))
            if not pipe.poll(POLL_S):
                continue
            order, value = pipe.recv()
            if order == "plan":
                with _timed(seconds, "plan"):
                    is_planned = _plan_for(sender, value)
            elif order == "connect":
                with _timed(seconds, "connect"):
                    sender.connect(value)
                    if not is_planned:
                        freeze_heap()
                if push.base is not None:
                    with _timed(seconds, "base"):
                        _wait_for(reading, checkpoint, num_read)
                        sender.note_base()
                    reading = reader.submit(checkpoint.refresh, push.checkpoint)
                pipe.send(("connected", seconds))
            else:
                pipe.send(("done", sender.update(0), sender.link))
                return
    finally:
        sender.close()
        if group is not None:
            dist.destroy_process_group()


def _wait_for(reading: Future[ReadReport], checkpoint: Checkpoint, num_read: Synchronized[int]) -> None:
    """Wait for a read, and say how far it is."""
    while not wait([reading], POLL_S).done:
        num_read.value = checkpoint.num_bytes_read
    reading.result()


def _plan_for(sender: Sender, layouts: Any) -> bool:
    """Plan for the engines' expected layouts. If that fails, connect() plans for their real ones."""
    try:
        sender.plan_for(layouts)
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
