"""Promises of conf/deadlines.py that its callers' tests do not keep."""

import asyncio
import time

import pytest

from slipstream.conf.deadlines import within


async def test_who_blocks_the_loop_again_and_again_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a reward that is a coroutine and computes for seconds at a time."""
    clock, blocked_s = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: clock() + blocked_s)
    with pytest.raises(TimeoutError):
        async with within(10.0):
            for _ in range(20):
                blocked_s += 7.0
                await asyncio.sleep(0)
