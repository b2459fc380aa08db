"""Layouts come back from bytes as they were."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from layouts import systems

from weight_sync.layout_wire import layouts_from_bytes, layouts_to_bytes


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(system=systems())
def test_layouts_come_back_as_they_were(system):
    for layouts in system[1]:
        data = layouts_to_bytes(layouts)
        assert layouts_from_bytes(data) == layouts
        assert layouts_to_bytes(layouts_from_bytes(data)) == data
        with pytest.raises(ValueError, match=r".*"):
            layouts_from_bytes(data[:-1])
