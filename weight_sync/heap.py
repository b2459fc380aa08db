"""What Python's cyclic garbage collector must not walk while engines stand still.

Owns one function. A process that takes part in publishes keeps, for as long as it lives, hundreds of thousands of
small objects: modules, a recorded layout, a plan (40,000 objects each at 18,867 tensors). A full collection visits all
of them, 70 ms with nothing loaded but torch and a plan, more beside vLLM, and one that starts inside a publish is added
to the pause. Frozen objects are not visited; reference counting still frees them.

Callers, each once its long-lived objects exist: publisher.py (connect), rollout/worker.py and
rollout/weight_receiver.py (start).
"""

from __future__ import annotations

import gc


def freeze_heap() -> None:
    """Collect what is garbage, then take everything that is alive out of later collections."""
    gc.collect()
    gc.freeze()
