"""Regions and sizes."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from slipstream.weight_sync.layout import DestLayout, Fill, Load, Param, PostLoad, Region
from slipstream.weight_sync.plan.columns import LoadTable


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


def test_layouts_are_equal_whatever_form_their_loads_have():
    loads = (Load("t", Region((0, 0), (2, 3)), (0, 1), "p", 0, (3, 1)),)
    one, other = (DestLayout(0, (Param("p", (2, 3), "float32"),), form) for form in (loads, LoadTable.of(loads)))
    assert one == other != DestLayout(1, one.params, loads)


def test_a_publish_writes_all_of_a_parameter_but_its_fills():
    layout = DestLayout(
        0,
        (
            Param("padded", (10,), "bfloat16"),
            Param("whole", (3,), "float32"),
            Param("computed", (4,), "float32", PostLoad.derived),
        ),
        (),
        (Fill("padded", 8, 2), Fill("padded", 3, 1), Fill("computed", 0, 1)),
    )
    # bfloat16 has 2 bytes: elements 0..2, then 4..7; element 3 and elements 8..9 are fills
    assert layout.written_ranges() == {"padded": [(0, 6), (8, 8)], "whole": [(0, 12)]}
    assert layout.written_bytes() == {"padded": 14, "whole": 12}
