"""What signals do to a run: the first one winds it down, a second one ends it at once.

    Ctrl-C ---------------------> asyncio cancels the run's task ---> state is saved, processes end, exit 130
    SIGTERM, SIGHUP --> SIGINT -^                                                              exit 143, 129

Owns: the handlers of the controller's process. Does not own: winding down (run.py, controller.py), or the words for it
(cli/exit.py). Invariant: importing this loads neither torch, Ray nor vLLM.
"""

import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

_SAME_SIGNAL_S = 1.0


@contextmanager
def wound_down_by_signals() -> Generator[list[int]]:
    """SIGTERM and SIGHUP wind the run down as Ctrl-C does; a second one of them ends the process at once.

    `timeout` sends SIGTERM to the process and to its group, so one that follows within _SAME_SIGNAL_S is the same one.

    They are passed on as SIGINT because asyncio turns only that one into a cancellation, which lets `finally` blocks
    run, and only where Python's own handler is installed. It is not where SIGINT was ignored at the start, as for a
    background job (`slipstream train ... &` in a script): hence it is installed here. A SIGHUP that is ignored stays
    ignored: that is what nohup is for.

    Yields:
        The signals received so far, Ctrl-C not among them.
    """
    received: list[int] = []
    first_s = 0.0

    def on_signal(signum: int, frame: FrameType | None) -> None:
        nonlocal first_s
        if received and time.monotonic() - first_s < _SAME_SIGNAL_S:
            return
        received.append(signum)
        if len(received) > 1:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
        first_s = time.monotonic()
        signal.raise_signal(signal.SIGINT)

    previous = {signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler)}
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signum is signal.SIGTERM or signal.getsignal(signum) is not signal.SIG_IGN:
            previous[signum] = signal.signal(signum, on_signal)
    try:
        yield received
    finally:
        for signum, handler in previous.items():
            if handler is not None:  # None: it belonged to no Python code, and cannot be put back
                signal.signal(signum, handler)


@contextmanager
def second_interrupt_ends_at_once(at_first: Callable[[], object] = lambda: None) -> Generator[None]:
    """Let the second Ctrl-C end the process on the spot. To be entered inside asyncio.run, which handles the first one.

    What the run has started ends then, too: its processes watch this one (ray_host.py, rollout.die_with_owner).

    Args:
        at_first: called by the handler of the first one.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_first(signum: int, frame: FrameType | None) -> None:
        at_first()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        handler(signum, frame)

    signal.signal(signal.SIGINT, on_first)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is on_first:
            signal.signal(signal.SIGINT, handler)


def take_sigterm_back() -> None:
    """Ray's C++ core puts a handler of its own on SIGTERM, which aborts this process on the spot.

    Python does not see that and still lists its own handler (the command line's, which winds the run down): installing
    that once more is enough. Signals belong to the main thread.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)
