"""Triton kernels that other processes compile, where Triton compiles one after the other, each before its launch.

    EngineCore   kernels_asked_for(): a pass that launches none of them    -> what there is to compile
                 begin_to_compile()  --forks--> processes that compile     -> Triton's cache on disk
    later        a launch finds its kernel in the cache; if it is not done yet, Triton compiles it there and then

Processes and not threads, because a good part of a compilation is Python: threads that compile beside torch.compile
take its lock (9 of 47 s).

Owns: the change of Triton that this takes, and those processes. Does not own: which kernels, and when
(kernels_beside_model.py). Invariant: a process that compiles opens no GPU.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from threading import Thread
from typing import Any

from rollout.die_with_owner import OWNER_VARIABLE, end_with
from rollout.in_vllm import fork_server
from rollout.in_vllm.replaced import replaced

logger = logging.getLogger(__name__)

_MOST_PROCESSES = 8


@dataclass(frozen=True, slots=True)
class Kernel:
    """One specialization of a Triton kernel: what triton.compile() is given, but for the function, which has a name."""

    module: str
    name: str
    signature: dict[str, str]
    constexprs: dict[tuple[int, ...], Any]
    attrs: dict[tuple[int, ...], Any]
    target: Any
    """triton.backends.compiler.GPUTarget."""
    options: dict[str, Any]


@contextmanager
def kernels_asked_for(names: Collection[str]) -> Iterator[list[Kernel]]:
    """While the block runs, Triton kernels of these names are not launched, and are noted instead of compiled.

    Yields:
        What was noted, each specialization once.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    run, compile_now = JITFunction.run, JITFunction._do_compile
    asked: list[Kernel] = []
    keys: set[tuple[str, str, str]] = set()

    def run_others(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=warmup or self.fn.__name__ in names, **options)

    def note(
        self: Any, key: Any, signature: Any, device: Any, constexprs: Any, options: Any, attrs: Any, warmup: bool
    ) -> Any:
        module, name = self.fn.__module__, self.fn.__name__
        if name not in names:
            return compile_now(self, key, signature, device, constexprs, options, attrs, warmup)
        if (module, name, str(key)) not in keys:
            keys.add((module, name, str(key)))
            (target,) = (one for one in self.device_caches[device] if isinstance(one, GPUTarget))
            given = dict(options.__dict__)
            asked.append(Kernel(module, name, dict(signature), dict(constexprs), dict(attrs), target, given))
        return None

    with replaced(JITFunction, {"run": run_others, "_do_compile": note}):
        yield asked


def begin_to_compile(kernels: Sequence[Kernel]) -> None:
    """Have processes of this process's fork server compile kernels into Triton's cache, and do not wait for them."""
    num_processes = min(_MOST_PROCESSES, os.cpu_count() or 1, len(kernels))
    for number in range(num_processes):
        part = list(kernels[number::num_processes])
        Thread(target=_compile_in_fork, args=(part,), name=f"waits for kernels {number}", daemon=True).start()


def _compile_in_fork(kernels: Sequence[Kernel]) -> None:
    try:
        fork_server.call_in_fork(partial(_compile_without_gpu, kernels))
    except RuntimeError as error:
        logger.info("the engine will compile up to %d kernels itself: %s", len(kernels), error)


def _compile_without_gpu(kernels: Sequence[Kernel]) -> None:
    """In the forked process, which ends with the worker."""
    end_with(int(os.environ.get(OWNER_VARIABLE, os.getpid())))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    compile_all(kernels)


def compile_all(kernels: Sequence[Kernel]) -> None:
    """Compile kernels into Triton's cache, one after the other."""
    from triton.compiler import ASTSource, compile
    from triton.runtime.jit import JITFunction

    for kernel in kernels:
        function = getattr(import_module(kernel.module), kernel.name)
        while not isinstance(function, JITFunction):  # under an autotuner or heuristics
            function = function.fn
        source = ASTSource(function, kernel.signature, kernel.constexprs, kernel.attrs)
        compile(source, target=kernel.target, options=kernel.options)
