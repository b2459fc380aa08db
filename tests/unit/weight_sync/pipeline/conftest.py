"""What tests of a pipeline share."""

import logging
from collections.abc import Iterator

import pytest

from slipstream.weight_sync.pipeline import staging_slots


@pytest.fixture
def impatience(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Filter]:
    """Packing that waits for a slot for a minute waits for ever: here that is an error."""

    class Impatience(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            assert not record.msg.startswith("packing waits"), "nobody gives a slot back"
            return True

    monkeypatch.setattr(staging_slots, "WAIT_LOG_S", 60.0)
    staging_slots.logger.addFilter(found := Impatience())
    yield found
    staging_slots.logger.removeFilter(found)
