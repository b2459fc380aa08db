"""A child process with a keeper beside it and a connection to it: a reward's, an agent's, and what serves agents.

Owns: its start and its end, whatever it started itself. Does not own: what is said over the connection (pool.py), or
the keeper (keeper.py), which also ends everything when this process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from slipstream.rollout.channel import MAX_BYTES, Channel
from slipstream.rollout.user_processes import keeper

logger = logging.getLogger(__name__)

MAX_LOG_BYTES = 64 << 20
"""Size at which the file is cut that has what the user's code prints."""
END_TIMEOUT_S = 1.0
"""How long a process may take to end after its connection closed, before its keeper kills it; and again after that."""


class KeptProcess:
    def __init__(self, keeper_process: subprocess.Popen[bytes], channel: Channel) -> None:
        self.channel = channel
        self._keeper = keeper_process

    @classmethod
    async def start(
        cls, module: str, *, environment: Mapping[str, str], log_path: Path | None, max_message_bytes: int = MAX_BYTES
    ) -> KeptProcess:
        """Start `python -m module FD`, FD being its end of the connection. What it prints is appended to the log, up to
        MAX_LOG_BYTES; without a log it is dropped. A message beyond `max_message_bytes` ends the connection."""
        ours, theirs = socket.socketpair()
        channel = await Channel.over(ours, max_bytes=max_message_bytes)
        with contextlib.ExitStack() as failed, theirs:
            failed.callback(channel.close)
            process = _keeper_of(module, theirs.fileno(), environment, log_path)
            failed.pop_all()
        return cls(process, channel)

    async def exit_status(self) -> int | None:
        """Wait until the process ends. Returns its exit status, 128 + N after signal N; None after END_TIMEOUT_S."""
        if self._keeper.poll() is None:
            # asyncio's own way to wait is a thread, which outlives the event loop with the process, and complains.
            loop, ended = asyncio.get_running_loop(), asyncio.Event()
            pidfd = os.pidfd_open(self._keeper.pid)
            loop.add_reader(pidfd, ended.set)
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(END_TIMEOUT_S):
                        await ended.wait()
            finally:
                loop.remove_reader(pidfd)
                os.close(pidfd)
        return self._keeper.poll()

    async def end(self, *, at_once: bool = False) -> None:
        """End it and everything that it started; `at_once` where it would not end by itself. Idempotent."""
        self.channel.close(drop_unsent=at_once)
        assert self._keeper.stdin is not None
        if at_once:
            self._keeper.stdin.close()
        for _ in range(2):
            status = await self.exit_status()
            self._keeper.stdin.close()  # the keeper kills what is left
            if status is not None:
                return
        # A device or a file system holds it; its successor need not wait.
        logger.warning("a process was killed and has not ended yet; process %d waits for it", self._keeper.pid)


def _keeper_of(module: str, fd: int, environment: Mapping[str, str], log_path: Path | None) -> subprocess.Popen[bytes]:
    output = os.open(log_path or os.devnull, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        return subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", keeper.__file__, str(fd), str(MAX_LOG_BYTES)),
                *(sys.executable, "-u", "-X", "faulthandler", "-P", "-m", module, str(fd)),
            ],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=(fd,),
            env=dict(environment),
            start_new_session=True,  # a signal to our group, such as Ctrl-C, does not reach it
        )
    finally:
        os.close(output)
