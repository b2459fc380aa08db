"""Every replica is updated once, in waves as equal as they can be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.weight_sync.publish.waves import assign_waves


@given(replicas=st.lists(st.integers(0, 100), unique=True, max_size=20), num_waves=st.integers(1, 25))
def test_waves_partition_the_replicas_in_order_and_differ_by_one_at_most(replicas: list[int], num_waves: int) -> None:
    waves = assign_waves(replicas, num_waves)
    assert [replica for wave in waves for replica in wave] == replicas
    assert len(waves) == min(num_waves, len(replicas))
    sizes = [len(wave) for wave in waves]
    assert sizes == sorted(sizes, reverse=True)
    assert not sizes or sizes[0] - sizes[-1] <= 1


def test_more_than_one_wave_never_takes_all_replicas() -> None:
    assert assign_waves([0, 2, 5], 2) == [[0, 2], [5]]


def test_no_wave_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one wave"):
        assign_waves([0], 0)
