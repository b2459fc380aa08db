"""Which link a request means, and how pieces are batched. Pure."""

import itertools

import pytest
from hypothesis import given, strategies as st

from slipstream.conf.schema import TransportKind
from slipstream.weight_sync.errors import LinkMismatch, TransferFailed
from slipstream.weight_sync.transport import base
from slipstream.weight_sync.transport.base import MemoryRange, batches, check_registered, merge_ranges
from slipstream.weight_sync.transport.this_machine import choose_link

MACHINE = {"device": "cpu", "host": "127.0.0.1", "has_hca": False, "has_nvlink": False, "has_cuda": False}
GPU = {"device": "cuda", "has_nvlink": True, "has_cuda": True}


@pytest.mark.parametrize(
    ("kind", "machine", "link"),
    [
        ("auto", {}, "tcp"),
        ("tcp", {"has_hca": True}, "tcp"),
        ("auto", {"has_hca": True}, "rdma"),
        ("auto", GPU, "nvlink"),
        ("auto", GPU | {"has_hca": True}, "nvlink"),
        ("auto", GPU | {"host": "10.0.0.7", "has_hca": True}, "rdma"),
        ("auto", GPU | {"host": "10.0.0.7"}, "tcp"),
        ("nvlink", GPU, "nvlink"),
        ("rdma", GPU | {"has_hca": True}, "rdma"),
    ],
)
def test_a_request_means_one_link(kind: str, machine: dict, link: str) -> None:
    assert choose_link(TransportKind(kind), **(MACHINE | machine)) == link


@pytest.mark.parametrize(
    ("kind", "machine", "reason"),
    [
        ("rdma", {}, "no RDMA device"),
        ("nvlink", {}, "needs GPUs at both ends"),
        ("nvlink", GPU | {"has_nvlink": False}, "built without it"),
        ("auto", {"device": "cuda"}, "no CUDA support"),
    ],
)
def test_a_link_that_cannot_be_had_is_refused_never_replaced(kind: str, machine: dict, reason: str) -> None:
    with pytest.raises(LinkMismatch, match=reason):
        choose_link(TransportKind(kind), **(MACHINE | machine))


@given(st.lists(st.integers(1, 1 << 31), max_size=3000))
def test_batches_keep_order_and_limits(sizes: list[int]) -> None:
    runs = batches(sizes)
    assert [i for run in runs for i in run] == list(range(len(sizes)))
    for run in runs:
        assert len(run) <= base.MAX_BATCH_ENTRIES
        assert len(run) == 1 or sum(sizes[i] for i in run) <= base.MAX_BATCH_BYTES


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=12))
def test_merged_ranges_are_disjoint_and_cover_the_same_bytes(raw: list[tuple[int, int]]) -> None:
    ranges = [MemoryRange(address, size) for address, size in raw]
    merged = merge_ranges(ranges)
    assert all(a.stop <= b.address for a, b in itertools.pairwise(merged))
    assert {b for r in ranges for b in range(r.address, r.stop)} == {
        b for r in merged for b in range(r.address, r.stop)
    }


def test_ranges_that_touch_stay_apart_for_they_may_be_two_allocations() -> None:
    """A registration that spans two is refused by RDMA, long after it was made over TCP."""
    ranges = [MemoryRange(150, 50), MemoryRange(100, 50)]
    assert merge_ranges(ranges) == sorted(ranges)
    assert merge_ranges([*ranges, MemoryRange(149, 2)]) == [MemoryRange(100, 100)]
    assert merge_ranges([*ranges, MemoryRange(120, 30)]) == sorted(ranges), "the end of one is in it"


def test_a_piece_must_lie_in_one_range() -> None:
    ranges = [MemoryRange(100, 50), MemoryRange(150, 50)]
    check_registered(ranges, [100, 150, 199], [50, 50, 1], "x")
    for address, size in ((99, 2), (140, 20), (199, 2), (500, 1)):
        with pytest.raises(TransferFailed, match="x: "):
            check_registered(ranges, [address], [size], "x")
