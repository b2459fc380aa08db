"""Promises of weight_sync/changes.py: a stream applied to what was is what is; nothing outside a chunk is written."""

import torch
from hypothesis import given, settings, strategies as st

from slipstream.weight_sync import change_kernels, changes
from slipstream.weight_sync.changes import TILE, Chunk, Landed, Packer, max_records, num_tiles, stream_bytes

SIZES = st.one_of(st.integers(1, 40), st.integers(TILE - 2, TILE + 2), st.integers(2 * TILE, 3 * TILE))


def random_bits(count: int, seed: int) -> torch.Tensor:
    return torch.randint(-(1 << 15), 1 << 15, (count,), generator=torch.Generator().manual_seed(seed)).to(torch.int16)


def packed(was: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """The stream of all elements that differ, in a room that fits it."""
    marks = (was != now).to(torch.uint8)
    stream = torch.full((stream_bytes(2 * len(now), int(marks.sum())) // 4,), -7, dtype=torch.int32)
    counts = torch.full((1,), -1, dtype=torch.int32)
    Packer([Chunk(now, marks, stream)]).pack_to(counts)
    assert counts.item() == int(marks.sum())
    return stream


@settings(max_examples=60)
@given(st.lists(st.tuples(SIZES, st.floats(0.0, 1.0)), min_size=1, max_size=4), st.integers(0, 1000))
def test_changes_of_any_chunks_and_shares_make_the_old_bytes_the_new_ones(chunks, seed):
    landed, wanted = [], []
    for number, (size, share) in enumerate(chunks):
        was = random_bits(size + 20, seed + number)
        is_changed = torch.rand(size, generator=torch.Generator().manual_seed(seed)) < share
        now = torch.where(is_changed, random_bits(size, seed + 99), was[10:-10])
        landed.append(Landed(packed(was[10:-10], now), was[10:-10]))
        wanted.append((was, torch.cat([was[:10], now, was[-10:]])))
    for _ in range(2):  # values are not differences
        assert changes.apply(landed) is None
        assert all(torch.equal(held, new) for held, new in wanted)


@settings(max_examples=60)
@given(st.data())
def test_a_stream_with_any_other_word_is_refused_or_stays_inside_its_chunk(data):
    """Whatever a word of a stream becomes, elements outside the chunk keep their bits, and a refusal writes nothing."""
    size = data.draw(SIZES)
    held = random_bits(size + 2, 1)
    now = torch.where(torch.arange(size) % 3 == 0, random_bits(size, 2), held[1:-1])
    stream = packed(held[1:-1], now)
    place = data.draw(st.integers(0, len(stream) - 1))
    stream[place] = data.draw(st.one_of(st.integers(-(1 << 31), (1 << 31) - 1), st.integers(-2, 2 * size)))
    before = held.clone()
    refused = changes.apply([Landed(packed(held[1:-1], now), held[1:-1].clone()), Landed(stream, held[1:-1])])
    assert torch.equal(held[[0, -1]], before[[0, -1]])
    if refused is not None:
        assert refused == 1 and torch.equal(held, before)


def test_a_record_just_behind_its_chunk_is_refused():
    held, now = random_bits(10, 1), random_bits(10, 2)
    stream = packed(held, now)
    stream[-1] += 1 << 16
    assert changes.apply([Landed(stream, held)]) == 0


def test_a_sender_has_room_for_an_eighth_of_the_elements_and_less_than_half_the_bytes():
    for num_bytes in (64, 1 << 14, 1 << 26):
        most = max_records(num_bytes)
        assert stream_bytes(num_bytes, most) <= num_bytes // 4
        assert most <= num_bytes // 2 // 8
    assert max_records(1 << 26) > 0.99 * (1 << 26) / 16
    assert max_records(10) <= 0 < max_records(48)
    assert num_tiles(2 * TILE) == 1 and num_tiles(2 * TILE + 2) == 2


def test_launches_do_every_chunk_once_in_grids_that_cuda_takes_and_with_few_idle_programs():
    """A Kimi-K2 engine rank gets parts of 100,000 small dense tensors beside its experts'."""
    tiles = [1] * 100_000 + [3, 20_000, 30_000, 2]
    launches = change_kernels.launches_of([[number] for number in range(len(tiles))], tiles, "cpu")
    rows = torch.cat([one.table for one in launches])
    assert torch.equal(rows[:, 0], rows[:, 1])
    assert sorted(rows[:, 1].tolist()) == list(range(len(tiles)))
    assert all(one.max_tiles == max(tiles[number] for number in one.table[:, 1].tolist()) for one in launches)
    assert all(one.grid[1] <= 65535 for one in launches)
    assert sum(one.grid[0] * one.grid[1] for one in launches) < 2 * sum(tiles)
    assert len(launches) == 4
