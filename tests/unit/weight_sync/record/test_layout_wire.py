"""Layouts come back from bytes as they were."""

from dataclasses import replace

import pytest
from cases.layouts import systems
from hypothesis import HealthCheck, given, settings, strategies as st

from slipstream.weight_sync.plan.columns import LoadTable, axes_code, widened
from slipstream.weight_sync.record.layout_wire import layouts_digest, layouts_from_bytes, layouts_to_bytes


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(system=systems())
def test_layouts_come_back_as_they_were(system):
    for layouts in system[1]:
        data = layouts_to_bytes(layouts)
        assert layouts_from_bytes(data) == layouts
        assert layouts_to_bytes(layouts_from_bytes(data)) == data
        with pytest.raises(ValueError, match=r".*"):
            layouts_from_bytes(data[:-1])


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(system=systems())
def test_equal_layouts_have_equal_digests_whatever_form_their_loads_have(system):
    for layouts in system[1]:
        for layout in layouts:
            table = LoadTable.of(layout.loads)
            names = ("unused", *reversed(table.names))
            other = replace(
                table, names=names, tensor=len(names) - 1 - table.tensor, param=len(names) - 1 - table.param
            )
            assert other == table
            assert layouts_digest((replace(layout, loads=other),)) == layouts_digest((layout,))
            shorter = replace(layout, loads=tuple(layout.loads)[:-1])
            assert layouts_digest((shorter,)) != layouts_digest((layout,)) or not layout.loads


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(system=systems(), data=st.data())
def test_tables_are_equal_when_their_loads_are(system, data):
    """By columns, without making a load: a cluster has millions."""
    layout = data.draw(st.sampled_from([layout for layouts in system[1] for layout in layouts if layout.loads]))
    table = LoadTable.of(layout.loads)
    wider = replace(
        table, **{name: widened(getattr(table, name), table.start.shape[1] + 1, 7) for name in ("start", "shape")}
    )
    column = data.draw(st.sampled_from(list(table.columns())))
    changed = getattr(table, column).copy()
    row = data.draw(st.integers(0, len(table) - 1))
    changed[row] = axes_code((3, 2, 1, 0)) if column == "axes" else (changed[row] + 1) % max(2, len(table.names))
    other = replace(table, **{column: changed})
    is_equal = column != "axes" and tuple(table) == tuple(other)  # columns beyond a tensor's dims say nothing
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoadTable, "__getitem__", None)
        assert table == wider
        assert (table == other) is is_equal
        assert table != replace(table, offset=table.offset + 1)
    assert table == tuple(layout.loads)
    assert table != tuple(layout.loads)[1:]
