"""Orders of items: seeded, bounded in memory, and continued exactly from any cursor."""

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from threading import Event

import pytest
from hypothesis import given, strategies as st

from slipstream.conf.schema import DataConfig
from slipstream.orchestrator.data.sources import Position, Row
from slipstream.orchestrator.data.streams import Mixed, Shuffled, Stream, Streamed, digest
from slipstream.orchestrator.data.training_stream import training_stream
from slipstream.rollout.errors import DataError
from slipstream.rollout.types import Prompt


def prompt(number: int) -> Prompt:
    return Prompt(number, (number + 10,), str(number))


class Rows:
    """A source of `count` rows."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.num_read = 0

    def __call__(self, start: Position) -> Iterator[Row]:
        for number in range(start.num_rows, self.count):
            self.num_read += 1
            yield Row(f"row {number}", {"number": number}, Position(number + 1))


class Buffered(DataConfig):
    """Two rows of each source at a time."""

    __slots__ = ()
    stream_buffer_rows = 2


def streamed(count: int, buffer_rows: int = 4, seed: int = 3, shuffle: bool = True, first: int = 0) -> Streamed[Prompt]:
    def read(row: Row, number: int) -> Prompt:
        return prompt(first + row.columns["number"])

    return Streamed("rows", Rows(count), read, seed=seed, buffer_rows=buffer_rows, shuffle=shuffle)


def ids(stream: Stream[Prompt], count: int) -> list[int]:
    return [item.prompt_id for item in islice(stream, count)]


@given(count=st.integers(1, 40), buffer_rows=st.integers(1, 50), seed=st.integers(0, 5))
def test_a_pass_has_every_row_once_and_moves_none_by_more_than_the_buffer(
    count: int, buffer_rows: int, seed: int
) -> None:
    stream, in_memory = streamed(count, buffer_rows, seed), shuffled(count)
    for _ in range(3):
        drawn = ids(stream, count)
        assert sorted(drawn) == sorted(ids(in_memory, count)) == list(range(count))
        assert all(abs(place - number) < buffer_rows for place, number in enumerate(drawn))


def test_passes_differ_and_seeds_too() -> None:
    stream = streamed(40, 20)
    first, second = ids(stream, 40), ids(stream, 40)
    assert first != second
    assert [number - 20 for number in first[20:]] != first[:20], "nor is a buffer shuffled as the one before it"
    assert first != ids(streamed(40, 20, seed=4), 40)
    assert ids(streamed(5, shuffle=False), 12) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_no_more_rows_are_read_than_two_buffers_hold() -> None:
    """One that is used up, and one that is filled meanwhile."""
    rows = Rows(10**9)
    stream = Streamed("rows", rows, lambda row, number: prompt(number), seed=1, buffer_rows=8)
    for num_drawn in range(1, 50):
        next(stream)
        first_of_buffer = (num_drawn - 1) // 8 * 8
        assert first_of_buffer + 8 <= rows.num_read <= first_of_buffer + 16


def test_the_next_buffer_is_filled_while_this_one_is_used() -> None:
    reached = Event()

    def read(row: Row, number: int) -> Prompt:
        if number == 7:
            reached.set()
        return prompt(number)

    stream = Streamed("rows", Rows(100), read, seed=1, buffer_rows=4)
    assert reached.wait(timeout=60), "nothing was drawn, and rows 4 to 7 are read"
    assert sorted(ids(stream, 4)) == [0, 1, 2, 3]


def test_the_end_of_the_rows_is_told_and_they_begin_again(caplog: pytest.LogCaptureFixture) -> None:
    stream = streamed(5)
    with caplog.at_level(logging.INFO):
        ids(stream, 5)
        assert stream.epoch == 0 and not caplog.messages
        next(stream)
    assert stream.epoch == 1
    assert caplog.messages == ["rows: all of its 5 rows were drawn; pass 2 begins"]
    with pytest.raises(DataError, match="rows has no rows"):
        streamed(0)


def test_a_row_that_is_wrong_ends_the_stream_and_its_cursor_is_that_of_the_last_good_row() -> None:
    def read(row: Row, number: int) -> Prompt:
        if number == 6:
            raise DataError(f"{row.where}: the prompt is empty")
        return prompt(number)

    def make(mended: bool) -> Streamed[Prompt]:
        reader: Callable[[Row, int], Prompt] = (lambda row, number: prompt(number)) if mended else read
        return Streamed("rows", Rows(9), reader, seed=1, buffer_rows=4)

    broken, whole = make(mended=False), make(mended=True)
    assert ids(broken, 4) == ids(whole, 4)
    with pytest.raises(DataError, match="row 6: the prompt is empty"):
        next(broken)
    resumed = make(mended=True)
    resumed.load_state_dict(json.loads(json.dumps(broken.state_dict())))
    assert ids(resumed, 20) == ids(whole, 20)


@given(kept=st.sets(st.integers(0, 19), min_size=1), buffer_rows=st.integers(1, 7), taken=st.integers(0, 30))
def test_rows_that_are_left_out_leave_no_gap_and_no_trace_in_a_cursor(
    kept: set[int], buffer_rows: int, taken: int
) -> None:
    def make() -> Streamed[Prompt]:
        def read(row: Row, number: int) -> Prompt | None:
            return prompt(number) if number in kept else None

        return Streamed("rows", Rows(20), read, seed=1, buffer_rows=buffer_rows)

    stream = make()
    assert all(sorted(ids(stream, len(kept))) == sorted(kept) for _ in range(3))
    ids(stream, taken)
    resumed = make()
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert ids(resumed, 40) == ids(stream, 40)


def test_a_source_without_a_row_that_is_short_enough_is_refused() -> None:
    with pytest.raises(DataError, match="rows has no rows that are short enough"):
        Streamed("rows", Rows(20), lambda row, number: None, seed=1, buffer_rows=4)


Make = Callable[[], Stream[Prompt]]


def shuffled(count: int, first: int = 0, seed: int = 2, shuffle: bool = True) -> Shuffled[Prompt]:
    return Shuffled([prompt(first + number) for number in range(count)], seed=seed, shuffle=shuffle)


def mixed() -> Mixed[Prompt]:
    parts = {"a": shuffled(7), "b": streamed(13, 5, first=100), "c": shuffled(2, first=200)}
    return Mixed(parts, [3.0, 1.0, 0.5], seed=5)


@given(make=st.sampled_from([lambda: shuffled(7), lambda: streamed(13, 5), mixed]), taken=st.integers(0, 60))
def test_a_cursor_continues_every_order_exactly(make: Make, taken: int) -> None:
    stream = make()
    ids(stream, taken)
    resumed = make()
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert resumed.epoch == stream.epoch
    assert resumed.state_dict() == stream.state_dict()
    assert ids(resumed, 50) == ids(stream, 50)


def test_shares_approach_the_weights_and_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """4000 draws: the standard deviation of a share of 0.75 is 0.007, so 0.03 is more than four of them."""
    stream = Mixed({"a.jsonl": shuffled(7), "b.jsonl": shuffled(7, first=100)}, [3, 1], seed=1)
    with caplog.at_level(logging.INFO):
        drawn = ids(stream, 999)
        assert len(caplog.messages) == 1 and caplog.messages[0].startswith("100 items were drawn: a.jsonl ")
        drawn += ids(stream, 3001)
    assert caplog.messages[1].startswith("1000 items were drawn: a.jsonl 7")
    assert "asked for 75.0%" in caplog.messages[1] and "asked for 25.0%" in caplog.messages[1]
    num_others = sum(number >= 100 for number in drawn)
    assert abs(num_others / 4000 - 0.25) < 0.03
    assert stream.epoch == num_others // 7, "the passes over the source that has had the fewest"
    assert stream.metrics()["data/share_error"] == pytest.approx(abs(num_others / 4000 - 0.25))


def test_a_cursor_of_an_earlier_release_points_at_the_same_items() -> None:
    """A run that was begun before is resumed: no seed and no draw may change."""
    assert ids(shuffled(7), 10) == [5, 6, 2, 3, 4, 0, 1, 4, 2, 0]
    assert ids(streamed(13, 5), 20) == [4, 2, 1, 3, 0, 7, 6, 9, 8, 5, 10, 11, 12, 1, 4, 0, 2, 3, 9, 8]
    assert ids(mixed(), 16) == [5, 6, 2, 3, 4, 0, 1, 4, 2, 0, 3, 6, 200, 201, 5, 104]
    cut = [Prompt(0, tokens, "") for tokens in ((1, 2), (3,), (1,), (2, 3))]
    assert digest(cut[:2]) != digest(cut[2:]), "the same tokens, cut elsewhere"


def test_the_order_within_a_source_does_not_depend_on_the_others() -> None:
    drawn = ids(mixed(), 200)
    assert [number for number in drawn if number < 100] == ids(shuffled(7), sum(number < 100 for number in drawn))


@pytest.mark.parametrize(
    ("mine", "other", "option"),
    [
        (lambda: streamed(13, 5), lambda: streamed(13, 5, seed=4), r"run\.seed"),
        (lambda: streamed(13, 5), lambda: streamed(13, 6), r"data\.stream_buffer_rows"),
        (lambda: streamed(13, 5), lambda: streamed(13, 5, shuffle=False), r"data\.order"),
        (lambda: streamed(13, 5), lambda: streamed(13, 5, first=1), r"data\.path"),
        (lambda: shuffled(8), lambda: shuffled(9), r"data\.path"),
        (lambda: shuffled(8), lambda: shuffled(8, seed=4), r"run\.seed"),
        (lambda: shuffled(8), lambda: shuffled(8, shuffle=False), r"data\.order"),
    ],
)
def test_a_cursor_of_other_rows_or_options_is_refused(mine: Make, other: Make, option: str) -> None:
    stream = mine()
    ids(stream, 7)
    with pytest.raises(DataError, match=option):
        other().load_state_dict(stream.state_dict())
    with pytest.raises(DataError, match=r"run\.seed"):
        stream.load_state_dict({name: value for name, value in stream.state_dict().items() if name != "seed"})


@pytest.mark.parametrize(
    ("names", "weights", "option"), [(("a", "c"), [1, 1], r"data\.sources"), (("a", "b"), [1, 2], r"data\.weights")]
)
def test_a_cursor_of_another_mixture_is_refused(names: tuple[str, str], weights: list[float], option: str) -> None:
    def mix(names: tuple[str, ...], weights: list[float]) -> Mixed[Prompt]:
        return Mixed({name: shuffled(3) for name in names}, weights, seed=1)

    with pytest.raises(DataError, match=option):
        mix(names, weights).load_state_dict(mix(("a", "b"), [1, 1]).state_dict())


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, ...]:
    """Three rows in one, five in the other."""
    for name, count in (("a", 3), ("b", 5)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"n": {number}}}\n' for number in range(count)))
    return str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")


@pytest.mark.parametrize("stream", [False, True])
def test_ids_tell_source_and_row_apart(files: tuple[str, ...], stream: bool) -> None:
    def read(row: Row, number: int) -> Prompt:
        return replace(
            prompt(row.columns["n"]), prompt_id=number, fields={"file": row.where.rpartition(".jsonl")[0][-1]}
        )

    data = Buffered(sources=files, stream=stream, weights=(1.0, 3.0))
    items = training_stream(data, read, seed=1)
    assert items.state_dict()["weights"] == [0.25, 0.75]
    assert len({cursor["seed"] for cursor in items.state_dict()["cursors"]}) == 2
    seen = {item.prompt_id: item for item in islice(items, 100)}
    assert {number: item.fields["file"] for number, item in seen.items()} == {
        0: "a", 1: "b", 2: "a", 3: "b", 4: "a", 5: "b", 7: "b", 9: "b",
    }  # fmt: skip
    assert all(item.text == str(number // 2) for number, item in seen.items())


def test_one_source_is_in_the_order_that_it_always_had(files: tuple[str, ...]) -> None:
    def read(row: Row, number: int) -> Prompt:
        return prompt(number)

    drawn = ids(training_stream(DataConfig(path=files[1]), read, seed=4), 12)
    assert drawn == ids(Shuffled([prompt(number) for number in range(5)], seed=4), 12)
