"""How many kernels a layer's step and an update launch, counted on a CPU, and the host's time for them there.

    python bench/launches.py              launches a layer and step, by kind and by name
    python bench/launches.py --lines      and by the line of trainer/ that asks for them
    python bench/launches.py --seconds    the host's time of 16 tiny layers: a proxy, without Triton's launches

The model is tiny, the code that of a GPU: Triton kernels run in Triton's interpreter, one launch each; grouped products
and attention are stood in for by torch, and count as one launch forward and one backward. The difference of a model of
two layers and one of one is a layer. bfloat16 adapters, activation checkpointing, softmax router (Qwen3-MoE).
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import os
import pstats
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # instead of this folder, where trainer.py hides the package trainer
os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from bench.shapes import model_config  # noqa: E402
from bench.trainer_rows import Ours  # noqa: E402
from trainer.step.optim import StepResult  # noqa: E402

NUM_TOKENS = 16
KERNELS = {"topk": 2, "cumsum": 2}
"""Kernels of an operator, where it is not one."""
NONE = ("empty", "detach", "as_strided", "set_", "_local_scalar_dense", "new_empty", "empty_like", "empty_strided")
"""Operators that launch nothing, beside views."""


class Launches(TorchDispatchMode):
    """Counts operators and kernels, by name and by line."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[tuple[str, str]] = Counter()
        self.lines: Counter[str] = Counter()
        self._is_hidden = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operator."""
        name = func.overloadpacket.__name__
        if not func.is_view and name not in NONE and not name.startswith("_unsafe_view"):
            is_copy = name in ("copy_", "_to_copy", "clone")
            kind = "dense GEMM" if "mm" in name else "copies" if is_copy else "elementwise"
            self.add(kind, name, KERNELS.get(name, 1))
        return func(*args, **(kwargs or {}))

    def add(self, kind: str, name: str, count: int = 1) -> None:
        """Some launches, from the line of trainer/ that is running."""
        if self._is_hidden:
            return
        self.names[kind, name] += count
        frames = [f for f in traceback.extract_stack() if f"{ROOT}/trainer/" in f.filename]
        line = f"{Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].line}" if frames else "autograd"
        self.lines[f"{name:24} {line}"] += count

    @contextlib.contextmanager
    def one(self, kind: str, name: str) -> Iterator[None]:
        """What happens inside is one launch."""
        self.add(kind, name)
        before, self._is_hidden = self._is_hidden, True
        try:
            yield
        finally:
            self._is_hidden = before


def take_the_gpu_path(counter: Launches, *, does_run: bool = True) -> None:
    """Every choice between a kernel and its torch form takes the kernel; what cannot run here is stood in for.

    Args:
        does_run: Or launch no Triton kernel, and no product of experts, at all.
    """
    from triton.runtime.interpreter import GridExecutor, InterpretedFunction

    from trainer import kernels
    from trainer.model import attention
    from trainer.moe import grouped, routed

    for path in Path(kernels.__path__[0]).glob("[a-z]*.py"):
        module = __import__(f"trainer.kernels.{path.stem}", fromlist=["_"])
        for name in dir(module):
            if name.endswith("_torch") and hasattr(module, twin := name.replace("_torch", "_triton")):
                setattr(module, name, getattr(module, twin))
            if name == "is_for_triton":
                setattr(module, name, lambda x: x.numel() > 0)
    interpret = GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        with counter.one("Triton", self.fn.__name__):
            interpret(self, *args, **kwargs)

    if does_run:
        GridExecutor.__call__ = launch  # type: ignore[method-assign]
    else:
        InterpretedFunction.__getitem__ = lambda self, grid: lambda *args, **kwargs: None  # type: ignore[method-assign]
        counter.add = lambda *what: None  # type: ignore[method-assign]
        torch.Tensor.new_empty, torch.empty_like = torch.Tensor.new_zeros, torch.zeros_like  # indices must be some
    product = grouped.grouped_product

    def one_product(x: Tensor, matrices: Tensor, groups: Any, backend: Any, **adapter: Any) -> Tensor:
        groups.ends_E  # noqa: B018  grouped_mm takes them
        with counter.one("grouped GEMM", "product"):  # an adapter's second factor is added in its accumulator
            if does_run:
                return product(x, matrices, groups, backend, **adapter)
            return x.new_empty(len(x), matrices.shape[2])

    routed.grouped_product = one_product

    class Attend(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kept: Any) -> Tensor:  # type: ignore[override]
            ctx.save_for_backward(q, k, v)
            if kept is None or kept.take() is None:
                if kept is not None:
                    kept.put(q)
                counter.add("attention", "forward")
            return torch.empty_like(q)

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
            saved = ctx.saved_tensors
            with counter.one("attention", "backward"):
                return torch.zeros_like(dout), *(torch.zeros_like(x) for x in saved[1:]), None

    attention.attend = lambda q, k, v, *rest, kept=None, **more: Attend.apply(q, k, v, kept)  # type: ignore[assignment]


def model(layers: int) -> Ours:
    """Tiny layers of Qwen3-MoE's kind."""
    tiny = {"experts": 8, "hidden": 64, "width": 32, "vocab": 512, "rank": 8, "heads": 8, "head_dim": 16}
    args = argparse.Namespace(layers=layers, device="cpu", **tiny)
    return Ours(model_config(args), "bfloat16", args)


def count(layers: int, counter: Launches) -> tuple[Counter[Any], Counter[Any], Counter[Any]]:
    """Launches of forward and backward by name and by line, and of the update by name."""
    forward_backward, update = halves(layers)
    counter.names.clear()
    counter.lines.clear()
    with counter:
        forward_backward()
    names, lines = counter.names.copy(), counter.lines.copy()
    counter.names.clear()
    with counter:
        update()
    return names, lines, Counter({key: n for key, n in counter.names.items() if key[0] == "Triton"})


def halves(layers: int) -> tuple[Callable[[], Any], Callable[[], None]]:
    """What computes the gradients of a step, and what updates the parameters as on a GPU."""
    subject = model(layers)
    rule: Any = subject.rank._optimizer._rule
    gradients = [torch.zeros_like(parameter) for parameter in rule._parameters]
    subject.rank._optimizer.step = lambda *given: StepResult(0.0, 0.0, is_finite=True)  # type: ignore[method-assign]
    rule._num_updates = 1
    ids = np.random.default_rng(0).integers(0, 512, NUM_TOKENS)
    return lambda: subject.step(ids), lambda: rule._step_on_cuda(gradients, 1e-5)


def seconds(repeats: int) -> None:
    """The host's time of 16 tiny layers, and where it goes."""
    torch.set_num_threads(1)
    for name, work in zip(("forward and backward", "update"), halves(16), strict=True):
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
        times = times[2:]
        median, least = 1e3 * statistics.median(times), 1e3 * min(times)
        print(f"{name} of 16 tiny layers: median {median:.1f} ms, least {least:.1f} ms")
        profiler = cProfile.Profile()
        profiler.runcall(work)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


def main() -> None:
    """Count, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", action="store_true")
    parser.add_argument("--seconds", action="store_true")
    parser.add_argument("--repeats", type=int, default=22)
    args = parser.parse_args()
    counter = Launches()
    take_the_gpu_path(counter, does_run=not args.seconds)
    if args.seconds:
        seconds(args.repeats)
        return
    (one, one_lines, one_update), (two, two_lines, two_update) = count(1, counter), count(2, counter)
    layer, rest = two - one, one - (two - one)
    kinds: Counter[str] = Counter()
    for (kind, _), number in layer.items():
        kinds[kind] += number
    print(f"launches a layer and step: {layer.total()}; outside layers: {rest.total()}")
    for kind, number in kinds.most_common():
        inside = ", ".join(f"{n} {name}" for (k, name), n in layer.most_common() if k == kind)
        print(f"{number:6}  {kind}: {inside}")
    print(f"launches of the update: {one_update.total()} for one layer, {two_update.total()} for two")
    if args.lines:
        for line, number in (two_lines - one_lines).most_common():
            print(f"{number:6}  {line}")


if __name__ == "__main__":
    main()
