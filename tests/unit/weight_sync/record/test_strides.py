"""Rectangles read from strides, against numpy views."""

import numpy as np
import pytest
from cases.packed_reads import part_of
from hypothesis import given, settings, strategies as st

from slipstream.weight_sync.record.strides import MAX_RECTANGLES, rectangles


@st.composite
def views(draw: st.DrawFn) -> tuple[tuple[int, ...], np.ndarray]:
    """A tensor of element numbers, seen through random slices, permutations, splits and joins; the number is the
    offset."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=0, max_size=3)))
    view = np.arange(int(np.prod(shape, dtype=np.int64)), dtype=np.int64).reshape(shape)
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["slice", "permute", "split", "join", "index"]))
        if view.ndim == 0:
            break
        dim = draw(st.integers(0, view.ndim - 1))
        size = view.shape[dim]
        if kind == "slice":
            a = draw(st.integers(0, size - 1))
            b = draw(st.integers(a + 1, size))
            view = view[(slice(None),) * dim + (slice(a, b),)]
        elif kind == "permute":
            view = view.transpose(draw(st.permutations(range(view.ndim))))
        elif kind == "index":
            view = view[(slice(None),) * dim + (draw(st.integers(0, size - 1)),)]
        elif kind == "split":
            parts = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
            view = view.reshape(*view.shape[:dim], parts, size // parts, *view.shape[dim + 1 :])
        elif view.flags.c_contiguous and dim + 1 < view.ndim:
            view = view.reshape(*view.shape[:dim], size * view.shape[dim + 1], *view.shape[dim + 2 :])
    return shape, view


@settings(max_examples=200)
@given(case=views(), data=st.data())
def test_rectangles_map_exactly_the_elements_of_the_view(case, data):
    shape, view = case
    source_stride = [step // 8 for step in view.strides]
    order = data.draw(st.permutations(range(view.ndim)))
    dest_stride = [0] * view.ndim
    step = data.draw(st.integers(1, 2))
    for dim in order:
        dest_stride[dim] = step
        step *= view.shape[dim]
    wanted = {}
    for index in np.ndindex(*view.shape):
        wanted[sum(i * s for i, s in zip(index, dest_stride, strict=True))] = int(view[index])
    try:
        found = rectangles(shape, view.shape, tuple(source_stride), int(view.reshape(-1)[0]), tuple(dest_stride))
    except ValueError as error:
        assert "across the rows" in str(error)  # a joined dim that was sliced: rows 0..2 and a half
        return
    got = {}
    numbers = np.arange(int(np.prod(shape, dtype=np.int64))).reshape(shape)
    for part in found:
        block = part_of(numbers, part.region).transpose(part.axes)
        for index in np.ndindex(*block.shape):
            at = part.offset + sum(i * s for i, s in zip(index, part.stride, strict=True))
            assert at not in got
            got[at] = int(block[index])
    assert got == wanted


def test_heads_seen_apart_are_one_rectangle():
    (part,) = rectangles((6, 4), (2, 3, 4), (12, 4, 1), 0, (12, 4, 1))
    assert (part.region.shape, part.axes, part.stride) == ((6, 4), (0, 1), (4, 1))


def test_too_many_rectangles_are_refused():
    size = MAX_RECTANGLES + 1
    with pytest.raises(ValueError, match="more than"):
        rectangles((2 * size,), (size,), (2,), 0, (1,))


def test_a_view_that_steps_over_the_ends_of_rows_or_ends_in_one_is_refused():
    for shape, size, step in (((2, 5), 5, 2), ((2, 4), 6, 1)):
        with pytest.raises(ValueError, match="across the rows"):
            rectangles(shape, (size,), (step,), 0, (1,))
