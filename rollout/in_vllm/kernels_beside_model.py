"""Kernels that vLLM compiles after the model are compiled beside it, on GPUs.

    before torch.compile   experts, adapters: other processes begin (compiled_in_forks.py)    top-k and top-p: a thread
    torch.compile          30 s and more, mostly Python
    CUDA graphs            experts' and adapters' kernels are found in Triton's cache
    sampler                waits for the thread

One after the other they take half a minute of the first start on a node: top-k 4 to 9 s, experts 12, adapters 20.

Owns: which kernels, and how an engine asks for them before it needs them. vllm_patches.py lists the change of vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import TYPE_CHECKING, Any

from rollout.in_vllm import fork_server
from rollout.in_vllm.compiled_in_forks import Kernel, begin_to_compile, kernels_asked_for
from rollout.in_vllm.replaced import replace, replaced

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_KERNELS = frozenset(
    {
        "fused_moe_kernel", "_fused_moe_lora_kernel", "_fused_moe_lora_one_shot_kernel",
        "_fused_moe_lora_small_batch_kernel", "_lora_shrink_kernel", "_lora_expand_kernel",
    }
)  # fmt: skip
"""vLLM's Triton kernels of experts and adapters. Each writes products alone, and no index: a pass can go on without."""


def compile_kernels_beside_model() -> None:
    """See the module's docstring. Call it before memory is measured; again is harmless."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    measure, sample = GPUModelRunner.profile_run, GPUModelRunner._dummy_sampler_run
    if measure.__module__ == __name__:
        return

    beside: list[Thread] = []

    def measure_beside(self: Any) -> None:
        begin_to_compile(kernels_of_graphs(self))
        vocab_size = self.model_config.get_vocab_size()
        beside.append(Thread(target=_sample_once, args=(self.device, vocab_size), daemon=True))
        beside[-1].start()
        measure(self)

    def sample_after(self: Any, hidden_states: Tensor) -> Tensor:
        for thread in beside:
            thread.join()
        return sample(self, hidden_states)

    replace(GPUModelRunner, "profile_run", measure_beside)
    replace(GPUModelRunner, "_dummy_sampler_run", sample_after)


def kernels_of_graphs(runner: Any) -> list[Kernel]:
    """What a GPUModelRunner's CUDA graphs will need of experts and adapters: the first layer of each kind is gone
    through once for every graph. Empty where there are neither, where the model is not one stack of layers, where no
    process can be forked that would compile them, and for an engine of several ranks, each of which would ask.
    """
    decoder = _decoder(runner.get_model())
    has_any = runner.lora_config or runner.model_config.is_moe
    is_alone = runner.parallel_config.world_size == 1
    if not has_any or decoder is None or not is_alone or not fork_server.is_known():
        return []
    from vllm.config import CUDAGraphMode

    with kernels_asked_for(_KERNELS) as asked, first_layers_alone(decoder):
        for num_tokens in runner.compilation_config.cudagraph_capture_sizes:
            for num_active_loras in runner.cudagraph_dispatcher._get_lora_cases():
                runner._dummy_run(
                    num_tokens,
                    cudagraph_runtime_mode=CUDAGraphMode.NONE,
                    skip_eplb=True,
                    remove_lora=False,
                    num_active_loras=num_active_loras,
                )
    return asked


def _decoder(model: nn.Module) -> nn.Module | None:
    """The stack of layers of a model of vLLM's, which is compiled as a whole; None if there is not exactly one."""
    marks = ("start_layer", "end_layer", "do_not_compile")
    found = [part for part in model.modules() if all(hasattr(part, name) for name in marks)]
    return found[0] if len(found) == 1 else None


@contextmanager
def first_layers_alone(decoder: nn.Module) -> Iterator[None]:
    """While the block runs, a stack of layers is not compiled, and ends after the first layer of the last kind."""
    from weight_sync.record.repeated_layers import layers_by_kind

    kinds = layers_by_kind((name, (param.shape, param.dtype)) for name, param in decoder.named_parameters())
    last = max(layers[0] for layers in kinds)
    with replaced(decoder, {"do_not_compile": True, "end_layer": last + 1}):
        yield


def _sample_once(device: torch.device, vocab_size: int) -> None:
    """Take the kernel of top-k and top-p over some rows: a multiple of 16, as Triton tells other numbers apart."""
    import torch
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    num_rows = 16
    logits = torch.zeros(num_rows, vocab_size, dtype=torch.float32, device=device)
    top_k = torch.full((num_rows,), vocab_size - 1, device=device)
    apply_top_k_top_p(logits, top_k, torch.full((num_rows,), 0.9, dtype=torch.float32, device=device))
