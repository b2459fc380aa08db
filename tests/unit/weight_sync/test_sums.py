"""Promises of weight_sync/sums.py: tables of several ranks add up to what dictionaries would."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weight_sync.protocol import Expected, pack, unpack
from weight_sync.sums import Places, Sums, params_digest, read_expected, write_expected

NAMES = ("a", "b", "c")
ALL = Places({(replica, rank): NAMES for replica in range(2) for rank in range(2)})
WRITES = st.lists(
    st.tuples(
        st.tuples(st.integers(0, 1), st.integers(0, 1)),
        st.sampled_from(NAMES),
        st.integers(1, 1 << 40),
        st.integers(0, (1 << 64) - 1),
    )
)


def places_of(writes: list) -> Places:
    """Of one rank: what it writes to, in the order in which it does."""
    params: dict = {}
    for dest, name, _, _ in writes:
        params.setdefault(dest, {})[name] = None
    return Places({dest: tuple(names) for dest, names in params.items()})


@given(ranks=st.lists(WRITES, min_size=1, max_size=3))
def test_ranks_add_up_to_bytes_and_hashes_modulo_2_to_the_64(ranks):
    expected: dict = {}
    total = Sums(ALL)
    for writes in ranks:
        own = Sums(places_of(writes))
        own.add(
            [own.places.column(dest, name) for dest, name, _, _ in writes],
            [size for _, _, size, _ in writes],
            np.array([value for *_, value in writes], np.uint64).view(np.int64).tolist(),
        )
        total.table += own.spread(ALL, ALL.columns_of(own.places)).table
        for dest, name, size, value in writes:
            had_bytes, had = expected.setdefault(dest, {}).get(name, (0, 0))
            expected[dest][name] = (had_bytes + size, (had + value) % (1 << 64))
    assert dict(total) == expected


def test_what_was_not_written_is_absent():
    sums = Sums(ALL)
    sums.add([ALL.column((1, 0), "b")], [5], [-1])
    assert list(sums) == [(1, 0)]
    assert sums[1, 0] == {"b": (5, (1 << 64) - 1)}
    assert sums.get((0, 0), {}) == {}
    assert sums.part((1, 0)).tolist() == [[0, 5, 0], [0, -1, 0]]


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, (1 << 64) - 1)), max_size=20), st.booleans())
def test_what_is_expected_survives_the_wire(entries, has_hashes):
    counts, hashes = [size for size, _ in entries], [value for _, value in entries]
    digest = params_digest([str(i) for i in range(len(entries))])
    columns = np.array(counts, np.int64), np.array(hashes, np.uint64).view(np.int64)
    said = write_expected(digest, columns[0], columns[1] if has_hashes else None)
    read = read_expected(unpack(Expected, pack(said)), digest, len(entries))
    assert read == (counts, hashes if has_hashes and entries else None)


def test_an_engine_rank_is_told_of_its_own_parameters_those_without_a_byte_included():
    sums = Sums(ALL)
    sums.add([ALL.column((1, 0), "b")], [5], [-1])
    said = sums.expected((1, 0), has_hashes=True)
    assert said.params == params_digest(NAMES)
    assert read_expected(said, said.params, 3) == ([0, 5, 0], [0, (1 << 64) - 1, 0])
    assert read_expected(sums.expected((0, 0), has_hashes=False), said.params, 3) == ([0, 0, 0], None)


@given(st.lists(st.text(max_size=3), unique=True, max_size=5), st.lists(st.text(max_size=3), unique=True, max_size=5))
def test_parameters_or_their_order_differ_where_digests_do(names, others):
    assert (params_digest(names) == params_digest(others)) == (names == others)
