"""Regions and sizes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_sync.layout import DTYPE_BYTES, Param, Region


@st.composite
def regions(draw: st.DrawFn) -> Region:
    return Region(tuple(draw(st.tuples(*[st.integers(0, 4)] * 2))), tuple(draw(st.tuples(*[st.integers(1, 4)] * 2))))


def mask(region: Region) -> np.ndarray:
    cells = np.zeros((9, 9), dtype=bool)
    cells[tuple(map(slice, region.start, region.stop))] = True
    return cells


@given(regions(), regions())
def test_intersect_is_the_common_set_of_elements(first, second):
    common = first.intersect(second)
    expected = mask(first) & mask(second)
    assert first.intersect(second) == second.intersect(first)
    if common is None:
        assert not expected.any()
    else:
        np.testing.assert_array_equal(mask(common), expected)
        assert common.num_elements == expected.sum()


def test_a_scalar_has_one_element():
    assert Region((), ()).num_elements == 1
    assert Region((), ()).intersect(Region((), ())) == Region((), ())
    assert Param("s", (), "float32").num_bytes == 4


def test_regions_of_different_ranks_do_not_mix():
    with pytest.raises(ValueError, match="zip"):
        Region((0,), (1,)).intersect(Region((0, 0), (1, 1)))


@pytest.mark.parametrize(("dtype", "size"), DTYPE_BYTES.items())
def test_param_bytes(dtype, size):
    assert Param("p", (3, 5), dtype).num_bytes == 15 * size
