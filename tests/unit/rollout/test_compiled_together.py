"""Triton kernels that a pool of threads compiles instead of their launch. Compiled here without a GPU."""

from __future__ import annotations

import threading

import pytest
import torch
import triton
import triton.language as tl
from cases.only_compiles import OnlyCompiles, only_allocate
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from rollout.in_vllm.vllm_patches import compiled_together


@triton.jit
def _double_kernel(x, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(x + place, 2 * tl.load(x + place))


def test_kernels_of_these_names_are_compiled_in_threads_and_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()
    own = triton.compiler.compile

    def noted(*args: object, **options: object) -> object:
        threads.add(threading.current_thread().name)
        return own(*args, **options)

    monkeypatch.setattr(driver, "_active", OnlyCompiles())
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", only_allocate)
    monkeypatch.setattr(triton.compiler, "compile", noted)
    x, run = torch.zeros(64), JITFunction.run
    with compiled_together({"_double_kernel"}):
        for block in (16, 32, 64, 32):
            _double_kernel[(1,)](x, block)
    assert JITFunction.run is run
    assert len(threads) >= 1 and threading.current_thread().name not in threads
    (cache,) = [caches[0] for device, caches in _double_kernel.device_caches.items() if device == -90]
    assert len(cache) == 3 and all(type(kernel) is CompiledKernel for kernel in cache.values())
    with pytest.raises(AttributeError):  # now it is launched, which the stand-in for a driver cannot do
        _double_kernel[(1,)](x, 16)
