"""The order in which items (prompts, conversations) are used, and cursors from which a resumed run goes on.

    Shuffled   all items in memory; every pass over them in another order
    Streamed   what does not fit in memory: a buffer of rows is filled, shuffled, used up and filled again
    Mixed      several of these; who gives the next item is drawn with the sources' weights

Owns: order and cursors. Does not own: rows and what is made of them (sources.py, prompts.py).
Invariant: what follows a cursor depends only on seed, options and rows, so a resumed run gets the items that it would
have got. A cursor that belongs to other ones is refused.
"""

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import islice
from typing import Generic, Protocol, TypeVar

import numpy as np

from slipstream.conf.failures import in_daemon_thread
from slipstream.conf.json_files import JsonMapping, JsonObject
from slipstream.orchestrator.data.sources import START, Position, Row
from slipstream.rollout.errors import DataError

logger = logging.getLogger(__name__)

DIGEST = "digest"
_CHOICES = 0x4D49
"""Keeps the draws of sources apart from the orders within them, which have the same seed."""
FIRST_LOG_ITEMS, LOG_EVERY_ITEMS = 100, 1000
"""After how many items the sources' shares are logged for the first time, and how often then."""


class Tokenized(Protocol):
    """An item. Digests are computed from its token ids."""

    @property
    def token_ids(self) -> Sequence[int]: ...


Item = TypeVar("Item", bound=Tokenized)


class Stream(ABC, Generic[Item]):
    """An endless sequence of items with a cursor."""

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Complete passes over the items."""

    def __iter__(self) -> Iterator[Item]:
        return self

    @abstractmethod
    def __next__(self) -> Item: ...

    @abstractmethod
    def state_dict(self) -> JsonObject:
        """The cursor: plain values, to be stored with a checkpoint."""

    @abstractmethod
    def load_state_dict(self, state: JsonObject) -> None:
        """Continue where `state` was taken. Raises: DataError, where items, seed or options differ: the cursor would
        point at other items."""

    def observe(self, prompt_id: int, rewards: Sequence[float | None]) -> None:
        """Take note of the rewards of one group. Every prompt that was drawn is observed once."""

    def metrics(self) -> dict[str, float | None]:
        return {"data/epoch": self.epoch}


def check_cursor(state: JsonMapping, mine: JsonMapping, options: Mapping[str, str]) -> None:
    """Refuse a cursor whose facts are not `mine`; `options` says which option each fact comes from."""
    for key, option in options.items():
        if state.get(key) == mine[key]:
            continue
        if key == DIGEST:
            raise DataError(
                f"the checkpoint's prompt cursor belongs to other rows: those of {option} have changed, or become "
                "other tokens; resume with the rows that the run began with, or start a new run"
            )
        raise DataError(
            f"the checkpoint's prompt cursor belongs to another order of prompts: {key} is {mine[key]!r} and was "
            f"{state.get(key)!r}; resume with the {option} that the run began with"
        )


def digest(items: Sequence[Tokenized]) -> str:
    """A digest of the token ids of all items, in their order."""
    found = hashlib.sha256()
    for item in items:
        found.update(np.asarray(item.token_ids, dtype=np.int64).tobytes())
        found.update(b"|")
    return found.hexdigest()


class Shuffled(Stream[Item]):
    """Epoch after epoch, each in an order that `seed` and the epoch decide, or without `shuffle` in the file's.

    Example: three items may come as 2 0 1 | 0 2 1 | ...; after four of them the cursor is epoch 1, position 1."""

    def __init__(self, items: Sequence[Item], *, seed: int, shuffle: bool = True) -> None:
        if not items:
            raise DataError("a stream needs at least one prompt or conversation")
        self.items = list(items)
        self._facts = {DIGEST: digest(self.items), "seed": seed, "shuffle": shuffle}
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = self._position = 0
        self._order: list[int] = self._order_of(0)

    @property
    def epoch(self) -> int:
        return self._epoch

    def __next__(self) -> Item:
        item = self.items[self._order[self._position]]
        self._position += 1
        if self._position == len(self._order):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        return item

    def state_dict(self) -> JsonObject:
        return {"epoch": self._epoch, "position": self._position, **self._facts}

    def load_state_dict(self, state: JsonObject) -> None:
        check_cursor(state, self._facts, {"seed": "run.seed", "shuffle": "data.order", DIGEST: "data.path"})
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> list[int]:
        return _order(len(self.items), (self._seed, epoch), self._shuffle)


@dataclass(frozen=True, slots=True)
class _Buffer(Generic[Item]):
    """Consecutive rows' items, in the order in which they are used."""

    items: Sequence[Item]
    epoch: int
    first: Position
    end: Position
    ahead: Iterator[Row]


class Streamed(Stream[Item]):
    """Rows as they come, twice `buffer_rows` of them in memory at most. How many there are need not be known.

    A full buffer is shuffled and used up, while a thread fills the next one: the event loop does not wait for a file or
    for the network. So a row moves by less than `buffer_rows` places, and the cursor is the buffer's first row and a
    number. At the end of the rows the first ones come again.
    `read` makes an item of a row and its number; None leaves the row out. Of a row that cannot be one it raises
    DataError, which the stream raises when the items before that row's buffer are used up.
    """

    def __init__(
        self,
        name: str,
        rows: Callable[[Position], Iterator[Row]],
        read: Callable[[Row, int], Item | None],
        *,
        seed: int,
        buffer_rows: int,
        shuffle: bool = True,
    ) -> None:
        self._name = name
        self._rows = rows
        self._read = read
        self._facts = {"seed": seed, "shuffle": shuffle, "buffer_rows": buffer_rows}
        self._seed = seed
        self._shuffle = shuffle
        self._buffer_rows = buffer_rows
        self._begin(0, START)

    @property
    def epoch(self) -> int:
        return self._buffer.epoch

    def __next__(self) -> Item:
        if self._taken == len(self._buffer.items):
            following, before = self._following.result(), self._buffer
            if following.epoch > before.epoch:
                logger.info(
                    "%s: all of its %d rows were drawn; pass %d begins",
                    self._name, before.end.num_rows, following.epoch + 1,
                )  # fmt: skip
            self._use(following)
        item = self._buffer.items[self._taken]
        self._taken += 1
        return item

    def state_dict(self) -> JsonObject:
        """Pass, the buffer's first row, how many of its items were taken, and their digest."""
        buffer = self._buffer
        place = {"pass": buffer.epoch, "first": astuple(buffer.first), "taken": self._taken}
        return {**place, DIGEST: digest(buffer.items), **self._facts}

    def load_state_dict(self, state: JsonObject) -> None:
        """Fill the buffer again with the rows that it had, unless it has them; see Stream."""
        options = {"seed": "run.seed", "shuffle": "data.order", "buffer_rows": "data.stream_buffer_rows"}
        check_cursor(state, self._facts, options)
        epoch, first = int(state["pass"]), Position(*state["first"])
        if (epoch, first) != (self._buffer.epoch, self._buffer.first):
            self._begin(epoch, first)
        check_cursor(state, {DIGEST: digest(self._buffer.items)}, {DIGEST: "data.path"})
        self._taken = int(state["taken"])

    def _begin(self, epoch: int, first: Position) -> None:
        self._use(self._fill(self._rows(first), epoch, first))

    def _use(self, buffer: _Buffer[Item]) -> None:
        """Take items from this buffer, and let a thread fill the one that follows."""
        self._buffer, self._taken = buffer, 0
        self._following = in_daemon_thread(self._fill, buffer.ahead, buffer.epoch, buffer.end, name="rows")

    def _fill(self, ahead: Iterator[Row], epoch: int, first: Position) -> _Buffer[Item]:
        """Items of the next rows; of the rows after them while all are left out."""
        end = first
        while rows := list(islice(ahead, self._buffer_rows)):
            end = rows[-1].after
            items = [item for row in rows if (item := self._read(row, row.after.num_rows - 1)) is not None]
            if items:
                order = _order(len(items), (self._seed, epoch, first.num_rows), self._shuffle)
                return _Buffer([items[place] for place in order], epoch, first, end, ahead)
        if first == START:
            raise DataError(f"{self._name} has no rows{'' if end == START else ' that are short enough'}")
        return self._fill(self._rows(START), epoch + 1, START)


class Mixed(Stream[Item]):
    """Several streams, by their sources' names. Item n comes from the stream that a random number of seed and n
    chooses, by weight; what the weights add up to does not matter."""

    def __init__(self, streams: Mapping[str, Stream[Item]], weights: Sequence[float], *, seed: int) -> None:
        shares = np.asarray(weights, dtype=np.float64) / np.sum(weights)
        self._names = list(streams)
        self._streams = list(streams.values())
        self._bounds = np.cumsum(shares)
        self._shares = [float(share) for share in shares]
        self._seed = seed
        self._facts = {"sources": self._names, "weights": self._shares, "seed": seed}
        self._counts = [0] * len(self._streams)

    @property
    def epoch(self) -> int:
        """Complete passes over the source that has had the fewest."""
        return min(stream.epoch for stream in self._streams)

    def __next__(self) -> Item:
        number = sum(self._counts)
        draw = np.random.default_rng((self._seed, _CHOICES, number)).random()
        index = min(int(np.searchsorted(self._bounds, draw, side="right")), len(self._streams) - 1)
        item = next(self._streams[index])
        self._counts[index] += 1
        if number + 1 == FIRST_LOG_ITEMS or (number + 1) % LOG_EVERY_ITEMS == 0:
            logger.info("%s", self.shares())
        return item

    def shares(self) -> str:
        num_items = sum(self._counts)
        parts = [
            f"{name} {count} ({count / max(num_items, 1):.1%}, asked for {share:.1%}, pass {stream.epoch + 1})"
            for name, count, share, stream in zip(self._names, self._counts, self._shares, self._streams, strict=True)
        ]
        return f"{num_items} items were drawn: {', '.join(parts)}"

    def state_dict(self) -> JsonObject:
        cursors = [stream.state_dict() for stream in self._streams]
        return {"counts": list(self._counts), "cursors": cursors, **self._facts}

    def load_state_dict(self, state: JsonObject) -> None:
        options = {"sources": "data.sources", "weights": "data.weights", "seed": "run.seed"}
        check_cursor(state, self._facts, options)
        for stream, cursor in zip(self._streams, state["cursors"], strict=True):
            stream.load_state_dict(cursor)
        self._counts = [int(count) for count in state["counts"]]

    def observe(self, prompt_id: int, rewards: Sequence[float | None]) -> None:
        """Pass it on: prompt ids of source i are i modulo the number of sources (inputs/rows/prompt_rows.py)."""
        self._streams[prompt_id % len(self._streams)].observe(prompt_id, rewards)

    def metrics(self) -> dict[str, float | None]:
        """How far the shares are from the weights; the mean over the sources of what they measure."""
        num_items = max(sum(self._counts), 1)
        error = max(abs(count / num_items - share) for count, share in zip(self._counts, self._shares, strict=True))
        measured = [stream.metrics() for stream in self._streams]
        means: dict[str, float | None] = {}
        for name in measured[0]:
            known = [value for part in measured if (value := part.get(name)) is not None]
            means[name] = sum(known) / len(known) if known else None
        return {**means, "data/epoch": self.epoch, "data/share_error": error}


def _order(count: int, seed: tuple[int, ...], shuffle: bool) -> list[int]:
    places = np.random.default_rng(seed).permutation(count) if shuffle else np.arange(count)
    return [int(place) for place in places]
