"""What tests of a pipeline share."""

import logging
from collections.abc import Iterator

import pytest

from slipstream.weight_sync.pipeline import slot_turns


@pytest.fixture
def impatience(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Filter]:
    """Packing that waits for a slot for ten seconds waits for ever: here that is an error."""

    class Impatience(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            assert not record.msg.startswith("packing waits"), "nobody gives a slot back"
            return True

    monkeypatch.setattr(slot_turns, "WAIT_LOG_S", 10.0)
    slot_turns.logger.addFilter(found := Impatience())
    yield found
    slot_turns.logger.removeFilter(found)
