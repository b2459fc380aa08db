"""Which replicas are updated together. Pure.

With one wave every replica is DIRTY at the same time, and a trainer that dies then leaves nobody who serves. With more,
the waves that have not begun still serve the version before, and those that are over serve the new one.
"""

from __future__ import annotations

from collections.abc import Sequence


def assign_waves(replicas: Sequence[int], num_waves: int) -> list[list[int]]:
    """Deal replicas into at most `num_waves` waves whose sizes differ by one at most, larger ones first.

    assign_waves([0, 1, 2, 3, 4], 2) is [[0, 1, 2], [3, 4]]. No wave is empty.
    """
    if num_waves < 1:
        raise ValueError(f"a publish needs at least one wave, got {num_waves}")
    num_waves = min(num_waves, len(replicas))
    waves: list[list[int]] = []
    start = 0
    for wave in range(num_waves):
        size = -(-(len(replicas) - start) // (num_waves - wave))
        waves.append(list(replicas[start : start + size]))
        start += size
    return waves
