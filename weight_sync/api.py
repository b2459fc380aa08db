"""The weight sync on its own, for other trainers and for checkpoints on disk. docs/push.md explains it.

    source = register_checkpoint("/models/Qwen3-30B-A3B")       or register_tensors({...}), or a WeightSource of yours
    report = update(source, engines, key=key)                   engines: endpoints, "tcp://host:port"

With several ranks, every rank makes the same calls at the same time, each with its own part of the tensors.

Invariant: update() returns when every engine has committed or is named in the report; an engine that did not commit
does not serve.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.conf.errors import ConfigError
from slipstream.conf.failures import in_words, outcome_of, undone_by
from slipstream.conf.schema import WeightSyncConfig
from slipstream.weight_sync.disk.copies import Held
from slipstream.weight_sync.disk.kept_source import KeptSource
from slipstream.weight_sync.disk.safetensors_source import NUM_THREADS, Checkpoint
from slipstream.weight_sync.disk.tensor_source import TensorSource
from slipstream.weight_sync.errors import ProtocolError, WeightSyncError
from slipstream.weight_sync.layout import DTYPE_BYTES, Region, TensorMeta
from slipstream.weight_sync.pipeline.packing import MarkingSource
from slipstream.weight_sync.publish.collectives import Meeting
from slipstream.weight_sync.publish.publisher import Publisher
from slipstream.weight_sync.publish.report import PublishReport
from slipstream.weight_sync.source import WeightSource
from slipstream.weight_sync.transport.mooncake import MooncakeTransport
from slipstream.weight_sync.transport.this_machine import LOOPBACK

Event = Literal["start", "finish"]
RequestHook = Callable[[Event], None]
"""Called only on rank 0, with "start" before an engine is asked to stop serving, and with "finish" after all of the
hook's endpoints have committed (not if one did not). It pauses and resumes an engine through the engine's own API. A
single hook is for all engines, and ends the update if it raises. In a sequence, each hook is for the endpoints at its
positions, and if it raises, only those fail."""


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's rectangle of a tensor that is spread over ranks: Part(local, start=(64, 0), shape=(512, 64))."""

    local: Tensor
    start: tuple[int, ...]
    """Place of the rectangle's first element, in elements of the whole tensor."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""


def register_checkpoint(
    path: Path | str, *, rank: int = 0, world_size: int = 1, num_threads: int = NUM_THREADS
) -> Checkpoint:
    """Read this rank's share of a safetensors checkpoint into host memory, page-locked if there is CUDA.

    Give the result's `source` to update(); `refresh()` reads other weights into the same memory. Raises ConfigError if
    the folder holds no complete checkpoint.
    """
    checkpoint = Checkpoint(path, rank=rank, world_size=world_size, num_threads=num_threads)
    checkpoint.read()
    return checkpoint


def register_tensors(
    tensors: Mapping[str, Tensor | Part], *, rank: int = 0, group: dist.ProcessGroup | None = None
) -> TensorSource:
    """Publish tensors from where they are: CPU, pinned or not, or GPU. Collective over `group`.

    Args:
        tensors: By their names in the Hugging Face checkpoint. A Tensor is a whole one (several ranks may hold it; each
            byte is sent once), a Part is a rectangle of one, and of a DTensor the local part is taken. All must be
            contiguous. They are not copied: update() sends what they hold at that time.
        group: All ranks that publish together; None if there is only one.

    Raises ConfigError, alike on every rank, if a tensor cannot be published as it is, or ranks disagree about one.
    """
    held: list[Held] = []
    meeting = Meeting(rank, 1 if group is None else dist.get_world_size(group), group)
    everyone = meeting.everywhere(dict[str, TensorMeta], lambda: _take(tensors, held))
    return TensorSource(rank, _agreed(everyone), held)


def _take(tensors: Mapping[str, Tensor | Part], held: list[Held]) -> dict[str, TensorMeta]:
    """Append this rank's part of every tensor to `held`. Returns the whole tensors' descriptions."""
    metas: dict[str, TensorMeta] = {}
    for name, value in tensors.items():
        part = _part_of(name, value)
        dtype = str(part.local.dtype).removeprefix("torch.")
        if dtype not in DTYPE_BYTES:
            raise ConfigError(f"{name} is {dtype}; formats that can be published: {', '.join(DTYPE_BYTES)}")
        if not part.local.is_contiguous():
            raise ConfigError(f"{name} is not contiguous (strides {part.local.stride()}); pass a contiguous tensor")
        metas[name] = TensorMeta(name, part.shape, dtype)
        if part.local.numel():
            region = Region(part.start, tuple(part.local.shape))
            held.append(Held(name, region, dtype, part.local.detach().reshape(-1).view(torch.uint8)))
    return metas


class Sender(Publisher):
    """A publisher with a link of its own: ranks that plan once, and update engines many times. Construction with
    engines is collective.

    Args:
        engines: Endpoints of all replicas, "tcp://host:port"; the same on every rank. None: connect() gets them later,
            so that the link opens while engines still start.
        key: At least 16 bytes, shared with the engines: who does not have it is not heard.
        rank, world_size, group: This rank, and a gloo group over all ranks (None if there is only one).
        device: Device of the staging memory; None: the current GPU, or else the CPU. Engines must use the same kind.
        host: Address at which engines on other machines reach this machine.
        config: Link, watermark, deadline, hashes. With delta_bytes, engines whose landing zone has that size get only
            what changed since the last update; the source's bytes as sent last are kept in host memory.

    Raises:
        WeightSyncError: An engine does not answer, or its parameters cannot be filled from these tensors.
    """

    def __init__(
        self,
        source: WeightSource,
        engines: Sequence[str] | None,
        *,
        key: bytes,
        rank: int = 0,
        world_size: int = 1,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        host: str = LOOPBACK,
        config: WeightSyncConfig | None = None,
    ) -> None:
        config = config or WeightSyncConfig()
        kind = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._link = MooncakeTransport(config.transport, device=kind.type, host=host, timeout_s=config.timeout_s)
        if config.delta_bytes and not isinstance(source, MarkingSource):
            source = KeptSource(source, config.watermark_bytes, kind)
        super().__init__(
            source, self._link, rank=rank, world_size=world_size, group=group, config=config, key=key, device=kind
        )
        if engines is not None:
            with undone_by(lambda _: self.close()):
                self.connect(engines)

    def reconnect(self, replica: int, endpoint: str) -> None:
        """Send to an engine that was started again, as Publisher.reconnect(). There are as many as connect() had."""
        self._check_known("reconnect() names", [replica])
        super().reconnect(replica, endpoint)

    @property
    def link(self) -> str:
        return self._link.link

    def update(
        self,
        version: int = 0,
        *,
        request_hook: RequestHook | Sequence[RequestHook] | None = None,
        exclude: Collection[int] = (),
    ) -> PublishReport:
        """Send the source's weights to every engine. Collective; the weights must not change meanwhile.

        Args:
            version: A number >= 0 of your choice; engines report it. The same one may be sent again.
            request_hook: See RequestHook. A sequence has one per endpoint, the same one for all ranks of an engine.
            exclude: Positions of engines that are out of service and not waited for, the same on every rank.

        Returns:
            What became of every engine. An engine that failed, or whose own hook did, is an entry, not an exception.

        Raises:
            WeightSyncError: The single hook raised, or `exclude` names an engine that does not exist. Raised alike on
                every rank.
        """
        self._check_known("update() excludes", exclude)
        num_engines = len(self._endpoints)

        def call(event: Event, ready: set[int]) -> dict[int, str]:
            """Call the hooks whose engines are all ready. Returns the engines whose hook raised, and why."""
            failed: dict[int, str] = {}
            for hook, engines in _by_hook(request_hook, num_engines, exclude).items():
                failure = outcome_of(hook, event) if ready.issuperset(engines) else None
                if isinstance(failure, Exception):
                    error = f"request_hook({event!r}) failed: {in_words(failure)}"
                    if callable(request_hook):
                        raise WeightSyncError(error) from failure
                    failed |= dict.fromkeys(engines, error)
            return failed

        refused = self._meeting.on_rank0(dict[int, str], lambda: call("start", set(range(num_engines))))
        report = _with_errors(self.publish(version, exclude={*exclude, *refused}), refused)
        committed = {number for number, engine in enumerate(report.replicas) if engine.committed}
        return _with_errors(report, self._meeting.on_rank0(dict[int, str], lambda: call("finish", committed)))

    def close(self) -> None:
        super().close()
        self._link.close()

    def _check_known(self, what: str, replicas: Collection[int]) -> None:
        if unknown := sorted(set(replicas) - set(range(len(self._endpoints)))):
            raise ProtocolError(f"{what} replicas {unknown}; there are {len(self._endpoints)}")


def _by_hook(
    hook: RequestHook | Sequence[RequestHook] | None, num_engines: int, exclude: Collection[int]
) -> dict[RequestHook, list[int]]:
    hooks = [hook] * num_engines if callable(hook) else list(hook or ())
    if hook is not None and len(hooks) != num_engines:
        raise ProtocolError(f"update() has {len(hooks)} request hooks for {num_engines} engines")
    found: dict[RequestHook, list[int]] = {}
    for number, own in enumerate(hooks):
        if number not in exclude:
            found.setdefault(own, []).append(number)
    return found


def _with_errors(report: PublishReport, errors: Mapping[int, str]) -> PublishReport:
    """Add to the report that the engines at these positions do not serve what was sent, and why."""
    replicas = list(report.replicas)
    for number, error in errors.items():
        replicas[number] = replace(replicas[number], committed=False, error=error)
    return replace(report, replicas=tuple(replicas))


def update(
    source: WeightSource | Checkpoint,
    engines: Sequence[str],
    *,
    key: bytes,
    version: int = 0,
    request_hook: RequestHook | Sequence[RequestHook] | None = None,
    **options: Any,
) -> PublishReport:
    """Connect, send the weights to every engine once, and disconnect. Options are Sender's.

    To update the same engines again, keep a Sender instead: it plans only once.
    """
    weights = source.source if isinstance(source, Checkpoint) else source
    sender = Sender(weights, engines, key=key, **options)
    try:
        return sender.update(version, request_hook=request_hook)
    finally:
        sender.close()


def _part_of(name: str, value: Tensor | Part) -> Part:
    """A Part as it is, a DTensor's local rectangle, or a whole tensor."""
    if isinstance(value, Part):
        if len(value.start) != len(value.shape) or value.local.dim() != len(value.shape):
            raise ConfigError(
                f"{name}: local, start and shape have {value.local.dim()} dims, {value.start}, {value.shape}"
            )
        ends = (a + n for a, n in zip(value.start, value.local.shape, strict=True))
        if any(a < 0 for a in value.start) or any(end > n for end, n in zip(ends, value.shape, strict=True)):
            raise ConfigError(f"{name}: {tuple(value.local.shape)} at {value.start} is not inside {value.shape}")
        return value
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if isinstance(value, DTensor):
        if any(placement.is_partial() for placement in value.placements):
            raise ConfigError(f"{name} is a partial sum; redistribute it first")
        _, start = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
        return Part(value.to_local(), tuple(start), tuple(value.shape))
    return Part(value, (0,) * value.dim(), tuple(value.shape))


def _agreed(everyone: Sequence[Mapping[str, TensorMeta]]) -> list[TensorMeta]:
    """Every tensor that any rank holds, ordered by name: the same list on every rank."""
    found: dict[str, TensorMeta] = {}
    for rank, theirs in enumerate(everyone):
        for name, meta in theirs.items():
            if found.setdefault(name, meta) != meta:
                raise ConfigError(f"rank {rank} has {name} as {meta}, another rank as {found[name]}")
    return [found[name] for name in sorted(found)]
