"""Collectives of the trainer's ranks that raise one rank's error on all ranks.

Owns: how a value, an error, a sum or bytes get from rank to rank. Does not own what values mean (its callers), nor the
group.

    on_rank0    rank 0 --> all      its value, or its error
    deal        rank 0 --> all      the same, and a part of its own for each rank
    gather      all --> rank 0      every rank's value
    attempts    all --> rank 0      every rank's value or error
    everywhere  all --> all         every rank's value, or the first rank's error
    add_up      all --> rank 0      one sum of arrays

Values are sent as msgpack, and the reader names the type that it expects (typed_msgpack.py); an error is sent as its
class's name and its text. Nothing is unpickled, as it is by torch's own collectives of objects.

Invariants. All ranks call the same methods in the same order. An exception on one rank is sent as a value, because the
others are waiting in a collective, and the ranks that get it raise it. If a rank died, or stopped for longer than the
group's timeout, the ranks that wait for it raise RankLost. A message over MAX_BYTES is an error on every rank, because
all ranks see its size before any of them allocates memory for it. With one rank, every method is local.
"""

import contextlib
import logging
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from slipstream.conf.errors import ConfigError, SlipstreamError, named_error
from slipstream.conf.failures import in_words, outcome_of
from slipstream.weight_sync.errors import ProtocolError, RankLost, WeightSyncError
from slipstream.weight_sync.plan.columns import Ints
from slipstream.weight_sync.typed_msgpack import pack, unpack

logger = logging.getLogger(__name__)

T = TypeVar("T")
Part = TypeVar("Part")
Outcome: TypeAlias = tuple[T | None, SlipstreamError | None]
"""A rank's result, or its error. Examples: (layout, None), (None, PlanError("no such tensor"))."""
Kind: TypeAlias = Any
"""The type of a value that is sent, as a type hint: int, dict[str, int], a dataclass of such; None for no value."""
MAX_BYTES = 1 << 30
"""Longest message of one rank. The longest in use is a rank's part of a plan: tens of MB for 256 ranks of Kimi-K2."""


class Meeting:
    """One trainer rank among the others.

    Args:
        group: A process group over all trainer ranks; None if there is only one rank.
    """

    def __init__(self, rank: int, world_size: int, group: dist.ProcessGroup | None) -> None:
        if group is None and world_size != 1:
            raise ValueError(f"{world_size} trainer ranks need a process group")
        self.rank = rank
        self._world_size = world_size
        self._group = group

    def on_rank0(self, kind: Kind, make: Callable[[], T]) -> T:
        """Call make() on rank 0. Every rank gets its result or its error."""
        outcome = _attempt(make) if self.rank == 0 else (None, None)
        if self._group is not None:
            with self._waiting("a broadcast"):
                data = broadcast_bytes(_packed(outcome) if self.rank == 0 else b"", self._group)
            outcome = outcome if self.rank == 0 else _unpacked(kind, data)
        value, error = outcome
        if error is not None:
            raise error
        return cast(T, value)

    def deal(self, kind: Kind, part_kind: Kind, make: Callable[[], tuple[T, Sequence[Part]]]) -> tuple[T, Part]:
        """Call make() on rank 0. Every rank gets its first result, and its part of the second; or all get its error."""
        parts: list[Part] = []

        def make_shared() -> T:
            shared, own = make()
            parts.extend(own)
            return shared

        shared = self.on_rank0(kind, make_shared)
        if self._group is None:
            return shared, parts[0]
        with self._waiting("a scatter"):
            data = scatter_bytes([pack(part) for part in parts], self._group)
        return shared, parts[0] if self.rank == 0 else unpack(part_kind, data)

    def gather(self, kind: Kind, value: T) -> list[T]:
        """Every rank's value, on rank 0; the other ranks get nothing."""
        return values(self._collect(gather_bytes, kind, (value, None)))

    def attempts(self, kind: Kind, make: Callable[[], T]) -> list[Outcome[T]]:
        """Call make() on every rank. Rank 0 gets every rank's result or error, the others get nothing."""
        return self._collect(gather_bytes, kind, _attempt(make))

    def everywhere(self, kind: Kind, make: Callable[[], T]) -> list[T]:
        """Call make() on every rank. Every rank gets all results; if one fails, all raise the first one's error."""
        return values(self._collect(all_gather_bytes, kind, _attempt(make)))

    def _collect(
        self, how: Callable[[bytes, dist.ProcessGroup], list[bytes]], kind: Kind, outcome: Outcome[T]
    ) -> list[Outcome[T]]:
        if self._group is None:
            return [outcome]
        with self._waiting("a gather"):
            gathered = how(_packed(outcome), self._group)
        return [_unpacked(kind, data) for data in gathered]

    def add_up(self, table: Ints) -> None:
        """Put the sum of all ranks' tables into rank 0's. The other ranks' tables are undefined afterwards."""
        if self._group is not None:
            with self._waiting("a sum"):
                dist.reduce(torch.as_tensor(table), group_dst=0, group=self._group)

    @contextlib.contextmanager
    def _waiting(self, what: str) -> Generator[None]:
        """Raise RankLost for what a collective raises if a peer is gone, or stopped beyond the group's timeout."""
        try:
            yield
        except WeightSyncError:
            raise
        except RuntimeError as e:
            raise RankLost(f"trainer rank {self.rank} of {self._world_size} met nobody in {what}: {e}") from e


def values(outcomes: Sequence[Outcome[T]]) -> list[T]:
    """Every rank's result. Raises the first rank's error, if any rank has one."""
    for rank, (_, error) in enumerate(outcomes):
        if error is not None:
            raise error if len(outcomes) == 1 else type(error)(f"trainer rank {rank}: {error}")
    return [cast(T, value) for value, _ in outcomes]


def _attempt(make: Callable[[], T]) -> Outcome[T]:
    """make()'s result, or its error as a value, because the other ranks are waiting in a collective."""
    made = outcome_of(make)
    if not isinstance(made, Exception):
        return made, None
    if isinstance(made, (WeightSyncError, ConfigError)):
        return None, made
    logger.error("unexpected error", exc_info=made)
    return None, WeightSyncError(in_words(made))


def _packed(outcome: Outcome[object]) -> bytes:
    value, error = outcome
    try:
        if error is None:
            return pack(("", "", value))
    except (TypeError, ValueError, OverflowError) as e:
        error = WeightSyncError(f"a value of type {type(value).__name__} cannot be sent to the other ranks: {e}")
    return pack((type(error).__name__, str(error), None))


def _unpacked(kind: Kind, data: bytes) -> Outcome[Any]:
    """Inverse of _packed. Raises ProtocolError if the bytes are not of this kind."""
    name, text, value = unpack(tuple[str, str, msgspec.Raw], data)
    if name:
        return None, (named_error(name, SlipstreamError) or WeightSyncError)(text)
    return unpack(kind, value), None


def broadcast_bytes(data: bytes, group: dist.ProcessGroup | None) -> bytes:
    """Rank 0's bytes, on every rank. This and all functions below are collective."""
    (size,) = _sizes(len(data), group)[:1]
    message = _padded(data if dist.get_rank(group) == 0 else b"", size, group)
    dist.broadcast(message, group=group, group_src=0)
    return _bytes(message, size)


def scatter_bytes(parts: Sequence[bytes], group: dist.ProcessGroup | None) -> bytes:
    """parts[i] of rank 0, on rank i; the parts of other ranks are ignored."""
    is_source = dist.get_rank(group) == 0
    sizes = torch.tensor([len(part) for part in parts] if is_source else [0] * dist.get_world_size(group))
    sizes = sizes.to(_device(group))
    dist.broadcast(sizes, group=group, group_src=0)
    size = _checked([int(size) for size in sizes])
    received = _padded(b"", size, group)
    dist.scatter(
        received, [_padded(part, size, group) for part in parts] if is_source else None, group=group, group_src=0
    )
    return _bytes(received, int(sizes[dist.get_rank(group)]))


def gather_bytes(data: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Every rank's bytes, on rank 0; the others get nothing."""
    sizes = _sizes(len(data), group)
    is_sink, size = dist.get_rank(group) == 0, max(sizes)
    received = [_padded(b"", size, group) for _ in sizes] if is_sink else None
    dist.gather(_padded(data, size, group), received, group=group, group_dst=0)
    return [_bytes(one, own) for one, own in zip(received or [], sizes)]


def all_gather_bytes(data: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Every rank's bytes, on every rank."""
    sizes = _sizes(len(data), group)
    received = [_padded(b"", max(sizes), group) for _ in sizes]
    _all_gather(received, _padded(data, max(sizes), group), group)
    return [_bytes(one, own) for one, own in zip(received, sizes, strict=True)]


def _all_gather(received: list[torch.Tensor], own: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    cast(Any, dist).all_gather(received, own, group=group)  # torch has no types for its arguments


def _sizes(own: int, group: dist.ProcessGroup | None) -> list[int]:
    """Every rank's size. Raises ProtocolError, on all ranks, if one is over the limit."""
    sizes = [torch.zeros(1, dtype=torch.int64, device=_device(group)) for _ in range(dist.get_world_size(group))]
    _all_gather(sizes, torch.tensor([own], device=_device(group)), group)
    found = [int(size) for size in sizes]
    _checked(found)
    return found


def _checked(sizes: Sequence[int]) -> int:
    """The largest size, at least one byte: some backends refuse empty tensors."""
    if not all(0 <= size <= MAX_BYTES for size in sizes):
        raise ProtocolError(f"trainer ranks send messages of {list(sizes)} bytes; at most {MAX_BYTES} are read")
    return max(1, *sizes)


def _padded(data: bytes, size: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    message = torch.zeros(max(1, size), dtype=torch.uint8)
    message[: len(data)] = torch.as_tensor(np.frombuffer(data, np.uint8).copy())
    return message.to(_device(group))


def _bytes(message: torch.Tensor, size: int) -> bytes:
    return message[:size].cpu().numpy().tobytes()


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """The device on which the group's backend takes tensors."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
