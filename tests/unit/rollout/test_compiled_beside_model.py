"""Triton kernels that threads compile instead of a launch, and the part of a model that asks for them. No GPU."""

from __future__ import annotations

import threading
from itertools import islice

import pytest
import torch
import triton
import triton.language as tl
from cases.only_compiles import OnlyCompiles, only_allocate
from torch import Tensor, nn
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from rollout.in_vllm.compiled_in_threads import compiled_in_threads
from rollout.in_vllm.vllm_patches import first_layers_alone


@triton.jit
def _double_kernel(x, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(x + place, 2 * tl.load(x + place))


def test_kernels_of_these_names_are_compiled_in_threads_and_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()
    may_compile = threading.Event()
    own = triton.compiler.compile

    def noted(*args: object, **options: object) -> object:
        threads.add(threading.current_thread().name)
        assert may_compile.wait(60)
        return own(*args, **options)

    monkeypatch.setattr(driver, "_active", OnlyCompiles())
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", only_allocate)
    monkeypatch.setattr(triton.compiler, "compile", noted)
    x, run = torch.zeros(64), JITFunction.run
    with compiled_in_threads({"_double_kernel"}):
        for block in (16, 32, 64, 32):
            _double_kernel[(1,)](x, block)
    assert JITFunction.run is run
    may_compile.set()  # the block has not waited for it
    with pytest.raises(AttributeError):  # launched, which waits, and which the stand-in for a driver cannot do
        _double_kernel[(1,)](x, 16)
    (cache,) = [caches[0] for device, caches in _double_kernel.device_caches.items() if device == -90]
    kernels = [kernel if isinstance(kernel, CompiledKernel) else kernel.result() for kernel in list(cache.values())]
    assert len(kernels) == 3 and all(type(kernel) is CompiledKernel for kernel in kernels)
    assert threads and threading.current_thread().name not in threads


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.num_calls = 0


class _Decoder(nn.Module):
    """As vLLM's decoders: a part of its layers is this rank's, and it is compiled unless it is told otherwise."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(width) for width in widths)
        self.start_layer, self.end_layer, self.do_not_compile = 0, len(widths), False

    def forward(self, x: Tensor) -> Tensor:
        assert self.do_not_compile
        for layer in islice(self.layers, self.start_layer, self.end_layer):
            assert isinstance(layer, _Layer)
            layer.num_calls += 1
        return x


@pytest.mark.parametrize(("widths", "called"), [([4, 4, 4], 1), ([8, 4, 4, 4], 2), ([8, 8, 4, 4], 3)])
def test_a_model_ends_after_the_first_layer_of_the_last_kind(widths: list[int], called: int) -> None:
    decoder = _Decoder(widths)
    model = nn.ModuleDict({"model": decoder, "lm_head": nn.Linear(2, 2)})
    with first_layers_alone(model):
        decoder(torch.zeros(1))
    assert [layer.num_calls for layer in decoder.layers] == [1] * called + [0] * (len(widths) - called)
    assert decoder.end_layer == len(widths) and not decoder.do_not_compile
