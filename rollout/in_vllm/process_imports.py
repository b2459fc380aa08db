"""What a process of an engine imports before anything else: vLLM, without collections of garbage on the way, with the
patches that belong to a process rather than to an engine.

    multiprocessing, in the process that it spawns:    1. imports the main module of the process that spawns
                                                       2. unpickles what is to be run there, which imports vLLM

Inside `come_first()` the main module is this one. (Otherwise it is a Ray worker's, which imports all of Ray for
nothing.) Its one act is that import with its patches, and step 2 finds it done; a rank that an EngineCore spawns
repeats both steps. Saves about 1 s of a core at each start of an engine.

Owns: that module, and which modules of vLLM are imported (import_vllm). Does not own: the process that imports them
for an EngineCore beforehand (fork_server.py). Invariant: nothing of what is spawned depends on which main module it
finds.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator
from importlib import import_module
from importlib.util import find_spec

from rollout.in_vllm.vllm_patches import open_no_gpu, send_logprobs_together
from weight_sync.gc_freeze import frozen_imports


def import_vllm() -> None:
    """Import what make_llm() and an EngineCore need: 6 s of a CPU's core, 15 s on a host with GPUs. It opens no GPU, so
    that the process may be forked.
    """
    with frozen_imports(), open_no_gpu():
        for name in ("vllm.engine.arg_utils", "vllm.v1.engine.core", "vllm.v1.engine.async_llm"):
            import_module(name)


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
    import_vllm()
    send_logprobs_together()
