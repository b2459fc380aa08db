"""Keeps Python's cyclic garbage collector from lengthening the pause of a publish.

A process that takes part in publishes has hundreds of thousands of small objects for its whole life: modules, a
recorded layout, a plan (40,000 objects each at 18,867 tensors). A full collection visits all of them: 70 ms with only
torch and a plan loaded, more with vLLM. One that starts during a publish is added to the pause. Frozen objects are not
visited; reference counting still frees them. Objects made after start-up are not frozen: with 256 requests in flight
and their log-probabilities, a full collection takes 25 to 40 ms, and the messages of a publish, while outputs pile up,
cause one. So a rollout worker allows none from pause to resume.

An import of vLLM makes a million objects. Automatic collections on the way visit them again and again, which takes a
fifth of its time.

Frozen garbage is never collected. So only processes of our own are frozen, never one that merely uses api.py.
"""

import contextlib
import gc
from collections.abc import Generator


def freeze_heap() -> None:
    """Collect garbage now, and leave all objects that are alive out of later collections."""
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def frozen_imports() -> Generator[None]:
    """For a block that imports something large: no automatic collection starts in it, and later ones skip what it
    left. That is not looked through for garbage: a tenth of the import's time, for some megabytes."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()
