"""How a section refuses a value: the option, what was given, what is allowed and the cure in one message."""

from __future__ import annotations

import math

from conf.errors import ConfigError


def require(ok: bool, message: str) -> None:
    """Refuse the section with `message` unless `ok`."""
    if not ok:
        raise ConfigError(message)


def divisors(number: int) -> list[int]:
    """All divisors of `number`, ascending."""
    return [size for size in range(1, number + 1) if number % size == 0]


def at_least(minimum: float, section: str, **values: float) -> None:
    """Refuse a value below `minimum`. Example: at_least(1, "trainer", num_ranks=self.num_ranks)."""
    for name, value in values.items():
        require(value >= minimum, f"{section}.{name} must be >= {minimum}, got {value}")


def at_least_or_null(minimum: float, section: str, **values: float | None) -> None:
    """The same for options that may be null."""
    for name, value in values.items():
        require(value is None or value >= minimum, f"{section}.{name} must be >= {minimum} or null, got {value}")


def above(bound: float, section: str, **values: float) -> None:
    """Refuse a value that is `bound` or less, or infinite."""
    for name, value in values.items():
        require(value > bound, f"{section}.{name} must be > {bound}, got {value}")
        require(value < math.inf, f"{section}.{name} must be finite, got {value}")
