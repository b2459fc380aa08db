"""What `slipstream parity` says while it works: each part as it begins, and every 10 or 30 seconds how far it is.

      4.7 s  engine: start
     14.7 s  engine: start: loading the weights
     29.2 s  engine: sample 16 x 64 tokens
     39.2 s  engine: sample 16 x 64 tokens: 320 of 1024

Owns: when something is said. Does not own: how it is printed (cli/commands.py).
"""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

Say = Callable[[str], None]
SAY_EVERY_S = 10.0


@contextmanager
def telling(say: Say, part: str, how_far: Callable[[], str], every_s: float = SAY_EVERY_S) -> Generator[None]:
    """Say that a part begins, and until the block ends, how far it is; where nothing has changed, every third time."""
    say(part)
    is_over = threading.Event()

    def tell() -> None:
        told, num_equal = "", 0
        while not is_over.wait(every_s):
            now = how_far()
            num_equal = num_equal + 1 if now == told else 0
            if num_equal % 3 == 0:
                say(f"{part}: {now}")
            told = now

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


class Count:
    """How many of a number are done. Example: "5 of 60"."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0

    def __str__(self) -> str:
        return f"{self.done} of {self.total}"
