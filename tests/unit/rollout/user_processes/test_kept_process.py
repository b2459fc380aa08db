"""Locks: the end of a process of the user's that cannot end."""

import asyncio
import logging
import os
import re
import signal
import time

import pytest

from slipstream.rollout.user_processes import kept_process
from slipstream.rollout.user_processes.kept_process import KeptProcess


def test_a_process_that_cannot_end_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio says nothing more of it, when it ends after the event loop."""
    monkeypatch.setattr(kept_process, "END_TIMEOUT_S", 0.1)

    async def leave_one() -> int:
        kept = await KeptProcess.start("this", environment=os.environ, log_path=None)
        pid = kept._keeper.pid
        os.kill(pid, signal.SIGSTOP)
        await kept.end()
        return pid

    with caplog.at_level(logging.DEBUG):
        pid = asyncio.run(leave_one())
        os.kill(pid, signal.SIGCONT)
        until_s = time.monotonic() + 60
        while time.monotonic() < until_s and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            time.sleep(0.05)
        time.sleep(0.2)
    said = [record.getMessage() for record in caplog.records if "Using selector" not in record.getMessage()]
    assert len(said) == 1, said
    assert re.fullmatch(f"a process was killed and has not ended yet; process {pid} waits for it", said[0])
