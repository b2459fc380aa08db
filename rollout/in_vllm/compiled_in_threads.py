"""Triton kernels that threads compile, where Triton compiles one after the other, each before its launch.

Owns: the change of Triton that this takes, while a block runs. Does not own: which kernels, and when (vllm_patches.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any


@contextlib.contextmanager
def compiled_in_threads(names: Collection[str]) -> Iterator[None]:
    """While the block runs, Triton kernels are compiled by threads, and those of these names are not launched. Whoever
    launches a kernel waits until it is compiled, also after the block.
    """
    from triton.runtime._async_compile import AsyncCompileMode, active_mode
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def compile_or_run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=warmup or self.fn.__name__ in names, **options)

    pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "compiles kernels")
    mode = active_mode.set(AsyncCompileMode(pool))
    JITFunction.run = compile_or_run
    try:
        yield
    finally:
        JITFunction.run = run
        active_mode.reset(mode)
        pool.shutdown(wait=False)
