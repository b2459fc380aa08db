"""The items of a run, from its `data` options: which sources, mixed how, in which order, with or without long rows.

Owns: what the options mean. Does not own what an item is: `read` makes one of a row and its id. The id of row r of
source i, of k sources, is r k + i.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Generic

from slipstream.conf.json_files import JsonMapping
from slipstream.conf.schema import DataConfig, Order
from slipstream.orchestrator.data.sources import Row, read_rows
from slipstream.orchestrator.data.streams import DIGEST, Item, Mixed, Shuffled, Stream, Streamed, check_cursor, digest
from slipstream.rollout.errors import DataError, RowTooLong

logger = logging.getLogger(__name__)

SAY_EVERY_S, _LOOK_EVERY_ROWS = 5.0, 1024
"""How often a source that takes long says how far it was read, and after how many rows the clock is looked at."""
_SEEDS_APART = 1_000_003
"""Between the seeds of two sources, so that sources of equal length have different orders."""

Read = Callable[[Row, int], Item]
ReadSome = Callable[[Row, int], Item | None]
MakeStream = Callable[[Sequence[Item], int], Stream[Item]]


@dataclass(frozen=True, slots=True)
class Items(Generic[Item]):
    found: list[Item]
    """At least one, in the source's order."""
    num_too_long: int

    def __str__(self) -> str:
        left_out = f" ({self.num_too_long} too long and left out)" if self.num_too_long else ""
        return f"{len(self.found)}{left_out}"


def training_stream(
    data: DataConfig, read: Read[Item], *, seed: int, order: MakeStream[Item] | None = None
) -> Stream[Item]:
    """The run's training items, endlessly. Without data.stream, all rows are read and checked by this call. Raises
    DataError: a source is missing or malformed, or one of the rows that were read cannot be an item.
    `order` makes a stream of a source's items and a seed, in place of data.order."""
    shuffle = data.order is not Order.given
    order = order or (lambda items, own_seed: Shuffled(items, seed=own_seed, shuffle=shuffle))
    streams: dict[str, Stream[Item]] = {}
    for index, source in enumerate(data.training_sources):
        own_seed = seed + index * _SEEDS_APART
        if data.stream:
            streams[source] = Streamed(
                source,
                partial(read_rows, source, stream=True),
                _reader(data, index, read),
                seed=own_seed,
                buffer_rows=data.stream_buffer_rows,
                shuffle=shuffle,
            )
        else:
            streams[source] = order(training_items(data, index, read).found, own_seed)
    if len(streams) == 1:
        return next(iter(streams.values()))
    return Mixed(streams, data.weights or [1.0] * len(streams), seed=seed)


def training_items(
    data: DataConfig, index: int, read: Read[Item], most_rows: int | None = None, verb: str = "reading"
) -> Items[Item]:
    """The items of data.training_sources[index]; with data.stream, or with most_rows, those of its first rows. `verb`
    is what the log says of a source that takes long. Raises: as training_stream."""
    source = data.training_sources[index]
    most = most_rows if most_rows is not None else data.stream_buffer_rows if data.stream else None
    option = "data.sources" if data.sources else "data.path"
    rows = islice(read_rows(source, stream=data.stream, option=option), most)
    return _items(source, rows, _reader(data, index, read), verb)


def check_goes_on(data: DataConfig, cursor: JsonMapping, items: Sequence[Items[Item]] | None) -> None:
    """Refuse what the stream would refuse when it loads this cursor, as far as is known before it is made: `items` are
    those of each training source, all and as the run reads them. Raises: DataError."""
    for index, own in enumerate(cursor.get("cursors", [cursor])):
        if "shuffle" in own:
            check_cursor(own, {"shuffle": data.order is not Order.given}, {"shuffle": "data.order"})
        if items is not None and DIGEST in own:
            check_cursor(own, {DIGEST: digest(items[index].found)}, {DIGEST: data.training_sources[index]})


def held_out_items(data: DataConfig, read: Read[Item], verb: str = "reading") -> dict[str, Items[Item]]:
    """The items of every held-out set, by its name (DataConfig.held_out_sources); ids are the numbers of rows. Raises:
    as training_stream."""
    found: dict[str, Items[Item]] = {}
    for name, source in data.held_out_sources.items():
        rows = read_rows(source, option=f"data.eval_sets.{name}" if name else "data.eval_path")
        found[name] = _items(source, rows, partial(_unless_too_long, data, read), verb)
    return found


def _items(source: str, rows: Iterable[Row], read: ReadSome[Item], verb: str) -> Items[Item]:
    items = [read(row, row.after.num_rows - 1) for row in _saying(source, rows, verb)]
    found = [item for item in items if item is not None]
    if not found:
        raise DataError(f"{source} has no rows{' that are short enough (data.drop_too_long)' if items else ''}")
    return Items(found, len(items) - len(found))


def _saying(source: str, rows: Iterable[Row], verb: str) -> Iterator[Row]:
    """Pass rows on, and log now and then how many there were."""
    said_at = time.monotonic()
    for count, row in enumerate(rows, start=1):
        yield row
        if count % _LOOK_EVERY_ROWS == 0 and time.monotonic() - said_at >= SAY_EVERY_S:
            said_at = time.monotonic()
            logger.info("%s %s: %s rows so far", verb, source, f"{count:,}")


def _reader(data: DataConfig, index: int, read: Read[Item]) -> ReadSome[Item]:
    num_sources = len(data.training_sources)
    return lambda row, number: _unless_too_long(data, read, row, number * num_sources + index)


def _unless_too_long(data: DataConfig, read: Read[Item], row: Row, item_id: int) -> Item | None:
    try:
        return read(row, item_id)
    except RowTooLong:
        if not data.drop_too_long:
            raise
        return None
