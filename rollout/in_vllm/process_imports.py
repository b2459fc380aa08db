"""What a process that makes engines imports of vLLM, without collections of garbage on the way.

vLLM forks its EngineCore, and that its ranks, from a process in which all of it is imported (vllm_process.py). So the
import must open no GPU: CUDA cannot be used after a fork. Owns: which modules are imported.
"""

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Generator
from importlib import import_module

from slipstream.weight_sync.gc_freeze import frozen_imports

ANSWER_TIMEOUT_S = 30.0
"""Longest wait for a process that is forked to ask the driver how many GPUs there are."""


def import_vllm() -> None:
    """Import what make_llm() and an EngineCore need: 7 s of a CPU's core, 15 s on a host with GPUs. It opens no GPU, so
    that the process may be forked."""
    with without_torchao():
        import_vllm_as_users_do()


def import_vllm_as_users_do() -> None:
    """The same, with torchao where it is installed: engines of users may load checkpoints of its format."""
    with frozen_imports():
        for name in ("vllm.engine.arg_utils", "vllm.v1.engine.core", "vllm.v1.engine.async_llm"):
            import_module(name)
        if import_module("vllm.platforms").current_platform.is_cpu():  # each engine would import it: 1.5 s of a core
            import_module("vllm.v1.worker.cpu_worker")


def num_gpus() -> int:
    """GPUs of this process, by the driver's management library: none is opened."""
    return import_module("torch").cuda.device_count()


def forks_can_use_gpu() -> bool:
    """Whether a fork of this process can use its GPUs: not if a library has opened one here. Forks a process to find
    out. If that does not answer within ANSWER_TIMEOUT_S, forks cannot: it may wait for a lock that another thread held
    when it was forked. True where there is no GPU."""
    if not num_gpus():
        return True
    process = multiprocessing.get_context("fork").Process(target=lambda: os._exit(0 if can_use_gpu() else 1))
    process.start()
    process.join(ANSWER_TIMEOUT_S)
    if process.exitcode is None:
        process.kill()
        process.join()
    return process.exitcode == 0


def can_use_gpu() -> bool:
    """False in a process whose parent has opened a GPU: no CUDA after a fork. Opens none itself: that takes seconds."""
    if not num_gpus():
        return True
    torch = import_module("torch")
    try:
        return not torch.cuda._is_in_bad_fork() and torch._C._cuda_getDeviceCount() > 0
    except RuntimeError:  # not PyTorch but another library of the parent's has opened one
        return False


def know_text_models() -> None:
    """Name Qwen3.5's language model alone to this process's vLLM, where it has no such architecture (0.25.1)."""
    from vllm.model_executor.models import ModelRegistry

    for name in ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"):
        if name not in ModelRegistry.models:
            ModelRegistry.register_model(name, f"slipstream.rollout.in_vllm.qwen3_5_text:{name}")


def ask_classes_here(architectures: list[str]) -> None:
    """Let vLLM ask the classes of models what they can do in this process, which has imported it. Of a class that it
    meets for the first time on a node it would ask another process, which imports all of vLLM for that."""
    from vllm.model_executor.models import ModelRegistry

    know_text_models()
    for name in architectures:
        if name in ModelRegistry.models:  # vLLM says of others that it does not support them
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


@contextlib.contextmanager
def without_torchao() -> Generator[None]:
    """While the block runs, and in what is forked meanwhile, torchao counts as not installed. vLLM and transformers
    import it if it is, for checkpoints of its own format, which no engine of ours loads; and it opens the GPU when it
    is imported."""
    if "torchao" in sys.modules:
        yield
        return
    sys.modules["torchao"] = None  # type: ignore[assignment] - "import torchao" raises, and find_spec() finds none
    try:
        yield
    finally:
        del sys.modules["torchao"]
