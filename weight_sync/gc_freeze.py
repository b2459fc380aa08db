"""What Python's cyclic garbage collector must not walk while engines stand still.

A process that takes part in publishes keeps, for as long as it lives, hundreds of thousands of
small objects: modules, a recorded layout, a plan (40,000 objects each at 18,867 tensors). A full collection visits all
of them, 70 ms with nothing loaded but torch and a plan, more beside vLLM, and one that starts inside a publish is added
to the pause. Frozen objects are not visited; reference counting still frees them. What comes after start-up is not
frozen: 256 requests in flight with their log-probabilities cost a full collection 25 to 40 ms, and messages of a
publish that let outputs pile up bring one about. So a rollout worker has none from pause to resume.

Frozen garbage is kept for good. So only processes of our own are frozen, never one that merely uses api.py.
"""

from __future__ import annotations

import gc


def freeze_heap() -> None:
    """Collect what is garbage, then take everything that is alive out of later collections."""
    gc.collect()
    gc.freeze()


def hold_collections() -> None:
    """No automatic collection starts until allow_collections(). Reference counting goes on."""
    gc.disable()


def allow_collections() -> None:
    """The end of hold_collections(); harmless without."""
    gc.enable()
