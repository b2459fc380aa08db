"""Promises of weight_sync/pipeline/sums.py: tables of several ranks add up to what dictionaries would."""

import numpy as np
from cases.plan_tables import by_name
from hypothesis import given, strategies as st

from slipstream.weight_sync.pipeline.sums import Places, Sums
from slipstream.weight_sync.replica.messages import Expected, Planned
from slipstream.weight_sync.typed_msgpack import pack, unpack

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


@given(ranks=st.lists(WRITES, min_size=1, max_size=3))
def test_ranks_add_up_to_bytes_and_hashes_modulo_2_to_the_64(ranks):
    expected: dict = {}
    total = Sums(ALL)
    for writes in ranks:
        own = Sums(ALL)
        own.add(
            np.array([own.places.column(dest, name) for dest, name, _, _ in writes], np.int64),
            np.array([size for _, _, size, _ in writes], np.int64),
            np.array([value for *_, value in writes], np.uint64).view(np.int64),
        )
        total.table += own.table
        for dest, name, size, value in writes:
            had_bytes, had = expected.setdefault(dest, {}).get(name, (0, 0))
            expected[dest][name] = (had_bytes + size, (had + value) % (1 << 64))
    assert by_name(total) == expected


def test_what_was_not_written_is_absent():
    sums = Sums(ALL)
    sums.add(*np.array([[ALL.column((1, 0), "b")], [5], [-1]]))
    assert by_name(sums) == {(1, 0): {"b": (5, (1 << 64) - 1)}}
    assert sums.part((1, 0)).tolist() == [[0, 5, 0], [0, -1, 0]]


@given(
    st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, (1 << 64) - 1)), min_size=1, max_size=20),
    st.booleans(),
    st.booleans(),
)
def test_what_is_expected_survives_the_wire(entries, has_hashes, is_as_planned):
    counts, hashes = [size for size, _ in entries], [value for _, value in entries]
    planned = Planned.of({str(i): size if is_as_planned else size + 1 for i, size in enumerate(counts)})
    said = planned.write(np.array(counts, np.int64), np.array(hashes, np.uint64).view(np.int64) if has_hashes else None)
    assert (said.num_bytes == b"") == is_as_planned
    assert planned.read(unpack(Expected, pack(said))) == (counts, hashes if has_hashes else None)


def test_a_parameter_that_was_sent_twice_does_not_hide_one_that_was_not_sent() -> None:
    planned = Planned.of({"a": 4, "b": 4, "c": 8})
    said = planned.write(np.array([8, 0, 8], np.int64), None)
    assert planned.read(said) == ([8, 0, 8], None)


SIZES = st.lists(st.tuples(st.text(max_size=2), st.integers(0, 2)), max_size=4).map(dict)


@given(SIZES, SIZES)
def test_parameters_their_order_or_their_sizes_differ_where_digests_do(first, second):
    same = list(first.items()) == list(second.items())
    assert (Planned.of(first).digest == Planned.of(second).digest) == same


def test_further_replicas_have_places_one_after_the_other() -> None:
    further = ALL.with_replicas([2, 3])
    assert list(further.params) == [(replica, rank) for replica in range(4) for rank in range(2)]
    assert [further.first[dest] for dest in further.params] == list(range(0, 24, 3))
