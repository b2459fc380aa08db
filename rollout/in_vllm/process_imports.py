"""What a process of an engine imports before anything else: vLLM, without collections of garbage on the way.

    multiprocessing, in the process that it spawns:    1. imports the main module of the process that spawns
                                                       2. unpickles what is to be run there, which imports vLLM

Inside `come_first()` the main module is this one. (Otherwise it is a Ray worker's, which imports all of Ray for
nothing.) Its one act is that import, and step 2 finds it done; a process that an EngineCore spawns repeats both steps.
Saves about 1 s of a core at each start of an engine.

Owns nothing else. Invariant: nothing of what is spawned depends on which main module it finds.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator
from importlib import import_module
from importlib.util import find_spec

from weight_sync.gc_freeze import frozen_imports


@contextlib.contextmanager
def come_first() -> Generator[None]:
    """While the block runs, processes that multiprocessing spawns import this module first."""
    main = sys.modules["__main__"]
    before = main.__spec__
    main.__spec__ = find_spec("rollout.in_vllm.process_imports")
    try:
        yield
    finally:
        main.__spec__ = before


if __name__ == "__mp_main__":
    with frozen_imports():
        import_module("vllm.v1.engine.core")
