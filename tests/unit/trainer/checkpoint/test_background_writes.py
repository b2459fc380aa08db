"""Files are written one after the other by a thread, and what keeps one from being written is said once."""

import threading
from unittest.mock import Mock

import pytest

from slipstream.trainer.checkpoint.background import BackgroundWrites


def test_they_are_written_in_order_beside_the_caller() -> None:
    writes, may_go_on = BackgroundWrites(), threading.Event()
    order: list[int] = []
    assert writes.are_done()
    writes.begin(lambda: order.append(int(may_go_on.wait(60))))
    writes.begin(lambda: order.append(2))
    assert not writes.are_done()
    may_go_on.set()
    writes.finish()
    assert writes.are_done()
    assert order == [1, 2]


def test_an_error_is_raised_once_and_the_others_are_written() -> None:
    writes, written = BackgroundWrites(), threading.Event()
    writes.begin(Mock(side_effect=OSError(28, "No space left on device")))
    writes.begin(written.set)
    with pytest.raises(OSError, match="No space left"):
        writes.finish()
    assert written.is_set()
    assert writes.are_done()
    writes.finish()
