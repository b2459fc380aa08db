"""Triton kernels that are asked for before they are launched, and the part of a model that asks for them. No GPU."""

from __future__ import annotations

import logging
import pickle
import threading
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from cases.only_compiles import OnlyCompiles, double_kernel, only_allocate
from torch import Tensor, nn
from triton import knobs
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from rollout.in_vllm import fork_server
from rollout.in_vllm.compiled_in_forks import begin_to_compile, compile_all, kernels_asked_for
from rollout.in_vllm.kernels_beside_model import first_layers_alone, kernels_of_graphs


@triton.jit
def _other_kernel(x):
    tl.store(x, 1.0)


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, bool]]:
    """Triton without a GPU. What it compiled, and whether it found that in its cache."""
    seen: list[tuple[str, bool]] = []

    def listen(*, src: ASTSource, cache_hit: bool, **_: object) -> None:
        seen.append((src.name, cache_hit))

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", OnlyCompiles())
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", only_allocate)
    monkeypatch.setattr(knobs.compilation, "listener", listen)
    for kernel in (double_kernel, _other_kernel):
        kernel.device_caches.clear()
    return seen


def test_what_is_asked_for_is_compiled_elsewhere_and_found_at_a_launch(compiles: list[tuple[str, bool]]) -> None:
    x, run, compile_now = torch.zeros(64), JITFunction.run, JITFunction._do_compile
    with kernels_asked_for({"double_kernel"}) as asked:
        for block in (16, 32, 64, 32):
            double_kernel[(1,)](x, block)
        with pytest.raises(AttributeError):  # another kernel is launched, which the stand-in for a driver cannot do
            _other_kernel[(1,)](x)
    assert (JITFunction.run, JITFunction._do_compile) == (run, compile_now)
    assert [kernel.constexprs for kernel in asked] == [{(1,): 16}, {(1,): 32}, {(1,): 64}]
    assert compiles == [("_other_kernel", False)]

    sent = [pickle.loads(pickle.dumps(kernel)) for kernel in asked]
    compile_all(sent)
    assert compiles[1:] == [("double_kernel", False)] * 3
    for block in (16, 32, 64):
        with pytest.raises(AttributeError):
            double_kernel[(1,)](x, block)
    assert compiles[4:] == [("double_kernel", True)] * 3


def test_a_kernel_that_nobody_compiled_is_compiled_by_its_launch(
    compiles: list[tuple[str, bool]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(function: object) -> None:
        raise RuntimeError("the fork server is gone")

    monkeypatch.setattr(fork_server, "call_in_fork", gone)
    x = torch.zeros(64)
    with kernels_asked_for({"double_kernel"}) as asked:
        double_kernel[(1,)](x, 128)
    with caplog.at_level(logging.INFO):
        begin_to_compile(asked)
        for thread in threading.enumerate():
            if thread.name.startswith("waits for kernels"):
                thread.join()
    assert "compile up to 1 kernels itself: the fork server is gone" in caplog.text
    with pytest.raises(AttributeError):
        double_kernel[(1,)](x, 128)
    assert compiles == [("double_kernel", False)]


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
    with first_layers_alone(decoder):
        decoder(torch.zeros(1))
    assert [layer.num_calls for layer in decoder.layers] == [1] * called + [0] * (len(widths) - called)
    assert decoder.end_layer == len(widths) and not decoder.do_not_compile


@pytest.mark.parametrize(
    ("num_stacks", "has_adapters", "has_experts", "has_server", "num_ranks"),
    [
        (1, False, False, True, 1),
        (1, True, True, False, 1),
        (0, True, True, True, 1),
        (2, False, True, True, 1),
        (1, True, True, True, 2),
    ],
)
def test_nothing_is_asked_for_where_nothing_is_needed_or_nobody_would_compile_it(
    num_stacks: int,
    has_adapters: bool,
    has_experts: bool,
    has_server: bool,
    num_ranks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.ModuleList(_Decoder([4, 4]) for _ in range(num_stacks))
    runner = SimpleNamespace(
        get_model=lambda: model,
        lora_config=object() if has_adapters else None,
        model_config=SimpleNamespace(is_moe=has_experts),
        parallel_config=SimpleNamespace(world_size=num_ranks),
    )
    monkeypatch.setattr(fork_server, "is_known", lambda: has_server)
    assert kernels_of_graphs(runner) == []
