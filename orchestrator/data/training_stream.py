"""The training items of a run, from its `data` options: which sources, mixed how, in which order.

Owns: what the options mean. Does not own the orders themselves (streams.py, curriculum.py) nor what an item is: `read`
makes one of a row and its id. The id of row r of source i, of k sources, is r k + i.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice

from conf.schema import DataConfig
from orchestrator.data.sources import START, Position, Row, read_rows
from orchestrator.data.streams import Item, Mixed, Shuffled, Stream, Streamed
from rollout.errors import DataError

_SEEDS_APART = 1_000_003
"""Between the seeds of two sources, so that sources of equal length have different orders."""

Read = Callable[[Row, int], Item]
Order = Callable[[Sequence[Item], int], Stream[Item]]


def training_stream(data: DataConfig, read: Read[Item], *, seed: int, order: Order[Item] | None = None) -> Stream[Item]:
    """The run's training items, endlessly. Without data.stream, all rows are read and checked by this call.

    Args:
        order: Makes a stream of a source's items and a seed. None: as data.shuffle says.

    Raises:
        DataError: A source is missing or malformed, or one of the rows that were read cannot be an item.
    """
    order = order or (lambda items, own_seed: Shuffled(items, seed=own_seed, shuffle=data.shuffle))
    streams: dict[str, Stream[Item]] = {}
    for index, source in enumerate(data.training_sources):
        own_seed = seed + index * _SEEDS_APART
        if data.stream:
            streams[source] = Streamed(
                source,
                partial(_rows_from, source),
                _with_ids(data, index, read),
                seed=own_seed,
                buffer_rows=data.stream_buffer_rows,
                shuffle=data.shuffle,
            )
        else:
            streams[source] = order(items_of(data, index, read), own_seed)
    if len(streams) == 1:
        return next(iter(streams.values()))
    return Mixed(streams, data.weights or [1.0] * len(streams), seed=seed)


def items_of(data: DataConfig, index: int, read: Read[Item]) -> list[Item]:
    """The items of data.training_sources[index], in its order; with data.stream those that the first buffer holds.

    Raises: as training_stream.
    """
    source, read_one = data.training_sources[index], _with_ids(data, index, read)
    rows = islice(read_rows(source, stream=data.stream), data.stream_buffer_rows if data.stream else None)
    items = [read_one(row, row.after.num_rows - 1) for row in rows]
    if not items:
        raise DataError(f"{source} has no rows")
    return items


def _rows_from(source: str, start: Position = START) -> Iterator[Row]:
    return read_rows(source, start, stream=True)


def _with_ids(data: DataConfig, index: int, read: Read[Item]) -> Read[Item]:
    num_sources = len(data.training_sources)
    return lambda row, number: read(row, number * num_sources + index)
