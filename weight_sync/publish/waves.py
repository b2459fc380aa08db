"""Which replicas are updated together. Pure.

With one wave all replicas are DIRTY at the same time, and if the trainer dies then, none serves. With more waves, the
replicas whose wave has not begun still serve the earlier version, and those whose wave is over serve the new one.
"""

from collections.abc import Sequence


def assign_waves(replicas: Sequence[int], num_waves: int) -> list[list[int]]:
    """Divide replicas into at most `num_waves` waves, none empty, whose sizes differ by at most one, larger ones first.

    Example: assign_waves([0, 1, 2, 3, 4], 2) == [[0, 1, 2], [3, 4]].
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
